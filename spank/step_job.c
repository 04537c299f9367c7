/* The job of a step, as SPANK and its environment describe it, and its image. */
#include "plugin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STORES_MS 3000

bool is_batch_step(spank_t spank)
{
    uint32_t step = 0;

    return spank_get_item(spank, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step == SLURM_BATCH_SCRIPT;
}

/* Some releases of Slurm give 0 as SPANK's item for batch steps; the environment of the script has the number. */
uint32_t count_restarts(spank_t spank)
{
    uint32_t restarts = 0;
    char text[16];
    char *end;
    unsigned long found;

    if (spank_get_item(spank, S_SLURM_RESTART_COUNT, &restarts) == ESPANK_SUCCESS && restarts > 0)
        return restarts;
    if (spank_getenv(spank, "SLURM_RESTART_COUNT", text, sizeof(text)) != ESPANK_SUCCESS)
        return 0;
    found = strtoul(text, &end, 10);
    return *end == '\0' && found <= UINT32_MAX ? (uint32_t)found : 0;
}

/* Whether a store of the site has an image of the job. This runs as root, as others may not see the store; the count of
 * restarts is not yet known then. Only the agent knows whether the image is valid. The search runs in a child: a store that
 * does not respond counts as one with an image, and does not keep the job from starting. */
bool find_image(const struct settings *settings, spank_t spank, uint32_t job_id)
{
    char cluster[65];
    char path[4096];
    pid_t child;

    if (settings->store_count == 0 ||
        spank_getenv(spank, "SLURM_CLUSTER_NAME", cluster, sizeof(cluster)) != ESPANK_SUCCESS ||
        strchr(cluster, '/') != NULL)
        return false;
    child = fork();
    if (child == 0) {
        for (int i = 0; i < settings->store_count; i++) {
            snprintf(path, sizeof(path), "%s/%s.%u", settings->stores[i], cluster, job_id);
            if (access(path, F_OK) == 0)
                _exit(1);
        }
        _exit(0);
    }
    return child < 0 || !wait_for_success(child, STORES_MS);
}

bool read_job(spank_t spank, struct keeper_job *job)
{
    gid_t *groups = NULL;
    char **arguments = NULL;
    uint32_t array = 0;
    uint32_t task = NO_VAL;
    int count = 0;

    if (spank_get_item(spank, S_JOB_ID, &job->job_id) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_UID, &job->uid) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_GID, &job->gid) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_SUPPLEMENTARY_GIDS, &groups, &job->group_count) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_ARGV, &count, &arguments) != ESPANK_SUCCESS || count < 1)
        return false;
    job->groups = groups;
    job->script = arguments[0];
    if (spank_get_item(spank, S_JOB_ARRAY_ID, &array) == ESPANK_SUCCESS && array != 0 &&
        spank_get_item(spank, S_JOB_ARRAY_TASK_ID, &task) == ESPANK_SUCCESS && task != NO_VAL)
        snprintf(job->name, sizeof(job->name), "%u_%u", array, task);
    else
        snprintf(job->name, sizeof(job->name), "%u", job->job_id);
    return true;
}
