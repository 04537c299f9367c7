// Reservations of waiting jobs, one for each. They are examined after each end of a job before its estimate: with a long queue,
// nearly all of the time of a simulation.

#include <stdbool.h>
#include <string.h>

#include "profile.h"

// The digest of the sources, which native.py compares (base/compiled.py).
#ifndef LIBRARY_SOURCES
#define LIBRARY_SOURCES ""
#endif
const char library_sources[] = LIBRARY_SOURCES;

// Return the place of the last breakpoint at or before `time`, which is not before the first one.
static int64_t place(const struct profile *p, int64_t time) {
  const struct breakpoint *low = p->at;
  for (int64_t count = p->count; count > 1;) {  // without branches, which a processor could not predict
    int64_t half = count / 2;
    low = low[half].time <= time ? low + half : low;
    count -= half;
  }
  return low - p->at;
}

static void shift(struct profile *p, int64_t from, int64_t to) {
  memmove(p->at + to, p->at + from, (size_t)(p->count + 1 - from) * sizeof *p->at);
  p->count += to - from;
}

// Return the place of a breakpoint at `time`, which is inserted if there is none.
static int64_t breakpoint(struct profile *p, int64_t time) {
  int64_t at = place(p, time);
  if (p->at[at].time == time)
    return at;
  shift(p, at, at + 1);
  p->at[at + 1].time = time;
  return at + 1;
}

// Remove a breakpoint that equals the one before: they would let the profile grow with each job.
static void merge(struct profile *p, int64_t at) {
  if (at > 0 && p->at[at].free == p->at[at - 1].free)
    shift(p, at + 1, at);
}

// Discard what was before `now`.
void advance(struct profile *p, int64_t now) {
  int64_t past = place(p, now);
  if (past > 0)
    shift(p, past, 0);
  if (p->at[0].time < now)
    p->at[0].time = now;
}

static void change(struct profile *p, int64_t first, int64_t end, int64_t units) {
  int64_t last = breakpoint(p, end);
  for (int64_t at = first; at < last; at++)
    p->at[at].free += units;
  merge(p, last);
  merge(p, first);
}

// Add `units` (negative: subtract) from `start`, at or after the first breakpoint, to `end`.
void add(struct profile *p, int64_t start, int64_t end, int64_t units) {
  if (start < end)
    change(p, breakpoint(p, start), end, units);
}

// Return the place of the first breakpoint before `limit` from which `units` are free for `span`, or until `limit`; -1 if there
// is none. Which breakpoints have the units follows no pattern that a processor could predict: that decides no branch.
static int64_t earliest(const struct profile *p, int64_t units, int64_t span, int64_t limit) {
  const struct breakpoint *at = p->at, *first = at;
  int64_t begin = at->time, next;
  do {
    bool blocked = at->free < units;
    next = (++at)->time;
    first = blocked ? at : first;
    begin = blocked ? next : begin;
  } while (next < limit && next - begin < span);
  return begin < limit ? first - p->at : -1;
}

static void hold(struct profile *p, int64_t job, int64_t first) {
  p->start[job] = p->at[first].time;
  change(p, first, p->start[job] + p->span[job], -p->units[job]);
}

// Append a job to the queue at a position, and give it the earliest time at which it fits.
void reserve(struct profile *p, int64_t position, int64_t job, int64_t span) {
  memmove(p->queue + position + 1, p->queue + position, (size_t)(p->waiting - position) * sizeof *p->queue);
  p->queue[position] = job;
  p->waiting++;
  p->span[job] = span;
  hold(p, job, earliest(p, p->units[job], span, INT64_MAX));
}

// Give each waiting job, in order, the earliest time at which it fits beside those before it.
void reserve_all(struct profile *p) {
  for (int64_t at = 0; at < p->waiting; at++) {
    int64_t job = p->queue[at];
    hold(p, job, earliest(p, p->units[job], p->span[job], INT64_MAX));
  }
}

// Give each waiting job, in order, an earlier reservation if there is one. From its present start on, its own units are enough.
void move_forward(struct profile *p) {
  for (int64_t at = 0; at < p->waiting; at++) {
    int64_t job = p->queue[at], before = p->start[job], first = earliest(p, p->units[job], p->span[job], before);
    if (first >= 0) {
      add(p, before, before + p->span[job], p->units[job]);
      hold(p, job, first);  // which is before all that has changed
    }
  }
}

// Take the jobs whose reservation has begun out of the queue. Return their number; `positions`: in the queue before, ascending;
// `next`: begin of the first of the other reservations, INT64_MAX without any.
int64_t take_due(struct profile *p, int64_t now, int64_t *positions, int64_t *next) {
  int64_t due = 0;
  *next = INT64_MAX;
  for (int64_t at = 0; at < p->waiting; at++) {
    int64_t job = p->queue[at], start = p->start[job];
    if (start <= now) {
      positions[due++] = at;
      continue;
    }
    p->queue[at - due] = job;
    if (start < *next)
      *next = start;
  }
  p->waiting -= due;
  return due;
}
