/* slurmstepd's message for a script that cannot be executed. Pure. */
#ifndef AFFINODE_EXEC_ERROR_H
#define AFFINODE_EXEC_ERROR_H

#include <stddef.h>

#define EXEC_FIRST_BYTES 256

/* Formats the message for an execve() of PATH that failed with errno NUMBER. FIRST: the first LENGTH bytes of the file. */
void exec_error_message(const char *path, int number, const char *first, size_t length, char *text, size_t size);

#endif
