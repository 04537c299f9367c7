/* Forks the shepherd-to-be into a PID namespace; the task becomes the keeper. */
#include "channel.h"
#include "first_pid.h"
#include "keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PROBE_MS 3000
#define NAMESPACE_MS 10000
#define PLACE_MS 30000

bool wait_for_success(pid_t child, int timeout_ms)
{
    struct timespec pause = {.tv_nsec = 200000};
    int64_t deadline = now_ns() + (int64_t)timeout_ms * 1000000;
    int status;

    for (;;) {
        pid_t got = waitpid(child, &status, WNOHANG);

        if (got == child)
            return WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (got < 0 && errno != EINTR)
            return false;
        if (now_ns() > deadline)
            break;
        nanosleep(&pause, NULL);
    }
    kill(child, SIGKILL);
    return false;
}

/* Whether the job's user can execute the shepherd, and it is of the plugin's version. Checked before the fork, while the task
 * can still continue without a shepherd. */
static bool probe_shepherd(const struct keeper_job *job, struct stat *program, char *error, size_t size)
{
    pid_t child;

    if (!announcement_program(job->shepherd, program, error, size))
        return false;
    child = fork();
    if (child == 0) {
        char *arguments[] = {(char *)job->shepherd, "--speaks", CHANNEL_VERSION, NULL};
        char *environment[] = {NULL};
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);

        if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0)
            _exit(1);
        if (setgroups((size_t)job->group_count, job->groups) != 0 || setresgid(job->gid, job->gid, job->gid) != 0 ||
            setresuid(job->uid, job->uid, job->uid) != 0)
            _exit(1);
        execve(job->shepherd, arguments, environment);
        _exit(1);
    }
    if (child > 0 && wait_for_success(child, PROBE_MS))
        return true;
    snprintf(error, size, "%s cannot be executed, or has another version", job->shepherd);
    return false;
}

/* Without PIDs of its own the job runs nevertheless, as it does on a kernel that cannot set them. */
static void set_first_pid(const struct keeper_job *job, uint32_t pid_max)
{
    struct timespec now;
    uint64_t attempt_ns;
    char line[160];

    clock_gettime(CLOCK_REALTIME, &now);
    attempt_ns = (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
    if (pid_max > 0 && first_pid_set(first_pid_of(job->job_id, attempt_ns, pid_max), pid_max))
        return;
    snprintf(line, sizeof(line), "slurm-affinode: the PIDs of the job may be those of other jobs too: %s", strerror(errno));
    job->log(line);
}

/* Called in the child. Mounts of the node (automounted homes) still propagate into the namespace, and none out of it. */
static int make_namespace(const struct keeper_job *job, uint32_t pid_max)
{
    setsid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) != 0 ||
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0)
        return errno;
    set_first_pid(job, pid_max);
    return 0;
}

static pid_t fork_into_namespace(int channel[2], char *error, size_t size)
{
    int own = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
    pid_t child = -1;

    if (own < 0) {
        snprintf(error, size, "/proc/self/ns/pid: %s", strerror(errno));
        return -1;
    }
    if (unshare(CLONE_NEWPID) != 0) {
        snprintf(error, size, "cannot create a PID namespace: %s", strerror(errno));
        close(own);
        return -1;
    }
    child = fork();
    if (child == 0) {
        close(own);
        close(channel[0]);
        return 0;
    }
    if (child < 0)
        snprintf(error, size, "fork: %s", strerror(errno));
    /* The other children of the keeper stay in the node's namespace. */
    if (setns(own, CLONE_NEWPID) != 0 && child > 0) {
        snprintf(error, size, "setns: %s", strerror(errno));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        child = -1;
    }
    close(own);
    return child;
}

/* False: the child is killed, without side effects. */
static bool wait_for_namespace(pid_t child, int channel, char *error, size_t size)
{
    struct packet packet;
    int got = channel_receive(channel, &packet, NAMESPACE_MS);

    if (got > 0 && packet.kind == PACKET_READY && packet.number == 0)
        return true;
    snprintf(error, size, "cannot set up the mounts of the job: %s",
             got > 0 ? strerror(packet.number) : got == 0 ? "no end of it" : "the process ended");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return false;
}

/* Waits until slurmstepd has set up the task's cgroups and CPUs. False: the task continues without a shepherd. */
static bool wait_for_place(const struct keeper_job *job, pid_t child, int channel, const struct stat *program,
                           struct announcement *announcement, char *error, size_t size)
{
    struct pollfd polled[2] = {{.fd = job->stepd_fd, .events = POLLIN}, {.fd = channel, .events = POLLIN}};
    struct packet packet;
    int status = 0;

    while (poll(polled, 2, -1) < 0 && errno == EINTR)
        ;
    if (polled[0].revents == 0 || channel_receive(job->stepd_fd, &packet, 0) <= 0 || packet.kind != PACKET_PLACE) {
        /* slurmstepd has aborted the step, or the child has ended. */
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        exit_as(status);
    }
    packet = (struct packet){.kind = PACKET_PLACED};
    if (place_with_caller(child, error, size) &&
        announcement_make(announcement, job->socket, job->job_id, job->uid, child, program, error, size)) {
        channel_send(job->stepd_fd, &packet);
        packet.kind = PACKET_GO;
        return channel_send(channel, &packet) || true; /* keeper_run() notices a child that has ended */
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    packet.number = 1;
    channel_send(job->stepd_fd, &packet);
    return false;
}

static void prepare_shepherd(const struct keeper_job *job, uint32_t pid_max, int channel, const sigset_t *mask)
{
    struct packet ready = {.kind = PACKET_READY, .number = make_namespace(job, pid_max)};

    channel_send(channel, &ready);
    if (ready.number != 0)
        _exit(1);
    sigprocmask(SIG_SETMASK, mask, NULL);
}

bool keeper_fork(const struct keeper_job *job, int *channel, char *error, size_t size)
{
    struct announcement announcement = {.directory = -1};
    struct stat program;
    int ends[2] = {-1, -1};
    uint32_t pid_max = pid_max_read();
    sigset_t all;
    sigset_t mask;
    pid_t child = -1;

    /* slurmstepd's signal handlers are still set, and must not run in the processes forked here. */
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &mask);
    if (!probe_shepherd(job, &program, error, size))
        goto fail;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        snprintf(error, size, "socketpair: %s", strerror(errno));
        goto fail;
    }
    child = fork_into_namespace(ends, error, size);
    if (child == 0) {
        close(job->stepd_fd);
        *channel = ends[1];
        prepare_shepherd(job, pid_max, *channel, &mask);
        return true;
    }
    if (child < 0)
        goto fail;
    close(ends[1]);
    ends[1] = -1;
    if (wait_for_namespace(child, ends[0], error, size) &&
        wait_for_place(job, child, ends[0], &program, &announcement, error, size))
        keeper_run(job, child, ends[0], &announcement);
fail:
    if (ends[0] >= 0)
        close(ends[0]);
    if (ends[1] >= 0)
        close(ends[1]);
    close(job->stepd_fd);
    signal(SIGCHLD, SIG_DFL); /* drops the pending signals of the children above */
    sigprocmask(SIG_SETMASK, &mask, NULL);
    return false;
}

bool keeper_wait_for_placement(int fd)
{
    struct packet packet = {.kind = PACKET_PLACE};

    return channel_send(fd, &packet) && channel_receive(fd, &packet, PLACE_MS) > 0 && packet.kind == PACKET_PLACED &&
           packet.number == 0;
}
