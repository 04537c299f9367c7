/* The state of the plugin in one process, and the handlers of each context: client.c (srun, sbatch, salloc), stepd.c
 * (slurmstepd) and task.c (the task that slurmstepd forks). */
#ifndef SLURM_AFFINODE_PLUGIN_H
#define SLURM_AFFINODE_PLUGIN_H

#include "keeper.h"
#include "option.h"
#include "settings.h"

#include <stdbool.h>
#include <stdint.h>

/* The compiler applies our warnings to Slurm's headers where they are not system headers (SLURM_CFLAGS=-I...). */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include <slurm/slurm.h>
#pragma GCC diagnostic pop

#if SLURM_VERSION_NUMBER < SLURM_VERSION_NUM(23, 11, 0)
#error "slurm-affinode needs the headers of Slurm 23.11 or newer: SLURM_CFLAGS=-I... selects their directory"
#endif

/* All other symbols are hidden (-fvisibility=hidden, plugin.map). */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
#pragma GCC visibility pop

/* Slurm leaves the option in the environment of the job and of salloc's shell; jobs submitted from there would inherit it. */
#define OPTION_OF_CLIENT "_SLURM_SPANK_OPTION_slurm_affinode_gpu_suspend_idle"
#define OPTION_VARIABLE "SLURM_SPANK_" OPTION_OF_CLIENT

struct plugin_state {
    int argc; /* the arguments in plugstack.conf */
    char **argv;
    struct settings settings;
    struct suspend_option option;
    bool option_given;
    bool enabled;  /* the option has an effect in this process */
    int stepd_fd;  /* slurmstepd's end of its socket to the task; -1: closed */
    int task_fd;   /* the task's end */
    int keeper_fd; /* in the shepherd-to-be: to the keeper; -1 in all other processes */
    bool has_image;
    char job_name[JOB_NAME_BYTES];                /* set together with has_image */
    char reason_disabled[OPTION_ERROR_BYTES];     /* logged by the task, when the job's standard error is open */
    char exceeded_limit[OPTION_ERROR_BYTES];      /* the site's limit that the option exceeds; empty: none */
};

/* A handler of a callback in one context. */
typedef int handler(struct plugin_state *state, spank_t spank);

handler client_init_post_opt;
handler stepd_init_post_opt;
handler stepd_task_post_fork;
handler task_init_privileged;
handler task_init;

/* The option as given on the command line of a client, and as handed on to slurmstepd. */
int client_option(struct plugin_state *state, const char *text);
int stepd_option(struct plugin_state *state, const char *text);

/* Has the option have no effect; the task logs the reason. */
void disable(struct plugin_state *state, const char *reason);

/* --- the job, as SPANK describes it (step_job.c) */

bool is_batch_step(spank_t spank);
uint32_t count_restarts(spank_t spank);
bool find_image(const struct settings *settings, spank_t spank, uint32_t job_id);
bool read_job(spank_t spank, struct keeper_job *job);

#endif
