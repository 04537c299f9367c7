/* The SPANK plugin: registers --gpu-suspend-idle, rejects invalid values at submission, and on the node starts the batch
 * script of a job with the option under a shepherd. A fault of the plugin is logged, and the job starts without the option.
 *
 * The callbacks of SPANK are at the end: a table maps each callback and context to one handler. */
#include "channel.h"
#include "io_uring.h"
#include "keeper.h"
#include "option.h"
#include "settings.h"
#include "shepherd.h"
#include "submission.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

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
SPANK_PLUGIN(slurm_affinode, 1)
#pragma GCC visibility pop

#define NUMBER_BYTES 12
#define PATH_VARIABLE_BYTES 16384
#define REAL_SRUN "SLURM_AFFINODE_SRUN"

#define STORES_MS 3000
#define REQUEUE_RETRY_S 10
#define REQUEUED_S 120 /* Slurm ends a requeued job long before */

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

static struct plugin_state the_plugin = {.stepd_fd = -1, .task_fd = -1, .keeper_fd = -1};

static void log_fault(const char *line)
{
    slurm_error("slurm-affinode: %s", line);
}

static void warn_at_submission(const char *reason)
{
    slurm_info("--" OPTION_NAME ": the job will not be suspended: %s", reason);
}

static void log_line(const char *line)
{
    slurm_error("%s", line);
}

static void disable(struct plugin_state *state, const char *reason)
{
    state->enabled = false;
    snprintf(state->reason_disabled, sizeof(state->reason_disabled), "%s", reason);
}

/* --- the option */

static int client_option(struct plugin_state *state, const char *text)
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

/* The job is already submitted: an invalid option is disabled instead of rejected. A limit of the site applies only to jobs
 * without an image, which is known later. */
static int remote_option(struct plugin_state *state, const char *text)
{
    char error[OPTION_ERROR_BYTES];

    state->enabled = option_parse(text, &state->settings.defaults, &state->option, error, sizeof(error));
    if (!state->enabled)
        disable(state, error);
    else if (!option_check(&state->option, &state->settings.limits, error, sizeof(error)))
        snprintf(state->exceeded_limit, sizeof(state->exceeded_limit), "%s", error);
    return ESPANK_SUCCESS;
}

