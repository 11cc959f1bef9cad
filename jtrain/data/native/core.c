/* The inner loops of the data plane. Built by hatch_build.py, called through ctypes by library.py.
 *
 * Every function does what a NumPy version beside its caller does, bit for bit: machines without a C compiler run
 * that one. Plain C11 without Python's headers, so one build serves every version of Python. Nothing allocates.
 */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* Hash of the C files when they were built: library.py refuses a library of another source. */
EXPORT const char jtrain_core_source[] = CORE_SOURCE;

/* The widening loops are worth wider registers where the CPU has them; a wheel must run on every CPU. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

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

/* Takes documents out of the rings of ChunkBuffer: the run of each, -1 if it is not there or has not arrived.
 * Returns how many have a run. */
EXPORT int64_t drop_documents(int64_t documents, const int64_t *source, const int64_t *number, const int64_t *base,
                              const int64_t *size, int64_t *table, int64_t *run) {
    int64_t dropped = 0;
    for (int64_t i = 0; i < documents; i++) {
        if (i + 8 < documents)
            __builtin_prefetch(table + 4 * (base[source[i + 8]] + (number[i + 8] & (size[source[i + 8]] - 1))), 1);
        int64_t *entry = table + 4 * (base[source[i]] + (number[i] & (size[source[i]] - 1)));
        run[i] = -1;
        if (entry[0] != number[i]) continue; /* the row belongs to a newer document by now */
        run[i] = entry[1];
        entry[0] = -1;
        dropped += run[i] >= 0;
    }
    return dropped;
}

/* Places documents in rows; see packing.place_concatenated. Each piece is `first` to `stop` of a document. Rows are
 * numbered in the order of their first documents. Returns the number of pieces. */
EXPORT int64_t place_concatenated(int64_t documents, const int64_t *start, const int64_t *end, int64_t seq_len,
                                  int64_t *row, int64_t *document, int64_t *first, int64_t *stop) {
#define REST(d) ((d) < documents ? start[d] + (end[d] - start[d]) / seq_len * seq_len : 0)
    int64_t pieces = 0, rows = 0;
    int64_t tail = 0, tail_at = REST(0); /* document whose rest is next in the concatenation, and its next token */
    for (int64_t d = 0; d < documents; d++) {
        for (int64_t at = start[d]; end[d] - at >= seq_len; at += seq_len, pieces++, rows++)
            row[pieces] = rows, document[pieces] = d, first[pieces] = at, stop[pieces] = at + seq_len;
        if (tail > d) continue; /* its rest lies in the row of an earlier document */
        if (tail_at == end[d]) {
            tail++, tail_at = REST(tail);
            continue;
        }
        for (int64_t room = seq_len; room && tail < documents;) {
            const int64_t count = end[tail] - tail_at < room ? end[tail] - tail_at : room;
            if (count) {
                row[pieces] = rows, document[pieces] = tail, first[pieces] = tail_at, stop[pieces] = tail_at + count;
                pieces++, room -= count, tail_at += count;
            }
            if (tail_at == end[tail]) tail++, tail_at = REST(tail);
        }
        rows++;
    }
    return pieces;
#undef REST
}

static uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Images of numbers below `size` under the permutation that `key` selects; see shuffle.permuted. */
EXPORT int64_t permute(int64_t count, const int64_t *index, int64_t size, int64_t key, int64_t *image) {
    const uint64_t last = size > 2 ? (uint64_t)size - 1 : 1;
    const int bits = 64 - __builtin_clzll(last), shift = bits / 2;
    const uint64_t low_mask = ((uint64_t)1 << shift) - 1, high_mask = ((uint64_t)1 << (bits - shift)) - 1;
    uint64_t round_key[6];
    for (int round = 0; round < 6; round++) round_key[round] = splitmix64((uint64_t)key + (uint64_t)round);
    for (int64_t i = 0; i < count; i++) {
        uint64_t x = (uint64_t)index[i];
        do { /* an image past `size` is permuted again until it falls below it */
            uint64_t high = x >> shift, low = x & low_mask;
            for (int round = 0; round < 6; round++) {
                /* An odd number of bits makes unequal halves, so their masks take turns. */
                const uint64_t mask = round % 2 ? low_mask : high_mask;
                const uint64_t mixed = (((low + round_key[round]) * 0x9E3779B97F4A7C15u >> 32) & mask) ^ high;
                high = low, low = mixed;
            }
            x = high << shift | low;
        } while (x >= (uint64_t)size);
        image[i] = (int64_t)x;
    }
    return count;
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
