/* FP1 (see fp1.py) of tensors in memory, and the division of a bucket (see checks/divide.py), on the calling thread. No
 * Python in here: native.py loads it with ctypes. */

#include <stdint.h>
#include <string.h>

#define CHUNK_WORDS 65536
#define PHI64 0x9E3779B97F4A7C15u
#define MIX64_A 0xBF58476D1CE4E5B9u
#define MIX64_B 0x94D049BB133111EBu

/* One machine code for each family of processors, chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#endif
#endif
#ifndef EACH_PROCESSOR
#define EACH_PROCESSOR
#endif

static uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * MIX64_A;
    z = (z ^ (z >> 27)) * MIX64_B;
    return z ^ (z >> 31);
}

/* The sums of `count` words, S0 and S1, added to `sums`. A word times a weight needs 62 bits; sums wrap. */
EACH_PROCESSOR
static void add_words(const int32_t *words, const int32_t *weights, int64_t count, uint64_t *sums)
{
    uint64_t first = 0, second = 0;
    for (int64_t i = 0; i < count; i++) {
        first += (uint64_t)(int64_t)words[i];
        second += (uint64_t)((int64_t)words[i] * weights[i]);
    }
    sums[0] += first;
    sums[1] += second;
}

/* The same, and whether some element is NaN or infinite, which means that all bits of its exponent are set: `high` and
 * `low` are the exponents of a word's elements, the same one twice where a word is one element. */
EACH_PROCESSOR
static int add_judged(const int32_t *words, const int32_t *weights, int64_t count, uint64_t *sums,
                      uint32_t high, uint32_t low)
{
    uint64_t first = 0, second = 0;
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t word = (uint32_t)words[i];
        first += (uint64_t)(int64_t)words[i];
        second += (uint64_t)((int64_t)words[i] * weights[i]);
        found |= ((word & high) == high) | ((word & low) == low);
    }
    sums[0] += first;
    sums[1] += second;
    return found != 0;
}

struct exponents {
    uint32_t high, low;
};

/* By the dtype of a span: not to be judged, float32, float16, bfloat16. */
static const struct exponents EXPONENTS[] = {
    {0, 0}, {0x7F800000u, 0x7F800000u}, {0x7C000000u, 0x00007C00u}, {0x7F800000u, 0x00007F80u}};

static int add_aligned(const int32_t *words, const int32_t *weights, int64_t count, uint64_t *sums,
                       struct exponents exponents)
{
    if (exponents.high)
        return add_judged(words, weights, count, sums, exponents.high, exponents.low);
    add_words(words, weights, count, sums);
    return 0;
}

/* The same for `bytes` bytes anywhere, whose last word may be short. */
static int add_bytes(const char *data, const int32_t *weights, int64_t bytes, uint64_t *sums,
                     struct exponents exponents)
{
    int32_t copy[1024];
    int found = 0;
    for (int64_t at = 0; at < bytes; at += sizeof copy) {
        int64_t part = bytes - at < (int64_t)sizeof copy ? bytes - at : (int64_t)sizeof copy;
        memcpy(copy, data + at, part);
        memset((char *)copy + part, 0, (4 - part % 4) % 4);
        found |= add_aligned(copy, weights + at / 4, (part + 3) / 4, sums, exponents);
    }
    return found;
}

/* `spans`: address, number of bytes, row, number of the first chunk, and place in EXPONENTS of each of `count` pieces
 * of memory; `weights`: T, 65,536 of them; the fingerprint of each is added to its row of `result`, two 64-bit integers.
 * Returns whether an element of those that are to be judged is not finite. */
int sdcrun_fp1(const int64_t *spans, int64_t count, const int32_t *weights, uint64_t *result)
{
    int found = 0;
    for (int64_t i = 0; i < count; i++) {
        const char *data = (const char *)(intptr_t)spans[5 * i];
        int64_t bytes = spans[5 * i + 1];
        uint64_t *row = result + 2 * spans[5 * i + 2];
        struct exponents exponents = EXPONENTS[spans[5 * i + 4]];
        for (uint64_t chunk = spans[5 * i + 3] + 1; bytes > 0; chunk++) {
            int64_t part = bytes < 4 * CHUNK_WORDS ? bytes : 4 * CHUNK_WORDS;
            uint64_t sums[2] = {0, 0};
            if ((uintptr_t)data % 4 == 0 && part % 4 == 0)
                found |= add_aligned((const int32_t *)data, weights, part / 4, sums, exponents);
            else
                found |= add_bytes(data, weights, part, sums, exponents);
            row[0] += sums[0];
            row[1] += mix64(sums[1] ^ mix64(sums[0] + chunk * PHI64));
            data += part;
            bytes -= part;
        }
    }
    return found;
}

/* Multiplies `count` numbers by `factor`; returns whether one of them was NaN or infinite. */
EACH_PROCESSOR
static int scale(float *values, int64_t count, float factor)
{
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, values + i, sizeof word);
        found |= (word & 0x7F800000u) == 0x7F800000u;
        values[i] *= factor;
    }
    return found != 0;
}

int sdcrun_scale(float *values, int64_t count, float factor)
{
    return scale(values, count, factor);
}
