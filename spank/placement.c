/* Moves the shepherd-to-be into the cgroups of the task, and binds it to the same CPUs. */
#include "cgroup.h"
#include "keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_BYTES 262144
#define MOST_CPUS 16384

static bool read_text(const char *path, char *text)
{
    size_t used = 0;
    ssize_t got;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return false;
    while ((got = read(fd, text + used, TEXT_BYTES - 1 - used)) > 0)
        used += (size_t)got;
    text[used] = '\0';
    close(fd);
    return got == 0;
}

static bool write_pid(const char *procs_path, void *context)
{
    const pid_t *pid = context;
    char text[16];
    int length = snprintf(text, sizeof(text), "%d", (int)*pid);
    int fd = open(procs_path, O_WRONLY | O_CLOEXEC);
    bool done;

    if (fd < 0)
        return false;
    done = write(fd, text, (size_t)length) == length;
    close(fd);
    return done;
}

static bool same_cgroups(pid_t child, char *own, char *theirs)
{
    char path[40];

    snprintf(path, sizeof(path), "/proc/%d/cgroup", (int)child);
    return read_text("/proc/self/cgroup", own) && read_text(path, theirs) && strcmp(own, theirs) == 0;
}

static bool place_in_cgroups(pid_t child, char *error, size_t size)
{
    char *texts = malloc((size_t)2 * TEXT_BYTES);
    bool done = false;

    if (texts == NULL) {
        snprintf(error, size, "out of memory while reading the cgroups");
        return false;
    }
    if (access("/proc/self/cgroup", F_OK) != 0 || same_cgroups(child, texts, texts + TEXT_BYTES)) {
        done = true;
    } else if (read_text("/proc/self/cgroup", texts) && read_text("/proc/self/mountinfo", texts + TEXT_BYTES)) {
        errno = 0;
        done = cgroup_each_procs(texts, texts + TEXT_BYTES, write_pid, &child);
        if (!done)
            snprintf(error, size, "cannot move the shepherd into the cgroups of the task: %s", strerror(errno));
        else if (!(done = same_cgroups(child, texts, texts + TEXT_BYTES)))
            snprintf(error, size, "the shepherd is not in all cgroups of the task");
    } else {
        snprintf(error, size, "cannot read the cgroups of the task: %s", strerror(errno));
    }
    free(texts);
    return done;
}

static void copy_affinity(pid_t child)
{
    size_t size = CPU_ALLOC_SIZE(MOST_CPUS);
    cpu_set_t *cpus = CPU_ALLOC(MOST_CPUS);

    /* An error means that nothing was bound. */
    if (cpus != NULL && sched_getaffinity(0, size, cpus) == 0)
        sched_setaffinity(child, size, cpus);
    CPU_FREE(cpus);
}

bool place_with_caller(pid_t child, char *error, size_t size)
{
    if (!place_in_cgroups(child, error, size))
        return false;
    copy_affinity(child); /* last: a move between cgroups resets it */
    return true;
}
