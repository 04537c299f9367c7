// Quick conversion of columns of text. Each function converts cells in the simple forms that nearly all cells have. A row with
// any other text is odd: its value is missing here, and the caller converts it. An empty or missing cell has no value.

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "columns.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "views of Arrow are little-endian"
#endif

// The digest of the sources, which native.py compares (base/compiled.py).
#ifndef LIBRARY_SOURCES
#define LIBRARY_SOURCES ""
#endif
const char library_sources[] = LIBRARY_SOURCES;

enum { AHEAD = 16 };  // rows between the one whose text is loaded and the one that is converted

struct text {
  const char *at;
  uint32_t length;
};

static inline bool is_valid(const struct column *c, int64_t row) {
  int64_t bit = c->bit + row;
  return c->valid == NULL || (c->valid[bit >> 3] >> (bit & 7) & 1);
}

static inline struct text cell(const struct column *c, int64_t row) {
  const struct view *v = &c->views[row];
  return (struct text){v->length <= INLINE ? v->text : c->buffers[v->far.buffer] + v->far.offset, v->length};
}

// Load a text far ahead of its conversion: texts of a column are too far apart for the processor to expect them.
static inline void prefetch(const struct column *c, int64_t row) {
  const struct view *v = &c->views[row < c->count ? row : c->count - 1];
  if (v->length > INLINE && is_valid(c, row < c->count ? row : c->count - 1))
    __builtin_prefetch(c->buffers[v->far.buffer] + v->far.offset);
}

static inline uint64_t load64(const char *at) {
  uint64_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

struct words {  // of a view: values in registers, which the compiler does not do with a structure of other parts
  uint64_t low, high;
};

static inline struct words words_of(const struct view *v) {
  struct words w;
  memcpy(&w, v, sizeof w);
  return w;
}

#define ONES(n) ((n) >= 8 ? ~UINT64_C(0) : (UINT64_C(1) << 8 * ((n) & 7)) - 1)
#define MASKS(n) {ONES((n) < 4 ? (n) : 4), ONES((n) < 4 ? 0 : (n) - 4)}
static const struct words KEPT[INLINE + 1] = {MASKS(0), MASKS(1), MASKS(2), MASKS(3), MASKS(4),  MASKS(5), MASKS(6),
                                              MASKS(7), MASKS(8), MASKS(9), MASKS(10), MASKS(11), MASKS(12)};

// Return a view of `length` bytes at `offset` of a text of `size` bytes. Lengths follow no pattern that a processor could predict:
// all bytes are loaded and the ones after the text are cut, without a branch.
static inline struct words view_of(const char *text, int64_t size, int64_t offset, int64_t length) {
  uint64_t first = 0, rest = 0, far = -(uint64_t)(length > INLINE), kept = (uint64_t)length & ~far;
  kept |= INLINE & far;
  if (offset + INLINE <= size) {
    memcpy(&first, text + offset, 4);
    rest = load64(text + offset + 4);
  } else {
    memcpy(&first, text + offset, kept < 4 ? kept : 4);
    memcpy(&rest, text + offset + 4, kept < 4 ? 0 : kept - 4);
  }
  rest &= KEPT[kept].high & ~far;
  return (struct words){(uint64_t)length | (first & KEPT[kept].low) << 32, rest | ((uint64_t)offset << 32 & far)};
}

enum { STRETCH = 64 };  // bytes that are searched at a time

// Return a mask of the bytes of a stretch that are `a` or `b`.
static inline uint64_t matches(const char *at, char a, char b) {
  uint64_t mask = 0;
#ifdef __SSE2__
  for (int k = 0; k < STRETCH; k += 16) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)(at + k));
    __m128i equal = _mm_or_si128(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(a)), _mm_cmpeq_epi8(bytes, _mm_set1_epi8(b)));
    mask |= (uint64_t)_mm_movemask_epi8(equal) << k;
  }
#else
  for (int k = 0; k < STRETCH; k++)
    mask |= (uint64_t)(at[k] == a || at[k] == b) << k;
#endif
  return mask;
}

