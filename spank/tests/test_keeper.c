/* Keeper and shepherd-to-be with real namespaces: needs root. The shepherd is announced before PACKET_GO, and until it
 * resigns or ends. */
#include "channel.h"
#include "check.h"
#include "keeper.h"
#include "script.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define UNPRIVILEGED 65534
#define FORKS_OF_START 2 /* of a task before the keeper runs: the probe of the shepherd, and the shepherd */
#define HANGS "hangs" /* name of a shepherd that does not respond */

static char top[64];
static char path[3][128];
static char program[96]; /* the shepherd */

static int forks_left = -1; /* the next fork() fails with EAGAIN; -1: no limit */

/* Overrides fork() of libc: root has no process limit. */
pid_t fork(void)
{
    if (forks_left == 0) {
        errno = EAGAIN;
        return -1;
    }
    if (forks_left > 0)
        forks_left--;
    return (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
}

static const char *log_path(void)
{
    snprintf(path[2], sizeof(path[2]), "%s/log", top);
    return path[2];
}

static void log_to_file(const char *line)
{
    FILE *file = fopen(log_path(), "a");

    CHECK(file != NULL && fprintf(file, "%s\n", line) > 0 && fclose(file) == 0);
}

static const char *announced(void)
{
    snprintf(path[0], sizeof(path[0]), "%s/run/shepherds/7", top);
    return path[0];
}

static void write_program(const char *name, const char *text, size_t length, mode_t mode)
{
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);

    CHECK(fd >= 0 && write(fd, text, length) == (ssize_t)length && fchmod(fd, mode) == 0);
    close(fd);
}

/* This program also acts as a shepherd: it implements --speaks. */
static void copy_this(const char *name)
{
    int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    off_t size = lseek(fd, 0, SEEK_END);
    char *bytes = malloc((size_t)size);

    CHECK(fd >= 0 && bytes != NULL && pread(fd, bytes, (size_t)size, 0) == (ssize_t)size);
    write_program(name, bytes, (size_t)size, 0711);
    free(bytes);
    close(fd);
}

/* The actions of the shepherd after PACKET_GO. */
typedef void shepherd(int channel);

/* Returns the wait status of a task with this shepherd, in a process group of its own that gets this signal (0: none). The
 * task can fork so many times (-1: no limit). */
static int status_of_signaled_task(shepherd *act, const char *socket, int forks, int number)
{
    char error[512] = "";
    struct packet packet;
    int ends[2];
    int status;
    pid_t task;

    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    task = fork();
    if (task == 0) {
        struct keeper_job job = {.job_id = 7, .name = "7", .uid = UNPRIVILEGED, .gid = UNPRIVILEGED, .shepherd = program,
                                 .socket = socket, .scontrol = "/bin/false", .script = "/no/such/script",
                                 .stepd_fd = ends[1], .log = log_to_file};
        int channel = -1;

        close(ends[0]);
        CHECK(setpgid(0, 0) == 0);
        forks_left = forks;
        if (!keeper_fork(&job, &channel, error, sizeof(error))) {
            fprintf(stderr, "%s\n", error);
            _exit(77);
        }
        CHECK(getpid() == 1);
        CHECK(channel_receive(channel, &packet, -1) == 1 && packet.kind == PACKET_GO);
        CHECK(access(announced(), F_OK) == 0);
        act(channel);
        _exit(99);
    }
    CHECK(task > 0);
    close(ends[1]);
    if (keeper_wait_for_placement(ends[0]) && number != 0)
        CHECK(kill(-task, number) == 0);
    CHECK(waitpid(task, &status, 0) == task);
    close(ends[0]);
    return status;
}

static int status_of_task(shepherd *act, const char *socket)
{
    return status_of_signaled_task(act, socket, -1, 0);
}

static void become_user(void)
{
    CHECK(setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED) == 0 && setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED) == 0);
}

static void has_pids_of_its_own(int channel)
{
    struct packet packet = {.kind = PACKET_STATUS};
    pid_t child = fork();

    if (child == 0)
        _exit(0);
    packet.number = (child > 1000 ? 0 : 1) << 8;
    CHECK(channel_send(channel, &packet));
    _exit(0);
}

static void ends(int channel)
{
    struct packet packet = {.kind = PACKET_STATUS, .number = 5 << 8};

    become_user();
    CHECK(channel_send(channel, &packet));
    _exit(0);
}

static void reports_a_stop_signal(int channel)
{
    struct packet packet = {.kind = PACKET_STATUS, .number = SIGSTOP};

    CHECK(channel_send(channel, &packet));
    _exit(0);
}

static void sends_unknown_packets(int channel)
{
    for (unsigned kind = 0; kind < 64; kind++) {
        struct packet packet = {.kind = kind == PACKET_STATUS || kind == PACKET_EXEC ? 1000 : kind, .number = -1, .group = -1};

        CHECK(channel_send(channel, &packet));
    }
    CHECK(send(channel, "x", 1, MSG_NOSIGNAL) == 1);
    ends(channel);
}

static void becomes_the_script(int channel)
{
    char *arguments[] = {"/bin/sh", "-c", "test $$ = 1 && exit 6", NULL};
    struct packet packet = {.kind = PACKET_RESIGN};

    CHECK(channel_send(channel, &packet));
    CHECK(channel_receive(channel, &packet, 5000) == 1 && packet.kind == PACKET_RESIGNED);
    CHECK(access(announced(), F_OK) != 0);
    become_user();
    script_execute(arguments, false, channel);
}

static void cannot_be_executed(int channel)
{
    char *arguments[] = {"/no/such/script", NULL};

    script_execute(arguments, false, channel);
}

