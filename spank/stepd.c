/* The remote context in slurmstepd: the option takes effect in batch steps, and waits for the placement of the task. */
#include "plugin.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* The job is already submitted: an invalid option is disabled instead of rejected. A limit of the site applies only to jobs
 * without an image, which is known later. */
int stepd_option(struct plugin_state *state, const char *text)
{
    char error[OPTION_ERROR_BYTES];

    state->enabled = option_parse(text, &state->settings.defaults, &state->option, error, sizeof(error));
    if (!state->enabled)
        disable(state, error);
    else if (!option_check(&state->option, &state->settings.limits, error, sizeof(error)))
        snprintf(state->exceeded_limit, sizeof(state->exceeded_limit), "%s", error);
    return ESPANK_SUCCESS;
}

static void check_job(struct plugin_state *state, spank_t spank)
{
    char value[256];
    char allowed[512];

    if (spank_getenv(spank, "SLURM_CONTAINER", value, sizeof(value)) == ESPANK_SUCCESS)
        disable(state, "the job runs in an OCI container");
    if (state->settings.partition_count > 0 &&
        spank_getenv(spank, "SLURM_JOB_PARTITION", value, sizeof(value)) == ESPANK_SUCCESS &&
        !settings_allow_partition(&state->settings, value)) {
        settings_list_partitions(&state->settings, allowed, sizeof(allowed));
        snprintf(state->exceeded_limit, sizeof(state->exceeded_limit), "partition '%s': this site allows %s", value, allowed);
    }
}

int stepd_init_post_opt(struct plugin_state *state, spank_t spank)
{
    int ends[2];

    if (!is_batch_step(spank)) {
        disable(state, "");
        return ESPANK_SUCCESS;
    }
    if (state->enabled)
        check_job(state, spank);
    if (!state->enabled)
        return ESPANK_SUCCESS;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        disable(state, "cannot create a socket");
        return ESPANK_SUCCESS;
    }
    state->stepd_fd = ends[0];
    state->task_fd = ends[1];
    return ESPANK_SUCCESS;
}

int stepd_task_post_fork(struct plugin_state *state, spank_t spank)
{
    (void)spank;
    if (!state->enabled || state->stepd_fd < 0)
        return ESPANK_SUCCESS;
    /* With a copy of its own end open here, the end of the task would not be noticed. */
    close(state->task_fd);
    state->task_fd = -1;
    keeper_wait_for_placement(state->stepd_fd); /* on failure the task has logged the reason */
    close(state->stepd_fd);
    state->stepd_fd = -1;
    return ESPANK_SUCCESS;
}