// Split lines into `columns` cells each, without the spaces before a cell if `skip` is set; the last line may have no end. Return
// the number of lines; -1 if one has more or fewer cells, a cell is one of the `refused` short texts, or there are more lines than
// `room`. `longest`: length of the longest cell of each column.
int64_t split(const char *text, int64_t size, char delimiter, char end, int64_t columns, struct view *const *views, int64_t room,
              int64_t skip, int64_t *longest, const struct view *refused, int64_t refusals) {
  int64_t begin = 0, column = 0, row = 0;
  if (size > INT32_MAX || columns < 1)
    return -1;
  memset(longest, 0, (size_t)columns * sizeof *longest);
  for (int64_t at = 0; at <= size; at += STRETCH) {
    char rest[STRETCH] = {0};
    int64_t left = size - at;
    if (left < STRETCH)
      memcpy(rest, text + at, (size_t)left);
    uint64_t mask = matches(left < STRETCH ? rest : text + at, delimiter, end);
    if (left < STRETCH) {
      mask &= (UINT64_C(1) << left) - 1;
      if (size > 0 && text[size - 1] != end)
        mask |= UINT64_C(1) << left;  // as if the last line had an end
    }
    for (; mask; mask &= mask - 1) {
      int64_t stop = at + __builtin_ctzll(mask);
      bool last = column == columns - 1;
      if (row == room || (stop == size ? !last : text[stop] != (last ? end : delimiter)))
        return -1;
      if (skip)
        while (begin < stop && text[begin] == ' ')
          begin++;
      int64_t length = stop - begin;
      longest[column] = length > longest[column] ? length : longest[column];
      struct words w = view_of(text, size, begin, length);
      for (int64_t k = 0; k < refusals; k++)
        if (w.low == words_of(&refused[k]).low && w.high == words_of(&refused[k]).high)
          return -1;
      memcpy(&views[column][row], &w, sizeof w);
      begin = stop + 1;
      column = last ? 0 : column + 1;
      row += last;
    }
  }
  return column ? -1 : row;
}

// Read decimal digits from `*at` to `end`, at most `most`; return how many there are.
static inline int64_t digits(const char **at, const char *end, int64_t most, int64_t *value) {
  int64_t count = 0, sum = 0;
  for (; *at < end && count < most && (uint8_t)(**at - '0') < 10; ++*at, count++)
    sum = 10 * sum + (**at - '0');
  *value = sum;
  return count;
}

static inline bool passes(const char **at, const char *end, char byte) {
  bool there = *at < end && **at == byte;
  *at += there;
  return there;
}

enum { DIGITS = 15, FIGURES = 9 };  // of a number that a double represents; of a part of a span of time
#define LONGEST_S 1e11

static const double POWERS[DIGITS + 1] = {1,   1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                          1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};

// Read a number with a fraction or without. It is the nearest double: both parts of the quotient are exact.
static inline bool decimal(const char **at, const char *end, double *value) {
  int64_t whole, part = 0, before = digits(at, end, DIGITS, &whole), after = 0;
  if (!before)
    return false;
  if (passes(at, end, '.') && !(after = digits(at, end, DIGITS - before, &part)))
    return false;
  for (int64_t k = 0; k < after; k++)
    whole *= 10;
  *value = (double)(whole + part) / POWERS[after];
  return true;
}

// Each conversion returns a sum of these.
enum { VALUE = 1, ODD = 2 };

static inline int of_integer(struct text t, int64_t *value) {
  const char *at = t.at, *end = t.at + t.length;
  return digits(&at, end, 18, value) && at == end ? VALUE : ODD;
}

// Bytes, with a suffix K, M, G, T or P (powers of 1024) or without one.
static inline int of_size(struct text t, int64_t *value) {
  static const char suffixes[] = "KMGTP";
  const char *at = t.at, *end = t.at + t.length;
  int64_t factor = 1, number;
  if (!digits(&at, end, 18, &number))
    return ODD;
  if (at + 1 == end) {
    const char *suffix = memchr(suffixes, *at, sizeof suffixes - 1);
    if (suffix == NULL)
      return ODD;
    factor = INT64_C(1024) << 10 * (suffix - suffixes);
  } else if (at != end)
    return ODD;
  if (number >= (INT64_C(1) << 62) / factor)
    return ODD;
  *value = number * factor;
  return VALUE;
}

