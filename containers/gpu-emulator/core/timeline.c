/* The times at which a GPU was busy, by process. Kernels run one after another on a GPU; the time of a queued kernel is
 * determined when it is queued, so no daemon is needed. */
#include "core.h"

/* Kernels of one process with short gaps between them are merged into one interval, so that the ring covers seconds even if
 * there are many tiny kernels. Merged intervals are short, so that utilization within a sample period stays accurate. */
#define MERGE_GAP_NS 1000000ULL
#define MERGE_LENGTH_NS 20000000ULL

static struct emu_interval *newest(struct emu_timeline *line)
{
    return line->count == 0 ? NULL : &line->ring[(line->count - 1) % EMU_INTERVALS];
}

static bool merges(const struct emu_interval *last, uint64_t owner, uint64_t start_ns, uint64_t end_ns)
{
    if (last == NULL || last->owner != owner || start_ns < last->end_ns || start_ns - last->end_ns > MERGE_GAP_NS)
        return false;
    if (start_ns == last->end_ns && last->busy_ns == last->end_ns - last->start_ns)
        return true;
    return end_ns - last->start_ns <= MERGE_LENGTH_NS;
}

uint64_t emu_launch(struct emu_gpu *gpu, uint64_t owner, uint64_t earliest_ns, uint64_t duration_ns, uint64_t now_ns)
{
    struct emu_timeline *line = &gpu->timeline;
    struct emu_interval *last = newest(line);
    uint64_t start_ns = now_ns;
    uint64_t end_ns;

    if (earliest_ns > start_ns)
        start_ns = earliest_ns;
    if (line->busy_until_ns > start_ns)
        start_ns = line->busy_until_ns;
    if (duration_ns == 0)
        return start_ns;
    end_ns = start_ns + duration_ns;
    if (merges(last, owner, start_ns, end_ns)) {
        last->end_ns = end_ns;
        last->busy_ns += duration_ns;
    } else {
        line->ring[line->count % EMU_INTERVALS] = (struct emu_interval){start_ns, end_ns, duration_ns, owner};
        line->count++;
    }
    line->busy_until_ns = end_ns;
    line->total_busy_ns += duration_ns;
    return end_ns;
}

static uint64_t overlap_ns(const struct emu_interval *interval, uint64_t from_ns, uint64_t to_ns)
{
    uint64_t start_ns = interval->start_ns > from_ns ? interval->start_ns : from_ns;
    uint64_t end_ns = interval->end_ns < to_ns ? interval->end_ns : to_ns;
    uint64_t length_ns = interval->end_ns - interval->start_ns;

    if (end_ns <= start_ns || length_ns == 0)
        return 0;
    if (interval->busy_ns == length_ns)
        return end_ns - start_ns;
    return (uint64_t)((double)(end_ns - start_ns) * (double)interval->busy_ns / (double)length_ns);
}

uint64_t emu_busy_ns(const struct emu_gpu *gpu, uint64_t owner, uint64_t from_ns, uint64_t to_ns)
{
    const struct emu_timeline *line = &gpu->timeline;
    uint64_t kept = line->count < EMU_INTERVALS ? line->count : EMU_INTERVALS;
    uint64_t sum_ns = 0;

    for (uint64_t age = 1; age <= kept; age++) {
        const struct emu_interval *interval = &line->ring[(line->count - age) % EMU_INTERVALS];

        if (owner == EMU_ANYONE || interval->owner == owner)
            sum_ns += overlap_ns(interval, from_ns, to_ns);
    }
    return sum_ns;
}

/* Removes the queued kernels of `owner`. Kernels that others queued after them keep their times. */
void emu_cancel(struct emu_gpu *gpu, uint64_t owner, uint64_t now_ns)
{
    struct emu_timeline *line = &gpu->timeline;
    uint64_t kept = line->count < EMU_INTERVALS ? line->count : EMU_INTERVALS;
    uint64_t busy_until_ns = 0;

    for (uint64_t age = 1; age <= kept; age++) {
        struct emu_interval *interval = &line->ring[(line->count - age) % EMU_INTERVALS];

        if (interval->end_ns <= now_ns)
            continue;
        if (interval->owner == owner) {
            uint64_t start_ns = interval->start_ns < now_ns ? interval->start_ns : now_ns;
            uint64_t done_ns = overlap_ns(interval, start_ns, now_ns);

            line->total_busy_ns -= interval->busy_ns - done_ns;
            interval->start_ns = interval->start_ns < now_ns ? interval->start_ns : now_ns;
            interval->end_ns = now_ns;
            interval->busy_ns = done_ns;
        } else if (interval->end_ns > busy_until_ns) {
            busy_until_ns = interval->end_ns;
        }
    }
    if (line->busy_until_ns > now_ns)
        line->busy_until_ns = busy_until_ns;
}

/* Percent of the last sample period, rounded. */
unsigned emu_utilization(const struct emu_state *state, const struct emu_gpu *gpu, uint64_t now_ns)
{
    uint64_t period_ns = state->sample_period_ns;
    uint64_t busy_ns = emu_busy_ns(gpu, EMU_ANYONE, now_ns - period_ns, now_ns);
    unsigned percent = (unsigned)((busy_ns * 100 + period_ns / 2) / period_ns);

    return percent > 100 ? 100 : percent;
}

/* A busy GPU uses 85 % of its limit: an arbitrary value, but the power follows the utilization. */
static uint64_t busy_extra_mw(const struct emu_gpu *gpu)
{
    uint64_t busy_mw = gpu->power_limit_mw / 100ULL * 85ULL;

    return busy_mw > gpu->power_idle_mw ? busy_mw - gpu->power_idle_mw : 0;
}

unsigned emu_power_mw(const struct emu_state *state, const struct emu_gpu *gpu, uint64_t now_ns)
{
    uint64_t period_ns = state->sample_period_ns;
    uint64_t busy_ns = emu_busy_ns(gpu, EMU_ANYONE, now_ns - period_ns, now_ns);

    return gpu->power_idle_mw + (unsigned)((double)busy_extra_mw(gpu) * (double)busy_ns / (double)period_ns);
}

/* The integral of this power since the state was created: it never decreases. */
uint64_t emu_energy_mj(const struct emu_state *state, const struct emu_gpu *gpu, uint64_t now_ns)
{
    uint64_t done_ns = gpu->timeline.total_busy_ns - emu_busy_ns(gpu, EMU_ANYONE, now_ns, UINT64_MAX);
    uint64_t since_ns = now_ns > state->created_ns ? now_ns - state->created_ns : 0;

    return (uint64_t)((double)gpu->power_idle_mw * (double)since_ns / 1e9 + (double)busy_extra_mw(gpu) * (double)done_ns / 1e9);
}
