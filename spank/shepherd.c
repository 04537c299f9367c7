/* slurm-affinode-shepherd: PID 1 of a job's PID namespace.
 *
 * Starts the batch script, or waits until the agent restores a checkpoint of it; reaps processes; passes signals on; reports
 * the script's wait status to the keeper. It has no privileges, and does not read the job's input or write its output: the
 * script has Slurm's own descriptors.
 */
#include "agent_link.h"
#include "channel.h"
#include "relay.h"
#include "script.h"
#include "shepherd.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL
#define ANSWER_NS (2 * SECOND_NS)      /* timeout of an agent that accepts the connection and does not respond */
#define HOLD_RETRY_NS (30 * SECOND_NS) /* retry of a failed scontrol: slurmctld may not respond */
#define HELD_NS (120 * SECOND_NS)      /* Slurm ends a held job long before */
#define END_NS (5 * SECOND_NS)         /* for other processes of a canceled job, after its script; KillWait is longer */
#define SIGNAL_NS (SECOND_NS / 5)      /* Slurm signals the processes of a job one after the other */
#define RESIGN_MS 10000
#define REAPED 64

enum phase { WAITING, RUNNING, ENDING, HELD };

struct shepherd {
    struct shepherd_options options;
    struct link link;
    struct relay relay;
    sigset_t mask;
    int signals;
    enum phase phase;
    bool in_place; /* mode=inplace: the agent is notified of signals, and decides when the job starts */
    bool reports;  /* the agent accepts reports of processes that end while the job is restored */
    bool gated;    /* the agent frees GPU memory before the start */
    pid_t root;
    int64_t answer_ns; /* WAITING without an image: when the wait for the agent times out */
    int64_t hold_ns;   /* WAITING for an image: when the job is held. HELD: when the shepherd exits. */
    bool terminated;   /* Slurm has sent all processes a signal that ends most of them */
    int64_t end_ns;    /* ENDING: when the remaining processes are killed */
    int status;        /* ENDING: wait status of the script */
    struct {
        pid_t pid;
        int status;
    } reaped[REAPED]; /* while WAITING: a restored root may end before the agent reports its PID */
    unsigned reaped_count;
    unsigned reported; /* how many of them the agent knows */
};

static void print_line(const char *text)
{
    struct pollfd polled = {.fd = STDERR_FILENO, .events = POLLOUT};
    char line[MESSAGE_TEXT_BYTES + 32];

    snprintf(line, sizeof(line), "slurm-affinode: %s\n", text);
    /* A full pipe must not block PID 1. */
    if (poll(&polled, 1, 0) > 0 && write(STDERR_FILENO, line, strlen(line)) < 0)
        return;
}

static void finish(struct shepherd *shepherd, int status)
{
    struct packet packet = {.kind = PACKET_STATUS, .number = status};
    char text[MESSAGE_BYTES];

    if (shepherd->phase == RUNNING || shepherd->phase == ENDING)
        link_send(&shepherd->link, text, message_exit(status, text), now_ns());
    channel_send(shepherd->options.keeper_fd, &packet);
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1); /* the kernel kills the rest of the namespace */
}

static struct hello hello_of(const struct shepherd *shepherd)
{
    return (struct hello){.job = shepherd->options.job,
                          .restarts = shepherd->options.restarts,
                          .image = shepherd->options.image,
                          .root = shepherd->root,
                          .option = shepherd->options.option};
}

/* Executes the script as PID 1 if fork() fails: under a limit of processes that is just enough without a shepherd. The script
 * is not trusted, so that the keeper has to withdraw the announcement first; otherwise the job fails. */
static void become_script(struct shepherd *shepherd, bool restore_failed, int number)
{
    struct packet packet = {.kind = PACKET_RESIGN};
    char text[MESSAGE_BYTES];
    int got;

    link_send(&shepherd->link, text, message_exit(0, text), now_ns());
    link_close(&shepherd->link, now_ns());
    channel_send(shepherd->options.keeper_fd, &packet);
    while ((got = channel_receive(shepherd->options.keeper_fd, &packet, RESIGN_MS)) > 0 && packet.kind != PACKET_RESIGNED)
        ;
    if (got <= 0) {
        snprintf(text, sizeof(text), "the script cannot be started: fork: %s", strerror(number));
        print_line(text);
        finish(shepherd, number << 8);
    }
    sigprocmask(SIG_SETMASK, &shepherd->mask, NULL);
    script_execute(shepherd->options.script, restore_failed, shepherd->options.keeper_fd);
}

