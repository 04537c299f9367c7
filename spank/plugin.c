/* The SPANK plugin: registers --gpu-suspend-idle, refuses what is wrong at submission, and on the node puts the batch script
 * of a job that asked for it under a shepherd. A fault of its own is logged, and the job starts as if it had not asked. */
#include "channel.h"
#include "keeper.h"
#include "option.h"
#include "settings.h"
#include "shepherd.h"
#include "submission.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* Outside of the system's directories (SLURM_CFLAGS=-I...) Slurm's headers have to pass our warnings, and do not. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include <slurm/slurm.h>
#pragma GCC diagnostic pop

#if SLURM_VERSION_NUMBER < SLURM_VERSION_NUM(23, 11, 0)
#error "slurm-affinode needs the headers of Slurm 23.11 or newer: SLURM_CFLAGS=-I... names their place"
#endif

/* Everything else is hidden (-fvisibility=hidden, plugin.map). */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
SPANK_PLUGIN(slurm_affinode, 1)
#pragma GCC visibility pop

#define NUMBER_BYTES 12

#define STORES_MS 3000
#define PUT_BACK_AGAIN_S 10
#define HELD_S 120 /* Slurm ends a job that was put back long before */

/* Slurm leaves the option in the environment of the job and of salloc's shell, where what they submit would find it. */
#define OPTION_OF_CLIENT "_SLURM_SPANK_OPTION_slurm_affinode_gpu_suspend_idle"
#define OPTION_VARIABLE "SLURM_SPANK_" OPTION_OF_CLIENT

static struct settings settings;
static struct suspend_option option;
static bool was_given;
static bool is_on;
static int stepd_fds[2] = {-1, -1}; /* slurmstepd's end, the task's end */
static int shepherd_channel = -1;   /* in the shepherd-to-be */
static bool has_image;
static char job_name[JOB_NAME_BYTES];       /* of one with an image */
static char reason_off[OPTION_ERROR_BYTES]; /* is said when the job's standard error is open */
static char limit[OPTION_ERROR_BYTES];      /* what this site has against the option by now */

static int take_option(int value, const char *text, int remote);

static struct spank_option the_option = {
    .name = OPTION_NAME,
    .arginfo = "WINDOW[,key=value...]",
    .usage = "checkpoint the job when its GPUs have been idle for WINDOW, give them back, and let it go on later, on any node, "
             "with the same job id. WINDOW is 90s, 15m, 2h, or a time in Slurm's forms; without =WINDOW the site's default "
             "holds (15m unless set). Keys: util=PCT: idle is GPU utilization up to PCT (0). mode=requeue|inplace: give the "
             "GPUs back (default), or move GPU memory to host memory and keep them. wake=auto|hold|TIME: when it goes "
             "on. when=pressure|always: only where a pending job could use the GPUs (default), or at once. "
             "signal=NAME@SECONDS: tell the job first. Example: --gpu-suspend-idle=15m,util=5,signal=USR1@60. For batch "
             "jobs; slurm-affinode status JOBID shows the rest.",
    .has_arg = 2,
    .val = 0,
    .cb = take_option,
};

static void complain(const char *line)
{
    slurm_error("slurm-affinode: %s", line);
}

static void log_line(const char *line)
{
    slurm_error("%s", line);
}

static void turn_off(const char *why)
{
    is_on = false;
    snprintf(reason_off, sizeof(reason_off), "%s", why);
}

static int take_option(int value, const char *text, int remote)
{
    char error[OPTION_ERROR_BYTES];

    (void)value;
    if (text != NULL && strcmp(text, "(null)") == 0) /* how Slurm hands on an option without a value */
        text = NULL;
    was_given = true;
    is_on = option_parse(text, &settings.defaults, &option, error, sizeof(error));
    if (is_on && !option_check(&option, &settings.limits, error, sizeof(error))) {
        is_on = remote != 0;
        snprintf(limit, sizeof(limit), "%s", error);
    }
    if (is_on && !remote && submission_is_crontab())
        slurm_info("--" OPTION_NAME " has no effect here: scrontab does not hand it on; let the entry call sbatch");
    if (is_on)
        return ESPANK_SUCCESS;
    if (remote) {
        turn_off(error); /* it is too late to refuse */
        return ESPANK_SUCCESS;
    }
    slurm_error("--" OPTION_NAME ": %s", error);
    return ESPANK_BAD_ARG;
}

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    settings_read(&settings, argc, argv, complain);
    if (spank_option_register(spank, &the_option) != ESPANK_SUCCESS)
        complain("the option --" OPTION_NAME " could not be registered");
    return ESPANK_SUCCESS;
}

