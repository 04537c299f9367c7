#include "submission.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

bool submission_is_batch(void)
{
    return strcmp(program_invocation_short_name, "sbatch") == 0;
}

bool submission_is_crontab(void)
{
    return strcmp(program_invocation_short_name, "scrontab") == 0;
}

bool submission_partition_allowed(const struct settings *settings, char *refused, size_t size)
{
    char *(*get)(void *, const char *);
    void *options = dlsym(RTLD_DEFAULT, "opt");
    char partitions[1024];
    char *rest = partitions;
    const char *name;
    const char *found;

    *(void **)&get = dlsym(RTLD_DEFAULT, "slurm_option_get");
    if (settings->partition_count == 0 || options == NULL || get == NULL || (found = get(options, "partition")) == NULL)
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
