/* What slurmstepd says of a script that it cannot execute. Pure. */
#ifndef AFFINODE_COMPLAINT_H
#define AFFINODE_COMPLAINT_H

#include <stddef.h>

#define EXEC_FIRST_BYTES 256

/* Of an execve() of PATH that failed with NUMBER; FIRST holds the first LENGTH bytes of the file. */
void exec_complaint(const char *path, int number, const char *first, size_t length, char *text, size_t size);

#endif
