// The fold of the join (slurm_affinode/analysis/join/fold.c) on random tables: `join KIND COUNT SEED`. Every array is allocated
// with exactly the size that the caller promises, so that AddressSanitizer sees an access beside it.
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "join.h"

int64_t fold(const struct block *b, const struct pieces *p, const struct timeline *line, const struct limits *limits,
             struct sums *s, int64_t *events, int64_t room);
void give_idle(const int64_t *events, int64_t count, const struct timeline *line, const struct windows *w);
void end_all_windows(const struct timeline *line, const struct windows *w);

#define FAR (INT64_C(1) << 60)
#define STEP 30000
enum { DEVICES = 3, ROWS = 64, OWNERS = 6, BOUNDS = 3 };

static uint64_t state;

static uint64_t next(void) {  // xorshift64*
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * UINT64_C(0x2545F4914F6CDD1D);
}

static int64_t below(int64_t count) { return (int64_t)(next() % (uint64_t)count); }

static void *array(int64_t count, size_t size) {
  void *made = calloc(count > 0 ? (size_t)count : 1, size);
  if (made == NULL)
    exit(2);
  return made;
}

static int64_t any_time(void) {
  switch (below(4)) {
  case 0: return (int64_t)next();
  case 1: return INT64_MAX - below(3);
  case 2: return INT64_MIN + below(3);
  default: return FAR / 2 - 2 + below(4);
  }
}

static float any_value(void) {
  switch (below(10)) {
  case 0: return NAN;
  case 1: return INFINITY;
  case 2: return -INFINITY;
  case 3: return 3.4e38F;
  case 4: return 1e-45F;
  case 5: return -1.0F;
  case 6: case 7: return 0.0F;
  default: return (float)below(80000) / 64.0F;
  }
}

static int compare(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}


struct input {
  struct block block;
  struct pieces pieces;
  struct timeline line;
  int64_t cells, devices, partly;
};

// Cells of each device: ascending, from -FAR to FAR. `inside` ones have up to two owners.
static void draw_cells(struct input *in) {
  struct timeline *line = &in->line;
  int64_t most = DEVICES * (OWNERS + 1), cell = 0;
  int64_t *offset = array(in->devices + 1, 8), *start = array(most, 8), *end = array(most, 8);
  for (int64_t d = 0; d < in->devices; d++) {
    int64_t cuts[OWNERS], count = below(OWNERS + 1), kept = 0;
    for (int64_t k = 0; k < count; k++)
      cuts[k] = below(8) ? below(ROWS * STEP) - STEP : (int64_t)(next() % (FAR / 2)) - FAR / 4;
    qsort(cuts, (size_t)count, sizeof *cuts, compare);
    offset[d] = cell, start[cell] = -FAR;
    for (int64_t k = 0; k < count; k++) {
      if (kept && cuts[k] == cuts[kept - 1])
        continue;
      cuts[kept++] = cuts[k];
      end[cell++] = cuts[k], start[cell] = cuts[k];
    }
    end[cell++] = FAR;
  }
  offset[in->devices] = cell;
  in->cells = cell;
  int64_t *earliest = array(cell, 8), *latest = array(cell, 8), *owner_offset = array(cell + 1, 8), owners = 0;
  int64_t *owner = array(2 * cell, 8), *starts = array(cell, 8), *ends = array(cell, 8);
  uint8_t *inside = array(cell, 1), *held = array(cell, 1);
  memcpy(starts, start, (size_t)cell * 8), memcpy(ends, end, (size_t)cell * 8);
  free(start), free(end);
  for (int64_t c = 0; c < cell; c++) {
    owner_offset[c] = owners;
    inside[c] = (uint8_t)below(2), held[c] = inside[c] && below(2);
    earliest[c] = inside[c] ? starts[c] - below(3 * STEP) * (starts[c] > -FAR) : FAR;
    latest[c] = inside[c] && below(2) ? earliest[c] + below(STEP) : earliest[c];
    for (int64_t k = held[c] ? 1 + below(2) : 0; k > 0; k--)
      owner[owners++] = below(OWNERS);
    in->partly += earliest[c] < latest[c];
  }
  owner_offset[cell] = owners;
  int64_t *exact = array(owners, 8);
  memcpy(exact, owner, (size_t)owners * 8);
  free(owner);
  *line = (struct timeline){offset, starts, ends, earliest, latest, inside, held, owner_offset, exact};
}

// Missing values are NaN, or any number with a bitmap that begins at any bit.
static struct column draw_metric(int64_t rows) {
  struct column drawn = {.present = below(3)};
  if (drawn.present == MISSING && below(2))
    return drawn;
  float *values = array(rows, 4);
  for (int64_t j = 0; j < rows; j++)
    values[j] = drawn.present == MISSING ? NAN : drawn.present == COMPLETE ? (float)below(100) : any_value();
  drawn.values = values;
  if (drawn.present == PARTIAL && below(2)) {
    drawn.bit = below(70);
    int64_t bytes = (drawn.bit + rows + 7) / 8, kind = below(3);
    uint8_t *valid = array(bytes, 1);
    for (int64_t k = 0; k < bytes; k++)
      valid[k] = kind ? (uint8_t)(0 - below(2)) : (uint8_t)next();
    drawn.valid = valid;
  }
  return drawn;
}

static struct column **columns_of(struct block *b) {
  static struct column *columns[METRICS];
  struct column *every[] = {&b->util, &b->engine, &b->sm, &b->tensor, &b->dram, &b->fb, &b->power};
  memcpy(columns, every, sizeof every);
  return columns;
}

