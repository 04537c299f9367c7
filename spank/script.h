/* Starts the batch script as slurmstepd does. */
#ifndef AFFINODE_SCRIPT_H
#define AFFINODE_SCRIPT_H

#include <signal.h>
#include <stdbool.h>
#include <sys/types.h>

/* Forks and executes ARGV in a new session, with signal mask MASK. -1: fork failed. */
pid_t script_start(char **argv, const sigset_t *mask, bool restore_failed, int keeper_fd);

/* Executes ARGV in this process. On failure reports errno to the keeper, which logs it, and exits with errno. */
void script_execute(char **argv, bool restore_failed, int keeper_fd) __attribute__((noreturn));

#endif
