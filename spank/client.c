/* The local and allocator contexts: srun, sbatch and salloc check the option before the job is submitted. */
#include "plugin.h"
#include "submission.h"

#include <stdlib.h>

static void warn_at_submission(const char *reason)
{
    slurm_info("--" OPTION_NAME ": the job will not be suspended: %s", reason);
}

int client_option(struct plugin_state *state, const char *text)
{
    char error[OPTION_ERROR_BYTES];

    state->enabled = option_parse(text, &state->settings.defaults, &state->option, error, sizeof(error)) &&
                     option_check(&state->option, &state->settings.limits, error, sizeof(error));
    if (!state->enabled) {
        slurm_error("--" OPTION_NAME ": %s", error);
        return ESPANK_BAD_ARG;
    }
    if (submission_is_crontab())
        slurm_info("--" OPTION_NAME " has no effect here: scrontab does not hand it on; let the entry call sbatch");
    return ESPANK_SUCCESS;
}

/* Checks what is known of the job before it is submitted. */
int client_init_post_opt(struct plugin_state *state, spank_t spank)
{
    char allowed[512];
    char refused[80];

    if (!state->enabled)
        return ESPANK_SUCCESS;
    if (!submission_is_batch()) {
        unsetenv(OPTION_OF_CLIENT);
        spank_job_control_unsetenv(spank, OPTION_OF_CLIENT);
        if (submission_allocates()) {
            slurm_error("--" OPTION_NAME ": only batch jobs can be suspended: submit this one with sbatch, or omit the option");
            exit(EXIT_FAILURE); /* before Slurm has allocated anything */
        }
        return ESPANK_SUCCESS;
    }
    if (submission_partition_allowed(&state->settings, refused, sizeof(refused))) {
        submission_check(&state->option, warn_at_submission);
        return ESPANK_SUCCESS;
    }
    settings_list_partitions(&state->settings, allowed, sizeof(allowed));
    slurm_error("--" OPTION_NAME ": partition '%s': this site allows %s", refused, allowed);
    exit(EXIT_FAILURE); /* Slurm ignores the return value of an optional plugin */
}
