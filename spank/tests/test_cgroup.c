/* The cgroup.procs files for both versions of cgroups, from recorded texts of kernels. */
#include "cgroup.h"
#include "check.h"

static char found[2048];

static bool collect(const char *path, void *context)
{
    (void)context;
    strcat(found, path);
    strcat(found, "\n");
    return true;
}

static bool refuse(const char *path, void *context)
{
    (void)path;
    (void)context;
    return false;
}

static bool places(const char *cgroups, const char *mounts, cgroup_each *each)
{
    char *first = strdup(cgroups);
    char *second = strdup(mounts);
    bool done;

    found[0] = '\0';
    done = cgroup_each_procs(first, second, each, NULL);
    free(first);
    free(second);
    return done;
}

static const char unified[] =
    "22 1 0:20 / / rw,relatime - ext4 /dev/vda rw\n"
    "30 22 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

static void version_2(void)
{
    CHECK(places("0::/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0\n", unified, collect));
    CHECK_TEXT(found, "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0/cgroup.procs\n");
    CHECK(places("0::/\n", unified, collect));
    CHECK_TEXT(found, "/sys/fs/cgroup/cgroup.procs\n");
}

static void version_1_and_both(void)
{
    const char *mounts = "30 22 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
                         "31 22 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
                         "32 22 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
                         "33 22 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

    CHECK(places("12:cpu,cpuacct:/slurm/uid_1/job_7\n5:memory:/slurm/uid_1/job_7/step_0\n3:pids:/elsewhere\n"
                 "1:name=systemd:/s\n0::/u\n",
                 mounts, collect));
    CHECK_TEXT(found, "/sys/fs/cgroup/cpu,cpuacct/slurm/uid_1/job_7/cgroup.procs\n"
                      "/sys/fs/cgroup/memory/slurm/uid_1/job_7/step_0/cgroup.procs\n"
                      "/sys/fs/cgroup/systemd/s/cgroup.procs\n"
                      "/sys/fs/cgroup/unified/u/cgroup.procs\n");
}

static void partial_mounts_and_escaped_names(void)
{
    CHECK(places("0::/docker/abc/job_7\n", "30 22 0:27 /docker/abc /sys/fs/c\\040g rw - cgroup2 cgroup rw\n", collect));
    CHECK_TEXT(found, "/sys/fs/c g/job_7/cgroup.procs\n");
    CHECK(!places("0::/docker/abcd\n", "30 22 0:27 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n", collect));
}

static void missing_hierarchy_is_reported(void)
{
    CHECK(!places("0::/a\n", "", collect));
    CHECK(!places("", unified, collect));
    CHECK(!places("nonsense\n::\n0:\n", "a b c\n - \n1 2 3 4 5 - cgroup2\n", collect));
    CHECK(!places("0::/a\n", unified, refuse));
}

int main(void)
{
    version_2();
    version_1_and_both();
    partial_mounts_and_escaped_names();
    missing_hierarchy_is_reported();
    return 0;
}
