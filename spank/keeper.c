/* The keeper: waits for the shepherd, passes it the signals that Slurm sends to the task, exits with the script's status. */
#include "channel.h"
#include "exec_error.h"
#include "keeper.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <syslog.h>
#include <unistd.h>

#define FORWARD_AFTER_NS 50000000 /* by then the witness has reported the signal if it got it too */
#define MAX_PENDING 32
#define MAX_PACKETS 64
#define HOLD_RETRY_NS 10000000000LL /* the shepherd is the user's process: limit how often it can run scontrol */

struct pending {
    int number;
    bool group;
    int64_t at_ns;
};

struct keeper {
    const struct keeper_job *job;
    int channel;
    int signals;
    int witness_fd;
    pid_t child;
    pid_t witness;
    pid_t scontrol;
    struct announcement *announcement;
    int status;       /* of the script, from the shepherd; -1: unknown yet */
    int64_t hold_ns;  /* the last start of scontrol; 0: never */
    bool hold_failed; /* the failure of scontrol was logged: once for each job */
    bool exec_failed; /* the failure of the script's execve() was logged: once for each job */
    struct pending pending[MAX_PENDING];
    int count;
};

/* No process ends by these signals, but the shepherd, a process of the user, may report one: it would stop the keeper. */
static bool stops_process(int number)
{
    return number == SIGSTOP || number == SIGTSTP || number == SIGTTIN || number == SIGTTOU;
}

void exit_as(int wait_status)
{
    struct rlimit none = {0, 0};
    sigset_t one;
    int number;

    if (!WIFSIGNALED(wait_status) || stops_process(WTERMSIG(wait_status)))
        _exit(WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 1);
    number = WTERMSIG(wait_status);
    setrlimit(RLIMIT_CORE, &none);
    prctl(PR_SET_DUMPABLE, 0); /* a core pattern that is a pipe ignores the limit */
    signal(number, SIG_DFL);
    sigemptyset(&one);
    sigaddset(&one, number);
    kill(getpid(), number);
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    _exit(128 + number);
}

/* A process in the task's process group that only reports signals: one that it gets too was sent to the group. */
static void run_witness(int report)
{
    sigset_t all;
    siginfo_t info;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigfillset(&all);
    for (;;) {
        unsigned char number;
        int got = sigwaitinfo(&all, &info);

        if (got <= 0)
            continue;
        number = (unsigned char)got;
        if (write(report, &number, 1) != 1)
            _exit(0); /* the keeper is gone */
    }
}

static void log_missing_witness(const struct keeper *keeper, const char *call, int number)
{
    char line[256];

    snprintf(line, sizeof(line), "slurm-affinode: scancel --full will signal only the batch script of the job: %s: %s", call,
             strerror(number));
    keeper->job->log(line);
}

/* If it cannot be started, every signal is forwarded to the script alone: one for the script (--signal=B:USR1) could end the
 * other processes of its group. */
static void start_witness(struct keeper *keeper)
{
    int ends[2];
    pid_t child;

    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        log_missing_witness(keeper, "pipe2", errno);
        return;
    }
    child = fork();
    if (child < 0) {
        log_missing_witness(keeper, "fork", errno);
        close(ends[0]);
        close(ends[1]);
        return;
    }
    if (child == 0) {
        close(keeper->channel);
        close(keeper->signals);
        close(ends[0]);
        run_witness(ends[1]);
    }
    close(ends[1]);
    keeper->witness = child;
    keeper->witness_fd = ends[0];
}

/* Closes Slurm's connections and the job's pipes, so that their readers do not wait for the keeper. The log file stays open,
 * and standard error, which slurmstepd keeps open too. */
static void close_others(int channel, int announcements)
{
    DIR *directory = opendir("/proc/self/fd");
    struct dirent *entry;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    closelog(); /* its descriptor is closed below, and the number used again */
    if (null >= 0) {
        dup2(null, 0);
        dup2(null, 1);
        close(null);
    }
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        int fd = (int)strtol(entry->d_name, NULL, 10);
        struct stat status;

        if (fd > 2 && fd != channel && fd != announcements && fd != dirfd(directory) && fstat(fd, &status) == 0 &&
            !S_ISREG(status.st_mode))
            close(fd);
    }
    if (directory != NULL)
        closedir(directory);
}