// Seconds of [DAYS-]HOURS:MINUTES:SECONDS or MINUTES:SECONDS, with a fraction or without.
static inline int of_span(struct text t, double *value) {
  const char *at = t.at, *end = t.at + t.length;
  int64_t first, second, third = 0, days = 0;
  double seconds;
  if (!digits(&at, end, FIGURES, &first))
    return ODD;
  bool has_days = passes(&at, end, '-');
  if (has_days) {
    days = first;
    if (!digits(&at, end, FIGURES, &first))
      return ODD;
  }
  if (!passes(&at, end, ':'))
    return ODD;
  const char *before = at;
  if (!digits(&at, end, FIGURES, &second))
    return ODD;
  if (passes(&at, end, ':'))
    before = at, third = second;
  else if (has_days)
    return ODD;
  else
    third = first, first = 0;
  at = before;
  if (!decimal(&at, end, &seconds) || at != end)
    return ODD;
  *value = (double)(days * 86400 + first * 3600 + third * 60) + seconds;
  return *value <= LONGEST_S ? VALUE : ODD;
}

// A number with a fraction or without, and the text `suffix` after it.
static inline int of_decimal(struct text t, double *value, const char *suffix, int64_t length) {
  if (t.length <= length || memcmp(t.at + t.length - length, suffix, (size_t)length) != 0)
    return ODD;
  const char *at = t.at, *end = t.at + t.length - length;
  return decimal(&at, end, value) && at == end ? VALUE : ODD;
}

static inline int64_t two(const char *at) {
  uint8_t tens = (uint8_t)(at[0] - '0'), ones = (uint8_t)(at[1] - '0');
  return tens < 10 && ones < 10 ? 10 * tens + ones : -1;
}

static int64_t days_of(int64_t year, int64_t month, int64_t day) {  // since 1970, of a date from 1970 to 2499
  static const int16_t before[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334, 365};
  bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
  if (year < 1970 || year > 2499 || month < 1 || month > 12 || day < 1 ||
      day > before[month] - before[month - 1] + (leap && month == 2))
    return -1;
  int64_t last = year - 1;
  return 365 * (year - 1970) + last / 4 - last / 100 + last / 400 - 477 + before[month - 1] + (leap && month > 2) + day - 1;
}

enum { DATED = 10, CLOCKED = 19 };  // lengths of a date, and of a date and a time of day

// Milliseconds since 1970 of a date and time of day as in 2026-11-30T12:30:00. If `loose` is set, also with slashes, a space, and
// up to three digits of a fraction; and with a Z at its end, of which `zone` is set.
static inline int of_clock(struct text t, int64_t *value, bool loose, uint8_t *zone) {
  const char *at = t.at, *end = t.at + t.length;
  if (t.length < CLOCKED)
    return ODD;
  int64_t century = two(at), year = two(at + 2), month = two(at + 5), day = two(at + 8);
  int64_t hour = two(at + DATED + 1), minute = two(at + DATED + 4), second = two(at + DATED + 7), ms = 0;
  for (int k = 4; k < DATED; k += 3)
    if (at[k] != '-' && !(loose && at[k] == '/'))
      return ODD;
  if ((at[DATED] != 'T' && !(loose && at[DATED] == ' ')) || at[DATED + 3] != ':' || at[DATED + 6] != ':')
    return ODD;
  if (century < 0 || year < 0 || hour < 0 || hour > 23 || minute < 0 || minute > 59 || second < 0 || second > 59)
    return ODD;
  at += CLOCKED;
  if (loose && passes(&at, end, '.')) {
    int64_t count = digits(&at, end, 3, &ms);
    if (!count)
      return ODD;
    ms *= count == 1 ? 100 : count == 2 ? 10 : 1;
  }
  *zone = loose && passes(&at, end, 'Z');
  int64_t days = days_of(100 * century + year, month, day);
  if (at != end || days < 0)
    return ODD;
  *value = ((days * 24 + hour) * 60 + minute) * 60000 + second * 1000 + ms;
  return VALUE;
}