/* sbatch, salloc, srun: what can be known of the job before it is submitted. */
static void check_submission(spank_t spank)
{
    char allowed[512];
    char refused[80];

    if (!submission_is_batch()) {
        unsetenv(OPTION_OF_CLIENT);
        spank_job_control_unsetenv(spank, OPTION_OF_CLIENT);
        /* Steps of a job inherit the option without having been asked. */
        if (getenv("SLURM_JOB_ID") == NULL)
            slurm_info("--" OPTION_NAME " has no effect here: only batch jobs (sbatch) can be suspended");
        return;
    }
    if (submission_partition_allowed(&settings, refused, sizeof(refused)))
        return;
    settings_list_partitions(&settings, allowed, sizeof(allowed));
    slurm_error("--" OPTION_NAME ": partition '%s': this site allows %s", refused, allowed);
    exit(EXIT_FAILURE); /* what an optional plugin returns here is ignored */
}

static bool is_batch_step(spank_t spank)
{
    uint32_t step = 0;

    return spank_get_item(spank, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step == SLURM_BATCH_SCRIPT;
}

/* Whether the option has no effect for this job on this node. */
static void look_why_off(spank_t spank)
{
    char value[256];
    char allowed[512];

    if (spank_getenv(spank, "SLURM_CONTAINER", value, sizeof(value)) == ESPANK_SUCCESS)
        turn_off("the job runs in an OCI container");
    if (settings.partition_count > 0 &&
        spank_getenv(spank, "SLURM_JOB_PARTITION", value, sizeof(value)) == ESPANK_SUCCESS &&
        !settings_allow_partition(&settings, value)) {
        settings_list_partitions(&settings, allowed, sizeof(allowed));
        snprintf(limit, sizeof(limit), "partition '%s': this site allows %s", value, allowed);
    }
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
    (void)argc;
    (void)argv;
    if (!spank_remote(spank)) {
        if (is_on)
            check_submission(spank);
        return ESPANK_SUCCESS;
    }
    if (!is_batch_step(spank)) {
        is_on = false;
        reason_off[0] = '\0';
        return ESPANK_SUCCESS;
    }
    if (is_on)
        look_why_off(spank);
    if (is_on && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, stepd_fds) != 0)
        turn_off("no socket could be made");
    return ESPANK_SUCCESS;
}

/* SPANK's item is 0 for batch steps of some releases; Slurm tells the script by its environment. */
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

/* Whether a store that this node sees has an image of the job: root sees it, and while this is root the count of restarts
 * is not known yet. What the image is worth, the agent knows. A store that does not answer (a file server that is gone)
 * keeps no job from starting, and may have one. */
static bool find_image(spank_t spank, uint32_t job_id)
{
    char cluster[65];
    char path[4096];
    pid_t child;

    if (settings.store_count == 0 ||
        spank_getenv(spank, "SLURM_CLUSTER_NAME", cluster, sizeof(cluster)) != ESPANK_SUCCESS ||
        strchr(cluster, '/') != NULL)
        return false;
    child = fork();
    if (child == 0) {
        for (int i = 0; i < settings.store_count; i++) {
            snprintf(path, sizeof(path), "%s/%s.%u", settings.stores[i], cluster, job_id);
            if (access(path, F_OK) == 0)
                _exit(1);
        }
        _exit(0);
    }
    return child < 0 || !ended_well(child, STORES_MS);
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

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv)
{
    struct keeper_job job = {.shepherd = settings.shepherd,
                             .socket = settings.socket,
                             .scontrol = settings.scontrol,
                             .stepd_fd = stepd_fds[1],
                             .log = log_line};
    char error[OPTION_ERROR_BYTES] = "the job could not be read";

    (void)argc;
    (void)argv;
    if (is_on) {
        close(stepd_fds[0]);
        stepd_fds[0] = -1;
        if (!read_job(spank, &job)) {
            close(stepd_fds[1]);
        } else {
            has_image = find_image(spank, job.job_id);
            memcpy(job_name, job.name, sizeof(job_name));
            if (limit[0] != '\0' && !has_image) { /* what was suspended is restored, whatever the site allows by now */
                close(stepd_fds[1]);
                snprintf(error, sizeof(error), "%s", limit);
            } else if (keeper_divide(&job, &shepherd_channel, error, sizeof(error))) {
                return ESPANK_SUCCESS;
            }
        }
        turn_off(error);
    }
    if (reason_off[0] != '\0' && !has_image)
        slurm_error("--" OPTION_NAME " has no effect: %s", reason_off);
    return ESPANK_SUCCESS;
}

