/* Assertions of the unit tests. */
#ifndef AFFINODE_CHECK_H
#define AFFINODE_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                                \
    do {                                                                                                                \
        if (!(condition)) {                                                                                             \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                                   \
            abort();                                                                                                    \
        }                                                                                                               \
    } while (0)

#define CHECK_TEXT(found, expected)                                                                                     \
    do {                                                                                                                \
        if (strcmp((found), (expected)) != 0) {                                                                         \
            fprintf(stderr, "%s:%d: found    \"%s\"\n    expected \"%s\"\n", __FILE__, __LINE__, (found), (expected));  \
            abort();                                                                                                    \
        }                                                                                                               \
    } while (0)

/* Pseudo-random numbers, the same in every run. */
static inline unsigned next_random(unsigned *state)
{
    *state = *state * 1664525U + 1013904223U;
    return *state >> 8;
}

#endif