// The job ID of JOB[_TASK][.STEP], the task (-1 without one), and the step; a step without a text if there is none.
static inline int of_id(struct text t, int64_t *job, int64_t *task, struct text *step) {
  const char *at = t.at, *end = t.at + t.length;
  *task = -1, *step = (struct text){end, 0};
  if (!digits(&at, end, 11, job))
    return ODD;
  if (passes(&at, end, '_') && (!digits(&at, end, 7, task) || *task >= 1 << 24))
    return ODD;
  if (passes(&at, end, '.')) {
    *step = (struct text){at, (uint32_t)(end - at)};
    if (at == end)
      return ODD;
    for (; at < end; at++)
      if ((uint8_t)(*at - '0') >= 10 && (uint8_t)((*at | 32) - 'a') >= 26)
        return ODD;
  }
  return at == end ? VALUE : ODD;
}

// Return a view of a cell in the whole text.
static inline struct view placed(const struct column *c, int64_t row) {
  struct view v = c->views[row];
  if (v.length > INLINE)
    v.far.offset += c->offset;
  return v;
}

// Put the value of a row, for which the conversion returned `found`.
static inline void put(const struct column *c, struct converted *r, int64_t row, int found) {
  int64_t at = r->base + row;
  r->valid[at >> 3] |= (uint8_t)((found & VALUE) << (at & 7));
  r->nulls += !(found & VALUE);
  if (found & ODD) {
    if (r->cells != NULL)
      r->cells[r->odds] = placed(c, row);
    r->odd[r->odds++] = at;
  }
}

