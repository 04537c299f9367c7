// Structures shared with native.py, which lists their fields in the same order. All arrays are contiguous.

#ifndef SLURM_AFFINODE_JOIN_H
#define SLURM_AFFINODE_JOIN_H

#include <stdint.h>

enum { SUMS = 12, METRICS = 7, CHUNK = 4096 };  // columns of sums; of blocks; most samples that are processed at once
enum { MISSING, PARTIAL, COMPLETE };  // whether no, some or all rows of a block have a value of a metric

// On x86-64, code for processors with AVX2 or AVX-512 is chosen when the library is loaded. The name of the
// latter is known to GCC from release 12 on.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define VERSIONS __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#elif defined(__x86_64__) && defined(__GLIBC__)
#define VERSIONS __attribute__((target_clones("default", "avx2")))
#else
#define VERSIONS
#endif

struct column {  // block.BlockColumn; no values: the metric is missing in the block; no bitmap: no value is missing
  int64_t present;
  const float *values;
  const uint8_t *valid;  // bitmap of Arrow, with the bit of the first row at `bit`
  int64_t bit;
};

struct block {  // block.Block
  int64_t count, row, next_time;
  const int64_t *time;
  struct column util, engine, sm, tensor, dram, fb, power;
};

struct pieces {  // block.Pieces
  int64_t count;
  const int64_t *device, *end, *step;
  const double *limit;
  const int64_t *next_time, *first_time, *reach;
};

struct timeline {  // segments.Cells; offset: the first cell of each device, followed by the number of cells
  const int64_t *offset, *start, *end, *earliest, *latest;
  const uint8_t *inside, *held;
  const int64_t *owner_offset, *owners;
};

struct limits {  // result.Thresholds; floors of util, engine, sm, tensor, dram; chunk: at most CHUNK
  const float *floors;
  float idle_pct, low_pct;
  int64_t chunk;
};

struct sums {  // of one thread: per cell; rows that count for some sharers of a cell, with the room for them, and their number
  double *sums;
  int32_t *peak;
  int64_t *partly_cell, *partly_time;
  double *partly_sums;
  int64_t partly_room, partly, gaps, gap_ms, samples;
};

struct windows {  // open idle windows and counts of closed ones per allocation; bins of lengths; the last idle time
  int64_t count;
  const int64_t *owner_start;
  const uint8_t *counted;
  int64_t *begin, *end;
  double *share;
  int64_t *windows, *longest;
  int64_t bounds_count;
  const int64_t *bounds;
  int64_t *bin_counts;
  double *bin_share;
  int64_t *last;
};

#endif
