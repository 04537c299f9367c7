#include "exec_error.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

void exec_error_message(const char *path, int number, const char *first, size_t length, char *text, size_t size)
{
    if (number == ENOENT && length >= 3 && first[0] == '#' && first[1] == '!') {
        size_t end = 2;

        while (end < length && end < EXEC_FIRST_BYTES - 1 && first[end] != '\n' && first[end] != '\0')
            end++;
        snprintf(text, size, "execve(): bad interpreter(%.*s): %s", (int)(end - 2), first + 2,
                 strerror(number));
        return;
    }
    snprintf(text, size, "execve(): %s: %s", path, strerror(number));
}
