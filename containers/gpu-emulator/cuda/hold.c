/* What a process has open while it holds GPUs: the device nodes, where there are any, and one descriptor that CRIU cannot
 * dump. The nodes of a container may be plain /dev/null, which CRIU would dump; a process that uses a real GPU cannot be
 * dumped, and so must this one not be until it was checkpointed. A child of fork() inherits all of it, as with the real one.
 */
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#endif
#define USER_FAULTS_ONLY 1 /* UFFD_USER_MODE_ONLY: allowed to everybody */

static int held[EMU_MAX_GPUS + 2];
static unsigned held_count;

static void hold(int fd)
{
    if (fd >= 0)
        held[held_count++] = fd;
}

/* A descriptor of a kind that CRIU knows nothing of: a userfaultfd, else a Landlock ruleset. */
static int open_undumpable(void)
{
    uint64_t handled_fs_access = 1;
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | USER_FAULTS_ONLY);

    if (fd < 0)
        fd = (int)syscall(SYS_landlock_create_ruleset, &handled_fs_access, sizeof(handled_fs_access), 0);
    return fd;
}

void hold_devices(void)
{
    char path[32];

    if (held_count > 0)
        return;
    hold(open("/dev/nvidiactl", O_RDWR | O_CLOEXEC));
    for (unsigned gpu = 0; gpu < cuda.gpu_count; gpu++) {
        snprintf(path, sizeof(path), "/dev/nvidia%u", cuda.gpus[gpu].minor);
        hold(open(path, O_RDWR | O_CLOEXEC));
    }
    hold(open_undumpable());
}

void release_devices(void)
{
    while (held_count > 0)
        close(held[--held_count]);
}
