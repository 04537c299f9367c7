/* io_uring fails like on a kernel without it, for a process and its children; nothing else changes. */
#include "check.h"
#include "io_uring.h"

#include <errno.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Runs TEST in a child, as a filter cannot be removed; returns its exit status. */
static int in_child(int (*test)(void))
{
    int status = 0;
    pid_t child = fork();

    if (child == 0)
        _exit(test());
    return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int denied(void)
{
    char parameters[120] = {0};

    if (geteuid() != 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); /* the filter needs this or root */
    if (!io_uring_deny())
        return 1;
    errno = 0;
    if (syscall(SYS_io_uring_setup, 4, parameters) != -1 || errno != ENOSYS)
        return 2;
    if (fork() == 0) { /* inherited */
        errno = 0;
        _exit(syscall(SYS_io_uring_setup, 4, parameters) == -1 && errno == ENOSYS ? 0 : 1);
    } else {
        int status = 1;

        if (wait(&status) < 0 || status != 0)
            return 3;
    }
    return getpid() == syscall(SYS_getpid) && access("/", F_OK) == 0 ? 0 : 4; /* other calls work */
}

static int privileges_unchanged(void)
{
    if (geteuid() != 0)
        return 0;
    return io_uring_deny() && prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 0 ? 0 : 1;
}

static int reported_without_privileges(void)
{
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0)
        return 1;
    return !io_uring_deny() && errno == EACCES ? 0 : 2;
}

int main(void)
{
    CHECK(in_child(denied) == 0);
    CHECK(in_child(privileges_unchanged) == 0);
    CHECK(in_child(reported_without_privileges) == 0);
    return 0;
}
