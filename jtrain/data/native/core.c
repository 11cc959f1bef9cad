/* The inner loops of the data plane. Built by hatch_build.py, called through ctypes by library.py.
 *
 * Every function does what a NumPy version beside its caller does, bit for bit: machines without a C compiler run
 * that one. Plain C11 without Python's headers, so one build serves every version of Python. Nothing allocates.
 */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* Hash of this file when it was built: library.py refuses a library of another source. */
EXPORT const char jtrain_core_source[] = CORE_SOURCE;

/* The widening loops are worth wider registers where the CPU has them; a wheel must run on every CPU. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* Index of the first byte in memory of a word with its highest bit set. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "the loops over words of eight bytes read the first byte in memory as the lowest"
#endif
#define FIRST_BYTE(word) (__builtin_ctzll(word) >> 3)

#define WIDEN(type)                                                                     \
    for (int64_t i = 0; i < count; i++) out[i] = (int32_t)((const type *)ids)[i];       \
    break;

/* Copies ids of `itemsize` bytes as int32. */
WIDE static void widen(int32_t *restrict out, const void *restrict ids, int64_t count, int64_t itemsize) {
    switch (itemsize) {
        case 1: WIDEN(uint8_t)
        case 2: WIDEN(uint16_t)
        case 4: WIDEN(int32_t)
        default: WIDEN(int64_t)
    }
}

WIDE static void count_up(int32_t *restrict position, int32_t *restrict segment, int64_t count, int32_t number) {
    for (int32_t i = 0; i < (int32_t)count; i++) position[i] = i;
    for (int64_t i = 0; i < count; i++) segment[i] = number;
}

/* Fills rows of tokens, targets, positions and segments from pieces of documents; see collate.fill_rows.
 *
 * array[i], start[i], length[i]: the piece is `length` ids from index `start` of an array on.
 * memory[2 * a], memory[2 * a + 1]: address and bytes per id of array a.
 * Returns the number of pieces placed: fewer than `pieces` if they are not in order, or a row holds too many. */
EXPORT int64_t fill_rows(int32_t *token, int32_t *target, int32_t *position, int32_t *segment, int64_t rows,
                         int64_t seq_len, int64_t pieces, const int64_t *row, const int64_t *array,
                         const int64_t *start, const int64_t *length, const int64_t *memory, int32_t ignore) {
    int64_t piece = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t filled = 0;
        for (int32_t number = 1; piece < pieces && row[piece] == r; piece++, number++) {
            const int64_t count = length[piece];
            if (count < 0 || count > seq_len - filled) return piece;
            if (piece + 1 < pieces) { /* ids lie all over the files: the next piece's come while this one is copied */
                const int64_t *next = memory + 2 * array[piece + 1];
                const char *ids = (const char *)next[0] + start[piece + 1] * next[1];
                __builtin_prefetch(ids);
                __builtin_prefetch(ids + 64);
            }
            const int64_t *from = memory + 2 * array[piece];
            if (count) {
                widen(token + filled, (const char *)from[0] + start[piece] * from[1], count, from[1]);
                memcpy(target + filled, token + filled + 1, (size_t)(count - 1) * sizeof(int32_t));
                target[filled + count - 1] = ignore;
                count_up(position + filled, segment + filled, count, number);
            }
            filled += count;
        }
        const size_t padding = (size_t)(seq_len - filled) * sizeof(int32_t);
        memset(token + filled, 0, padding);
        memset(position + filled, 0, padding);
        memset(segment + filled, 0, padding);
        for (int64_t i = filled; i < seq_len; i++) target[i] = ignore;
        token += seq_len, target += seq_len, position += seq_len, segment += seq_len;
    }
    return piece;
}

/* Looks documents up in the rings of ChunkBuffer: the run of each, -1 if it is not there, its start and its end.
 * Returns how many are not there. */
EXPORT int64_t find_documents(int64_t documents, const int64_t *source, const int64_t *number, const int64_t *base,
                              const int64_t *size, const int64_t *table, int64_t *run, int64_t *first, int64_t *stop) {
    int64_t missing = 0;
    for (int64_t i = 0; i < documents; i++) {
        if (i + 8 < documents)
            __builtin_prefetch(table + 4 * (base[source[i + 8]] + (number[i + 8] & (size[source[i + 8]] - 1))));
        const int64_t *entry = table + 4 * (base[source[i]] + (number[i] & (size[source[i]] - 1)));
        run[i] = entry[0] == number[i] ? entry[1] : -1;
        first[i] = entry[2];
        stop[i] = entry[3];
        missing += run[i] < 0;
    }
    return missing;
}

/* JSON. Everything below refuses (NULL, or -1) what Python's parser and jtrain's messages have to see: malformed
 * lines, bytes that are not UTF-8, half a surrogate pair, escapes in keys, deep nesting, thousands of digits. */

#define BYTES(byte) (0x0101010101010101u * (uint64_t)(byte))
#define MOST_DEPTH 64
#define MOST_DIGITS 4000

