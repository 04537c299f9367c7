/* POSIX record locks show which processes are alive, and their PIDs in this PID namespace.
 *
 * The kernel releases the lock of a process when it ends, and F_GETLK translates the holder's PID into the caller's PID
 * namespace. The agent on the node therefore sees the outer PID of a process in a nested namespace, its siblings see the
 * inner PID, and a reused PID is not mistaken for the earlier process.
 *
 * The kernel also releases the record locks of a file when the process closes *any* descriptor of that file. Therefore each
 * process has one descriptor with a reference count, which libcuda and libnvidia-ml share through this library.
 */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

static pthread_mutex_t locks_mutex = PTHREAD_MUTEX_INITIALIZER;
static int locks_fd = -1;
static unsigned locks_users;

/* A child of fork() holds none of its parent's locks, and closing its descriptor does not release them. */
static void forget_in_child(void)
{
    if (locks_fd >= 0)
        close(locks_fd);
    locks_fd = -1;
    locks_users = 0;
    pthread_mutex_init(&locks_mutex, NULL);
}

__attribute__((constructor)) static void watch_fork(void)
{
    pthread_atfork(NULL, NULL, forget_in_child);
}

int emu_locks_get(void)
{
    char path[4096];
    int fd;

    pthread_mutex_lock(&locks_mutex);
    if (locks_fd < 0) {
        int length = snprintf(path, sizeof(path), "%s.lock", emu_state_path());
        if (length > 0 && (size_t)length < sizeof(path))
            locks_fd = open(path, O_RDWR | O_CLOEXEC);
    }
    fd = locks_fd;
    if (fd >= 0)
        locks_users++;
    pthread_mutex_unlock(&locks_mutex);
    return fd;
}

void emu_locks_put(void)
{
    pthread_mutex_lock(&locks_mutex);
    if (locks_users > 0 && --locks_users == 0) {
        close(locks_fd);
        locks_fd = -1;
    }
    pthread_mutex_unlock(&locks_mutex);
}

static int record_lock(int command, short type, off_t offset, struct flock *lock)
{
    *lock = (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = offset, .l_len = 1};
    return fcntl(locks_fd, command, lock);
}

bool emu_locks_take(off_t offset)
{
    struct flock lock;

    return locks_fd >= 0 && record_lock(F_SETLK, F_WRLCK, offset, &lock) == 0;
}

void emu_locks_drop(off_t offset)
{
    struct flock lock;

    if (locks_fd >= 0)
        record_lock(F_SETLK, F_UNLCK, offset, &lock);
}

pid_t emu_locks_holder(off_t offset)
{
    struct flock lock;

    if (locks_fd < 0 || record_lock(F_GETLK, F_WRLCK, offset, &lock) != 0)
        return 0; /* unknown: treated as alive */
    return lock.l_type == F_UNLCK ? -1 : lock.l_pid;
}
