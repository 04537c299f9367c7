// Decoder of Parquet column chunks: page headers, LZ4, definition levels, floats, packed deltas.
//
// Sources: https://parquet.apache.org/docs/file-format/, parquet.thrift (PageHeader), Thrift's compact protocol, and
// https://parquet.apache.org/docs/file-format/data-pages/encodings/ for RLE (3), PLAIN (0), RLE_DICTIONARY (8) and
// DELTA_BINARY_PACKED (5). Numbers are little-endian.
//
// A damaged file may contain anything. Checks before each loop keep it within its arrays; on a violation the function
// returns MALFORMED.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "join.h"

#define MALFORMED (-1)
#define ABSENT (-1)
#define MOST (INT64_C(1) << 31)

enum { TYPE = 1, SIZE = 2, PACKED_SIZE = 3, CRC = 4, DATA_HEADER = 5, DICTIONARY_HEADER = 7, INNER = 8 };
// Fields of a page header. Those of the data-page or dictionary-page header in it follow from INNER on.
enum { VALUES = INNER + 1, ENCODING, LEVEL_ENCODING, HEADER_FIELDS = 16 };
enum { DATA_PAGE = 0, DICTIONARY_PAGE = 2 };
enum { PLAIN = 0, PLAIN_DICTIONARY = 2, RLE = 3, DELTA_BINARY_PACKED = 5, RLE_DICTIONARY = 8 };
enum { COMPACT_TRUE = 1, COMPACT_FALSE, COMPACT_BYTE, COMPACT_I16, COMPACT_I64 = 6, COMPACT_BINARY = 8, COMPACT_STRUCT = 12 };
enum { DEEPEST = 4 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Decode an unsigned varint (ULEB128) to an integer with the same 64 bits; set `at` to its end, or to -1.
static int64_t varint(const uint8_t *data, int64_t *at, int64_t stop) {
  uint64_t value = 0;
  int64_t from = *at;
  *at = MALFORMED;
  for (int shift = 0; from >= 0 && from < stop && shift < 64; shift += 7) {
    uint8_t byte = data[from++];
    value |= (uint64_t)(byte & 127) << shift;
    if (byte < 128) {
      *at = from;
      break;
    }
  }
  return (int64_t)value;
}

// Decode a zigzag-encoded signed integer (sign in the lowest bit).
static int64_t zigzag(int64_t value) {
  uint64_t bits = (uint64_t)value;
  return (int64_t)((bits >> 1) ^ (0 - (bits & 1)));
}

static inline uint64_t load_eight(const uint8_t *data) {
  uint64_t value;
  memcpy(&value, data, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap64(value);
#endif
  return value;
}

// Load up to eight bytes as a number; bytes from `stop` on count as 0.
static inline uint64_t word(const uint8_t *data, int64_t at, int64_t stop) {
  if (at + 8 <= stop)
    return load_eight(data + at);
  uint64_t value = 0;
  for (int k = 0; at + k < stop; k++)
    value |= (uint64_t)data[at + k] << (8 * k);
  return value;
}

// Read the integers of the page header at byte `at` into `fields`; return its end, or MALFORMED. Strings and deeper
// structs are skipped.
static int64_t read_header(const uint8_t *content, int64_t at, int64_t stop, int64_t *fields) {
  int64_t numbers[DEEPEST] = {0};
  for (int k = 0; k < HEADER_FIELDS; k++)
    fields[k] = ABSENT;
  for (int depth = 0; depth >= 0;) {
    if (at >= stop)
      return MALFORMED;
    uint8_t head = content[at++];
    if (head == 0) {
      depth--;
      continue;
    }
    int kind = head & 15;
    int64_t number = numbers[depth] + (head >> 4);
    if (head < 16) {
      number = zigzag(varint(content, &at, stop));
      if (at < 0)
        return MALFORMED;
    }
    if (number < -MOST || number > MOST)
      return MALFORMED;
    numbers[depth] = number;
    if (COMPACT_I16 <= kind && kind <= COMPACT_I64) {
      int64_t value = zigzag(varint(content, &at, stop));
      if (at < 0)
        return MALFORMED;
      int64_t outer = numbers[0];
      if (depth == 0 && 0 <= number && number < INNER)
        fields[number] = value;
      else if (depth == 1 && 0 <= number && number < INNER && (outer == DATA_HEADER || outer == DICTIONARY_HEADER))
        fields[INNER + number] = value;
    } else if (kind == COMPACT_STRUCT) {
      if (++depth == DEEPEST)
        return MALFORMED;
      numbers[depth] = 0;
    } else if (kind == COMPACT_BINARY) {
      int64_t length = varint(content, &at, stop);
      if (at < 0 || length < 0 || length > stop - at)
        return MALFORMED;
      at += length;
    } else if (kind == COMPACT_BYTE) {
      at++;
    } else if (kind != COMPACT_TRUE && kind != COMPACT_FALSE) {
      return MALFORMED;
    }
  }
  return at;
}

// Fill `pages` with the pages of `chunks`, in order; return their number, or MALFORMED: a header is not supported, a
// length in it exceeds the chunk, or there are more than `most` pages. Chunks must lie within `content`.
int64_t find_pages(const uint8_t *content, const struct chunk *chunks, int64_t chunks_count, struct page *pages,
                   int64_t most) {
  int64_t count = 0, fields[HEADER_FIELDS];
  for (int64_t k = 0; k < chunks_count; k++) {
    int64_t at = chunks[k].begin, stop = at + chunks[k].packed;
    while (at < stop) {
      at = read_header(content, at, stop, fields);
      if (at < 0 || count == most || fields[CRC] != ABSENT)
        return MALFORMED;
      bool dictionary = fields[TYPE] == DICTIONARY_PAGE;
      if (!dictionary && (fields[TYPE] != DATA_PAGE || fields[LEVEL_ENCODING] != RLE))
        return MALFORMED;
      int64_t rows = fields[VALUES], encoding = fields[ENCODING];
      int64_t length = fields[PACKED_SIZE], unpacked = fields[SIZE];
      if (rows < 0 || rows >= MOST || encoding < 0 || length < 0 || unpacked < 0)
        return MALFORMED;
      if (length > stop - at || unpacked > chunks[k].unpacked)
        return MALFORMED;
      pages[count++] = (struct page){k, dictionary, rows, encoding, at, at + length, unpacked};
      at += length;
    }
  }
  return count;
}

// Read the rest of an LZ4 length: if it is 15, further bytes are added. Move `at` after it.
static inline uint64_t lengthened(uint64_t length, const uint8_t *data, uint64_t *at, uint64_t stop) {
  uint8_t more = length == 15 ? 255 : 0;
  while (more == 255 && *at < stop) {
    more = data[(*at)++];
    length += more;
  }
  return length;
}

// Copy `length` bytes, eight at once: up to seven too many.
static inline void copy_eights(uint8_t *to, const uint8_t *from, uint64_t length) {
  for (uint64_t k = 0; k < length; k += 8)
    memcpy(to + k, from + k, 8);
}

// Decompress an LZ4 block that fills `out`; return false if it is malformed or does not fill it.
// Format (lz4_Block_format.md of LZ4): sequences of literals and a match, a copy of earlier output.
int unpack(const uint8_t *data, int64_t packed, uint8_t *out, int64_t unpacked) {
  const uint64_t stop = (uint64_t)packed, size = (uint64_t)unpacked, near = 64;
  uint64_t at = 0, done = 0;
  while (at < stop) {
    uint8_t token = data[at++];
    uint64_t length = lengthened(token >> 4, data, &at, stop);
    if (length > stop - at || length > size - done)
      return false;
    // The bytes too many are overwritten by later output.
    if (length <= near && stop - at >= near && size - done >= near)
      copy_eights(out + done, data + at, length);
    else
      memcpy(out + done, data + at, length);
    at += length;
    done += length;
    if (at == stop)  // the last sequence has no match
      return done == size;
    if (stop - at < 2)
      return false;
    uint64_t distance = (uint64_t)data[at] | (uint64_t)data[at + 1] << 8;
    at += 2;
    length = lengthened(token & 15, data, &at, stop) + 4;
    if (distance == 0 || distance > done || length > size - done)
      return false;
    uint64_t first = done - distance;
    if (distance >= 8 && length <= near && size - done >= near) {
      copy_eights(out + done, out + first, length);
      done += length;
      continue;
    }
    // The match may overlap its own output: the length that can be copied at once doubles each round.
    while (length > 0) {
      uint64_t n = length < done - first ? length : done - first;
      memcpy(out + done, out + first, n);
      done += n;
      length -= n;
    }
  }
  return false;
}

// Return the number of rows with a value, or MALFORMED. Definition levels: bytes `at` to `stop`.
int64_t count_known(const uint8_t *data, int64_t at, int64_t stop, int64_t rows) {
  int64_t known = 0;
  for (int64_t done = 0, n; done < rows; done += n) {
    int64_t header = varint(data, &at, stop), length = header >> 1;
    if (at < 0 || at >= stop || header < 2)
      return MALFORMED;
    if (header & 1) {
      if (length > stop - at)
        return MALFORMED;
      n = smaller(length * 8, rows - done);
      for (int64_t j = 0; j < n; j++)
        known += data[at + (j >> 3)] >> (j & 7) & 1;
      at += length;
    } else {
      n = smaller(length, rows - done);
      if (data[at] > 1)
        return MALFORMED;
      known += n * data[at++];
    }
  }
  return known;
}

// Distribute `values` to the rows that have one, by the definition levels; the other rows become NaN. `count_known` must
// have accepted the levels, and there must be as many values as it has counted.
void spread(const uint8_t *data, int64_t at, int64_t stop, const float *values, float *out, int64_t rows) {
  for (int64_t done = 0, n; done < rows; done += n) {
    int64_t header = varint(data, &at, stop), length = header >> 1;
    if (header & 1) {
      n = smaller(length * 8, rows - done);
      for (int64_t j = 0; j < n; j++)
        out[done + j] = data[at + (j >> 3)] >> (j & 7) & 1 ? *values++ : NAN;
      at += length;
    } else {
      n = smaller(length, rows - done);
      if (data[at++]) {
        memcpy(out + done, values, (size_t)n * sizeof *out);
        values += n;
      } else {
        for (int64_t j = 0; j < n; j++)
          out[done + j] = NAN;
      }
    }
  }
}

// Fill `out` with dictionary entries; return the number of rows, or MALFORMED. At byte `at`: the bit width of the
// indices, then the indices (RLE and bit-packed).
int64_t look_up(const uint8_t *data, int64_t at, int64_t stop, const float *dictionary, int64_t entries, float *out,
                int64_t rows) {
  if (rows == 0)
    return 0;
  if (at >= stop || data[at] > 32 || entries == 0)
    return MALFORMED;
  const int64_t width = data[at++];
  const uint64_t mask = (UINT64_C(1) << width) - 1, last = (uint64_t)entries - 1;
  uint64_t largest = 0;
  for (int64_t done = 0, n; done < rows; done += n) {
    int64_t header = varint(data, &at, stop), length = header >> 1;
    if (at < 0 || header < 2)
      return MALFORMED;
    if (header & 1) {
      // Each group of eight indices takes `width` bytes.
      length = smaller(length, (rows - done + 7) >> 3);
      if (length * width > stop - at)
        return MALFORMED;
      n = smaller(length * 8, rows - done);
      int64_t whole = width <= 8 ? n >> 3 : 0;
      float *to = out + done;
      for (int64_t g = 0; g < whole; g++) {
        uint64_t eight = word(data, at + g * width, stop);
        for (int j = 0; j < 8; j++) {
          uint64_t number = eight >> (j * width) & mask;
          largest = number > largest ? number : largest;
          *to++ = dictionary[number < last ? number : last];
        }
      }
      for (int64_t j = whole * 8; j < n; j++) {
        int64_t bit = j * width;
        uint64_t number = word(data, at + (bit >> 3), stop) >> (bit & 7) & mask;
        largest = number > largest ? number : largest;
        *to++ = dictionary[number < last ? number : last];
      }
      at += length * width;
    } else {
      int64_t size = (width + 7) >> 3;
      if (size > stop - at)
        return MALFORMED;
      n = smaller(length, rows - done);
      uint64_t number = word(data, at, stop) & ((UINT64_C(1) << 8 * size) - 1);
      largest = number > largest ? number : largest;
      float value = dictionary[number < last ? number : last];
      for (int64_t j = 0; j < n; j++)
        out[done + j] = value;
      at += size;
    }
  }
  return largest <= last ? rows : MALFORMED;
}

// Fill `out` with the first `count` of `rows` numbers (DELTA_BINARY_PACKED) at byte `at`. Return `rows`, or MALFORMED.
int64_t deltas(const uint8_t *data, int64_t at, int64_t stop, int64_t rows, int64_t *out, int64_t count) {
  int64_t head[4];  // size of a block, miniblocks in it, number of values, first value
  for (int k = 0; k < 4; k++) {
    head[k] = varint(data, &at, stop);
    if (at < 0)
      return MALFORMED;
  }
  const int64_t block = head[0], minis = head[1];
  if (block <= 0 || block > 1 << 16 || minis <= 0 || minis > block || head[2] != rows || count > rows)
    return MALFORMED;
  const int64_t per = block / minis;
  if (per * minis != block || per & 7)
    return MALFORMED;
  uint64_t last = (uint64_t)zigzag(head[3]);  // sums may overflow, as in the format
  int64_t done = 0;
  if (count)
    out[done++] = (int64_t)last;
  while (done < count) {
    uint64_t least = (uint64_t)zigzag(varint(data, &at, stop));
    if (at < 0 || minis > stop - at)
      return MALFORMED;
    const uint8_t *widths = data + at;
    at += minis;
    for (int64_t m = 0, n; m < minis && done < count; m++, done += n) {
      int64_t width = widths[m], size = (per >> 3) * width;
      if (width > 64 || size > stop - at)
        return MALFORMED;
      n = smaller(per, count - done);
      if (width == 0) {
        for (int64_t j = 0; j < n; j++)
          out[done + j] = (int64_t)(last + (uint64_t)(j + 1) * least);
        last += (uint64_t)n * least;
      } else {
        uint64_t mask = ~UINT64_C(0) >> (64 - width);
        for (int64_t j = 0; j < n; j++) {
          int64_t bit = j * width, first = at + (bit >> 3), shift = bit & 7;
          uint64_t delta = word(data, first, stop) >> shift;
          if (width + shift > 64)
            delta |= (uint64_t)data[first + 8] << (64 - shift);
          last += least + (delta & mask);
          out[done + j] = (int64_t)last;
        }
      }
      at += size;
    }
  }
  return rows;
}

// Return the end of a page's definition levels, which begin with a four-byte length, or MALFORMED.
static int64_t levels_end(const uint8_t *data, int64_t size, bool optional) {
  if (!optional)
    return 0;
  int64_t end = 4 + (int64_t)(word(data, 0, size) & 0xFFFFFFFF);
  return size >= 4 && end <= size ? end : MALFORMED;
}

// Decode `count` times of a column chunk; return their number, or MALFORMED. No time may be missing. `unpacked`: buffer
// for a page.
static int64_t decode_times(const uint8_t *packed, const struct page *pages, int64_t pages_count, bool optional,
                            uint8_t *unpacked, int64_t *out, int64_t count) {
  int64_t done = 0;
  for (const struct page *page = pages; page < pages + pages_count && done < count; page++) {
    if (page->dictionary || page->encoding != DELTA_BINARY_PACKED)
      return MALFORMED;
    if (!unpack(packed + page->start, page->stop - page->start, unpacked, page->unpacked))
      return MALFORMED;
    int64_t at = levels_end(unpacked, page->unpacked, optional);
    if (at < 0 || (optional && count_known(unpacked, 4, at, page->rows) != page->rows))
      return MALFORMED;
    int64_t n = smaller(page->rows, count - done);
    if (deltas(unpacked, at, page->unpacked, page->rows, out + done, n) < 0)
      return MALFORMED;
    done += n;
  }
  return done;
}

// Decode a column chunk of `g->rows` floats to `out`; return the number of present values, or MALFORMED. A single page
// of plain, aligned values, none missing, is left in `unpacked`: its first byte is written to `here`, otherwise -1.
static int64_t decode_floats(const struct row_group *g, const struct page *pages, int64_t pages_count, bool optional,
                             uint8_t *unpacked, float *out, int64_t *here) {
  int64_t done = 0, known = 0, entries = 0;
  *here = -1;
  for (const struct page *page = pages; page < pages + pages_count; page++) {
    int64_t rows = page->rows, size = page->unpacked;
    if (!unpack(g->packed + page->start, page->stop - page->start, unpacked, size))
      return MALFORMED;
    if (page->dictionary) {
      if ((page->encoding != PLAIN && page->encoding != PLAIN_DICTIONARY) || rows > size >> 2)
        return MALFORMED;
      entries = rows;
      memcpy(g->dictionary, unpacked, (size_t)entries * sizeof *out);
      continue;
    }
    int64_t at = levels_end(unpacked, size, optional);
    if (at < 0 || rows > g->rows - done)
      return MALFORMED;
    int64_t present = optional ? count_known(unpacked, 4, at, rows) : rows;
    if (present < 0)
      return MALFORMED;
    float *values = present == rows ? out + done : g->dense;
    if (page->encoding == PLAIN) {
      if (present > (size - at) >> 2)
        return MALFORMED;
      if (present == g->rows && (at & 3) == 0) {
        *here = at;
        return present;
      }
      memcpy(values, unpacked + at, (size_t)present * sizeof *out);
    } else if (page->encoding == RLE_DICTIONARY || page->encoding == PLAIN_DICTIONARY) {
      if (look_up(unpacked, at, size, g->dictionary, entries, values, present) < 0)
        return MALFORMED;
    } else {
      return MALFORMED;
    }
    if (present < rows)
      spread(unpacked, 4, at, values, out + done, rows);
    done += rows;
    known += present;
  }
  return done == g->rows ? known : MALFORMED;
}

// Decode the column chunks of a row group; return false if one is malformed. One call decodes all of them, because each
// change between Python and this code contends for the interpreter lock.
int decode(const struct row_group *g) {
  const struct page *page = g->pages, *end = page + g->pages_count;
  for (int64_t k = 0; k < g->metrics + 2; k++) {
    const struct chunk *chunk = g->chunks + k;
    if (chunk->packed == 0)
      continue;
    const struct page *first = page;
    while (page < end && page->chunk == k)
      page++;
    int64_t count = page - first;
    bool optional = chunk->optional != 0;
    uint8_t *unpacked = g->unpacked + k * g->unpacked_width;
    if (k == 0 || k > g->metrics) {
      int64_t *out = k ? g->following : g->time, rows = k ? 1 : g->rows;
      if (decode_times(g->packed, first, count, optional, unpacked, out, rows) != rows)
        return false;
    } else {
      int64_t *found = g->found + 2 * (k - 1);
      float *out = g->values + (k - 1) * g->values_width;
      found[0] = decode_floats(g, first, count, optional, unpacked, out, found + 1);
      if (found[0] < 0)
        return false;
    }
  }
  return true;
}
