"""Pure integer functions of (seed, id, column, step): row blocks, initial values, rounding bits; numpy reference.

Pure: numpy only, no state. The native twins are in ``csrc/core/store/{hash.h,init.cpp}``; both give the same bits.

Invariants:

1. Every function here is fixed for ever: checkpoints and placements depend on it.
2. Only integer operations, plus for initial values one exact multiply (an integer below 2^24 by a power of two) and one
   add: the bits are the same on every device, with or without fused multiply-add.
3. All 64 bits of an id count; no id value is special.

Legend: N ids, D width.
"""

from __future__ import annotations

import math

import numpy as np

GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B1
_MASK64 = (1 << 64) - 1


def fmix64(values: np.ndarray) -> np.ndarray:
    """MurmurHash3's 64-bit finaliser (Austin Appleby, public domain), a bijection. uint64[N] -> uint64[N]."""
    h = values.astype(np.uint64, copy=True)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def _as_uint64(ids: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(ids, dtype=None if ids.dtype == np.uint64 else np.int64).view(np.uint64)


def row_blocks(ids: np.ndarray, num_blocks: int) -> np.ndarray:
    """Row block of each id: which of ``num_blocks`` (a power of two) equal ranges its hash falls in. uint32[N]."""
    if num_blocks == 1:
        return np.zeros(ids.shape, np.uint32)
    shift = 64 - (num_blocks.bit_length() - 1)
    return (fmix64(_as_uint64(ids)) >> np.uint64(shift)).astype(np.uint32)


def init_keys(seed: int, ids: np.ndarray) -> np.ndarray:
    """The key that each row's initial values are drawn from. uint64[N]."""
    mixed = fmix64(np.array([(seed + GOLDEN64) & _MASK64], np.uint64))
    return fmix64(_as_uint64(ids) ^ mixed)


def rounding_keys(seed: int, ids: np.ndarray, step: int) -> np.ndarray:
    """The key that each row's rounding bits of ``step`` are drawn from. uint64[N]."""
    return fmix64(init_keys(seed, ids) + np.uint64(GOLDEN64 * (step + 1) & _MASK64))


def column_bits(keys: np.ndarray, embedding_dim: int, first_column: int = 0) -> np.ndarray:
    """32 uniform bits per row and column, of ``embedding_dim`` columns from ``first_column`` on. uint32[N, D].

    Source: the "lowbias32" multipliers of Christopher Wellons' hash prospector (public domain), with the key's high
    half mixed in between.
    """
    low, high = keys.astype(np.uint32)[:, None], (keys >> np.uint64(32)).astype(np.uint32)[:, None]
    columns = np.arange(first_column, first_column + embedding_dim, dtype=np.uint32)
    x = low + columns[None, :] * np.uint32(GOLDEN32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= high
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _as_words(columns: np.ndarray) -> np.ndarray:
    """Each row's bytes as 64-bit words, the last one padded with zeros. uint64[N, W]."""
    num_bytes = columns.shape[1] * columns.itemsize
    padded = np.zeros((len(columns), -(-num_bytes // 8) * 8), np.uint8)
    padded[:, :num_bytes] = np.frombuffer(columns.tobytes(), np.uint8).reshape(len(columns), num_bytes)
    return padded.view("<u8")


def row_hashes_reference(
    ids: np.ndarray, last_step: np.ndarray, count: np.ndarray, slots: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """A 64-bit hash of all that each row is. ids, last_step, count int64[N], slots float32[N, S], weights any [N, D].

    The payload is slots, then weights, each as little-endian 64-bit words padded with zeros; each word d meets a key k
    of its place as d + low32(d ^ k) * high32(d ^ k). Native twin: ``csrc/core/store/checksum.h``. uint64[N].
    """
    words = np.concatenate([_as_words(slots), _as_words(weights)], axis=1)
    places = np.arange(1, words.shape[1] + 1, dtype=np.uint64)
    mixed = words ^ fmix64(places * np.uint64(GOLDEN64))[None, :]
    terms = words + (mixed & np.uint64(0xFFFFFFFF)) * (mixed >> np.uint64(32))
    meta = (last_step.astype(np.uint64) << np.uint64(32)) | count.astype(np.uint64)
    head = fmix64(fmix64(_as_uint64(ids) + np.uint64(GOLDEN64)) + meta)
    return fmix64(head + terms.sum(axis=1, dtype=np.uint64))


def rows_checksum_reference(
    ids: np.ndarray, last_step: np.ndarray, count: np.ndarray, slots: np.ndarray, weights: np.ndarray
) -> int:
    """Sum modulo 2^64 of :func:`row_hashes_reference`: the checksum of a set of rows, in any order."""
    return int(row_hashes_reference(ids, last_step, count, slots, weights).sum(dtype=np.uint64))


def init_range(init_min: float, init_max: float) -> tuple[np.float32, np.float32, int]:
    """(min, unit, steps): a value is ``min + (bits * steps >> 32) * unit``; unit is a power of two, steps <= 2^24."""
    low = np.float32(init_min)
    width = init_max - float(low)
    if not width > 0:
        return low, np.float32(0), 0
    exponent = max(math.frexp(width)[1] - 24, -126)
    return low, np.float32(math.ldexp(1.0, exponent)), round(math.ldexp(width, -exponent))


def initial_values_reference(
    seed: int, ids: np.ndarray, embedding_dim: int, init_min: float, init_max: float, first_column: int = 0
) -> np.ndarray:
    """Initial weights of rows, uniform in [init_min, init_max), from ``first_column`` on. float32[N, D]."""
    low, unit, steps = init_range(init_min, init_max)
    bits = column_bits(init_keys(seed, ids), embedding_dim, first_column)
    units = (bits.astype(np.uint64) * np.uint64(steps)) >> np.uint64(32)
    return low + units.astype(np.float32) * unit


def round_bfloat16_reference(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """float32[...] -> bfloat16 patterns, uint16[...], rounded up with probability equal to the distance cut off.

    Finite values saturate at the largest finite number; infinities and NaN stay what they are.
    """
    pattern = values.astype(np.float32).view(np.uint32)
    magnitude, sign = pattern & np.uint32(0x7FFFFFFF), (pattern >> np.uint32(16)) & np.uint32(0x8000)
    rounded = np.minimum((magnitude + (bits >> np.uint32(16))) >> np.uint32(16), np.uint32(0x7F7F))
    rounded = np.where(magnitude == 0x7F800000, np.uint32(0x7F80), rounded)
    rounded = np.where(magnitude > 0x7F800000, np.uint32(0x7FC0), rounded)
    return (rounded | sign).astype(np.uint16)


def round_float16_reference(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """float32[...] -> float16 patterns, uint16[...]; as :func:`round_bfloat16_reference`, 13 random bits a value."""
    pattern = values.astype(np.float32).view(np.uint32)
    magnitude, sign = pattern & np.uint32(0x7FFFFFFF), (pattern >> np.uint32(16)) & np.uint32(0x8000)
    noise = bits >> np.uint32(19)
    normal = ((magnitude + noise) >> np.uint32(13)).astype(np.int64) - (112 << 10)
    is_small = magnitude < 0x38800000  # Below 2^-14 float16's grid is uniform, with step 2^-24.
    scaled = np.where(is_small, magnitude, np.uint32(0)).view(np.float32) * np.float32(2.0**24)
    small = (scaled + noise.astype(np.float32) * np.float32(2.0**-13)).astype(np.int64)
    rounded = np.where(is_small, small, np.minimum(normal, 0x7BFF))
    rounded = np.where(magnitude == 0x7F800000, 0x7C00, rounded)
    rounded = np.where(magnitude > 0x7F800000, 0x7E00, rounded)
    return (rounded.astype(np.uint32) | sign).astype(np.uint16)
