/* The SPANK plugin: registers --gpu-suspend-idle, rejects invalid values at submission, and on the node starts the batch
 * script of a job with the option under a shepherd. A fault of the plugin is logged, and the job starts without the option.
 *
 * The callbacks of SPANK are at the end: a table maps each callback and context to one handler, in client.c, stepd.c or
 * task.c. */
#include "plugin.h"

#include "announcement.h"

#include <stdio.h>
#include <string.h>

#pragma GCC visibility push(default)
SPANK_PLUGIN(slurm_affinode, 1)
/* Compared with the agent by slurm-affinode doctor (slurm_affinode/pipeline/plugin_check.py). */
const char slurm_affinode_release[] = RELEASE;
const unsigned int slurm_affinode_announcement = ANNOUNCEMENT_VERSION;
#pragma GCC visibility pop

static struct plugin_state the_plugin = {.stepd_fd = -1, .task_fd = -1, .keeper_fd = -1};

static void log_fault(const char *line)
{
    slurm_error("slurm-affinode: %s", line);
}

void disable(struct plugin_state *state, const char *reason)
{
    state->enabled = false;
    snprintf(state->reason_disabled, sizeof(state->reason_disabled), "%s", reason);
}

/* --- the option */

/* SPANK passes the context to this callback. */
static int dispatch_option(int value, const char *text, int remote)
{
    (void)value;
    if (text != NULL && strcmp(text, "(null)") == 0) /* Slurm's text of an option without a value */
        text = NULL;
    the_plugin.option_given = true;
    return remote ? stepd_option(&the_plugin, text) : client_option(&the_plugin, text);
}

static struct spank_option the_option = {
    .name = OPTION_NAME,
    .arginfo = "WINDOW[,key=value...]",
    .usage = "checkpoint and requeue the job when its GPUs have been idle for WINDOW; it resumes later, on any node, with the "
             "same job ID. WINDOW is 90s, 15m, 2h, or a time in Slurm's forms (default: 15m, or the site's). Keys: "
             "util=PCT: GPU utilization up to PCT is idle (0). mode=requeue|inplace: give the GPUs back (default), or "
             "move GPU memory to host memory and keep them. wake=auto|hold|TIME: when to resume. when=pressure|always: "
             "only if a pending job could use the GPUs (default), or at once. signal=NAME@SECONDS: send the job a signal "
             "first. io_uring=allow: do not deny io_uring, with which a job cannot be checkpointed. "
             "steps=slurm|local: run srun steps of the script under Slurm (default), or below the script, so that they can "
             "be suspended. after_loss=image|start|hold: after a loss of the restored job, restore it again, start its script "
             "from the beginning, or hold it. Example: --gpu-suspend-idle=15m,util=5,signal=USR1@60. For batch jobs; slurm-affinode status JOBID "
             "shows more.",
    .has_arg = 2,
    .val = 0,
    .cb = dispatch_option,
};

static int register_option(struct plugin_state *state, spank_t spank)
{
    settings_read(&state->settings, state->argc, state->argv, log_fault);
    if (spank_option_register(spank, &the_option) != ESPANK_SUCCESS)
        log_fault("the option --" OPTION_NAME " could not be registered");
    return ESPANK_SUCCESS;
}

/* --- dispatch */

enum callback { INIT, INIT_POST_OPT, TASK_INIT_PRIVILEGED, TASK_POST_FORK, TASK_INIT, CALLBACKS };

#define CONTEXTS (S_CTX_JOB_SCRIPT + 1)

/* A callback without a handler in its context does nothing. */
static handler *const handlers[CALLBACKS][CONTEXTS] = {
    [INIT] = {[S_CTX_LOCAL] = register_option, [S_CTX_ALLOCATOR] = register_option, [S_CTX_REMOTE] = register_option},
    [INIT_POST_OPT] = {[S_CTX_LOCAL] = client_init_post_opt,
                       [S_CTX_ALLOCATOR] = client_init_post_opt,
                       [S_CTX_REMOTE] = stepd_init_post_opt},
    [TASK_INIT_PRIVILEGED] = {[S_CTX_REMOTE] = task_init_privileged},
    [TASK_POST_FORK] = {[S_CTX_REMOTE] = stepd_task_post_fork},
    [TASK_INIT] = {[S_CTX_REMOTE] = task_init},
};

static int dispatch(enum callback callback, spank_t spank, int argc, char **argv)
{
    unsigned context = (unsigned)spank_context();
    handler *handle = context < CONTEXTS ? handlers[callback][context] : NULL;

    the_plugin.argc = argc;
    the_plugin.argv = argv;
    return handle == NULL ? ESPANK_SUCCESS : handle(&the_plugin, spank);
}

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    return dispatch(INIT, spank, argc, argv);
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
    return dispatch(INIT_POST_OPT, spank, argc, argv);
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv)
{
    return dispatch(TASK_INIT_PRIVILEGED, spank, argc, argv);
}

int slurm_spank_task_post_fork(spank_t spank, int argc, char **argv)
{
    return dispatch(TASK_POST_FORK, spank, argc, argv);
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    return dispatch(TASK_INIT, spank, argc, argv);
}
