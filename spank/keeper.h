/* The two processes that stand between slurmstepd and a job's script, on the side of root.
 *
 *   slurmstepd ── task (the keeper, root) ── shepherd (PID 1 of a PID namespace, the user) ── script
 *
 * The task that Slurm forked stays what Slurm knows: it is waited for, signalled, put into cgroups. It makes the namespace,
 * hands on what is done to it, and ends exactly as the script ended.
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
    char name[JOB_NAME_BYTES]; /* for scontrol: the number of an array's last task is also that of the whole array */
    uid_t uid;
    gid_t gid;
    const gid_t *groups;
    int group_count;
    const char *shepherd;
    const char *socket;   /* the agent's; the shepherd is announced beside it */
    const char *scontrol; /* NULL: looked for */
    const char *script;   /* what Slurm would execute */
    int stepd_fd;         /* to slurmstepd; is closed */
    void (*log)(const char *line); /* to Slurm's log and the job's standard error, as slurmstepd logs */
};

/* To be called in the task, as root. Returns
 * - in a child that is PID 1 of a new namespace: true, with *CHANNEL open to the keeper (close-on-exec);
 * - in the task itself only where the namespace could not be made: false, with the reason in ERROR. The task is then as
 *   it was.
 * Where all went well the task does not return: it keeps, then ends. */
bool keeper_divide(const struct keeper_job *job, int *channel, char *error, size_t size);

/* In a child of its own: becomes scontrol (NULL: looked for), which puts the job back into the queue, held. Does not return;
 * the status is 127 where there is no scontrol. */
void put_back(const char *scontrol, const char *job) __attribute__((noreturn));

/* Waits for the end of a child at most so long; it is killed then. Whether it ended with status 0. */
bool ended_well(pid_t child, int timeout_ms);

/* Ends this process as a process with this wait status has ended, without a core file. */
void mirror(int wait_status) __attribute__((noreturn));

/* The rest of the task's life: CHILD is the shepherd that was announced. */
void keep(const struct keeper_job *job, pid_t child, int channel, struct announcement *announcement) __attribute__((noreturn));

/* In slurmstepd, when the task has its cgroups and CPUs: waits until the shepherd has them too. False: the task went on
 * without a shepherd. */
bool keeper_place(int fd);

/* Gives CHILD the cgroups and CPUs of this process. */
bool place_beside(pid_t child, char *error, size_t size);

#endif
