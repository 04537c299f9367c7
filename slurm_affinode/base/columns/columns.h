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
  int32_t offset;  // of the first buffer in the whole text
};

struct converted {  // values of a column: arrays and a bitmap for as many rows, and the rows of which the text is not simple
  void *values;
  uint8_t *valid;  // zeros at first
  int64_t *odd;
  struct view *cells;   // cells of the odd rows; NULL: not needed
  int64_t nulls, odds;  // number of missing values, odd ones among them; number of odd rows
  int64_t base;         // row at which the values begin
};

struct texts {  // the texts of a column: views of the whole text
  uint32_t *codes;  // for each row the number of its text; NULL: each row has its own
  struct view *views;
  int32_t *table;  // numbers of texts at the places of their hashes
  uint64_t mask;
  int64_t count, far;  // number of texts; size of those that a view itself does not contain
  int64_t base;        // row at which the codes begin
};

enum { SKIPPED, INTEGERS, SIZES, SPANS, CLOCKS, USAGES, IDENTIFIERS, RESULTS = 3 };

struct plan {  // of a column
  int64_t kind;
  struct converted *results[RESULTS];
  struct texts *texts;
};

#endif
