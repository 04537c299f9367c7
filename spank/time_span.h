/* Time spans: 90s 15m 2h 1d, or Slurm's MINUTES, MM:SS, HH:MM:SS, DAYS-HH[:MM[:SS]]. Pure. */
#ifndef AFFINODE_TIME_SPAN_H
#define AFFINODE_TIME_SPAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LONGEST_SPAN_S 31622400U /* 366 days */

/* False: not a time span, or 0, or longer than LONGEST_SPAN_S. */
bool time_span_parse(const char *text, uint32_t *seconds);

/* "90s", "15m", "2h", "1d": in the largest unit that is exact. */
void time_span_format(uint32_t seconds, char *text, size_t size);

#endif