/* Logs that the script cannot be executed, with slurmstepd's message and log function. */
static void log_exec(const struct keeper *keeper, int number)
{
    char text[4096 + EXEC_FIRST_BYTES];
    char first[EXEC_FIRST_BYTES];
    ssize_t length = 0;
    int fd = open(keeper->job->script, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    struct stat found;

    if (fd >= 0 && fstat(fd, &found) == 0 && S_ISREG(found.st_mode))
        length = read(fd, first, sizeof(first));
    if (fd >= 0)
        close(fd);
    exec_error_message(keeper->job->script, number, first, length > 0 ? (size_t)length : 0, text, sizeof(text));
    keeper->job->log(text);
}

static struct pending *find_pending(struct keeper *keeper, int number)
{
    for (int i = 0; i < keeper->count; i++)
        if (keeper->pending[i].number == number)
            return &keeper->pending[i];
    return NULL;
}

static void record_signal(struct keeper *keeper, int number, bool group)
{
    struct pending *found = find_pending(keeper, number);

    if (found == NULL) {
        if (keeper->count == MAX_PENDING)
            return;
        found = &keeper->pending[keeper->count++];
        *found = (struct pending){.number = number, .at_ns = now_ns()};
    }
    found->group |= group;
}

static void forward_signals(struct keeper *keeper)
{
    while (keeper->count > 0 && now_ns() - keeper->pending[0].at_ns >= FORWARD_AFTER_NS) {
        struct packet packet = {.kind = PACKET_SIGNAL,
                                .number = keeper->pending[0].number,
                                .group = keeper->pending[0].group,
                                .at_ns = keeper->pending[0].at_ns};

        if (keeper->channel < 0 || !channel_send(keeper->channel, &packet))
            kill(keeper->child, packet.number);
        keeper->count--;
        memmove(keeper->pending, keeper->pending + 1, (size_t)keeper->count * sizeof(struct pending));
    }
}

void exec_requeuehold(const char *scontrol, const char *job)
{
    static const char *const places[] = {"/usr/bin/scontrol", "/usr/local/bin/scontrol", "/opt/slurm/bin/scontrol"};
    static char path_variable[] = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
    const char *conf = getenv("SLURM_CONF"); /* set where slurm.conf is not in its default place */
    char conf_variable[PATH_MAX + 16];
    char *environment[] = {path_variable, NULL, NULL};
    sigset_t none;

    if (conf != NULL && snprintf(conf_variable, sizeof(conf_variable), "SLURM_CONF=%s", conf) < (int)sizeof(conf_variable))
        environment[1] = conf_variable;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (size_t i = 0; i <= sizeof(places) / sizeof(*places); i++) {
        const char *path = i == 0 ? scontrol : places[i - 1];
        char *arguments[] = {(char *)path, "requeuehold", "incomplete", (char *)job, NULL}; /* fails for a canceled job */

        if (path != NULL)
            execve(path, arguments, environment);
    }
    _exit(127);
}

static void hold_ended(struct keeper *keeper, int status)
{
    struct packet packet = {.kind = PACKET_HELD, .number = status != 0};

    keeper->scontrol = 0;
    if (status != 0 && !keeper->hold_failed) {
        keeper->hold_failed = true;
        keeper->job->log("slurm-affinode: the job has an image and this node no agent, and scontrol requeuehold failed");
    }
    if (keeper->channel >= 0)
        channel_send(keeper->channel, &packet);
}

/* The job cannot be restored without an agent: requeue it instead of starting it from its beginning. */
static void start_hold(struct keeper *keeper)
{
    if (keeper->scontrol > 0 || (keeper->hold_ns != 0 && now_ns() - keeper->hold_ns < HOLD_RETRY_NS))
        return;
    keeper->hold_ns = now_ns();
    keeper->scontrol = fork();
    if (keeper->scontrol == 0)
        exec_requeuehold(keeper->job->scontrol, keeper->job->name);
    if (keeper->scontrol < 0)
        hold_ended(keeper, 1);
}

/* The agent no longer trusts the process once the announcement is withdrawn: it is about to execute the user's script. */
static void resign(struct keeper *keeper)
{
    struct packet packet = {.kind = PACKET_RESIGNED};

    if (announcement_withdraw(keeper->announcement))
        channel_send(keeper->channel, &packet);
}

/* True: there may be more. The limit keeps a shepherd that floods the channel from delaying signals and the end of the job. */
static bool read_packets(struct keeper *keeper)
{
    struct packet packet;

    for (int count = 0; count < MAX_PACKETS; count++) {
        if (keeper->channel < 0 || channel_receive(keeper->channel, &packet, 0) <= 0)
            return false;
        if (packet.kind == PACKET_STATUS) {
            keeper->status = packet.number & 0xffff;
        } else if (packet.kind == PACKET_EXEC && !keeper->exec_failed) {
            keeper->exec_failed = true;
            log_exec(keeper, packet.number);
        } else if (packet.kind == PACKET_HOLD) {
            start_hold(keeper);
        } else if (packet.kind == PACKET_RESIGN) {
            resign(keeper);
        }
    }
    return true;
}

static void finish(struct keeper *keeper, int status)
{
    while (read_packets(keeper)) /* every process that could send more has ended with the namespace */
        ;
    if (keeper->witness > 0) {
        kill(keeper->witness, SIGKILL);
        waitpid(keeper->witness, NULL, 0);
    }
    announcement_withdraw(keeper->announcement);
    /* PID 1 cannot end by a signal of its own and reports the status instead, except when it is killed from outside. */
    exit_as(keeper->status >= 0 ? keeper->status : status);
}

static void reap(struct keeper *keeper)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == keeper->child)
            finish(keeper, status);
        if (pid == keeper->scontrol)
            hold_ended(keeper, status);
        if (pid == keeper->witness)
            keeper->witness = 0;
    }
}

