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

static bool is_set(const char *value)
{
    return value != NULL && value[0] != '\0' && strcmp(value, "unset") != 0 && strcmp(value, "(null)") != 0;
}

/* NAME: gpu, shard */
static bool requests_gres(const char *name)
{
    static const char *const lists[] = {"gres", "tres-per-task"};
    const char *value;

    for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++)
        if (is_set(value = own_option(lists[i])) && strstr(value, name) != NULL)
            return true;
    return false;
}

static bool requests_whole_gpus(void)
{
    static const char *const counts[] = {"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"};

    for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
        if (is_set(own_option(counts[i])))
            return true;
    return requests_gres("gpu");
}

void submission_check(const struct suspend_option *option, void (*warn)(const char *reason))
{
    bool requeue = option->mode == MODE_REQUEUE;
    const char *nodes = own_option("nodes");
    const char *requeued = own_option("requeue");

    if (nodes == NULL)
        return; /* the symbols of this program are not found */
    if (strtol(nodes, NULL, 10) > 1)
        warn("it requests several nodes (submit it with --nodes=1)");
    if (requeue && requeued != NULL && strcmp(requeued, "no-requeue") == 0)
        warn("it may not be requeued (submit it with --requeue, or with mode=inplace)");
    if (requests_whole_gpus()) {
        /* Nothing waits for the memory of GPUs that no other job can use: the pressure never comes. */
        if (!requeue && option->when == WHEN_PRESSURE)
            warn("with mode=inplace it keeps its GPUs, and no other job could use them (submit it with --gres=shard:N, "
                 "mode=requeue, or when=always)");
    } else if (!requests_gres("shard"))
        warn("it requests no GPUs (--gpus, --gres=gpu:N), unless the site adds some");
}
