/* A shepherd is announced only in a directory that only its owner can change, with hostile files and links in it. */
#include "announcement.h"
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static char top[64];
static pid_t child;

static const char *at(const char *name)
{
    static char paths[4][160];
    static unsigned next;
    char *path = paths[next++ % 4];

    snprintf(path, sizeof(paths[0]), "%s%s", top, name);
    return path;
}

static bool make(struct announcement *made, const char *socket, char *error)
{
    static const gid_t groups[] = {4, 24, 4294967294u};
    struct announcement_owner owner = {.uid = 1001, .gid = 1002, .groups = groups, .group_count = 3};
    struct stat program;

    CHECK(stat("/proc/self/exe", &program) == 0);
    return announcement_make(made, socket, 4711, &owner, child, &program, error, 512);
}

static size_t read_file(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got;

    if (fd < 0)
        return 0;
    got = read(fd, text, size - 1);
    close(fd);
    CHECK(got >= 0);
    text[got] = '\0';
    return (size_t)got;
}

static void announcement_names_process_and_program(void)
{
    struct announcement made;
    struct stat found;
    char error[512] = "";
    char expected[512];
    char text[1024];
    mode_t before = umask(0777); /* of the job */

    if (!make(&made, at("/run/shepherd.sock"), error))
        CHECK_TEXT(error, "");
    umask(before);
    CHECK(stat(at("/run"), &found) == 0 && (found.st_mode & 07777) == 0755);
    CHECK(stat(at("/run/shepherds"), &found) == 0 && (found.st_mode & 07777) == 0700);
    CHECK(stat(at("/run/shepherds/4711"), &found) == 0 && (found.st_mode & 07777) == 0600 && found.st_nlink == 1);
    CHECK(read_file(at("/run/shepherds/4711"), text, sizeof(text)) > 0);
    snprintf(expected, sizeof(expected), "version=2\njob=4711\nuid=1001\ngid=1002\npid=%d\nstarted=", (int)child);
    CHECK(strncmp(text, expected, strlen(expected)) == 0);
    snprintf(expected, sizeof(expected), "\nkeeper=%d\nkeeper_started=", (int)getpid());
    CHECK(strstr(text, expected) != NULL);
    CHECK(stat("/proc/self/ns/pid", &found) == 0);
    snprintf(expected, sizeof(expected), "\npid_namespace=%ju:%ju\n", (uintmax_t)found.st_dev, (uintmax_t)found.st_ino);
    CHECK(strstr(text, expected) != NULL);
    CHECK(stat("/proc/self/exe", &found) == 0);
    snprintf(expected, sizeof(expected), "\nprogram=%ju:%ju\n", (uintmax_t)found.st_dev, (uintmax_t)found.st_ino);
    CHECK(strstr(text, expected) != NULL);
    CHECK(strstr(text, "\ngroups=4,24,4294967294\n") != NULL);
    CHECK(strstr(text, "started=0\n") == NULL);
    CHECK(announcement_withdraw(&made) && access(at("/run/shepherds/4711"), F_OK) != 0);
    CHECK(announcement_withdraw(&made));
}

static void later_announcement_is_not_withdrawn(void)
{
    struct announcement first;
    struct announcement second;
    char error[512] = "";

    CHECK(make(&first, at("/run/shepherd.sock"), error));
    CHECK(make(&second, at("/run/shepherd.sock"), error));
    CHECK(announcement_withdraw(&first) && access(at("/run/shepherds/4711"), F_OK) == 0);
    CHECK(announcement_withdraw(&second) && access(at("/run/shepherds/4711"), F_OK) != 0);
}

