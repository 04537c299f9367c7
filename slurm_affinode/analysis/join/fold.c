// The join of samples and cells, as loops over pieces, cells and samples. native.py builds the structures.
//
// Samples are sorted by (device, time), and cells are few, so there is no hashing and no search per sample. Values are
// 32-bit floats, as stored; sums are 64-bit. The time in each activity class is the length of its stretches without a
// gap, exact in milliseconds. Products of a value and a time are rounded to a power of two, so that their sums are exact,
// and do not depend on how the samples are divided into blocks, threads and machines. The inner loops are simple, so that
// the compiler vectorizes them. They read each column of a chunk once, as stored: missing values are replaced in a copy,
// and only in chunks that have some.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "join.h"

enum { BUSY, LOW, IDLE, UNKNOWN, UTIL, FB = 6, POWER = 9 };
// First columns of sums: time by activity class; for each metric value x time, time with a value and, except for UTIL,
// value x time while idle.

enum { CELL, BEGIN, END, TAKEN };
// Columns of idle time: cell, period, and the time since which an allocation must have held the device.

#define GAP 128  // added to the class of a sample that is followed by a gap
#define FAR (INT64_C(1) << 60)        // end of the last cell of a device
#define LATEST (INT64_C(1) << 59)     // of all times; with its weight, a sample ends before FAR
#define FLOAT_INFINITY 0x7F800000

// Parts of a unit x ms to which products are rounded. A double holds integers up to 2^53: sums are exact up to a month of
// 800 %, 3 TiB (in MiB) and 13 kW of one device in one cell.
#define UTIL_PARTS 4096.0
#define FB_PARTS 1.0
#define POWER_PARTS 256.0

