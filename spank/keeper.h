/* The keeper: the task that Slurm forked, which runs as root between slurmstepd and the shepherd of a job.
 *
 *   slurmstepd ── task (the keeper, root) ── shepherd (PID 1 of a PID namespace, the user) ── script
 *
 * slurmstepd waits for the task, signals it and moves it into cgroups. The task creates the namespace, passes signals and
 * cgroups on to the shepherd, and exits with the status of the script.
 */
#ifndef AFFINODE_KEEPER_H
#define AFFINODE_KEEPER_H

#include "announcement.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define JOB_NAME_BYTES 24

struct keeper_job {
    uint32_t job_id;
    char name[JOB_NAME_BYTES]; /* for scontrol: the job ID of an array's last task is also that of the whole array */
    uid_t uid;
    gid_t gid;
    const gid_t *groups;
    int group_count;
    const char *shepherd;
    const char *socket;   /* the agent's; the shepherd is announced beside it */
    const char *scontrol; /* NULL: searched for in the usual places */
    const char *script;   /* the program that Slurm would execute */
    int stepd_fd;         /* to slurmstepd; closed by keeper_fork() */
    void (*log)(const char *line); /* to Slurm's log and the job's standard error, as slurmstepd logs */
};

/* Called in the task, as root. Returns
 * - true in a child that is PID 1 of a new namespace, with *CHANNEL open to the keeper (close-on-exec);
 * - false in the task, if the namespace could not be created, with the reason in ERROR. The task is then unchanged.
 * Otherwise the task does not return: it runs the keeper, then exits. */
bool keeper_fork(const struct keeper_job *job, int *channel, char *error, size_t size);

/* Called in a child: executes scontrol (NULL: searched for), which requeues and holds the job. Does not return; the exit
 * status is 127 if there is no scontrol. */
void exec_requeuehold(const char *scontrol, const char *job) __attribute__((noreturn));

/* Waits for a child, and kills it after the timeout. True: it exited with status 0. */
bool wait_for_success(pid_t child, int timeout_ms);

/* Ends this process with this wait status, by the same signal if there was one, without a core file. */
void exit_as(int wait_status) __attribute__((noreturn));

/* Runs the keeper until the task ends. CHILD is the announced shepherd. */
void keeper_run(const struct keeper_job *job, pid_t child, int channel, struct announcement *announcement)
    __attribute__((noreturn));

/* Called in slurmstepd, when the task has its cgroups and CPUs: waits until the shepherd has them too. False: the task
 * continues without a shepherd. */
bool keeper_wait_for_placement(int fd);

/* Moves CHILD into the cgroups of this process, and binds it to the same CPUs. */
bool place_with_caller(pid_t child, char *error, size_t size);

#endif
