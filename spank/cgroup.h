/* Which cgroup.procs files put a process beside another one, for cgroups of version 1, 2 and both at once. */
#ifndef AFFINODE_CGROUP_H
#define AFFINODE_CGROUP_H

#include <stdbool.h>
#include <stddef.h>

typedef bool cgroup_each(const char *procs_path, void *context);

/* CGROUPS is the text of /proc/PID/cgroup, MOUNTS that of /proc/self/mountinfo. Calls EACH for every hierarchy that is
 * mounted here, until one gives false. Gives false then, and where no line could be placed. Both texts are changed. */
bool cgroup_each_procs(char *cgroups, char *mounts, cgroup_each *each, void *context);

#endif
