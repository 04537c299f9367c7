/* A setuid starter as sites install them, such as Apptainer's: gives its user a PID and a mount namespace without a user
 * namespace, and executes a program there as PID 1, with the user's ids. For tests; owned by root, mode 4755.
 *
 *   setuid_starter PROGRAM ARGUMENT... */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    uid_t user = getuid();
    int status = 0;
    pid_t child;

    if (argc < 2 || setuid(0) != 0 || unshare(CLONE_NEWPID | CLONE_NEWNS) != 0) {
        perror("setuid_starter");
        return 1;
    }
    child = fork();
    if (child == 0) {
        if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount("proc", "/proc", "proc", 0, NULL) != 0 ||
            setresuid(user, user, user) != 0)
            perror("setuid_starter");
        else
            execv(argv[1], argv + 1);
        _exit(1);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