/* SPANK passes the context to this callback. */
static int dispatch_option(int value, const char *text, int remote)
{
    (void)value;
    if (text != NULL && strcmp(text, "(null)") == 0) /* Slurm's text of an option without a value */
        text = NULL;
    the_plugin.option_given = true;
    return remote ? remote_option(&the_plugin, text) : client_option(&the_plugin, text);
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

/* --- local and allocator contexts: srun, sbatch, salloc */

/* Checks what is known of the job before it is submitted. */
static int client_init_post_opt(struct plugin_state *state, spank_t spank)
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

/* --- remote context: slurmstepd, and the task that it forks */

static bool is_batch_step(spank_t spank)
{
    uint32_t step = 0;

    return spank_get_item(spank, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step == SLURM_BATCH_SCRIPT;
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

static int remote_init_post_opt(struct plugin_state *state, spank_t spank)
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

/* Some releases of Slurm give 0 as SPANK's item for batch steps; the environment of the script has the number. */
static uint32_t count_restarts(spank_t spank)
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
static bool find_image(const struct settings *settings, spank_t spank, uint32_t job_id)
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

static bool read_job(spank_t spank, struct keeper_job *job)
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

/* Forks the shepherd-to-be, and returns true in that process. The task does not return, but becomes the keeper, unless there
 * is to be no shepherd: it then returns false, with the reason in ERROR. */
static bool fork_shepherd(struct plugin_state *state, spank_t spank, char *error, size_t size)
{
    struct keeper_job job = {.shepherd = state->settings.shepherd,
                             .socket = state->settings.socket,
                             .scontrol = state->settings.scontrol,
                             .stepd_fd = state->task_fd,
                             .log = log_line};

    close(state->stepd_fd);
    state->stepd_fd = -1;
    if (!read_job(spank, &job)) {
        snprintf(error, size, "the job could not be read");
        goto fail;
    }
    state->has_image = find_image(&state->settings, spank, job.job_id);
    memcpy(state->job_name, job.name, sizeof(state->job_name));
    /* A suspended job is restored even if the site has changed its limits since. */
    if (state->exceeded_limit[0] != '\0' && !state->has_image) {
        snprintf(error, size, "%s", state->exceeded_limit);
        goto fail;
    }
    return keeper_fork(&job, &state->keeper_fd, error, size); /* closes task_fd */
fail:
    close(state->task_fd);
    return false;
}

static int remote_task_init_privileged(struct plugin_state *state, spank_t spank)
{
    char error[OPTION_ERROR_BYTES];

    if (state->enabled) {
        if (fork_shepherd(state, spank, error, sizeof(error))) {
            if (state->option.mode == MODE_REQUEUE && !state->option.io_uring && !io_uring_deny())
                slurm_info("slurm-affinode: io_uring is not denied: %s", strerror(errno));
            return ESPANK_SUCCESS;
        }
        disable(state, error);
    }
    if (state->reason_disabled[0] != '\0' && !state->has_image)
        slurm_error("--" OPTION_NAME " has no effect: %s", state->reason_disabled);
    return ESPANK_SUCCESS;
}

static int remote_task_post_fork(struct plugin_state *state, spank_t spank)
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

static int prepend_shepherd(const struct plugin_state *state, spank_t spank)
{
    const struct settings *settings = &state->settings;
    char numbers[5][NUMBER_BYTES];
    char text[OPTION_TEXT_BYTES];
    const char *arguments[SHEPHERD_ARGUMENTS] = {settings->shepherd, numbers[0],       numbers[1], numbers[2], numbers[3],
                                                 numbers[4],         settings->socket, text,       "--"};
    uint32_t restarts = count_restarts(spank);
    uint32_t job_id = 0;

    spank_get_item(spank, S_JOB_ID, &job_id);
    snprintf(numbers[0], NUMBER_BYTES, "%d", state->keeper_fd);
    snprintf(numbers[1], NUMBER_BYTES, "%u", job_id);
    snprintf(numbers[2], NUMBER_BYTES, "%u", restarts);
    /* Without a restart the image is of an earlier job with the same ID. */
    snprintf(numbers[3], NUMBER_BYTES, "%d", state->has_image && restarts > 0 ? 1 : 0);
    snprintf(numbers[4], NUMBER_BYTES, "%u", settings->agent_wait_s);
    option_format(&state->option, text, sizeof(text));
    return (int)spank_prepend_task_argv(spank, SHEPHERD_ARGUMENTS, arguments);
}

/* Finds the first srun in PATH that is not LAUNCHER. */
static bool find_srun(const char *path, const char *launcher, char *srun, size_t size)
{
    for (const char *directory = path; *directory != '\0';) {
        size_t length = strcspn(directory, ":");

        if (length > 0 && snprintf(srun, size, "%.*s/srun", (int)length, directory) < (int)size &&
            strcmp(srun, launcher) != 0 && access(srun, X_OK) == 0)
            return true;
        directory += length;
        directory += *directory == ':';
    }
    return false;
}

/* steps=local: the script finds the launcher as srun, and the launcher finds Slurm's in a variable. */
static void prepend_launcher(const struct plugin_state *state, spank_t spank)
{
    const char *launcher = state->settings.srun;
    int length = (int)(strrchr(launcher, '/') - launcher);
    char path[PATH_VARIABLE_BYTES];
    char made[PATH_VARIABLE_BYTES];
    char srun[PATH_VARIABLE_BYTES];

    if (state->option.steps != STEPS_LOCAL)
        return;
    if (access(launcher, X_OK) != 0 || spank_getenv(spank, "PATH", path, sizeof(path)) != ESPANK_SUCCESS ||
        snprintf(made, sizeof(made), "%.*s:%s", length, launcher, path) >= (int)sizeof(made) ||
        spank_setenv(spank, "PATH", made, 1) != ESPANK_SUCCESS) {
        slurm_error("--" OPTION_NAME ": steps=local has no effect: %s cannot be run, or PATH is missing or too long", launcher);
        return;
    }
    if (find_srun(path, launcher, srun, sizeof(srun)))
        spank_setenv(spank, REAL_SRUN, srun, 1);
}

/* Go listens with MPTCP where it can, and CRIU cannot dump such sockets. A setting of the user stays. */
static void set_go_debug(const struct plugin_state *state, spank_t spank)
{
    if (state->option.mode == MODE_REQUEUE)
        spank_setenv(spank, "GODEBUG", "multipathtcp=0", 0);
}

/* Requeues and holds a job with an image that cannot be restored here for lack of a shepherd: a start from the beginning
 * would lose its work. Does not return then: the task waits until Slurm ends it. */
static void requeue_held(const struct plugin_state *state, spank_t spank)
{
    sigset_t none;
    int status = 0;
    pid_t child;

    if (!state->has_image)
        return;
    if (count_restarts(spank) == 0) { /* the image is of an earlier job with the same ID */
        slurm_error("--" OPTION_NAME " has no effect: %s", state->reason_disabled);
        return;
    }
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_NAME, "affinode-keeper"); /* proctrack/linuxproc does not signal processes named slurmstepd */
    slurm_error("--" OPTION_NAME ": the job has an image, and is not started from its beginning; it is held: %s",
                state->reason_disabled);
    for (;;) {
        child = fork();
        if (child == 0)
            exec_requeuehold(state->settings.scontrol, state->job_name);
        if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0)
            break;
        sleep(REQUEUE_RETRY_S); /* slurmctld may not respond */
    }
    sleep(REQUEUED_S);
    _exit(1);
}

/* Runs as the user: in the shepherd-to-be, or in the task where there is no shepherd. */
static int remote_task_init(struct plugin_state *state, spank_t spank)
{
    struct packet packet;

    if (state->option_given)
        spank_unsetenv(spank, OPTION_VARIABLE);
    if (!state->enabled || state->keeper_fd < 0) {
        requeue_held(state, spank);
        return ESPANK_SUCCESS;
    }
    prctl(PR_SET_DUMPABLE, 0); /* other processes of the user must not trace the shepherd-to-be */
    if (channel_receive(state->keeper_fd, &packet, -1) <= 0 || packet.kind != PACKET_GO)
        _exit(1); /* the task has ended, or continues without a shepherd */
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* the change of the user has cleared it */
    if (prepend_shepherd(state, spank) != ESPANK_SUCCESS) {
        slurm_error("--" OPTION_NAME " has no effect: the shepherd cannot be started");
        return ESPANK_SUCCESS;
    }
    prepend_launcher(state, spank);
    set_go_debug(state, spank);
    fcntl(state->keeper_fd, F_SETFD, 0);
    return ESPANK_SUCCESS;
}

/* --- dispatch */

typedef int handler(struct plugin_state *state, spank_t spank);

enum callback { INIT, INIT_POST_OPT, TASK_INIT_PRIVILEGED, TASK_POST_FORK, TASK_INIT, CALLBACKS };

#define CONTEXTS (S_CTX_JOB_SCRIPT + 1)

/* A callback without a handler in its context does nothing. */
static handler *const handlers[CALLBACKS][CONTEXTS] = {
    [INIT] = {[S_CTX_LOCAL] = register_option, [S_CTX_ALLOCATOR] = register_option, [S_CTX_REMOTE] = register_option},
    [INIT_POST_OPT] = {[S_CTX_LOCAL] = client_init_post_opt,
                       [S_CTX_ALLOCATOR] = client_init_post_opt,
                       [S_CTX_REMOTE] = remote_init_post_opt},
    [TASK_INIT_PRIVILEGED] = {[S_CTX_REMOTE] = remote_task_init_privileged},
    [TASK_POST_FORK] = {[S_CTX_REMOTE] = remote_task_post_fork},
    [TASK_INIT] = {[S_CTX_REMOTE] = remote_task_init},
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
