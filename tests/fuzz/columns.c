// The conversion of columns of text (slurm_affinode/base/columns/columns.c) on random texts: `columns KIND COUNT SEED`. Every array
// is allocated with exactly the size that the caller promises, so that AddressSanitizer sees an access beside it.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "columns.h"

int64_t split(const char *text, int64_t size, char delimiter, char end, int64_t columns, struct view *const *views, int64_t room,
              int64_t skip, int64_t *longest, const struct view *refused, int64_t refusals);
int64_t read_table(const char *text, int64_t size, char delimiter, char end, int64_t columns, const struct plan *plans, int64_t room,
                   int64_t *longest, const struct view *refused, int64_t refusals, uint64_t seed);
int64_t copies(const char *text, struct view *views, int64_t count, uint8_t *valid, char *bytes);
void decimals(const struct column *c, struct converted *r, const char *suffix, int64_t length);
void clocks(const struct column *c, struct converted *r, uint8_t *zones);

enum { COLUMNS = 4, BYTES = 300 };

static uint64_t state;

static uint64_t next(void) {  // xorshift64*
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * UINT64_C(0x2545F4914F6CDD1D);
}

static int64_t below(int64_t count) { return (int64_t)(next() % (uint64_t)count); }

static void *array(int64_t count, size_t size) {
  void *made = calloc((size_t)count, size);
  if (made == NULL && count)
    exit(2);
  return made;
}

