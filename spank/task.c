/* The remote context in the task that slurmstepd forks: it becomes the keeper, and forks the shepherd-to-be, which starts the
 * script under the shepherd. */
#include "channel.h"
#include "io_uring.h"
#include "plugin.h"
#include "shepherd.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define NUMBER_BYTES 12
#define PATH_VARIABLE_BYTES 16384
#define REAL_SRUN "SLURM_AFFINODE_SRUN"

#define REQUEUE_RETRY_S 10
#define REQUEUED_S 120 /* Slurm ends a requeued job long before */

static void log_line(const char *line)
{
    slurm_error("%s", line);
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

int task_init_privileged(struct plugin_state *state, spank_t spank)
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
int task_init(struct plugin_state *state, spank_t spank)
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