static void links_are_replaced_and_not_followed(void)
{
    struct announcement made;
    char error[512] = "";
    char text[64];
    int fd = open(at("/precious"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

    CHECK(fd >= 0 && write(fd, "precious", 8) == 8);
    close(fd);
    CHECK(symlink(at("/precious"), at("/run/shepherds/4711")) == 0);
    CHECK(symlink(at("/precious"), at("/run/shepherds/.4711.new")) == 0);
    CHECK(make(&made, at("/run/shepherd.sock"), error));
    CHECK(read_file(at("/precious"), text, sizeof(text)) == 8);
    CHECK_TEXT(text, "precious");
    CHECK(announcement_withdraw(&made));
    CHECK(access(at("/precious"), F_OK) == 0 && access(at("/run/shepherds/.4711.new"), F_OK) != 0);
}

static void refused(const char *socket, const char *why)
{
    struct announcement made;
    char error[512] = "";

    CHECK(!make(&made, socket, error));
    CHECK(made.directory < 0);
    if (strstr(error, why) == NULL)
        CHECK_TEXT(error, why);
}

static void writable_directory_is_rejected(void)
{
    CHECK(rmdir(at("/run/shepherds")) == 0);
    CHECK(mkdir(at("/elsewhere"), 0700) == 0 && symlink(at("/elsewhere"), at("/run/shepherds")) == 0);
    refused(at("/run/shepherd.sock"), "/run/shepherds: ");
    CHECK(unlink(at("/run/shepherds")) == 0);
    CHECK(symlink(at("/run"), at("/link")) == 0);
    refused(at("/link/shepherd.sock"), "/link: ");
    CHECK(mkdir(at("/run/shepherds"), 0700) == 0 && chmod(at("/run/shepherds"), 0770) == 0);
    refused(at("/run/shepherd.sock"), "/run/shepherds: not a directory that only root can change");
    CHECK(chmod(at("/run/shepherds"), 0700) == 0 && chmod(at("/run"), 0757) == 0);
    refused(at("/run/shepherd.sock"), "/run: not a directory that only root can change");
    CHECK(chmod(at("/run"), 0755) == 0);
    if (geteuid() == 0) {
        CHECK(chown(at("/run"), 1001, 0) == 0);
        refused(at("/run/shepherd.sock"), "/run: not a directory that only root can change");
        CHECK(chown(at("/run"), 0, 0) == 0);
    }
    refused(at("/precious/shepherd.sock"), "/precious: ");
    refused(at("/no/such/shepherd.sock"), "/no/such: No such file or directory");
    refused("/shepherd.sock", "has no directory of its own");
}

static void writable_program_is_rejected(void)
{
    struct stat program;
    char error[512] = "";

    CHECK(announcement_program(at("/precious"), &program, error, sizeof(error)));
    CHECK(chmod(at("/precious"), 0775) == 0);
    CHECK(!announcement_program(at("/precious"), &program, error, sizeof(error)));
    CHECK(strstr(error, "only root can change") != NULL);
    CHECK(chmod(at("/precious"), 0755) == 0);
    CHECK(!announcement_program(at("/precious"), &program, error, sizeof(error)));
    CHECK(strstr(error, "could trace it") != NULL);
    CHECK(chmod(at("/precious"), 0711) == 0);
    CHECK(announcement_program(at("/precious"), &program, error, sizeof(error)));
    CHECK(!announcement_program(at("/elsewhere"), &program, error, sizeof(error)));
    CHECK(!announcement_program(at("/no/such"), &program, error, sizeof(error)));
    CHECK(strstr(error, "No such file") != NULL);
}

static void ended_process_is_not_announced(void)
{
    kill(child, SIGKILL);
    CHECK(waitid(P_PID, (id_t)child, &(siginfo_t){0}, WEXITED | WNOWAIT) == 0);
    refused(at("/run/shepherd.sock"), "cannot read the status of process");
    CHECK(waitpid(child, NULL, 0) == child);
    refused(at("/run/shepherd.sock"), "cannot read the status of process");
}

int main(void)
{
    char command[128];

    snprintf(top, sizeof(top), "/tmp/affinode-announcement-XXXXXX");
    CHECK(mkdtemp(top) != NULL);
    child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    announcement_names_process_and_program();
    later_announcement_is_not_withdrawn();
    links_are_replaced_and_not_followed();
    writable_directory_is_rejected();
    writable_program_is_rejected();
    ended_process_is_not_announced();
    snprintf(command, sizeof(command), "rm -rf %s", top);
    return system(command);
}