static void start(struct shepherd *shepherd, bool restore_failed)
{
    char text[MESSAGE_BYTES];

    shepherd->root = script_start(shepherd->options.script, &shepherd->mask, restore_failed, shepherd->options.keeper_fd);
    if (shepherd->root < 0)
        become_script(shepherd, restore_failed, errno);
    shepherd->phase = RUNNING;
    if (shepherd->link.fd >= 0)
        link_send(&shepherd->link, text, message_started(shepherd->root, text), now_ns());
}

/* The agent sees that the root of a restored tree has ended, but not how. */
static void report_reaped(struct shepherd *shepherd)
{
    char text[MESSAGE_BYTES];

    if (shepherd->reaped_count - shepherd->reported > REAPED)
        shepherd->reported = shepherd->reaped_count - REAPED;
    for (; shepherd->reported < shepherd->reaped_count; shepherd->reported++) {
        unsigned at = shepherd->reported % REAPED;
        size_t length = message_reaped(shepherd->reaped[at].pid, shepherd->reaped[at].status, text);

        if (!link_send(&shepherd->link, text, length, now_ns())) {
            shepherd->reports = false;
            return;
        }
    }
}

static void restored(struct shepherd *shepherd, pid_t root)
{
    shepherd->root = root;
    shepherd->phase = RUNNING;
    /* A process that exists is not the one that was reaped with that PID, which belonged to an aborted restore. */
    if (kill(root, 0) == 0)
        return;
    /* Of processes with the same PID, the last one that was reaped. */
    for (unsigned i = 0; i < shepherd->reaped_count && i < REAPED; i++) {
        unsigned at = (shepherd->reaped_count - 1 - i) % REAPED;

        if (shepherd->reaped[at].pid == root)
            finish(shepherd, shepherd->reaped[at].status);
    }
}

static void hold(struct shepherd *shepherd, const char *why)
{
    char line[MESSAGE_TEXT_BYTES];

    snprintf(line, sizeof(line), "the job was not started: %.*s", (int)sizeof(line) - 64, why);
    print_line(line);
    shepherd->phase = HELD;
    shepherd->hold_ns = now_ns() + HELD_NS;
}

static void handle_message(struct shepherd *shepherd, const struct message *message)
{
    bool waiting = shepherd->phase == WAITING;

    switch (message->verb) {
    case VERB_START:
        if (waiting)
            start(shepherd, message->restore_failed);
        break;
    case VERB_RESTORED:
        if (waiting)
            restored(shepherd, message->pid);
        break;
    case VERB_WAIT:
        if (message->fresh) {
            shepherd->gated = true;
            shepherd->answer_ns = now_ns() + (int64_t)shepherd->options.agent_wait_s * SECOND_NS;
            break;
        }
        /* The agent has an image, even if the plugin found none: no longer start the script from its beginning. */
        shepherd->options.image = true;
        if (message->reports && waiting && !shepherd->reports) {
            shepherd->reports = true;
            shepherd->reported = 0;
            report_reaped(shepherd);
        }
        shepherd->hold_ns = now_ns() + (int64_t)shepherd->options.agent_wait_s * SECOND_NS;
        break;
    case VERB_HOLD:
        if (waiting)
            hold(shepherd, message->text[0] == '\0' ? "the agent put it on hold" : message->text);
        break;
    case VERB_SAY:
        print_line(message->text);
        break;
    case VERB_SIGNAL:
        if (shepherd->phase == RUNNING)
            kill(-shepherd->root, message->number);
        break;
    case VERB_UNKNOWN:
        break;
    }
}

static void read_link(struct shepherd *shepherd)
{
    struct message message;
    enum link_news news;

    while ((news = link_read(&shepherd->link, &message, now_ns())) == LINK_MESSAGE)
        handle_message(shepherd, &message);
    if (news == LINK_LOST)
        shepherd->reports = false; /* the next connection may be to another agent */
    if (news == LINK_LOST && shepherd->phase == WAITING && !shepherd->options.image && !shepherd->gated)
        start(shepherd, false);
}

