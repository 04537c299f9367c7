/* The value of wake=: a word, or a time at which a suspended job goes on. */
#ifndef AFFINODE_WAKE_H
#define AFFINODE_WAKE_H

#include <stdbool.h>

/* Whether the agent can make something of it: auto, hold, a span such as 2h (from the moment the job falls asleep), or a time
 * in the forms of sbatch --begin. That a date is in the calendar is looked at, not whether it lies ahead. */
bool wake_is_known(const char *text);

#endif
