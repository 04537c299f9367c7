#include "first_pid.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PID_MAX "/proc/sys/kernel/pid_max"
#define LAST_PID "/proc/sys/kernel/ns_last_pid"
#define LOWEST 1000U     /* above the PIDs that the kernel reserves, and those that CRIU tries for its helpers */
#define SHARE_FOR_JOB 16 /* of all PIDs above the first one: most jobs need no more before the numbers start again */

uint32_t pid_max_read(void)
{
    char text[16] = "";
    int fd = open(PID_MAX, O_RDONLY | O_CLOEXEC);
    ssize_t length;

    if (fd < 0)
        return 0;
    length = read(fd, text, sizeof(text) - 1);
    close(fd);
    return length > 0 ? (uint32_t)strtoul(text, NULL, 10) : 0;
}

/* The finalizer of SplitMix64 (Steele, Lea, Flood 2014): each bit of the result depends on all bits of the argument. */
static uint64_t mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
}

uint32_t first_pid_of(uint32_t job_id, uint64_t attempt_ns, uint32_t pid_max)
{
    uint32_t highest = pid_max - pid_max / SHARE_FOR_JOB;

    if (highest <= LOWEST)
        return 0;
    return LOWEST + (uint32_t)(mix(mix(job_id) + attempt_ns) % (highest - LOWEST));
}

static bool write_number(const char *path, uint32_t number)
{
    char text[16];
    int length = snprintf(text, sizeof(text), "%u", number);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool written;
    int error;

    if (fd < 0)
        return false;
    written = write(fd, text, (size_t)length) == length;
    error = errno;
    close(fd);
    errno = error;
    return written;
}

bool first_pid_set(uint32_t last, uint32_t pid_max)
{
    /* Since Linux 6.14 a new namespace has a limit of its own, the highest possible one. Another node may not reach it. */
    if (pid_max_read() != pid_max && !write_number(PID_MAX, pid_max))
        return false;
    return write_number(LAST_PID, last);
}
