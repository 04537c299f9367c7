/* The PIDs of a job.
 *
 * Programs use their PID as a unique name in places that outlive a PID namespace: /tmp, /dev/shm, lock files (Open MPI's
 * session directory, hsperfdata of Java). In each new namespace the kernel counts from 1, so that the names of all jobs
 * would be the same. */
#ifndef AFFINODE_FIRST_PID_H
#define AFFINODE_FIRST_PID_H

#include <stdbool.h>
#include <stdint.h>

/* The node's highest PID plus 1 (kernel.pid_max), read outside of the namespace; 0: unknown. */
uint32_t pid_max_read(void);

/* The PID after which those of the job begin. It differs from job to job, and from attempt to attempt. */
uint32_t first_pid_of(uint32_t job_id, uint64_t attempt_ns, uint32_t pid_max);

/* Called by PID 1 of a namespace with its /proc mounted: the next process gets a PID after LAST, and PIDs end where they end
 * outside. False: errno says why. */
bool first_pid_set(uint32_t last, uint32_t pid_max);

#endif