static const uint8_t *skip_blanks(const uint8_t *p, const uint8_t *end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

static int hex_digit(uint8_t byte) {
    if (byte >= '0' && byte <= '9') return byte - '0';
    byte |= 0x20;
    return byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

/* The number that four hexadecimal digits spell; -1 if they are none. */
static int32_t hex_number(const uint8_t *p, const uint8_t *end) {
    if (end - p < 4) return -1;
    int32_t number = 0;
    for (int i = 0; i < 4; i++) {
        const int digit = hex_digit(p[i]);
        if (digit < 0) return -1;
        number = number << 4 | digit;
    }
    return number;
}

/* Bytes of the UTF-8 character of two to four bytes at p; 0 if it is none. */
static int64_t character_bytes(const uint8_t *p, const uint8_t *end) {
    const uint8_t lead = p[0];
    const int64_t size = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (!size || end - p < size) return 0;
    for (int64_t i = 1; i < size; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    /* Longer than needed, a surrogate, or beyond the last character. */
    if ((lead == 0xE0 && p[1] < 0xA0) || (lead == 0xED && p[1] > 0x9F)) return 0;
    if ((lead == 0xF0 && p[1] < 0x90) || (lead == 0xF4 && p[1] > 0x8F)) return 0;
    return size;
}

static uint8_t *write_character(uint8_t *out, uint32_t code) {
    if (code < 0x80) {
        *out++ = (uint8_t)code;
    } else if (code < 0x800) {
        *out++ = (uint8_t)(0xC0 | code >> 6);
        *out++ = (uint8_t)(0x80 | (code & 0x3F));
    } else {
        if (code < 0x10000) {
            *out++ = (uint8_t)(0xE0 | code >> 12);
        } else {
            *out++ = (uint8_t)(0xF0 | code >> 18);
            *out++ = (uint8_t)(0x80 | (code >> 12 & 0x3F));
        }
        *out++ = (uint8_t)(0x80 | (code >> 6 & 0x3F));
        *out++ = (uint8_t)(0x80 | (code & 0x3F));
    }
    return out;
}

/* Decodes the string that begins at p, behind its quote, to *out, and moves *out behind it.
 *
 * Returns the byte behind the closing quote. *out has room for eight bytes more than are left of the line. */
static const uint8_t *read_string(const uint8_t *p, const uint8_t *end, uint8_t **out) {
    uint8_t *to = *out;
    for (;;) {
        while (end - p >= 8) {
            uint64_t word, special;
            memcpy(&word, p, 8);
            memcpy(to, &word, 8);
            /* Lowest bit set: the first quote, backslash, control character or byte of a longer character. */
            special = (word - BYTES(0x20)) & ~word;
            special |= ((word ^ BYTES('"')) - BYTES(1)) & ~(word ^ BYTES('"'));
            special |= ((word ^ BYTES('\\')) - BYTES(1)) & ~(word ^ BYTES('\\'));
            special = (special | word) & BYTES(0x80);
            if (special) {
                const int plain = FIRST_BYTE(special);
                p += plain, to += plain;
                break;
            }
            p += 8, to += 8;
        }
        if (p >= end || *p < 0x20) return 0;
        if (*p == '"') break;
        if (*p >= 0x80) {
            const int64_t size = character_bytes(p, end);
            if (!size) return 0;
            for (int64_t i = 0; i < size; i++) *to++ = *p++;
        } else if (*p != '\\') { /* within eight bytes of the line's end */
            *to++ = *p++;
        } else {
            if (end - p < 2) return 0;
            const uint8_t escape = p[1];
            p += 2;
            switch (escape) {
                case '"': case '\\': case '/': *to++ = escape; break;
                case 'b': *to++ = '\b'; break;
                case 'f': *to++ = '\f'; break;
                case 'n': *to++ = '\n'; break;
                case 'r': *to++ = '\r'; break;
                case 't': *to++ = '\t'; break;
                case 'u': {
                    int32_t code = hex_number(p, end);
                    if (code < 0) return 0;
                    p += 4;
                    if (code >= 0xD800 && code < 0xE000) {
                        if (code >= 0xDC00 || end - p < 6 || p[0] != '\\' || p[1] != 'u') return 0;
                        const int32_t low = hex_number(p + 2, end);
                        if (low < 0xDC00 || low > 0xDFFF) return 0;
                        p += 6;
                        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                    }
                    to = write_character(to, (uint32_t)code);
                    break;
                }
                default: return 0;
            }
        }
    }
    *out = to;
    return p + 1;
}

static const uint8_t *skip_digits(const uint8_t *p, const uint8_t *end) {
    const uint8_t *first = p;
    while (p < end && *p >= '0' && *p <= '9') p++;
    return p > first && p - first <= MOST_DIGITS ? p : 0;
}

static const uint8_t *skip_number(const uint8_t *p, const uint8_t *end) {
    if (p < end && *p == '-') p++;
    if (p < end && *p == '0') p++;
    else if (!(p = skip_digits(p, end))) return 0;
    if (p < end && *p == '.' && !(p = skip_digits(p + 1, end))) return 0;
    if (p < end && (*p | 0x20) == 'e') {
        p++;
        if (p < end && (*p == '+' || *p == '-')) p++;
        p = skip_digits(p, end);
    }
    return p;
}

/* Skips a value with all that is in it, whose strings are decoded to `room` and forgotten. */
static const uint8_t *skip_value(const uint8_t *p, const uint8_t *end, uint8_t *room) {
    uint8_t is_object[MOST_DEPTH];
    int depth = 0;
    for (;;) { /* once per value; p is at its first byte */
        uint8_t *unused = room;
        if (p >= end) return 0;
        if (*p == '{' || *p == '[') {
            if (depth == MOST_DEPTH) return 0;
            is_object[depth++] = *p == '{';
            p = skip_blanks(p + 1, end);
            if (p < end && *p == (is_object[depth - 1] ? '}' : ']')) {
                p++, depth--;
            } else {
                if (!is_object[depth - 1]) continue;
                goto key;
            }
        } else if (*p == '"') {
            if (!(p = read_string(p + 1, end, &unused))) return 0;
        } else if (end - p >= 4 && (!memcmp(p, "true", 4) || !memcmp(p, "null", 4))) {
            p += 4;
        } else if (end - p >= 5 && !memcmp(p, "false", 5)) {
            p += 5;
        } else if (!(p = skip_number(p, end))) {
            return 0;
        }
        for (;;) { /* behind a value: the ends of what it is the last of, and a comma */
            if (!depth) return p;
            p = skip_blanks(p, end);
            if (p >= end) return 0;
            if (*p == ',') break;
            if (*p != (is_object[depth - 1] ? '}' : ']')) return 0;
            p++, depth--;
        }
        p = skip_blanks(p + 1, end);
        if (!is_object[depth - 1]) continue;
    key:
        unused = room;
        if (p >= end || *p != '"' || !(p = read_string(p + 1, end, &unused))) return 0;
        p = skip_blanks(p, end);
        if (p >= end || *p != ':') return 0;
        p = skip_blanks(p + 1, end);
    }
}

/* Decodes the text of one line to `out`: the string of the last field named `key` of its object.
 *
 * Returns its bytes, or -1 if there is none or only Python can tell: with a field `labels` a record may be refused. */
static int64_t text_of_line(const uint8_t *p, const uint8_t *end, const uint8_t *key, int64_t key_bytes,
                            uint8_t *out) {
    int64_t text_bytes = -1;
    p = skip_blanks(p, end);
    if (p >= end || *p != '{') return -1;
    p = skip_blanks(p + 1, end);
    for (;;) { /* once per field */
        if (p >= end || *p != '"') return -1;
        const uint8_t *name = ++p;
        while (p < end && *p != '"' && *p != '\\' && *p >= 0x20 && *p < 0x80) p++;
        if (p >= end || *p != '"') return -1;
        const int64_t name_bytes = p - name;
        if (name_bytes == 6 && !memcmp(name, "labels", 6)) return -1;
        p = skip_blanks(p + 1, end);
        if (p >= end || *p != ':') return -1;
        p = skip_blanks(p + 1, end);
        if (name_bytes == key_bytes && !memcmp(name, key, (size_t)key_bytes)) {
            uint8_t *to = out;
            if (p >= end || *p != '"' || !(p = read_string(p + 1, end, &to))) return -1;
            text_bytes = to - out;
        } else if (!(p = skip_value(p, end, out + (text_bytes < 0 ? 0 : text_bytes)))) {
            return -1;
        }
        p = skip_blanks(p, end);
        if (p >= end || (*p != ',' && *p != '}')) return -1;
        if (*p++ == '}') return skip_blanks(p, end) == end ? text_bytes : -1;
        p = skip_blanks(p, end);
    }
}

/* Ids of chunks of JSON lines for the tokenizer of bytes, one after another; see ChunkReader.
 *
 * start[i], end[i]: the line of chunk i in `content`. first[i], num[i]: its chunks of the text with its two border ids.
 * out: room for all lines and ten bytes more for each. length[i]: ids of chunk i, or -1 if its line is left to Python.
 * Returns the number of ids. */
EXPORT int64_t json_chunks(int64_t chunks, const uint8_t *content, const int64_t *start, const int64_t *end,
                           const int64_t *first, const int64_t *num, int64_t chunk_bytes, const uint8_t *key,
                           int64_t key_bytes, uint8_t *out, int32_t *length) {
    uint8_t *to = out;
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t text = text_of_line(content + start[i], content + end[i], key, key_bytes, to + 1);
        length[i] = -1;
        if (text < 0) continue;
        const int64_t total = text ? text + 2 : 0; /* the text stands at to[1]; an empty one has no border ids */
        const int64_t low = first[i] * chunk_bytes;
        const int64_t high = low + num[i] * chunk_bytes < total ? low + num[i] * chunk_bytes : total;
        to[0] = to[text + 1] = 0;
        length[i] = low < high ? (int32_t)(high - low) : 0;
        if (low && length[i]) memmove(to, to + low, (size_t)length[i]);
        to += length[i];
    }
    return to - out;
}
