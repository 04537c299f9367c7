/* Starts the batch script as slurmstepd would. */
#ifndef AFFINODE_SCRIPT_H
#define AFFINODE_SCRIPT_H

#include <signal.h>
#include <stdbool.h>
#include <sys/types.h>

/* Forks and executes ARGV in a session of its own, with MASK. -1: it could not be forked. */
pid_t script_start(char **argv, const sigset_t *mask, bool restore_failed, int keeper_fd);

/* Executes ARGV in this process, or tells the keeper why not (it has slurmstepd's words for it) and ends with errno. */
void script_execute(char **argv, bool restore_failed, int keeper_fd) __attribute__((noreturn));

#endif
