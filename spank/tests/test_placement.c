/* A process is moved into the cgroups of another one, if the test can create a cgroup, and bound to its CPUs. */
#include "check.h"
#include "keeper.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char group[96]; /* empty: none could be made */

static void make_group(void)
{
    static const char *const places[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/unified"};

    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
        char procs[128];

        snprintf(group, sizeof(group), "%s/affinode-test-%d", places[i], (int)getpid());
        snprintf(procs, sizeof(procs), "%s/cgroup.procs", group);
        if (mkdir(group, 0755) == 0 && access(procs, W_OK) == 0)
            return;
        rmdir(group);
    }
    group[0] = '\0';
}

static void join_group(void)
{
    char procs[128];
    char pid[16];
    int fd;

    if (group[0] == '\0')
        return;
    snprintf(procs, sizeof(procs), "%s/cgroup.procs", group);
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    fd = open(procs, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0 && write(fd, pid, strlen(pid)) == (ssize_t)strlen(pid));
    close(fd);
}

static bool is_in_group(pid_t pid)
{
    char path[64];
    char text[8192] = "";
    ssize_t got;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/cgroup", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    got = read(fd, text, sizeof(text) - 1);
    close(fd);
    return got > 0 && strstr(text, "/affinode-test-") != NULL;
}

/* Acts as the task: forks its child before it joins the cgroup itself. */
static void be_task(void)
{
    char error[512] = "";
    cpu_set_t one;
    cpu_set_t found;
    int first = 0;
    pid_t child = fork();

    if (child == 0) {
        pause();
        _exit(0);
    }
    CHECK(child > 0);
    join_group();
    CHECK(sched_getaffinity(0, sizeof(found), &found) == 0);
    while (!CPU_ISSET(first, &found))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
    if (!place_with_caller(child, error, sizeof(error)))
        CHECK_TEXT(error, "");
    CHECK(group[0] == '\0' || is_in_group(child));
    CHECK(sched_getaffinity(child, sizeof(found), &found) == 0 && CPU_EQUAL(&found, &one));
    CHECK(place_with_caller(child, error, sizeof(error))); /* again: nothing to do */
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CHECK(group[0] == '\0' || !place_with_caller(child, error, sizeof(error)));
    _exit(0);
}

int main(void)
{
    int status = -1;
    pid_t task;

    make_group();
    task = fork();
    if (task == 0)
        be_task();
    CHECK(task > 0 && waitpid(task, &status, 0) == task);
    if (group[0] != '\0')
        rmdir(group);
    CHECK(status == 0);
    if (group[0] == '\0')
        printf("test_placement: no cgroup can be made here, only CPUs were tried\n");
    return 0;
}
