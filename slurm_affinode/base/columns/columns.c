// Quick conversion of columns of text. Each function converts cells in the simple forms that nearly all cells have. A row with
// any other text is odd: its value is missing here, and the caller converts it. An empty or missing cell has no value.

#include <stdbool.h>
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

// Return a view of `length` bytes at `offset` of a text of `size` bytes.
static inline struct view view_of(const char *text, int64_t size, int64_t offset, int64_t length) {
  struct view v = {.length = (uint32_t)length};
  if (offset + INLINE <= size) {
    // All bytes are loaded and the ones after the text are cut: faster than a copy of variable length.
    uint64_t first = 0, rest = load64(text + offset + 4), kept = (uint64_t)(length < INLINE ? length : INLINE);
    memcpy(&first, text + offset, 4);
    first = kept < 4 ? first & ((UINT64_C(1) << 8 * kept) - 1) : first;
    rest = kept < 4 ? 0 : kept < INLINE ? rest & ((UINT64_C(1) << 8 * (kept - 4)) - 1) : rest;
    rest = length > INLINE ? (uint64_t)offset << 32 : rest;
    memcpy(v.text, &first, 4), memcpy(v.text + 4, &rest, 8);
  } else if (length > INLINE) {
    memcpy(&v.far.start, text + offset, sizeof v.far.start);
    v.far.buffer = 0, v.far.offset = (int32_t)offset;
  } else {
    memcpy(v.text, text + offset, (size_t)length);
  }
  return v;
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
// the number of lines; -1 if one has more or fewer cells, or there are more than `room`. `longest`: length of the longest cell.
int64_t split(const char *text, int64_t size, char delimiter, char end, int64_t columns, struct view *const *views, int64_t room,
              int64_t skip, int64_t *longest) {
  int64_t begin = 0, column = 0, row = 0, most = 0;
  if (size > INT32_MAX || columns < 1)
    return -1;
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
      most = stop - begin > most ? stop - begin : most;
      views[column][row] = view_of(text, size, begin, stop - begin);
      begin = stop + 1;
      column = last ? 0 : column + 1;
      row += last;
    }
  }
  *longest = most;
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

enum { DIGITS = 15 };  // of a number that a double represents

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

// Milliseconds since 1970 of a date and time of day as in 2026-11-30T12:30:00, also with slashes, a space, up to three digits of a
// fraction, and a Z at its end, of which `zone` is set.
static inline int of_clock(struct text t, int64_t *value, uint8_t *zone) {
  const char *at = t.at, *end = t.at + t.length;
  if (t.length < CLOCKED)
    return ODD;
  int64_t century = two(at), year = two(at + 2), month = two(at + 5), day = two(at + 8);
  int64_t hour = two(at + DATED + 1), minute = two(at + DATED + 4), second = two(at + DATED + 7), ms = 0;
  for (int k = 4; k < DATED; k += 3)
    if (at[k] != '-' && at[k] != '/')
      return ODD;
  if ((at[DATED] != 'T' && at[DATED] != ' ') || at[DATED + 3] != ':' || at[DATED + 6] != ':')
    return ODD;
  if (century < 0 || year < 0 || hour < 0 || hour > 23 || minute < 0 || minute > 59 || second < 0 || second > 59)
    return ODD;
  at += CLOCKED;
  if (passes(&at, end, '.')) {
    int64_t count = digits(&at, end, 3, &ms);
    if (!count)
      return ODD;
    ms *= count == 1 ? 100 : count == 2 ? 10 : 1;
  }
  *zone = passes(&at, end, 'Z');
  int64_t days = days_of(100 * century + year, month, day);
  if (at != end || days < 0)
    return ODD;
  *value = ((days * 24 + hour) * 60 + minute) * 60000 + second * 1000 + ms;
  return VALUE;
}

// Put the value of a row, for which the conversion returned `found`.
static inline void put(struct converted *r, int64_t row, int found) {
  r->valid[row >> 3] |= (uint8_t)((found & VALUE) << (row & 7));
  r->nulls += !(found & VALUE);
  if (found & ODD)
    r->odd[r->odds++] = row;
}

#define CONVERT(type, convert, ...)                                                                                                \
  type *values = r->values;                                                                                                        \
  for (int64_t row = 0; row < c->count; row++) {                                                                                   \
    prefetch(c, row + AHEAD);                                                                                                      \
    struct text t = is_valid(c, row) ? cell(c, row) : (struct text){NULL, 0};                                                      \
    type value = 0;                                                                                                                \
    int found = t.length ? convert(t, &value, ##__VA_ARGS__) : 0;                                                                  \
    values[row] = value;                                                                                                           \
    put(r, row, found);                                                                                                            \
  }

void decimals(const struct column *c, struct converted *r, const char *suffix, int64_t length) {
  CONVERT(double, of_decimal, suffix, length)
}

// `zones`: whether a time ends in Z.
void clocks(const struct column *c, struct converted *r, uint8_t *zones) {
  CONVERT(int64_t, of_clock, &zones[row])
}