int slurm_spank_task_post_fork(spank_t spank, int argc, char **argv)
{
    (void)spank;
    (void)argc;
    (void)argv;
    if (!is_on || stepd_fds[0] < 0)
        return ESPANK_SUCCESS;
    /* Otherwise the task would be among the holders of its own end. */
    close(stepd_fds[1]);
    stepd_fds[1] = -1;
    keeper_place(stepd_fds[0]); /* where it fails the task has said why */
    close(stepd_fds[0]);
    stepd_fds[0] = -1;
    return ESPANK_SUCCESS;
}

static int prepend_shepherd(spank_t spank)
{
    char numbers[5][NUMBER_BYTES];
    char text[OPTION_TEXT_BYTES];
    const char *arguments[SHEPHERD_ARGUMENTS] = {settings.shepherd, numbers[0],      numbers[1], numbers[2], numbers[3],
                                                 numbers[4],        settings.socket, text,       "--"};
    uint32_t restarts = count_restarts(spank);
    uint32_t job_id = 0;

    spank_get_item(spank, S_JOB_ID, &job_id);
    snprintf(numbers[0], NUMBER_BYTES, "%d", shepherd_channel);
    snprintf(numbers[1], NUMBER_BYTES, "%u", job_id);
    snprintf(numbers[2], NUMBER_BYTES, "%u", restarts);
    snprintf(numbers[3], NUMBER_BYTES, "%d", has_image && restarts > 0 ? 1 : 0); /* an id may have been used before */
    snprintf(numbers[4], NUMBER_BYTES, "%u", settings.agent_wait_s);
    option_format(&option, text, sizeof(text));
    return (int)spank_prepend_task_argv(spank, SHEPHERD_ARGUMENTS, arguments);
}

/* There is no shepherd here to restore the job, and what it has done is worth more than a fresh start: it goes back to the
 * queue, held. Returns where there is nothing to lose. The task waits for Slurm to end it. */
static void keep_image(spank_t spank)
{
    sigset_t none;
    int status = 0;
    pid_t child;

    if (!has_image)
        return;
    if (count_restarts(spank) == 0) { /* its number was another job's before */
        slurm_error("--" OPTION_NAME " has no effect: %s", reason_off);
        return;
    }
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_NAME, "affinode-keeper"); /* proctrack/linuxproc ends nothing that is called slurmstepd */
    slurm_error("--" OPTION_NAME ": the job has an image, and is not started from its beginning; it is held: %s", reason_off);
    for (;;) {
        child = fork();
        if (child == 0)
            put_back(settings.scontrol, job_name);
        if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0)
            break;
        sleep(PUT_BACK_AGAIN_S); /* slurmctld may be away */
    }
    sleep(HELD_S);
    _exit(1);
}

/* In the shepherd-to-be, which has become the user by now; in the task, where there is none. */
int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    struct packet packet;

    (void)argc;
    (void)argv;
    if (was_given)
        spank_unsetenv(spank, OPTION_VARIABLE);
    if (!is_on || shepherd_channel < 0) {
        keep_image(spank);
        return ESPANK_SUCCESS;
    }
    prctl(PR_SET_DUMPABLE, 0); /* it is the user's by now: none of his processes is to trace what becomes the shepherd */
    if (channel_receive(shepherd_channel, &packet, -1) <= 0 || packet.kind != PACKET_GO)
        _exit(1); /* the task is gone, or has gone on without this process */
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* becoming the user has cleared it */
    if (prepend_shepherd(spank) != ESPANK_SUCCESS) {
        slurm_error("--" OPTION_NAME " has no effect: the shepherd cannot be started");
        return ESPANK_SUCCESS;
    }
    fcntl(shepherd_channel, F_SETFD, 0);
    return ESPANK_SUCCESS;
}
