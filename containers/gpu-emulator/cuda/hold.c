/* Files that a process has open while it holds GPUs: the device nodes, if they exist, and a descriptor that CRIU cannot
 * dump. In containers the nodes may be plain /dev/null, which CRIU would dump; but a process that uses a real GPU can be
 * dumped only after a checkpoint. A child of fork() inherits the files, as with the real driver. */
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#endif
#define USER_FAULTS_ONLY 1 /* UFFD_USER_MODE_ONLY: permitted for all users */

#define MAPPED_BYTES 4096

static int held[EMU_MAX_GPUS + 2]; /* the GPUs, nvidiactl, nvidia-uvm */
static unsigned held_count;
static int undumpable = -1;
static void *mapped = MAP_FAILED;

static void hold(int fd)
{
    if (fd >= 0)
        held[held_count++] = fd;
}

/* Opens a descriptor that CRIU does not support: a userfaultfd, otherwise a Landlock ruleset. */
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
    int uvm;

    if (held_count > 0 || undumpable >= 0)
        return;
    hold(open("/dev/nvidiactl", O_RDWR | O_CLOEXEC));
    for (unsigned gpu = 0; gpu < cuda.gpu_count; gpu++) {
        snprintf(path, sizeof(path), "/dev/nvidia%u", cuda.gpus[gpu].minor);
        hold(open(path, O_RDWR | O_CLOEXEC));
    }
    uvm = open("/dev/nvidia-uvm", O_RDONLY | O_CLOEXEC);
    hold(uvm);
    if (uvm >= 0)
        mapped = mmap(NULL, MAPPED_BYTES, PROT_READ, MAP_SHARED, uvm, 0);
    undumpable = open_undumpable();
}

static void release_undumpable(void)
{
    if (undumpable >= 0)
        close(undumpable);
    undumpable = -1;
}

void release_devices(void)
{
    while (held_count > 0)
        close(held[--held_count]);
    if (mapped != MAP_FAILED)
        munmap(mapped, MAPPED_BYTES);
    mapped = MAP_FAILED;
    release_undumpable();
}

/* The device files and their mappings stay open in the child until it ends or calls exec(). */
void forget_devices(void)
{
    held_count = 0;
    mapped = MAP_FAILED;
    release_undumpable();
}
