#include "script.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIRST_BYTES 256

void script_complaint(const char *path, int number, const char *first, size_t length, char *text, size_t size)
{
    if (number == ENOENT && length >= 3 && first[0] == '#' && first[1] == '!') {
        size_t end = 2;

        while (end < length && end < FIRST_BYTES - 1 && first[end] != '\n' && first[end] != '\0')
            end++;
        snprintf(text, size, "slurmstepd: error: execve(): bad interpreter(%.*s): %s\n", (int)(end - 2), first + 2,
                 strerror(number));
        return;
    }
    snprintf(text, size, "slurmstepd: error: execve(): %s: %s\n", path, strerror(number));
}

static void complain(const char *path, int number)
{
    char text[4096 + FIRST_BYTES];
    char first[FIRST_BYTES];
    ssize_t length = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd >= 0) {
        length = read(fd, first, sizeof(first));
        close(fd);
    }
    script_complaint(path, number, first, length > 0 ? (size_t)length : 0, text, sizeof(text));
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        return; /* there is nobody else to tell */
}

void script_execute(char **argv, bool restore_failed)
{
    char pid[16];
    int number;

    /* Slurm set it to the number of the process that was to become the script. */
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    if (getenv("SLURM_TASK_PID") != NULL)
        setenv("SLURM_TASK_PID", pid, 1);
    if (restore_failed)
        setenv("SLURM_AFFINODE_RESTORE_FAILED", "1", 1);
    execv(argv[0], argv);
    number = errno;
    complain(argv[0], number);
    _exit(number);
}

pid_t script_start(char **argv, const sigset_t *mask, bool restore_failed)
{
    pid_t child = fork();

    if (child == 0) {
        setsid();
        sigprocmask(SIG_SETMASK, mask, NULL);
        script_execute(argv, restore_failed);
    }
    return child;
}
