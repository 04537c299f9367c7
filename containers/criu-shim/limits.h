#ifndef CRIU_SHIM_LIMITS_H
#define CRIU_SHIM_LIMITS_H

#include <stdio.h>
#include <sys/resource.h>
#include <sys/types.h>

/* Reads one limit of a process from /proc/PID/limits. Returns 0, or -1 if it is not available. */
int shim_read_limit(pid_t pid, int resource, struct rlimit *limit);

/* Reads it from an open file with this format. */
int shim_parse_limits(FILE *file, int resource, struct rlimit *limit);

#endif
