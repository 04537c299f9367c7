/* The value of wake=: when a suspended job resumes. */
#ifndef AFFINODE_WAKE_TIME_H
#define AFFINODE_WAKE_TIME_H

#include <stdbool.h>

/* Whether TEXT is auto, hold, a time span such as 2h (counted from the suspension), or a time in a form of sbatch --begin.
 * A date has to exist in the calendar; it may lie in the past. */
bool wake_time_is_valid(const char *text);

#endif
