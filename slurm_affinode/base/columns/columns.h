// Structures shared with native.py. Columns of text are arrays of views, as in Arrow.

#ifndef SLURM_AFFINODE_COLUMNS_H
#define SLURM_AFFINODE_COLUMNS_H

#include <stdint.h>

enum { INLINE = 12 };  // longest text that a view itself contains

struct view {  // a shorter text is padded with zeros; of a longer one, `start` has the first bytes
  uint32_t length;
  union {
    char text[INLINE];
    struct {
      uint32_t start;
      int32_t buffer, offset;
    } far;
  };
};

struct column {  // a column of text; no bitmap: no value is missing
  int64_t count;
  const struct view *views;
  const uint8_t *valid;  // bitmap of Arrow, with the bit of the first row at `bit`
  int64_t bit;
  const char *const *buffers;
};

struct converted {  // values of a column: arrays and a bitmap for as many rows, and the rows of which the text is not simple
  void *values;
  uint8_t *valid;  // zeros at first
  int64_t *odd;
  int64_t nulls, odds;  // number of missing values, odd ones among them; number of odd rows
};

#endif
