#include "script.h"

#include "channel.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

void script_execute(char **argv, bool restore_failed, int keeper_fd)
{
    struct packet packet = {.kind = PACKET_EXEC};
    char pid[16];

    /* Slurm set it to the PID of the task, which is the keeper now. */
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    if (getenv("SLURM_TASK_PID") != NULL)
        setenv("SLURM_TASK_PID", pid, 1);
    if (restore_failed)
        setenv("SLURM_AFFINODE_RESTORE_FAILED", "1", 1);
    execv(argv[0], argv);
    packet.number = errno;
    channel_send(keeper_fd, &packet);
    _exit(packet.number);
}

pid_t script_start(char **argv, const sigset_t *mask, bool restore_failed, int keeper_fd)
{
    pid_t child = fork();

    if (child == 0) {
        setsid();
        /* Survives execve() and a checkpoint. Orphans become children of the script instead of PID 1, and thus stay in the
         * process tree that is checkpointed. */
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        sigprocmask(SIG_SETMASK, mask, NULL);
        script_execute(argv, restore_failed, keeper_fd);
    }
    return child;
}
