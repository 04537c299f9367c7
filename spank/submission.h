/* Checks of a job before it is submitted. SPANK does not give the partition to a plugin: it is read from sbatch's own options,
 * if their symbols are found. If not, the node checks it when the job starts. */
#ifndef AFFINODE_SUBMISSION_H
#define AFFINODE_SUBMISSION_H

#include "option.h"
#include "settings.h"

bool submission_is_batch(void);

/* salloc, and srun outside of a job: the program creates a job without a batch script. */
bool submission_allocates(void);

/* scrontab accepts the options of plugins, and submits jobs without them. */
bool submission_is_crontab(void);

/* False: REFUSED has a partition that the site does not allow. */
bool submission_partition_allowed(const struct settings *settings, char *refused, size_t size);

/* Calls WARN with each reason, known at submission, why the job will not be suspended later. */
void submission_check(const struct suspend_option *option, void (*warn)(const char *reason));

#endif