static void impossible(const char *what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

// Text of numbers, times, sizes and IDs with any bytes between them; at most one byte in four ends a cell or a line.
static int64_t draw(char *text) {
  static const char *const words[] = {"2026-11-30T12:30:00", "2024/02/29 23:59:59.123Z", "1-02:03:04", "12:30.5", "99999999999",
                                      "4096K", "1000 MiB", "123_4.batch", "0.953125", "a text that is longer than a view",
                                      "cpu=1,gres/gpumem=34908M,gres/gpuutil=92"};
  static const char marks[] = "|\n|\n-:.TZ_ K0";
  int64_t size = 0, most = below(BYTES);
  while (size < most) {
    const char *word = words[below(sizeof words / sizeof *words)];
    int64_t length = (int64_t)strlen(word), kept = below(4) ? length : below(length);
    for (int64_t k = 0; k < kept && size < most; k++)
      text[size++] = below(40) ? word[k] : (char)next();
    if (size < most)
      text[size++] = marks[below(below(8) ? 4 : sizeof marks - 1)];
  }
  return size;
}

static struct converted result(int64_t count, size_t size) {
  return (struct converted){.values = array(count, size), .valid = array((count + 7) / 8, 1), .odd = array(count, 8),
                            .cells = array(count, sizeof(struct view))};
}

// `rows`: number of rows with results.
static void release(struct converted *r, int64_t rows, bool is_checked) {
  int64_t nulls = 0;
  for (int64_t row = 0; row < rows; row++)
    nulls += !(r->valid[row >> 3] >> (row & 7) & 1);
  for (int64_t k = 0; k < r->odds && is_checked; k++)
    if (r->odd[k] < (k ? r->odd[k - 1] + 1 : 0) || r->odd[k] >= rows)
      impossible("odd rows are out of order");
  if (is_checked && (nulls != r->nulls || r->odds > nulls))
    impossible("impossible counts");
  free(r->values), free(r->valid), free(r->odd), free(r->cells);
}

static void convert(const struct column *c) {
  struct converted r;
  static const char suffix[] = " MiB";
  r = result(c->count, 8), decimals(c, &r, suffix, below(2) ? sizeof suffix - 1 : 0), release(&r, c->count, true);
  uint8_t *zones = array(c->count, 1);
  r = result(c->count, 8), clocks(c, &r, below(2) ? zones : NULL), release(&r, c->count, true);
  free(zones);
}

// Read the text as a table, with any conversion of each column.
static bool read_any(const char *text, int64_t size, char end, int64_t columns, int64_t room) {
  struct plan plans[COLUMNS];
  struct converted results[COLUMNS][RESULTS];
  struct texts texts[COLUMNS];
  int64_t longest[COLUMNS];
  struct view refused = {.length = 1, .text = "x"};
  memset(plans, 0, sizeof plans), memset(texts, 0, sizeof texts);
  for (int64_t k = 0; k < columns; k++) {
    plans[k].kind = below(IDENTIFIERS + 1);
    for (int j = 0; j < RESULTS; j++)
      results[k][j] = result(room, sizeof(struct view)), plans[k].results[j] = &results[k][j];
    texts[k].views = array(room, sizeof *texts[k].views);
    texts[k].codes = below(2) ? array(room, sizeof *texts[k].codes) : NULL;
    plans[k].texts = below(2) ? &texts[k] : NULL;
  }
  int64_t count = read_table(text, size, '|', end, columns, plans, room, longest, &refused, below(2), next());
  if (count > room)
    impossible("a table has more lines than there is room for");
  for (int64_t k = 0; k < columns; k++) {
    struct texts *t = &texts[k];
    if (count >= 0 && plans[k].texts != NULL) {
      int64_t far = 0;
      for (int64_t row = 0; row < count && t->codes != NULL; row++)
        if (t->codes[row] >= t->count)
          impossible("a row has no text");
      for (int64_t j = 0; j < t->count; j++) {
        struct view *v = &t->views[j];
        if (v->length > INLINE && (v->far.offset < 0 || v->far.offset + (int64_t)v->length > size))
          impossible("a text is not in the table");
        far += v->length > INLINE ? v->length : 0;
      }
      if (far != t->far || t->count > count || (t->codes == NULL && t->count != count))
        impossible("impossible texts");
      uint8_t *valid = array((t->count + 7) / 8, 1);
      char *bytes = array(far, 1);
      copies(text, t->views, t->count, valid, bytes);
      free(valid), free(bytes);
    }
    free(t->views), free(t->codes);
    for (int j = 0; j < RESULTS; j++)
      release(&results[k][j], count, false);
  }
  return count >= 0;
}

// Return whether the text was split. Ends the process if a result is impossible.
static bool one(void) {
  char drawn[BYTES];
  int64_t size = draw(drawn), columns = 1 + below(COLUMNS), longest[COLUMNS], lines = 0;
  char *text = array(size, 1), end = below(8) ? '\n' : '|';
  if (size)
    memcpy(text, drawn, (size_t)size);
  for (int64_t k = 0; k < size; k++)
    lines += text[k] == end;
  int64_t room = below(8) ? lines + 1 : below(lines + 1);
  struct view *views[COLUMNS];
  for (int64_t k = 0; k < columns; k++)
    views[k] = array(room, sizeof **views);
  int64_t count = split(text, size, '|', end, columns, views, room, below(2), longest, NULL, 0);
  if (count > room)
    impossible("more lines than there is room for");
  const char *buffers[] = {text};
  for (int64_t k = 0; k < columns && count > 0; k++) {
    int64_t bit = below(9), kind = below(3);
    uint8_t *valid = array((bit + count + 7) / 8, 1);
    for (int64_t b = 0; b < (bit + count + 7) / 8; b++)
      valid[b] = kind ? (uint8_t)next() : 0xff;
    for (int64_t row = 0; row < count; row++) {
      struct view *v = &views[k][row];
      if (v->length > longest[k] || (v->length > INLINE && (v->far.offset < 0 || v->far.offset + (int64_t)v->length > size)))
        impossible("a cell is not in the text");
    }
    convert(&(struct column){count, views[k], kind == 2 ? NULL : valid, bit, buffers, 0});
    free(valid);
  }
  for (int64_t k = 0; k < columns; k++)
    free(views[k]);
  read_any(text, size, end, columns, room);
  free(text);
  return count >= 0;
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