// The digest of the sources, which native.py compares (base/compiled.py).
#ifndef LIBRARY_SOURCES
#define LIBRARY_SOURCES ""
#endif
const char library_sources[] = LIBRARY_SOURCES;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Return the piece that contains `row`: the first one that ends after it.
static int64_t piece_of(const struct pieces *p, int64_t row) {
  int64_t low = 0, high = p->count;
  while (low < high) {
    int64_t middle = (low + high) >> 1;
    if (p->end[middle] <= row)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Return whether the numbers of a piece are usable, and `begin`, the time of its first row in a block, is in its interval.
static bool plausible(const struct pieces *p, int64_t piece, int64_t begin) {
  return p->step[piece] >= 0 && p->step[piece] <= INT32_MAX && p->limit[piece] >= 0 && p->limit[piece] <= INT32_MAX &&
         begin >= p->first_time[piece] && begin < p->reach[piece] && begin > -LATEST && begin < LATEST;
}

static inline double parts_of(double value, double duration, double parts) { return rint(value * duration * parts); }

// Add `duration` ms of a sample to a row of sums.
static void add(double *sums, int64_t duration, int activity, float util, float fb, float power) {
  sums[activity] += (double)duration;
  if (util >= 0) {
    sums[UTIL] += parts_of(util, (double)duration, UTIL_PARTS) / UTIL_PARTS;
    sums[UTIL + 1] += (double)duration;
  }
  if (fb >= 0) {
    double product = parts_of(fb, (double)duration, FB_PARTS) / FB_PARTS;
    sums[FB] += product;
    sums[FB + 1] += (double)duration;
    if (activity == IDLE)
      sums[FB + 2] += product;
  }
  if (power >= 0) {
    double product = parts_of(power, (double)duration, POWER_PARTS) / POWER_PARTS;
    sums[POWER] += product;
    sums[POWER + 1] += (double)duration;
    if (activity == IDLE)
      sums[POWER + 2] += product;
  }
}

// Return whether a time follows another one, at most INT32_MAX ms later, and is before LATEST.
static inline bool follows(int64_t before, int64_t after) {
  return (uint64_t)after - (uint64_t)before - 1 < INT32_MAX && after < LATEST;
}

// Write the distance of each of `size` times to the next one to `weights`; return the largest, or -1 if one does not
// follow the one before.
static inline int32_t weigh(const int64_t *times, int64_t size, int32_t *weights) {
  int32_t most = 0;
  uint64_t wrong = 0;
  for (int64_t j = 0; j < size; j++) {
    uint64_t distance = (uint64_t)times[j + 1] - (uint64_t)times[j];
    wrong |= (distance - 1) | (INT32_MAX - distance);
    int32_t weight = (int32_t)distance;
    weights[j] = weight;
    most = weight > most ? weight : most;
  }
  return wrong >> 63 ? -1 : most;
}

// Set the weight of each sample that is followed by a gap to `step`, and add GAP to its class.
static void mark_gaps(const int64_t *times, int64_t size, int64_t after_last, double limit, int64_t step,
                      int32_t *weights, uint8_t *kinds) {
  for (int64_t j = 0; j < size; j++) {
    int64_t after = j + 1 < size ? times[j + 1] : after_last;
    if ((double)(after - times[j]) > limit) {
      weights[j] = (int32_t)step;
      kinds[j] += GAP;
    }
  }
}

// Return whether the value of a row is there.
static inline bool there(const struct column *column, int64_t row) {
  int64_t bit = column->bit + row;
  return column->values && (!column->valid || column->valid[bit >> 3] >> (bit & 7) & 1);
}

static inline float value_of(const struct column *column, int64_t row) {
  return there(column, row) ? column->values[row] : NAN;
}

// Return the values of `size` rows from `first` on, NaN if missing: those of the column, a copy, or `missing` if all are.
static inline const float *values_of(const struct column *column, int64_t first, int64_t size, const float *missing,
                                     float *copy) {
  if (!column->values)
    return missing;
  const float *values = column->values + first;
  if (!column->valid)
    return values;
  int64_t bit = column->bit + first, last = bit + size - 1;
  const uint8_t *bytes = column->valid + (bit >> 3);
  // Bits of other rows in the first and last byte count as well: then the copy is made without need.
  uint8_t all = 0xFF, any = 0;
  for (int64_t k = 0; k <= (last >> 3) - (bit >> 3); k++)
    all &= bytes[k], any |= bytes[k];
  if (all == 0xFF)
    return values;
  if (any == 0)
    return missing;
  for (int64_t j = 0; j < size; j++)
    copy[j] = there(column, first + j) ? values[j] : NAN;
  return copy;
}

// Return the larger of a number and a value, or 0 if the value is at or below its floor; NaN raises nothing.
static inline float raised(float number, float value, float floor) {
  value = value <= floor ? 0.0F : value;
  return value > number ? value : number;
}

// Write the class of each of `size` samples to `kinds`. The columns are read at once, so that their memory is fetched
// at the same time.
static inline void classify(const float *const *signals, int64_t size, const struct limits *limits,
                            uint8_t *restrict kinds) {
  const float *util = signals[0], *engine = signals[1], *sm = signals[2], *tensor = signals[3], *dram = signals[4];
  const float util_floor = limits->floors[0], engine_floor = limits->floors[1], sm_floor = limits->floors[2];
  const float tensor_floor = limits->floors[3], dram_floor = limits->floors[4];
  const float idle_pct = limits->idle_pct, low_pct = limits->low_pct;
  for (int64_t j = 0; j < size; j++) {
    float largest = raised(-1, engine[j], engine_floor);
    largest = raised(largest, sm[j], sm_floor);
    largest = raised(largest, tensor[j], tensor_floor);
    largest = raised(largest, dram[j], dram_floor);
    largest = raised(largest * 100, util[j], util_floor);
    kinds[j] = (uint8_t)((largest <= idle_pct) + (largest <= low_pct) + (largest < 0));
  }
}

// Add value x time, time with a value, and value x time while idle to three columns. With `complete` no value is
// missing, and the caller adds the time. `count` rows.
static inline void sum_up(const float *values, int64_t count, const int32_t *weights, const uint8_t *kinds,
                          double *columns, double parts, bool complete) {
  double total = 0, while_idle = 0;
  int64_t known = 0;
  for (int64_t j = 0; j < count; j++) {
    bool there = complete || values[j] >= 0;
    double product = there ? parts_of(values[j], weights[j], parts) : 0;
    total += product;
    known += there ? weights[j] : 0;
    while_idle += (kinds[j] & (GAP - 1)) == IDLE ? product : 0;
  }
  columns[0] += total / parts;
  if (!complete)
    columns[1] += (double)known;
  columns[2] += while_idle / parts;
}

// Likewise without the time while idle.
static inline void sum_plainly(const float *values, int64_t count, const int32_t *weights, double *columns,
                               double parts, bool complete) {
  double total = 0;
  int64_t known = 0;
  for (int64_t j = 0; j < count; j++) {
    bool there = complete || values[j] >= 0;
    total += there ? parts_of(values[j], weights[j], parts) : 0;
    known += there ? weights[j] : 0;
  }
  columns[0] += total / parts;
  if (!complete)
    columns[1] += (double)known;
}

// Raise `peak`, the bits of a float, to the largest of `count` values. The bits of non-negative floats have the order
// of the floats, and NaN is above infinity. Comparisons of integers are vectorized.
static inline void raise_peak(const float *values, int64_t count, int32_t *peak) {
  int32_t most = *peak;
  for (int64_t j = 0; j < count; j++) {
    int32_t bits;
    memcpy(&bits, values + j, sizeof bits);
    bits = bits <= FLOAT_INFINITY ? bits : -1;
    most = bits > most ? bits : most;
  }
  *peak = most;
}

// Do the same for the three metrics of samples without a missing value at once, and raise the peak of the framebuffer.
static inline void sum_all(const float *restrict util, const float *restrict fb, const float *restrict power,
                           int64_t count, const int32_t *restrict weights, const uint8_t *restrict kinds,
                           double *columns) {
  double util_total = 0, fb_total = 0, power_total = 0, fb_idle = 0, power_idle = 0;
  for (int64_t j = 0; j < count; j++) {
    double duration = weights[j];
    bool idle = (kinds[j] & (GAP - 1)) == IDLE;
    double fb_product = parts_of(fb[j], duration, FB_PARTS), power_product = parts_of(power[j], duration, POWER_PARTS);
    util_total += parts_of(util[j], duration, UTIL_PARTS);
    fb_total += fb_product, power_total += power_product;
    fb_idle += idle ? fb_product : 0, power_idle += idle ? power_product : 0;
  }
  columns[UTIL] += util_total / UTIL_PARTS;
  columns[FB] += fb_total / FB_PARTS, columns[FB + 2] += fb_idle / FB_PARTS;
  columns[POWER] += power_total / POWER_PARTS, columns[POWER + 2] += power_idle / POWER_PARTS;
}

// Return the first row from `at` on, before `high`, with another class than row `at - 1`, else `high`.
static inline int64_t change(const uint8_t *kinds, int64_t at, int64_t high) {
  uint8_t kind = kinds[at - 1];
  uint64_t eight = kind * UINT64_C(0x0101010101010101), word;
  while (at + 8 <= high && (memcpy(&word, kinds + at, sizeof word), word == eight))
    at += 8;
  while (at < high && kinds[at] == kind)
    at++;
  return at;
}

// Return the cell that contains `time`, among the cells `low` to `high`.
static int64_t first_cell(const int64_t *starts, int64_t low, int64_t high, int64_t time) {
  while (high - low > 1) {
    int64_t middle = (low + high) >> 1;
    if (starts[middle] <= time)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Return the first row of first < row < stop with time[row] >= end, else stop.
static int64_t behind(const int64_t *time, int64_t first, int64_t stop, int64_t end, int64_t step) {
  if (stop == first || time[stop - 1] < end)
    return stop;
  // Samples are almost evenly spaced: interpolate, widen the range until it contains the row, then bisect.
  int64_t guess = smaller(larger(first + (end - time[first]) / larger(step, 1), first), stop - 1);
  int64_t low = guess, high = guess;
  for (int64_t reach = 1; low > first && time[low] >= end; reach *= 2)
    low = larger(low - reach, first);
  for (int64_t reach = 1; time[high] < end; reach *= 2)
    high = smaller(high + reach, stop - 1);
  while (high - low > 1) {
    int64_t middle = (low + high) >> 1;
    if (time[middle] < end)
      low = middle;
    else
      high = middle;
  }
  return time[low] < end ? high : low;
}

// Append idle time to `events`, unless its length is 0; return the number of rows in `events`, or room + 1 if it is full.
static inline int64_t record(int64_t *events, int64_t room, int64_t at, int64_t cell, int64_t begin, int64_t end,
                             int64_t taken) {
  if (end <= begin)
    return at;
  if (at >= room)
    return room + 1;
  int64_t *event = events + 4 * at;
  event[0] = cell, event[1] = begin, event[2] = end, event[3] = taken;
  return at + 1;
}

// Add the rows of a block to `s`, and its idle time to `events`: rows of cell, begin, end, and the time since which an
// allocation must have held the device. Return the number of rows in `events`. It needs as many as the block has rows plus
// the timeline has cells. Return a larger number than `room`, with `s` incomplete, if the times of a piece do not ascend or
// are not in its interval, as in a damaged file, or if pieces contradict each other, so that `events` is too small.
VERSIONS int64_t fold(const struct block *b, const struct pieces *p, const struct timeline *line,
                      const struct limits *limits, struct sums *s, int64_t *events, int64_t room) {
  int32_t weights[CHUNK];
  uint8_t kinds[CHUNK];
  float missing[CHUNK], copies[METRICS][CHUNK];
  for (int64_t j = 0; j < CHUNK; j++)
    missing[j] = NAN;
  const struct column *columns[METRICS] = {&b->util, &b->engine, &b->sm, &b->tensor, &b->dram, &b->fb, &b->power};
  const int64_t *times = b->time, *ends = line->end;
  bool util_complete = b->util.present == COMPLETE, fb_complete = b->fb.present == COMPLETE;
  bool power_complete = b->power.present == COMPLETE;
  int64_t event = 0, begin = 0;
  for (int64_t piece = piece_of(p, b->row); begin < b->count; piece++) {
    if (piece == p->count || !plausible(p, piece, times[begin]))
      return room + 1;
    int64_t stop = smaller(p->end[piece] - b->row, b->count), bound = smaller(p->reach[piece], LATEST);
    bool continues = p->end[piece] - b->row > b->count;
    int64_t following = continues ? b->next_time : p->next_time[piece];
    following = larger(smaller(following, FAR), times[stop - 1]);
    int64_t step = p->step[piece], device = p->device[piece];
    double limit = p->limit[piece];
    int64_t cell = first_cell(line->start, line->offset[device], line->offset[device + 1], times[begin]);
    while (begin < stop) {
      // A chunk: rows of one piece.
      int64_t behind_chunk = smaller(begin + limits->chunk, stop), size = behind_chunk - begin;
      int64_t after_last = behind_chunk < stop ? times[behind_chunk] : following;
      int32_t most = weigh(times + begin, size - 1, weights);
      if (most < 0 || times[behind_chunk - 1] >= bound)
        return room + 1;
      if ((behind_chunk < stop || continues) && !follows(times[behind_chunk - 1], after_last))
        return room + 1;
      int64_t last_weight = after_last - times[behind_chunk - 1];
      weights[size - 1] = (int32_t)((double)last_weight <= limit ? last_weight : step);
      const float *values[METRICS];
      for (int k = 0; k < METRICS; k++)
        values[k] = values_of(columns[k], begin, size, missing, copies[k]);
      const float *util = values[0], *fb = values[5], *power = values[6];
      classify(values, size, limits, kinds);
      if (most > limit || (double)last_weight > limit)
        mark_gaps(times + begin, size, after_last, limit, step, weights, kinds);
      for (int64_t low = 0, high; low < size; low = high) {
        // Rows `low` to `high` of the chunk are in one cell.
        while (times[begin + low] >= ends[cell])
          cell++;
        int64_t end = ends[cell], first = begin + low;
        high = behind(times, first, behind_chunk, end, step) - begin;
        double *sums = s->sums + SUMS * cell;
        const int32_t *weight = weights + low;
        if (util_complete && fb_complete && power_complete) {
          sum_all(util + low, fb + low, power + low, high - low, weight, kinds + low, sums);
        } else {
          if (b->util.present)
            sum_plainly(util + low, high - low, weight, sums + UTIL, UTIL_PARTS, util_complete);
          if (b->fb.present)
            sum_up(fb + low, high - low, weight, kinds + low, sums + FB, FB_PARTS, fb_complete);
          if (b->power.present)
            sum_up(power + low, high - low, weight, kinds + low, sums + POWER, POWER_PARTS, power_complete);
        }
        if (b->fb.present)
          raise_peak(fb + low, high - low, s->peak + cell);
        if (line->inside[cell])
          s->samples += high - low;
        int run_class = -1;
        int64_t run_begin = 0, lost = 0;
        for (int64_t j = low; j < high;) {
          // A run begins, or the gap after a row ends one.
          uint8_t kind = kinds[j];
          int activity = kind & (GAP - 1);
          if (activity != run_class) {
            if (run_class >= 0) {
              sums[run_class] += (double)(times[begin + j] - run_begin);
              if (run_class == IDLE)
                event = record(events, room, event, cell, run_begin, times[begin + j], run_begin);
            }
            run_class = activity, run_begin = times[begin + j];
          }
          if (kind < GAP) {
            j = change(kinds, j + 1, high);
            continue;
          }
          int64_t until = times[begin + j] + step, after = j + 1 < size ? times[begin + j + 1] : after_last;
          // Time in the gap for which a counted run held the device.
          int64_t held = 0;
          for (int64_t c = cell; after < FAR; c++) {
            if (line->held[c])
              held += larger(0, smaller(after, ends[c]) - larger(until, line->start[c]));
            if (ends[c] >= after)
              break;
          }
          s->gaps += held > 0;
          s->gap_ms += held;
          if (j + 1 < high) {
            lost += after - until;
            sums[run_class] += (double)(until - run_begin);
            if (run_class == IDLE)
              event = record(events, room, event, cell, run_begin, until, run_begin);
            run_class = -1;
          }
          j++;
        }
        int64_t last = begin + high - 1, taken = times[last], reach = taken + weights[high - 1];
        // Time of all these rows; as in the sums of values, the last sample is not clipped yet.
        double in_all = (double)(reach - times[first] - lost);
        if (util_complete)
          sums[UTIL + 1] += in_all;
        if (fb_complete)
          sums[FB + 1] += in_all;
        if (power_complete)
          sums[POWER + 1] += in_all;
        sums[run_class] += (double)(smaller(reach, end) - run_begin);
        if (run_class == IDLE)
          event = record(events, room, event, cell, run_begin, smaller(reach, end), run_begin);
        if (reach > end) {
          // The sums of values contain the whole last sample, the time only its part in the cell.
          sums[run_class] += (double)(reach - end);
          add(sums, end - reach, run_class, value_of(&b->util, last), value_of(&b->fb, last), value_of(&b->power, last));
        }
        for (int64_t c = cell; ends[c] < reach;) {
          // The rest counts for the following cells, if their owners held the device at the sample's time.
          c++;
          int64_t duration = smaller(reach, ends[c]) - line->start[c];
          if (taken < line->earliest[c])
            continue;
          double *row = s->sums + SUMS * c;
          if (taken < line->latest[c]) {
            if (s->partly == s->partly_room)
              return room + 1;
            s->partly_cell[s->partly] = c;
            s->partly_time[s->partly] = taken;
            row = s->partly_sums + SUMS * s->partly++;
          }
          add(row, duration, run_class, value_of(&b->util, last), value_of(&b->fb, last), value_of(&b->power, last));
          if (run_class == IDLE)
            event = record(events, room, event, c, line->start[c], line->start[c] + duration, taken);
        }
      }
      begin = behind_chunk;
    }
  }
  return event;
}

// Close and count the open idle window of allocation `a`.
static void end_window(int64_t a, const struct windows *w) {
  int64_t length = w->end[a] - w->begin[a];
  if (length <= 0)
    return;
  w->windows[a]++;
  w->longest[a] = larger(w->longest[a], length);
  if (!w->counted[a])
    return;
  int64_t bin = 0;
  for (int64_t k = 0; k < w->bounds_count; k++)
    bin += length >= w->bounds[k];
  w->bin_counts[bin]++;
  w->bin_share[bin] += w->share[a];
}

// Attribute idle time to the owners of its cell that held the device early enough: it extends their open windows, or
// closes them and begins new ones.
static void give(const int64_t *event, const struct timeline *line, const struct windows *w) {
  int64_t cell = event[CELL], begin = event[BEGIN], end = event[END], taken = event[TAKEN];
  if (cell < 0)
    return;
  int64_t low = line->owner_offset[cell], high = line->owner_offset[cell + 1];
  for (int64_t n = low; n < high; n++) {
    int64_t a = line->owners[n];
    if (w->owner_start[a] > taken)
      continue;
    double share = (double)(end - begin) / (double)(high - low);
    if (w->end[a] == begin) {
      w->share[a] += share;
    } else {
      end_window(a, w);
      w->begin[a] = begin;
      w->share[a] = share;
    }
    w->end[a] = end;
  }
}

// Attribute idle time, in row order. The last row is kept: it may continue in the next block, and shares of time do not
// depend on where a block ends.
void give_idle(const int64_t *events, int64_t count, const struct timeline *line, const struct windows *w) {
  int64_t *last = w->last;
  for (int64_t e = 0; e < count; e++) {
    const int64_t *event = events + 4 * e;
    bool whole = event[TAKEN] == event[BEGIN] && last[TAKEN] == last[BEGIN];
    if (whole && event[CELL] == last[CELL] && event[BEGIN] == last[END]) {
      last[END] = event[END];
      continue;
    }
    give(last, line, w);
    memcpy(last, event, 4 * sizeof *event);
  }
}

// Close and count the idle windows that are open after the last block.
void end_all_windows(const struct timeline *line, const struct windows *w) {
  give(w->last, line, w);
  for (int64_t a = 0; a < w->count; a++)
    end_window(a, w);
}
