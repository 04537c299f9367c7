/* What sbatch knows of a job before it is submitted. SPANK does not tell a plugin the partition; sbatch's own table of
 * options does, where it can be found. Where not, the node checks when the job starts. */
#ifndef AFFINODE_SUBMISSION_H
#define AFFINODE_SUBMISSION_H

#include "settings.h"

bool submission_is_batch(void);

/* scrontab reads the options of plugins, and submits without them. */
bool submission_is_crontab(void);

/* False: REFUSED has the partition that is not among those that the site allows. */
bool submission_partition_allowed(const struct settings *settings, char *refused, size_t size);

#endif