/* Connects to the agent when due. Without an agent, a job without an image starts immediately. */
static void connect_if_due(struct shepherd *shepherd)
{
    struct hello hello = hello_of(shepherd);

    if (shepherd->phase == HELD || shepherd->phase == ENDING)
        return;
    if (!link_try(&shepherd->link, &hello, now_ns()) && shepherd->phase == WAITING && !shepherd->options.image &&
        !shepherd->gated)
        start(shepherd, false);
}

static void check_deadlines(struct shepherd *shepherd)
{
    struct packet packet = {.kind = PACKET_HOLD};
    int64_t now = now_ns();

    if (shepherd->phase == HELD && now >= shepherd->hold_ns)
        finish(shepherd, 1 << 8);
    if (shepherd->phase == ENDING && now >= shepherd->end_ns)
        finish(shepherd, shepherd->status);
    if (shepherd->phase != WAITING)
        return;
    if (shepherd->options.image && now >= shepherd->hold_ns) {
        channel_send(shepherd->options.keeper_fd, &packet);
        shepherd->hold_ns = now + HOLD_RETRY_NS;
    }
    if (!shepherd->options.image && now >= shepherd->answer_ns) {
        /* Discards a late response of the agent; the next hello reports that the script runs. */
        link_close(&shepherd->link, now);
        start(shepherd, false);
    }
}

/* Frozen processes handle only SIGKILL: the agent resumes the job on a signal. */
static void report_signal(struct shepherd *shepherd, int number)
{
    char text[MESSAGE_BYTES];

    if (shepherd->in_place && shepherd->phase == RUNNING && shepherd->link.fd >= 0)
        link_send(&shepherd->link, text, message_signalled(number, text), now_ns());
}

static void read_packets(struct shepherd *shepherd)
{
    struct packet packet;
    int got;

    while ((got = channel_receive(shepherd->options.keeper_fd, &packet, 0)) > 0) {
        if (packet.kind == PACKET_SIGNAL) {
            relay_reported(&shepherd->relay, packet.number, packet.group != 0, packet.at_ns);
            /* Slurm's SIGSTOP follows: no request may wake the job while the relay waits for other reports. */
            if (packet.number == SIGTSTP)
                report_signal(shepherd, packet.number);
        }
        if (packet.kind == PACKET_HELD && packet.number == 0 && shepherd->phase == WAITING)
            hold(shepherd, "it has an image and this node's agent does not respond; it is held: release it with scontrol "
                           "release");
    }
    if (got < 0)
        _exit(1); /* the keeper has ended */
}

/* The script of a canceled job, such as a shell, may end before its children, which have got the same signal and are removing
 * their files: the end of PID 1 would kill them. Slurm would not, or later. The script may even end before the signal gets
 * here. */
static void end(struct shepherd *shepherd, int status)
{
    shepherd->phase = ENDING;
    shepherd->status = status;
    shepherd->end_ns = now_ns() + (shepherd->terminated ? END_NS : SIGNAL_NS);
}

static void reap(struct shepherd *shepherd)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == shepherd->root && shepherd->phase == RUNNING)
            end(shepherd, status);
        if (shepherd->phase == WAITING) {
            shepherd->reaped[shepherd->reaped_count % REAPED].pid = pid;
            shepherd->reaped[shepherd->reaped_count % REAPED].status = status;
            shepherd->reaped_count++;
        }
    }
    if (shepherd->phase == WAITING && shepherd->reports)
        report_reaped(shepherd);
    if (shepherd->phase == ENDING && pid < 0) /* no process is left */
        finish(shepherd, shepherd->status);
}

static bool ends_waiting(int number)
{
    return number == SIGTERM || number == SIGINT || number == SIGHUP || number == SIGQUIT;
}

static void terminate(struct shepherd *shepherd, int number)
{
    if (shepherd->phase == ENDING && !shepherd->terminated)
        shepherd->end_ns = now_ns() + END_NS;
    shepherd->terminated = true;
    if (shepherd->phase == WAITING || shepherd->phase == HELD)
        finish(shepherd, number);
}

