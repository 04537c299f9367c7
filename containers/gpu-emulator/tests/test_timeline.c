#include "check.h"

#define MS 1000000ULL
#define START (1000000ULL * MS)

static struct emu_gpu gpu;
static struct emu_state state = {.sample_period_ns = 1000 * MS};

static void reset(void)
{
    memset(&gpu, 0, sizeof(gpu));
    gpu.power_idle_mw = 60000;
    gpu.power_limit_mw = 400000;
    state.created_ns = START;
}

static void kernels_run_one_after_another(void)
{
    reset();
    CHECK(emu_launch(&gpu, 1, 0, 100 * MS, START) == START + 100 * MS);
    CHECK(emu_launch(&gpu, 2, 0, 50 * MS, START + 10 * MS) == START + 150 * MS);
    CHECK(emu_busy_ns(&gpu, EMU_ANYONE, START, START + 1000 * MS) == 150 * MS);
    CHECK(emu_busy_ns(&gpu, 1, START, START + 1000 * MS) == 100 * MS);
    CHECK(emu_busy_ns(&gpu, 2, START, START + 120 * MS) == 20 * MS);
}

static void kernel_starts_after_the_last_one_of_its_stream(void)
{
    reset();
    CHECK(emu_launch(&gpu, 1, START + 500 * MS, 10 * MS, START) == START + 510 * MS);
    CHECK(emu_busy_ns(&gpu, 1, START, START + 500 * MS) == 0);
}

static void utilization_is_the_busy_share_of_the_sample_period(void)
{
    reset();
    emu_launch(&gpu, 1, 0, 300 * MS, START);
    CHECK(emu_utilization(&state, &gpu, START) == 0);
    CHECK(emu_utilization(&state, &gpu, START + 200 * MS) == 20);
    CHECK(emu_utilization(&state, &gpu, START + 1000 * MS) == 30);
    CHECK(emu_utilization(&state, &gpu, START + 1150 * MS) == 15);
    CHECK(emu_utilization(&state, &gpu, START + 1300 * MS) == 0);
    CHECK(emu_power_mw(&state, &gpu, START + 2000 * MS) == 60000);
    CHECK(emu_power_mw(&state, &gpu, START + 1000 * MS) == 60000 + 280000 * 3 / 10);
}

static void tiny_kernels_are_merged(void)
{
    uint64_t now = START;

    reset();
    for (int kernel = 0; kernel < 100000; kernel++) {
        emu_launch(&gpu, 1, 0, 10000, now); /* 10 of every 20 us */
        now += 20000;
    }
    CHECK(emu_utilization(&state, &gpu, now) >= 49 && emu_utilization(&state, &gpu, now) <= 51);
}

static void queued_kernels_of_dead_process_are_dropped(void)
{
    uint64_t energy;

    reset();
    emu_launch(&gpu, 1, 0, 100 * MS, START);
    emu_launch(&gpu, 2, 0, 5000 * MS, START);
    emu_launch(&gpu, 1, 0, 100 * MS, START);
    energy = emu_energy_mj(&state, &gpu, START + 600 * MS);
    emu_cancel(&gpu, 2, START + 600 * MS);
    CHECK(emu_energy_mj(&state, &gpu, START + 600 * MS) == energy);
    CHECK(emu_busy_ns(&gpu, 2, START, UINT64_MAX) == 500 * MS);
    CHECK(emu_busy_ns(&gpu, 1, START, UINT64_MAX) == 200 * MS);
    CHECK(gpu.timeline.busy_until_ns == START + 5200 * MS);
    emu_cancel(&gpu, 1, START + 700 * MS);
    CHECK(emu_launch(&gpu, 3, 0, 10 * MS, START + 700 * MS) == START + 710 * MS);
}

static void energy_never_decreases(void)
{
    uint64_t before = 0;

    reset();
    for (uint64_t now = START; now < START + 3000 * MS; now += 70 * MS) {
        uint64_t energy = emu_energy_mj(&state, &gpu, now);

        CHECK(energy >= before);
        before = energy;
        emu_launch(&gpu, 1 + now % 3, 0, 90 * MS, now);
        if (now % 5 == 0)
            emu_cancel(&gpu, 2, now);
    }
    CHECK(before > 60 * 2900 / 1000);
}

static void uuids_are_parsed_as_printed(void)
{
    uint8_t uuid[16] = {0x39, 0x08, 0x54, 0xe2, 0xc3, 0x3a, 0x4a, 0x9f, 0xbe, 0xe6, 0xdb, 0x1c, 0x8f, 0xcb, 0x94, 0xe7}, back[16];
    char text[41];

    emu_uuid_text(uuid, text);
    CHECK(strcmp(text, "GPU-390854e2-c33a-4a9f-bee6-db1c8fcb94e7") == 0);
    CHECK(emu_uuid_parse(text, back) && memcmp(uuid, back, 16) == 0);
    CHECK(!emu_uuid_parse("GPU-390854e2", back));
    CHECK(!emu_uuid_parse("GPU-390854e2-c33a-4a9f-bee6-db1c8fcb94e7a", back));
    CHECK(!emu_uuid_parse("GPU-x90854e2-c33a-4a9f-bee6-db1c8fcb94e7", back));
}

int main(void)
{
    kernels_run_one_after_another();
    kernel_starts_after_the_last_one_of_its_stream();
    utilization_is_the_busy_share_of_the_sample_period();
    tiny_kernels_are_merged();
    queued_kernels_of_dead_process_are_dropped();
    energy_never_decreases();
    uuids_are_parsed_as_printed();
    return 0;
}
