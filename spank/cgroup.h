/* Finds the cgroup.procs files of another process's cgroups, for cgroup version 1, 2 and hybrid setups. */
#ifndef AFFINODE_CGROUP_H
#define AFFINODE_CGROUP_H

#include <stdbool.h>
#include <stddef.h>

typedef bool cgroup_each(const char *procs_path, void *context);

/* CGROUPS is the text of /proc/PID/cgroup, MOUNTS that of /proc/self/mountinfo; both are modified. Calls EACH for every mounted
 * hierarchy. False: EACH returned false, which ends the iteration, or no hierarchy was found. */
bool cgroup_each_procs(char *cgroups, char *mounts, cgroup_each *each, void *context);

#endif