static void handle_signals(struct shepherd *shepherd)
{
    struct signalfd_siginfo info;
    int number;
    bool group;

    while (read(shepherd->signals, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        /* Senders outside the namespace have PID 0. Signals from inside are ignored, as PID 1 does by default. */
        if (info.ssi_code == SI_USER && info.ssi_pid == 0) {
            relay_direct(&shepherd->relay, (int)info.ssi_signo, now_ns());
            report_signal(shepherd, (int)info.ssi_signo);
            if (ends_waiting((int)info.ssi_signo))
                terminate(shepherd, (int)info.ssi_signo);
        }
    }
    reap(shepherd);
    while (relay_next(&shepherd->relay, now_ns(), &number, &group)) {
        if (shepherd->phase == RUNNING) {
            kill(group ? -shepherd->root : shepherd->root, number);
            report_signal(shepherd, number);
        }
        /* Sent to the script alone, as by proctrack/cgroup: Slurm then kills the other processes when the script has ended. */
        if (ends_waiting(number) && (shepherd->phase == WAITING || shepherd->phase == HELD))
            finish(shepherd, number);
    }
}

static void set_earlier(int64_t *due, int64_t when)
{
    if (when != 0 && (*due == 0 || when < *due))
        *due = when;
}

static int next_timeout_ms(const struct shepherd *shepherd)
{
    int64_t due = relay_due_ns(&shepherd->relay);
    int64_t left;

    if (shepherd->phase == ENDING)
        set_earlier(&due, shepherd->end_ns);
    else if (shepherd->phase != RUNNING)
        set_earlier(&due, shepherd->options.image || shepherd->phase == HELD ? shepherd->hold_ns : shepherd->answer_ns);
    if (shepherd->link.fd < 0 && shepherd->phase != HELD && shepherd->phase != ENDING)
        set_earlier(&due, shepherd->link.retry_ns);
    if (due == 0)
        return -1;
    left = due - now_ns();
    return left <= 0 ? 0 : (int)(left / 1000000) + 1;
}

static void run(struct shepherd *shepherd)
{
    for (;;) {
        struct pollfd polled[3] = {{.fd = shepherd->signals, .events = POLLIN},
                                   {.fd = shepherd->options.keeper_fd, .events = POLLIN},
                                   {.fd = shepherd->link.fd, .events = POLLIN}};

        if (poll(polled, 3, next_timeout_ms(shepherd)) > 0) {
            if (polled[1].revents != 0)
                read_packets(shepherd);
            if (polled[2].revents != 0)
                read_link(shepherd);
        }
        handle_signals(shepherd);
        check_deadlines(shepherd);
        connect_if_due(shepherd);
    }
}

int main(int argc, char **argv)
{
    struct shepherd shepherd = {.phase = WAITING};
    sigset_t all;

    if (argc == 3 && strcmp(argv[1], "--speaks") == 0)
        return strcmp(argv[2], CHANNEL_VERSION) == 0 ? 0 : 1;
    if (!shepherd_options(argc, argv, &shepherd.options)) {
        fprintf(stderr, "slurm-affinode-shepherd is started by Slurm for jobs with --gpu-suspend-idle, not by users\n");
        return 2;
    }
    /* The job's processes run as the same user, and must not trace the shepherd to impersonate it. The script can be traced:
     * execve() resets the flag. */
    prctl(PR_SET_DUMPABLE, 0);
    fcntl(shepherd.options.keeper_fd, F_SETFD, FD_CLOEXEC);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &shepherd.mask);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    shepherd.signals = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
    link_init(&shepherd.link, shepherd.options.socket);
    shepherd.answer_ns = now_ns() + ANSWER_NS;
    shepherd.hold_ns = now_ns() + (int64_t)shepherd.options.agent_wait_s * SECOND_NS;
    shepherd.in_place = strstr(shepherd.options.option, "mode=inplace") != NULL;
    if (!shepherd.options.image && shepherd.options.restarts == 0 && !shepherd.in_place)
        start(&shepherd, false); /* never suspended: the agent has nothing to restore */
    connect_if_due(&shepherd);
    run(&shepherd);
}
