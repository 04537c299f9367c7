// Structure shared with native.py, which lists its fields in the same order. All arrays are contiguous.

#ifndef SLURM_AFFINODE_PROFILE_H
#define SLURM_AFFINODE_PROFILE_H

#include <stdint.h>

struct breakpoint {
  int64_t time, free;
};

// Free units from each breakpoint to the next, the last of `count` for ever, and the waiting jobs in order. The breakpoint after it
// is later than all times. Two breakpoints for each job that runs or waits, and five more, have room. `start` and `span`: of the reservation of each waiting job; `units`: of each job.
struct profile {
  int64_t count;
  struct breakpoint *at;
  int64_t waiting;
  int64_t *queue;
  int64_t *start, *span;
  const int64_t *units;
};

void advance(struct profile *p, int64_t now);
void add(struct profile *p, int64_t start, int64_t end, int64_t units);
void reserve(struct profile *p, int64_t position, int64_t job, int64_t span);
void reserve_all(struct profile *p);
void move_forward(struct profile *p);
int64_t take_due(struct profile *p, int64_t now, int64_t *positions, int64_t *next);

#endif
