// The conversion of columns of text (slurm_affinode/base/columns/columns.c) on random texts: `columns KIND COUNT SEED`. Every array
// is allocated with exactly the size that the caller promises, so that AddressSanitizer sees an access beside it.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "columns.h"

int64_t split(const char *text, int64_t size, char delimiter, char end, int64_t columns, struct view *const *views, int64_t room,
              int64_t skip, int64_t *longest);
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

// Text of numbers and times with any bytes between them; at most one byte in four ends a cell or a line.
static int64_t draw(char *text) {
  static const char *const words[] = {"2026-11-30T12:30:00", "2024/02/29 23:59:59.123Z", "99999999999", "1000 MiB", "0.953125",
                                       "a text that is longer than a view"};
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

static struct converted result(int64_t count) {
  return (struct converted){array(count, 8), array((count + 7) / 8, 1), array(count, 8), 0, 0};
}

static void release(struct converted *r, int64_t count) {
  int64_t nulls = 0;
  for (int64_t row = 0; row < count; row++)
    nulls += !(r->valid[row >> 3] >> (row & 7) & 1);
  for (int64_t k = 0; k < r->odds; k++)
    if (r->odd[k] < (k ? r->odd[k - 1] + 1 : 0) || r->odd[k] >= count)
      impossible("odd rows are out of order");
  if (nulls != r->nulls || r->odds > nulls)
    impossible("impossible counts");
  free(r->values), free(r->valid), free(r->odd);
}

static void convert(const struct column *c) {
  struct converted r;
  static const char suffix[] = " MiB";
  r = result(c->count), decimals(c, &r, suffix, below(2) ? sizeof suffix - 1 : 0), release(&r, c->count);
  uint8_t *zones = array(c->count, 1);
  r = result(c->count), clocks(c, &r, zones), release(&r, c->count);
  free(zones);
}

// Return whether the text was split. Ends the process if a result is impossible.
static bool one(void) {
  char drawn[BYTES];
  int64_t size = draw(drawn), columns = 1 + below(COLUMNS), longest = -1, lines = 0;
  char *text = array(size, 1), end = below(8) ? '\n' : '|';
  if (size)
    memcpy(text, drawn, (size_t)size);
  for (int64_t k = 0; k < size; k++)
    lines += text[k] == end;
  int64_t room = below(8) ? lines + 1 : below(lines + 1);
  struct view *views[COLUMNS];
  for (int64_t k = 0; k < columns; k++)
    views[k] = array(room, sizeof **views);
  int64_t count = split(text, size, '|', end, columns, views, room, below(2), &longest);
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
      if (v->length > longest || (v->length > INLINE && (v->far.offset < 0 || v->far.offset + (int64_t)v->length > size)))
        impossible("a cell is not in the text");
    }
    convert(&(struct column){count, views[k], kind == 2 ? NULL : valid, bit, buffers});
    free(valid);
  }
  for (int64_t k = 0; k < columns; k++)
    free(views[k]);
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