static void draw_rows(struct input *in) {
  int64_t pieces = 1 + below(4), row = 0;
  int64_t *device = array(pieces, 8), *end = array(pieces, 8), *step = array(pieces, 8);
  int64_t *next_time = array(pieces, 8), *first = array(pieces, 8), *reach = array(pieces, 8);
  double *limit = array(pieces, 8);
  int64_t *all = array(4 * ROWS, 8);
  for (int64_t p = 0; p < pieces; p++) {
    int64_t rows = 1 + below(ROWS / 2), time = below(20) ? below(10 * STEP) - STEP : any_time();
    device[p] = below(in->devices);
    step[p] = below(20) ? STEP - 5 + below(10) : below(4) ? 0 : any_time();
    limit[p] = below(30) ? 3.0 * (double)step[p] : NAN;
    first[p] = below(20) ? time : any_time();
    for (int64_t j = 0; j < rows; j++) {
      all[row + j] = time;
      uint64_t on = below(6) ? STEP : below(4) ? (uint64_t)below(20 * STEP) + 1 : below(8) ? UINT64_C(1) << 31 : next();
      time = (int64_t)((uint64_t)time + on);
    }
    row += rows;
    end[p] = row, reach[p] = below(20) ? INT64_MAX : any_time();
    next_time[p] = below(6) ? FAR : below(4) ? time : any_time();
  }
  in->pieces = (struct pieces){pieces, device, end, step, limit, next_time, first, reach};
  struct block *b = &in->block;
  // A block may begin and end anywhere.
  b->row = below(4) ? 0 : below(row);
  b->count = below(4) ? row - b->row : below(row - b->row + 1);
  b->next_time = b->row + b->count < row && below(8) ? all[b->row + b->count] : any_time();
  int64_t *times = array(b->count, 8);
  memcpy(times, all + b->row, (size_t)b->count * 8);
  free(all);
  b->time = times;
  for (int k = 0; k < METRICS; k++)
    *columns_of(b)[k] = draw_metric(b->count);
}

static void release(struct input *in) {
  const void *made[] = {
      in->block.time, in->pieces.device, in->pieces.end, in->pieces.step, in->pieces.limit, in->pieces.next_time,
      in->pieces.first_time, in->pieces.reach, in->line.offset, in->line.start, in->line.end, in->line.earliest,
      in->line.latest, in->line.inside, in->line.held, in->line.owner_offset, in->line.owners};
  for (size_t k = 0; k < sizeof made / sizeof *made; k++)
    free((void *)(uintptr_t)made[k]);
  for (int k = 0; k < METRICS; k++) {
    const struct column *column = columns_of(&in->block)[k];
    free((void *)(uintptr_t)column->values), free((void *)(uintptr_t)column->valid);
  }
}

// Return whether the block was accepted. Ends the process if a result is impossible.
static bool one(void) {
  struct input in = {.devices = 1 + below(DEVICES)};
  draw_cells(&in);
  draw_rows(&in);
  float floors[5] = {0, 0, 0, 0, 0.0005F};
  static const int64_t chunks[] = {1, 8, 17, CHUNK};
  struct limits limits = {floors, (float)below(3), 5, chunks[below(4)]};
  int64_t room = below(8) ? in.block.count + in.cells + 1 : below(4), *events = array(4 * room, 8);
  struct sums s = {
      array(SUMS * in.cells, 8), array(in.cells, 4), array(in.partly, 8), array(in.partly, 8),
      array(SUMS * in.partly, 8), in.partly, 0, 0, 0, 0};
  int64_t found = fold(&in.block, &in.pieces, &in.line, &limits, &s, events, room);
  bool accepted = found <= room;
  if (accepted) {
    int64_t owner_start[OWNERS] = {0}, begin[OWNERS], end[OWNERS], windows[OWNERS] = {0}, longest[OWNERS] = {0};
    int64_t bounds[BOUNDS] = {60000, 600000, 3600000}, bins[BOUNDS + 1] = {0}, last[4] = {-1, -1, -1, -1};
    double share[OWNERS] = {0}, bin_share[BOUNDS + 1] = {0};
    uint8_t counted[OWNERS] = {1, 0, 1, 1, 1, 1};
    for (int k = 0; k < OWNERS; k++)
      begin[k] = end[k] = -1, owner_start[k] = below(2) ? -FAR : below(ROWS * STEP);
    struct windows w = {OWNERS, owner_start, counted, begin, end, share, windows, longest, BOUNDS, bounds, bins, bin_share, last};
    give_idle(events, found, &in.line, &w);
    end_all_windows(&in.line, &w);
    for (int64_t e = 0; e < found; e++)
      if (events[4 * e] < 0 || events[4 * e] >= in.cells || events[4 * e + 1] >= events[4 * e + 2])
        fprintf(stderr, "idle time %lld is empty or in no cell\n", (long long)e), exit(1);
    if (s.partly > in.partly || s.samples < 0 || s.samples > in.block.count || s.gap_ms < 0)
      fprintf(stderr, "impossible counts\n"), exit(1);
  }
  free(events), free(s.sums), free(s.peak), free(s.partly_cell), free(s.partly_time), free(s.partly_sums);
  release(&in);
  return accepted;
}

int main(int argc, char **argv) {
  if (argc != 4)
    return 2;
  long long count = atoll(argv[2]), refused = 0, accepted = 0;
  uint64_t seed = strtoull(argv[3], NULL, 10);
  for (long long k = 0; k < count; k++) {
    if (k % 1024 == 0)
      fprintf(stderr, "at %lld\n", k);
    state = (seed + 1) * UINT64_C(0x9E3779B97F4A7C15) + (uint64_t)k * UINT64_C(0xD1342543DE82EF95);
    state |= 1, next(), next();
    if (one())
      accepted++;
    else
      refused++;
  }
  printf("%lld %lld\n", refused, accepted);
  return 0;
}
