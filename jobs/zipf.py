"""Bounded Zipf ids: the skew of recommendation logs, as pure functions of a numpy generator. Needs numpy only.

Invariants: Z1 every id lies in [0, num_ids). Z2 ``scatter_ids`` is a bijection of [0, num_ids). Z3 rank k (from 1) has
probability k^-alpha / sum_j j^-alpha, up to a relative error of 1e-9.
"""

from __future__ import annotations

import functools

import numpy as np

# Ranks up to this one use an exact cumulative table, the others the integral of x^-alpha from k - 1/2 to k + 1/2, whose
# relative error against k^-alpha is alpha (alpha + 1) / (24 k^2) (midpoint rule): below 1e-9 from here on.
_HEAD = 1 << 14
# Any odd numbers mix; these are the golden ratio and two primes from MurmurHash3's finaliser and xxHash64.
_ODD = (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC2B2AE3D27D4EB4F)


def bounded_zipf(
    n: int, num_ids: int, alpha: float, rng: np.random.Generator, *, is_scattered: bool = True
) -> np.ndarray:
    """n ids in [0, num_ids), int64, independent, rank k with probability proportional to k^-alpha (Z1, Z3).

    By inverse CDF; memory is O(n), whatever ``num_ids`` is. alpha = 0 is uniform, alpha < 0 is refused.
    ``is_scattered`` gives rank k the id ``scatter_ids(k - 1, num_ids)``, so that hot ids are not neighbours; without
    it rank k is id k - 1.

    Raises:
        ValueError: num_ids < 1, or alpha is negative.
    """
    ranks = zipf_ranks(n, num_ids, alpha, rng)
    return scatter_ids(ranks, num_ids) if is_scattered else ranks


def zipf_ranks(n: int, num_ids: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """n ranks from 0, int64; see ``bounded_zipf``."""
    if num_ids < 1 or not alpha >= 0:
        raise ValueError(f"bounded_zipf needs num_ids >= 1 and alpha >= 0, got {num_ids} and {alpha}")
    if alpha == 0:
        return rng.integers(0, num_ids, n, dtype=np.int64)
    head_cdf, total = _head_cdf(num_ids, alpha)
    u = rng.random(n) * total
    ranks = np.searchsorted(head_cdf, u, side="right").astype(np.int64)
    if num_ids > len(head_cdf):
        tail = np.flatnonzero(ranks == len(head_cdf))
        low = len(head_cdf) + 0.5
        x = _inverse_integral(u[tail] - head_cdf[-1], low, alpha)
        # Rank k covers [k - 1/2, k + 1/2); ranks here count from 0.
        ranks[tail] = np.rint(x).astype(np.int64) - 1
    return np.clip(ranks, 0, num_ids - 1, out=ranks)


def scatter_ids(ranks: np.ndarray, num_ids: int, seed: int = 0) -> np.ndarray:
    """A fixed bijection of [0, num_ids) that looks random (Z2): int64 in, int64 out, one pass and a few repairs.

    Works on the next power of two with invertible steps (odd multiply, xor-shift) and repeats on values outside
    [0, num_ids) ("cycle walking": Black and Rogaway, CT-RSA 2002), fewer than one repeat per value on average.
    """
    bits = max(2, int(num_ids - 1).bit_length())
    x = _mix(ranks.astype(np.uint64), bits, seed)
    outside = np.flatnonzero(x >= np.uint64(num_ids))
    while outside.size:
        x[outside] = _mix(x[outside], bits, seed)
        outside = outside[x[outside] >= np.uint64(num_ids)]
    return x.astype(np.int64)


def _mix(x: np.ndarray, bits: int, seed: int) -> np.ndarray:
    """A bijection of [0, 2^bits), uint64 in and out."""
    mask = np.uint64((1 << bits) - 1)
    shift = np.uint64(max(1, bits // 2))
    add = np.uint64((seed * 0x9E3779B97F4A7C15 + 0x243F6A8885A308D3) & 0xFFFFFFFFFFFFFFFF)
    for odd in _ODD:
        x = (x * np.uint64(odd) + add) & mask
        x ^= x >> shift
    return x


@functools.lru_cache(maxsize=256)
def _head_cdf(num_ids: int, alpha: float) -> tuple[np.ndarray, float]:
    """Cumulative k^-alpha of the first ranks (not normalised), and the total over all ranks."""
    head = np.cumsum(np.arange(1, min(num_ids, _HEAD) + 1, dtype=np.float64) ** -alpha)
    total = float(head[-1])
    if num_ids > _HEAD:
        total += float(_integral(_HEAD + 0.5, num_ids + 0.5, alpha))
    return head, total


def _integral(low: float, high: float, alpha: float) -> float:
    """Integral of x^-alpha over [low, high]."""
    if abs(alpha - 1.0) < 1e-9:
        return float(np.log(high / low))
    return float((high ** (1.0 - alpha) - low ** (1.0 - alpha)) / (1.0 - alpha))


def _inverse_integral(mass: np.ndarray, low: float, alpha: float) -> np.ndarray:
    """The x whose integral of t^-alpha over [low, x] is ``mass``."""
    if abs(alpha - 1.0) < 1e-9:
        return low * np.exp(mass)
    return (low ** (1.0 - alpha) + (1.0 - alpha) * mass) ** (1.0 / (1.0 - alpha))
