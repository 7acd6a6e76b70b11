"""FP1, the fingerprint: its definition, as plain numbers.

A tensor's bytes are read as little-endian signed 32-bit words w (zero tail), cut into chunks r = 0, 1, … of 65,536
words. With 64-bit wrapping sums over each chunk (c = position in the chunk)

    S0_r = Σ w          S1_r = Σ T[c]·w          T[c] = fmix32(c + 131073) >> 1

the fingerprint is the pair, modulo 2^64,

    ( Σ_r S0_r ,  Σ_r mix64(S1_r ^ mix64(S0_r + (r+1)·PHI64)) )

One read, 16 bytes a tensor, no order among chunks. The weights are 65,536 distinct 31-bit integers, so any corruption
confined to two words of one chunk is always seen (S0 sees one word; two words that cancel in S0 leave (T_i − T_j)·d ≠
0, |…| < 2^64, in S1); larger ones slip through with a probability near 2^-64. An empty tensor is (0, 0). 64-bit
words, float sums and XOR are no substitutes: whole families of corruptions are invisible to them.

`fmix32` is the 32-bit finaliser of MurmurHash3 (Austin Appleby, public domain); `mix64` the finaliser of splitmix64
(Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; constants by David Stafford, Mix13).
Every integer that leaves this package is the unsigned result reinterpreted as a signed 64-bit one, as torch holds it.
"""

from __future__ import annotations

CHUNK_WORDS = 65536
CHUNK_BYTES = 4 * CHUNK_WORDS
WEIGHT_SEED = 131073
PHI64 = 0x9E3779B97F4A7C15
MIX64_A = 0xBF58476D1CE4E5B9
MIX64_B = 0x94D049BB133111EB
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def signed64(value: int) -> int:
    """The integer congruent to `value` modulo 2^64 in [-2^63, 2^63)."""
    return ((value + (1 << 63)) & MASK64) - (1 << 63)


def fmix32(h: int) -> int:
    """MurmurHash3's 32-bit finaliser of an unsigned 32-bit integer."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & MASK32
    h ^= h >> 13
    h = h * 0xC2B2AE35 & MASK32
    return h ^ (h >> 16)


def weight(c: int) -> int:
    """T[c], the weight of position c (0 ≤ c < 65,536) in a chunk."""
    return fmix32(c + WEIGHT_SEED) >> 1


def mix64(z: int) -> int:
    """splitmix64's finaliser of an integer taken modulo 2^64; the result is unsigned."""
    z &= MASK64
    z = (z ^ (z >> 30)) * MIX64_A & MASK64
    z = (z ^ (z >> 27)) * MIX64_B & MASK64
    return z ^ (z >> 31)