static void keeper_exits_as_the_script(void)
{
    char socket[96];

    snprintf(socket, sizeof(socket), "%s/run/shepherd.sock", top);
    CHECK(status_of_task(has_pids_of_its_own, socket) == 0);
    CHECK(status_of_task(ends, socket) == 5 << 8);
    CHECK(access(announced(), F_OK) != 0);
    CHECK(status_of_task(reports_a_stop_signal, socket) == 1 << 8);
    CHECK(status_of_task(sends_unknown_packets, socket) == 5 << 8);
    CHECK(status_of_task(becomes_the_script, socket) == 6 << 8);
    CHECK(status_of_task(cannot_be_executed, socket) == ENOENT << 8);
    CHECK(access(announced(), F_OK) != 0);
}

static void gets_a_signal_for_the_script_alone(int channel)
{
    struct packet packet;

    CHECK(channel_receive(channel, &packet, 5000) == 1 && packet.kind == PACKET_SIGNAL);
    CHECK(packet.number == SIGUSR2 && packet.group == 0);
    ends(channel);
}

static void needs_hold(int channel)
{
    struct packet packet = {.kind = PACKET_HOLD};

    CHECK(channel_send(channel, &packet));
    CHECK(channel_receive(channel, &packet, 5000) == 1 && packet.kind == PACKET_HELD && packet.number == 1);
    ends(channel);
}

static void failed_forks_are_logged(void)
{
    char socket[96];
    char text[2048];
    FILE *file;

    snprintf(socket, sizeof(socket), "%s/run/shepherd.sock", top);
    unlink(log_path());
    CHECK(status_of_signaled_task(gets_a_signal_for_the_script_alone, socket, FORKS_OF_START, SIGUSR2) == 5 << 8);
    CHECK(status_of_signaled_task(needs_hold, socket, FORKS_OF_START + 1, 0) == 5 << 8);
    file = fopen(log_path(), "r");
    CHECK(file != NULL);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    CHECK_TEXT(text, "slurm-affinode: scancel --full will signal only the batch script of the job: fork: "
                     "Resource temporarily unavailable\n"
                     "slurm-affinode: the job has an image and this node no agent, and scontrol requeuehold failed\n");
}

static void task_continues_without_announcement(void)
{
    char socket[96];

    snprintf(socket, sizeof(socket), "%s/open/shepherd.sock", top);
    snprintf(path[1], sizeof(path[1]), "%s/open", top);
    CHECK(mkdir(path[1], 0755) == 0 && chmod(path[1], 0777) == 0);
    CHECK(status_of_task(ends, socket) == 77 << 8);
    snprintf(path[1], sizeof(path[1]), "%s/shepherd", top);
    snprintf(socket, sizeof(socket), "%s/run/shepherd.sock", top);
    CHECK(status_of_task(ends, socket) == 5 << 8);
    CHECK(chmod(path[1], 0731) == 0); /* others could change what is executed */
    CHECK(status_of_task(ends, socket) == 77 << 8);
    CHECK(chmod(path[1], 0755) == 0); /* and trace it */
    CHECK(status_of_task(ends, socket) == 77 << 8);
    snprintf(program, sizeof(program), "%s/" HANGS, top);
    copy_this(program);
    CHECK(status_of_task(ends, socket) == 77 << 8);
}

static void scontrol_has_a_clean_environment(void)
{
    static const char script[] = "#!/bin/sh\necho \"$*\"\nenv\n";
    char script_path[96];
    char text[1024];
    int status;
    int pipe_ends[2];
    ssize_t got;
    pid_t child;

    snprintf(script_path, sizeof(script_path), "%s/scontrol", top);
    write_program(script_path, script, strlen(script), 0755);
    CHECK(pipe(pipe_ends) == 0);
    setenv("LD_LIBRARY_PATH", "/home/user", 1);
    setenv("SLURM_CONF", "/etc/slurm/slurm.conf", 1);
    child = fork();
    if (child == 0) {
        dup2(pipe_ends[1], 1);
        exec_requeuehold(script_path, "7_1");
    }
    close(pipe_ends[1]);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    got = read(pipe_ends[0], text, sizeof(text) - 1);
    CHECK(got > 0);
    text[got] = '\0';
    close(pipe_ends[0]);
    unsetenv("LD_LIBRARY_PATH");
    CHECK(strncmp(text, "requeuehold incomplete 7_1\n", 27) == 0);
    CHECK(strstr(text, "SLURM_CONF=/etc/slurm/slurm.conf\n") != NULL && strstr(text, "PATH=/usr/sbin:") != NULL);
    CHECK(strstr(text, "LD_LIBRARY_PATH") == NULL && strstr(text, "HOME") == NULL);
}

int main(int argc, char **argv)
{
    char command[128];

    while (strstr(argv[0], "/" HANGS) != NULL)
        pause();
    if (argc == 3)
        return strcmp(argv[1], "--speaks") == 0 && strcmp(argv[2], CHANNEL_VERSION) == 0 ? 0 : 1;

    snprintf(top, sizeof(top), "/tmp/affinode-keeper-XXXXXX");
    CHECK(mkdtemp(top) != NULL && chmod(top, 0755) == 0);
    scontrol_has_a_clean_environment();
    if (geteuid() == 0) {
        snprintf(program, sizeof(program), "%s/shepherd", top);
        copy_this(program);
        keeper_exits_as_the_script();
        failed_forks_are_logged();
        task_continues_without_announcement();
    } else {
        printf("test_keeper: not root, so no namespaces were made\n");
    }
    snprintf(command, sizeof(command), "rm -rf %s", top);
    return system(command);
}