#define CONVERT(type, convert, ...)                                                                                                \
  type *values = (type *)r->values + r->base;                                                                                      \
  for (int64_t row = 0; row < c->count; row++) {                                                                                   \
    prefetch(c, row + AHEAD);                                                                                                      \
    struct text t = is_valid(c, row) ? cell(c, row) : (struct text){NULL, 0};                                                      \
    type value = 0;                                                                                                                \
    int found = t.length ? convert(t, &value, ##__VA_ARGS__) : 0;                                                                  \
    values[row] = value;                                                                                                           \
    put(c, r, row, found);                                                                                                         \
  }

static void integers(const struct column *c, struct converted *r) { CONVERT(int64_t, of_integer) }

static void sizes(const struct column *c, struct converted *r) { CONVERT(int64_t, of_size) }

static void spans(const struct column *c, struct converted *r) { CONVERT(double, of_span) }

void decimals(const struct column *c, struct converted *r, const char *suffix, int64_t length) {
  CONVERT(double, of_decimal, suffix, length)
}

// `zones`: whether a time ends in Z; NULL if only the strict form is simple.
void clocks(const struct column *c, struct converted *r, uint8_t *zones) {
  uint8_t none;
  CONVERT(int64_t, of_clock, zones != NULL, zones == NULL ? &none : &zones[row])
}

// Job IDs, tasks and steps (views), each with a validity of its own; a row is odd in `jobs` alone.
static void identifiers(const struct column *c, struct converted *jobs, struct converted *tasks, struct converted *steps) {
  int64_t *job = (int64_t *)jobs->values + jobs->base, *task = (int64_t *)tasks->values + tasks->base;
  struct view *views = (struct view *)steps->values + steps->base;
  for (int64_t row = 0; row < c->count; row++) {
    struct text t = cell(c, row), step = {NULL, 0};
    job[row] = 0, task[row] = -1;
    int found = t.length ? of_id(t, &job[row], &task[row], &step) : ODD;
    if (found == ODD || step.length > INLINE)
      found = ODD, job[row] = 0, task[row] = -1, step.length = 0;
    struct view v = {.length = step.length};
    memcpy(v.text, step.length ? step.at : "", step.length);
    views[row] = v;
    put(c, jobs, row, found), put(c, tasks, row, task[row] < 0 ? 0 : VALUE), put(c, steps, row, step.length ? VALUE : 0);
  }
}

// Read the utilization and the memory of GPUs from a list NAME=AMOUNT,... A name with a type, or one that occurs twice, is odd.
static inline int of_usage(struct text t, int64_t *util, int64_t *memory) {
  static const char name[] = "gres/gpu";
  enum { NAME = sizeof name - 1, SLASH = 4 };
  const char *end = t.at + t.length, *at = t.at;
  *util = *memory = -1;
  while ((at = memchr(at, '/', (size_t)(end - at))) != NULL) {
    const char *start = at - SLASH, *amount = start + NAME;
    at++;
    if (start < t.at || amount > end || memcmp(start, name, NAME) != 0)
      continue;
    if (start > t.at && start[-1] != ',')
      return ODD;
    const char *comma = memchr(amount, ',', (size_t)(end - amount));
    uint32_t length = (uint32_t)((comma == NULL ? end : comma) - amount);
    int read = ODD;
    if (length > 5 && memcmp(amount, "util=", 5) == 0 && *util < 0)
      read = of_integer((struct text){amount + 5, length - 5}, util);
    else if (length > 4 && memcmp(amount, "mem=", 4) == 0 && *memory < 0)
      read = of_size((struct text){amount + 4, length - 4}, memory);
    if (read == ODD)
      return ODD;
  }
  return VALUE;
}

// The largest utilization and memory of GPUs in lists of amounts; a row is odd in `utils` alone.
static void usages(const struct column *c, struct converted *utils, struct converted *memories) {
  int64_t *util = (int64_t *)utils->values + utils->base, *memory = (int64_t *)memories->values + memories->base;
  for (int64_t row = 0; row < c->count; row++) {
    struct text t = cell(c, row);
    util[row] = memory[row] = -1;
    bool odd = t.length && of_usage(t, &util[row], &memory[row]) == ODD;
    put(c, utils, row, odd ? ODD : util[row] < 0 ? 0 : VALUE);
    put(c, memories, row, odd || memory[row] < 0 ? 0 : VALUE);
  }
}

static inline uint64_t mixed(uint64_t a, uint64_t b) {
  a ^= b * UINT64_C(0x9E3779B97F4A7C15);
  a *= UINT64_C(0xD6E8FEB86659FD93);
  return a ^ a >> 32;
}

static inline uint64_t hash_of(struct text t, uint64_t seed) {
  uint64_t hash = mixed(seed, t.length), word;
  uint32_t at = 0;
  for (; at + 8 <= t.length; at += 8)
    hash = mixed(hash, load64(t.at + at));
  word = 0, memcpy(&word, t.at + at, t.length - at);
  return mixed(hash, word);
}

static inline struct text at_view(const char *text, const struct view *v) {
  return (struct text){v->length <= INLINE ? v->text : text + v->far.offset, v->length};
}

// Whether two views of the whole text have the same text.
static inline bool same(const char *text, const struct view *v, const struct view *w) {
  if (memcmp(v, w, 8) != 0)  // length and start
    return false;
  if (v->length <= INLINE)
    return memcmp(v, w, sizeof *v) == 0;
  return memcmp(at_view(text, v).at, at_view(text, w).at, v->length) == 0;
}

enum { FEW = 1 << 10 };  // entries of a new table

static int32_t *table_of(uint64_t entries) {  // -1: free
  int32_t *table = malloc(entries * sizeof *table);
  if (table != NULL)
    memset(table, -1, entries * sizeof *table);
  return table;
}

static bool doubled(const char *text, struct texts *t, uint64_t seed) {
  uint64_t mask = 2 * t->mask + 1;
  int32_t *larger = table_of(mask + 1);
  if (larger == NULL)
    return false;
  for (int64_t k = 0; k < t->count; k++) {
    uint64_t place = hash_of(at_view(text, &t->views[k]), seed) & mask;
    while (larger[place] >= 0)
      place = (place + 1) & mask;
    larger[place] = (int32_t)k;
  }
  free(t->table);
  t->table = larger, t->mask = mask;
  return true;
}

static inline void append(struct texts *t, struct view v) {
  t->far += v.length > INLINE ? v.length : 0;
  t->views[t->count++] = v;
}

// Number the distinct texts in the order of their first rows. Return false without memory.
static bool encode(const char *text, const struct column *c, struct texts *t, uint64_t seed) {
  uint32_t *codes = t->codes + t->base;
  if (t->table == NULL) {
    if ((t->table = table_of(FEW)) == NULL)
      return false;
    t->mask = FEW - 1;
  }
  for (int64_t row = 0; row < c->count; row++) {
    struct view v = placed(c, row);
    if (row && same(text, &v, &t->views[codes[row - 1]])) {
      codes[row] = codes[row - 1];
      continue;
    }
    uint64_t place = hash_of(at_view(text, &v), seed) & t->mask;
    while (t->table[place] >= 0 && !same(text, &v, &t->views[t->table[place]]))
      place = (place + 1) & t->mask;
    if (t->table[place] >= 0) {
      codes[row] = (uint32_t)t->table[place];
      continue;
    }
    codes[row] = (uint32_t)t->count;
    t->table[place] = (int32_t)t->count;
    append(t, v);
    if (2 * (uint64_t)t->count > t->mask && !doubled(text, t, seed))
      return false;
  }
  return true;
}

// Copy the texts of `views` to `bytes`, so that they need no other buffer; an empty text has no value. Return how many have none.
int64_t copies(const char *text, struct view *views, int64_t count, uint8_t *valid, char *bytes) {
  int64_t nulls = 0;
  int32_t offset = 0;
  for (int64_t k = 0; k < count; k++) {
    struct view *v = &views[k];
    if (v->length > INLINE) {
      memcpy(bytes + offset, text + v->far.offset, v->length);
      v->far.offset = offset;
      offset += (int32_t)v->length;
    }
    valid[k >> 3] |= (uint8_t)((v->length > 0) << (k & 7));
    nulls += v->length == 0;
  }
  return nulls;
}

static bool convert(const char *text, const struct column *c, const struct plan *p, uint64_t seed) {
  struct converted *const *r = p->results;
  switch (p->kind) {
  case INTEGERS:
    integers(c, r[0]);
    break;
  case SIZES:
    sizes(c, r[0]);
    break;
  case SPANS:
    spans(c, r[0]);
    break;
  case CLOCKS:
    clocks(c, r[0], NULL);
    break;
  case USAGES:
    usages(c, r[0], r[1]);
    break;
  case IDENTIFIERS:
    identifiers(c, r[0], r[1], r[2]);
    break;
  default:
    break;
  }
  for (int k = 0; k < RESULTS; k++)
    if (r[k] != NULL)
      r[k]->base += c->count;
  struct texts *t = p->texts;
  if (t == NULL)
    return true;
  if (t->codes != NULL && !encode(text, c, t, seed))
    return false;
  for (int64_t row = 0; t->codes == NULL && row < c->count; row++)
    append(t, placed(c, row));
  t->base += c->count;
  return true;
}

#ifndef PART_BYTES
#define PART_BYTES (1 << 18)
#endif
enum { PART = PART_BYTES };  // split at a time, so that text and views stay in the cache until they are converted

// Split lines, each with an end, and convert their cells as planned for each column. Return the number of lines; -1 as `split`, and
// without memory. The tables of `plans` are freed.
int64_t read_table(const char *text, int64_t size, char delimiter, char end, int64_t columns, const struct plan *plans, int64_t room,
                   int64_t *longest, const struct view *refused, int64_t refusals, uint64_t seed) {
  if (size > INT32_MAX || columns < 1)
    return -1;
  int64_t lines = 0, most = PART / columns + 1, widest[columns];
  struct view *scratch = malloc((size_t)(most * columns) * sizeof *scratch), *views[columns];
  if (scratch == NULL)
    return -1;
  for (int64_t k = 0; k < columns; k++)
    views[k] = scratch + k * most, longest[k] = 0;
  for (int64_t begin = 0, stop; begin < size && lines >= 0; begin = stop) {
    const char *last = size - begin > PART ? memchr(text + begin + PART - 1, end, (size_t)(size - begin - PART + 1)) : NULL;
    stop = last == NULL ? size : last - text + 1;
    const char *part = text + begin;
    int64_t count = split(part, stop - begin, delimiter, end, columns, views, most, 0, widest, refused, refusals);
    if (count < 0 || lines + count > room) {
      lines = -1;
      break;
    }
    for (int64_t k = 0; k < columns; k++) {
      struct column c = {count, views[k], NULL, 0, &part, (int32_t)begin};
      longest[k] = widest[k] > longest[k] ? widest[k] : longest[k];
      if (!convert(text, &c, &plans[k], seed)) {
        lines = -1;
        break;
      }
    }
    lines = lines < 0 ? lines : lines + count;
  }
  for (int64_t k = 0; k < columns; k++)
    if (plans[k].texts != NULL)
      free(plans[k].texts->table), plans[k].texts->table = NULL;
  free(scratch);
  return lines;
}
