/* The script starts as slurmstepd starts it, with slurmstepd's messages for scripts that cannot be executed. */
#include "channel.h"
#include "check.h"
#include "exec_error.h"
#include "script.h"
#include "shepherd.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void exec_errors_match_slurmstepd(void)
{
    char text[512];

    exec_error_message("/spool/slurm_script", EACCES, "#!/etc/passwd\n", 14, text, sizeof(text));
    CHECK_TEXT(text, "execve(): /spool/slurm_script: Permission denied");
    exec_error_message("/s", ENOENT, "#!/no/such -x\necho\n", 19, text, sizeof(text));
    CHECK_TEXT(text, "execve(): bad interpreter(/no/such -x): No such file or directory");
    exec_error_message("/s", ENOENT, "#!/cut", 6, text, sizeof(text));
    CHECK_TEXT(text, "execve(): bad interpreter(/cut): No such file or directory");
    exec_error_message("/s", ENOENT, "", 0, text, sizeof(text));
    CHECK_TEXT(text, "execve(): /s: No such file or directory");
}

static int status_of(const char *command, const sigset_t *mask, bool failed)
{
    char *arguments[] = {"/bin/sh", "-c", (char *)command, NULL};
    int status = -1;
    pid_t child = script_start(arguments, mask, failed, -1);

    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return status;
}

static void script_has_session_mask_and_task_pid(void)
{
    sigset_t none;
    sigset_t all;

    sigemptyset(&none);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL); /* as the shepherd */
    setenv("SLURM_TASK_PID", "1", 1);
    CHECK(status_of("exit 7", &none, false) == 7 << 8);
    CHECK(status_of("kill -TERM $$", &none, false) == SIGTERM);
    CHECK(status_of("test $SLURM_TASK_PID = $$", &none, false) == 0);
    CHECK(status_of("test $(ps -o sid= -p $$) = $$ || test ! -x /bin/ps", &none, false) == 0);
    CHECK(status_of("test -z \"$SLURM_AFFINODE_RESTORE_FAILED\"", &none, false) == 0);
    CHECK(status_of("test \"$SLURM_AFFINODE_RESTORE_FAILED\" = 1", &none, true) == 0);
}

static void orphans_are_children_of_the_script(void)
{
    sigset_t none;

    sigemptyset(&none);
    CHECK(status_of("orphan=$( (sleep 60 >/dev/null & echo $!) ); set -- $(cat /proc/$orphan/stat); kill $orphan; test $4 = $$",
                    &none, false) == 0);
}

static void exec_failure_is_reported_to_the_keeper(void)
{
    char *arguments[] = {"/no/such/script", NULL};
    struct packet packet = {0};
    sigset_t none;
    int status;
    int ends[2];

    sigemptyset(&none);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    CHECK(waitpid(script_start(arguments, &none, false, ends[1]), &status, 0) > 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == ENOENT);
    CHECK(channel_receive(ends[0], &packet, 1000) == 1 && packet.kind == PACKET_EXEC && packet.number == ENOENT);
    close(ends[0]);
    close(ends[1]);
}

static void command_line_is_parsed(void)
{
    char *good[] = {"s", "20", "7", "1", "1", "300", "/run/x", "window=9", "--", "/spool/script", "a", NULL};
    char *bad[] = {"s", "x", "7", "1", "1", "300", "/run/x", "window=9", "--", "/spool/script", NULL};
    struct shepherd_options options;

    CHECK(shepherd_options(11, good, &options));
    CHECK(options.keeper_fd == 20 && options.job == 7 && options.restarts == 1 && options.image);
    CHECK(options.agent_wait_s == 300);
    CHECK_TEXT(options.script[1], "a");
    CHECK(!shepherd_options(10, bad, &options));
    CHECK(!shepherd_options(9, good, &options));
    CHECK(!shepherd_options(1, good, &options));
    bad[1] = "4294967296";
    CHECK(!shepherd_options(10, bad, &options));
    bad[1] = "3";
    bad[4] = "2";
    CHECK(!shepherd_options(10, bad, &options));
}

int main(void)
{
    exec_errors_match_slurmstepd();
    script_has_session_mask_and_task_pid();
    orphans_are_children_of_the_script();
    exec_failure_is_reported_to_the_keeper();
    command_line_is_parsed();
    return 0;
}
