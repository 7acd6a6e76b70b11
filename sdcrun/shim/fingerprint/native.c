/* FP1 (see fp1.py) of tensors in memory, on the calling thread. No Python in here: native.py loads it with ctypes. */

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

/* The same for `bytes` bytes anywhere, whose last word may be short. */
static void add_bytes(const char *data, const int32_t *weights, int64_t bytes, uint64_t *sums)
{
    int32_t copy[1024];
    for (int64_t at = 0; at < bytes; at += sizeof copy) {
        int64_t part = bytes - at < (int64_t)sizeof copy ? bytes - at : (int64_t)sizeof copy;
        memcpy(copy, data + at, part);
        memset((char *)copy + part, 0, (4 - part % 4) % 4);
        add_words(copy, weights + at / 4, (part + 3) / 4, sums);
    }
}

/* `spans`: address, number of bytes, row, and number of the first chunk of each of `count` pieces of memory; `weights`:
 * T, 65,536 of them; the fingerprint of each is added to its row of `result`, two 64-bit integers. */
void sdcrun_fp1(const int64_t *spans, int64_t count, const int32_t *weights, uint64_t *result)
{
    for (int64_t i = 0; i < count; i++) {
        const char *data = (const char *)(intptr_t)spans[4 * i];
        int64_t bytes = spans[4 * i + 1];
        uint64_t *row = result + 2 * spans[4 * i + 2];
        for (uint64_t chunk = spans[4 * i + 3] + 1; bytes > 0; chunk++) {
            int64_t part = bytes < 4 * CHUNK_WORDS ? bytes : 4 * CHUNK_WORDS;
            uint64_t sums[2] = {0, 0};
            if ((uintptr_t)data % 4 == 0 && part % 4 == 0)
                add_words((const int32_t *)data, weights, part / 4, sums);
            else
                add_bytes(data, weights, part, sums);
            row[0] += sums[0];
            row[1] += mix64(sums[1] ^ mix64(sums[0] + chunk * PHI64));
            data += part;
            bytes -= part;
        }
    }
}
