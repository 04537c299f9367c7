#include "submission.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Identifies a program of Slurm by the symbol of its options, as sites rename and wrap programs; else by name. */
static bool is_program(const char *options, const char *name)
{
    return dlsym(RTLD_DEFAULT, options) != NULL || strcmp(program_invocation_short_name, name) == 0;
}

bool submission_is_batch(void)
{
    return is_program("sbopt", "sbatch");
}

bool submission_is_crontab(void)
{
    return is_program("scopt", "scrontab");
}

/* Returns a value of the program's own options in the form of its messages, or NULL if the symbols are not found. */
static const char *own_option(const char *name)
{
    char *(*get)(void *, const char *);
    void *options = dlsym(RTLD_DEFAULT, "opt");

    *(void **)&get = dlsym(RTLD_DEFAULT, "slurm_option_get");
    return options == NULL || get == NULL ? NULL : get(options, name);
}

bool submission_allocates(void)
{
    const char *job;

    if (is_program("saopt", "salloc"))
        return true;
    if (!is_program("sropt", "srun") || getenv("SLURM_JOB_ID") != NULL)
        return false;
    job = own_option("jobid"); /* --jobid=JOBID */
    return job == NULL || strcmp(job, "unset") == 0;
}

bool submission_partition_allowed(const struct settings *settings, char *refused, size_t size)
{
    char partitions[1024];
    char *rest = partitions;
    const char *name;
    const char *found;

    if (settings->partition_count == 0 || (found = own_option("partition")) == NULL)
        return true;
    if (snprintf(partitions, sizeof(partitions), "%s", found) >= (int)sizeof(partitions))
        return true;
    while ((name = strsep(&rest, ",")) != NULL)
        if (!settings_allow_partition(settings, name)) {
            option_shown(name, refused, size);
            return false;
        }
    return true;
}
