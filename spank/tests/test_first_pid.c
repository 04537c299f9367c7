/* Each attempt of each job has PIDs of its own, within the limits of the node. */
#include "check.h"
#include "first_pid.h"

#define PIDS 4194304U /* usual on 64-bit machines; 32768 without systemd */
#define JOBS 1000

static void first_pid_is_within_limits(void)
{
    static const uint32_t limits[] = {32768, PIDS, 1500};
    unsigned state = 1;

    for (unsigned i = 0; i < sizeof(limits) / sizeof(*limits); i++)
        for (int n = 0; n < 100000; n++) {
            uint32_t first = first_pid_of(next_random(&state), next_random(&state), limits[i]);

            CHECK(first >= 1000 && first < limits[i] - limits[i] / 16);
        }
    CHECK(first_pid_of(1, 1, 0) == 0);
    CHECK(first_pid_of(1, 1, 1000) == 0);
}

static int compare(const void *a, const void *b)
{
    uint32_t first = *(const uint32_t *)a, second = *(const uint32_t *)b;

    return first < second ? -1 : first > second;
}

/* Returns how many neighbors of JOBS numbers are closer than 100. */
static int close_neighbors(uint32_t *found)
{
    int count = 0;

    qsort(found, JOBS, sizeof(*found), compare);
    for (int i = 1; i < JOBS; i++)
        count += found[i] - found[i - 1] < 100;
    return count;
}

static void jobs_and_attempts_are_far_apart(void)
{
    uint32_t found[JOBS];

    for (uint32_t i = 0; i < JOBS; i++)
        found[i] = first_pid_of(4000 + i, 1700000000000000000ULL, PIDS);
    CHECK(close_neighbors(found) < 50); /* 1 in 40 for random numbers */
    for (uint32_t i = 0; i < JOBS; i++)
        found[i] = first_pid_of(4000, 1700000000000000000ULL + i * 1000000000ULL, PIDS);
    CHECK(close_neighbors(found) < 50);
}

int main(void)
{
    first_pid_is_within_limits();
    jobs_and_attempts_are_far_apart();
    CHECK(pid_max_read() >= 300);
    return 0;
}