static void read_signals(struct keeper *keeper)
{
    struct signalfd_siginfo info;

    while (read(keeper->signals, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo != SIGCHLD || info.ssi_code == SI_USER)
            record_signal(keeper, (int)info.ssi_signo, false);
    }
    reap(keeper);
}

static void read_reports(struct keeper *keeper)
{
    unsigned char number;
    ssize_t got;

    while ((got = read(keeper->witness_fd, &number, 1)) == 1)
        record_signal(keeper, number, true);
    if (got == 0) {
        close(keeper->witness_fd);
        keeper->witness_fd = -1;
    }
}

static int next_timeout_ms(const struct keeper *keeper)
{
    int64_t left;

    if (keeper->count == 0)
        return -1;
    left = keeper->pending[0].at_ns + FORWARD_AFTER_NS - now_ns();
    return left <= 0 ? 0 : (int)(left / 1000000) + 1;
}

void keeper_run(const struct keeper_job *job, pid_t child, int channel, struct announcement *announcement)
{
    struct keeper keeper = {.job = job, .child = child, .announcement = announcement, .status = -1, .witness_fd = -1};
    sigset_t all;

    keeper.channel = channel;
    close_others(channel, announcement->directory);
    if (chdir("/") != 0)
        _exit(1);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    keeper.signals = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
    start_witness(&keeper);
    /* proctrack/linuxproc neither counts nor signals processes named slurmstepd, nor their children. The witness keeps that
     * name. */
    prctl(PR_SET_NAME, "affinode-keeper");
    for (;;) {
        struct pollfd polled[3] = {{.fd = keeper.signals, .events = POLLIN},
                                   {.fd = keeper.witness_fd, .events = POLLIN},
                                   {.fd = keeper.channel, .events = POLLIN}};

        reap(&keeper);
        if (poll(polled, 3, next_timeout_ms(&keeper)) > 0) {
            if (polled[1].revents != 0)
                read_reports(&keeper);
            if (polled[0].revents != 0)
                read_signals(&keeper);
            if (polled[2].revents & POLLIN)
                read_packets(&keeper);
            else if (polled[2].revents != 0) {
                close(keeper.channel); /* the shepherd ends, or has become the script */
                keeper.channel = -1;
            }
        }
        forward_signals(&keeper);
    }
}
