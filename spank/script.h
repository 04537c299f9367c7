/* Starts the batch script as slurmstepd would. */
#ifndef AFFINODE_SCRIPT_H
#define AFFINODE_SCRIPT_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* Forks and executes ARGV in a session of its own, with MASK. -1: it could not be forked. */
pid_t script_start(char **argv, const sigset_t *mask, bool restore_failed);

/* Executes ARGV in this process, or writes what slurmstepd writes and ends with errno. */
void script_execute(char **argv, bool restore_failed) __attribute__((noreturn));

/* What slurmstepd says of an execve() of PATH that failed with NUMBER; FIRST holds the first LENGTH bytes of the file. */
void script_complaint(const char *path, int number, const char *first, size_t length, char *text, size_t size);

#endif
