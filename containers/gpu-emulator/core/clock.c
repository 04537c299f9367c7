#include "core.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t emu_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

static struct timespec to_timespec(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000ULL), .tv_nsec = (long)(ns % 1000000000ULL)};
}

void emu_sleep_until(uint64_t deadline_ns)
{
    struct timespec deadline = to_timespec(deadline_ns);

    while (clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &deadline, NULL) == EINTR)
        ;
}

bool emu_futex_wait(uint32_t *word, uint32_t value, uint64_t deadline_ns)
{
    struct timespec deadline = to_timespec(deadline_ns);

    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value) {
        long rc = syscall(SYS_futex, word, FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, value, deadline_ns ? &deadline : NULL,
                          NULL, FUTEX_BITSET_MATCH_ANY);
        if (rc != 0 && errno == ETIMEDOUT)
            return false;
    }
    return true;
}

void emu_futex_wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}
