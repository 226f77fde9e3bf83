"""Criteo-shaped click logs with a planted signal: what a chunk of rows holds, as a pure function of (spec, chunk).

13 dense and 26 sparse features with the cardinalities of the Criteo Kaggle data, bounded Zipf ids whose hot set drifts
over time, and labels drawn from known probabilities

    logit p = bias + dense . w + sum_f effect_f(id_f) + sum_pairs u_i(id_i) . u_j(id_j)

where an effect is a hash of (seed, feature, id): nothing is stored, whatever the cardinality. Since p is known for each
row, so is the best AUC any model can reach (``bayes_auc`` of ``synth``).

Needs numpy and pyarrow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from shoal.jobs.zipf import scatter_ids, zipf_ranks
from shoal.kernels.errors import ConfigError

#: Distinct ids per sparse column of the Criteo Kaggle data (as published with facebookresearch/dlrm).
CRITEO_CARDINALITIES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)

#: Rows per chunk: the unit of generation and of Parquet row groups.
CHUNK_ROWS = 65_536

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_INTERACTION_WIDTH = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickLogSpec:
    """Everything that decides the contents of a click log."""

    #: Rows of the whole log; drift is relative to it.
    rows: int
    seed: int = 0
    num_dense: int = 13
    cardinalities: tuple[int, ...] = CRITEO_CARDINALITIES
    #: No column has more distinct ids than this; None: as the cardinalities say.
    cardinality_max: int | None = None
    #: Exponent of the bounded Zipf distribution, >= 0; 0 is uniform.
    alpha: float = 1.05
    #: How often, on average, a rank of the distribution is handed to another id during the log, >= 0.
    drift: float = 1.0
    #: Mean label, in (0, 1), before drift.
    label_mean: float = 0.25
    #: Standard deviation of the logit, about; 0 makes labels pure noise.
    signal: float = 1.5
    #: Part of the signal's variance that only pairs of features carry, in [0, 1].
    interaction: float = 0.2
    #: Feature name -> mean bag length: such a column holds lists of 0 to twice as many ids.
    multi_hot: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def dense_names(self) -> tuple[str, ...]:
        return tuple(f"i{i + 1}" for i in range(self.num_dense))

    @property
    def sparse_names(self) -> tuple[str, ...]:
        return tuple(f"c{i + 1}" for i in range(len(self.cardinalities)))

    @property
    def num_ids(self) -> dict[str, int]:
        """Feature name -> number of distinct ids it can have; ids are 0 to that number - 1."""
        limit = self.cardinality_max or max(self.cardinalities)
        return {name: min(n, limit) for name, n in zip(self.sparse_names, self.cardinalities)}

    @property
    def num_chunks(self) -> int:
        return -(-self.rows // CHUNK_ROWS)

    def validate(self) -> None:
        """Raise ConfigError naming the field, its value and the allowed range."""
        checks = (
            ("rows", self.rows, self.rows >= 1, ">= 1"),
            ("num_dense", self.num_dense, self.num_dense >= 0, ">= 0"),
            ("cardinalities", self.cardinalities, bool(self.cardinalities) and min(self.cardinalities) >= 1, ">= 1"),
            ("cardinality_max", self.cardinality_max, (self.cardinality_max or 1) >= 1, ">= 1"),
            ("alpha", self.alpha, self.alpha >= 0, ">= 0"),
            ("drift", self.drift, self.drift >= 0, ">= 0"),
            ("label_mean", self.label_mean, 0 < self.label_mean < 1, "in (0, 1)"),
            ("signal", self.signal, self.signal >= 0, ">= 0"),
            ("interaction", self.interaction, 0 <= self.interaction <= 1, "in [0, 1]"),
        )
        for name, value, is_ok, allowed in checks:
            if not is_ok:
                raise ConfigError(f"synth: {name} is {value}; it must be {allowed}")
        for name, length in self.multi_hot.items():
            if name not in self.sparse_names or length < 1:
                raise ConfigError(f"synth: multi_hot has {name}: {length}; it maps c1.. to mean lengths >= 1")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows of a click log: the Arrow table, and the true probability of each label (float64 [n])."""

    table: pa.Table
    probability: np.ndarray


class ClickLog:
    """Makes the chunks of a spec. Construction draws one sample chunk, to find the bias for ``label_mean``."""

    def __init__(self, spec: ClickLogSpec) -> None:
        spec.validate()
        self.spec = spec
        num_effects = spec.num_dense + len(spec.cardinalities)
        # Pairs of neighbouring features interact; a lone feature has no pair.
        self._pairs = [(i, i + 1) for i in range(0, len(spec.cardinalities) - 1, 2)]
        pair_share = spec.interaction if self._pairs else 0.0
        self._effect_scale = spec.signal * np.sqrt((1 - pair_share) / num_effects)
        self._pair_scale = spec.signal * np.sqrt(pair_share / max(1, len(self._pairs)) / _INTERACTION_WIDTH)
        signs = hash_to_unit(np.arange(spec.num_dense), spec.seed, 0) < 0
        self._dense_weights = np.where(signs, -1.0, 1.0) * self._effect_scale
        self._bias = 0.0
        self._bias = self._bias_for(spec.label_mean)

    def chunk(self, index: int) -> Chunk:
        """Rows [index * CHUNK_ROWS, ...) of the log; only the last chunk is shorter."""
        spec = self.spec
        first = index * CHUNK_ROWS
        num_rows = min(CHUNK_ROWS, spec.rows - first)
        assert index >= 0 and num_rows > 0, f"chunk {index} of {spec.num_chunks}"
        rng = np.random.default_rng((spec.seed, index))
        normal = rng.standard_normal((spec.num_dense, num_rows))
        time = (first + np.arange(num_rows)) / spec.rows
        bags = [self._draw_bags(f, time, rng) for f in range(len(spec.cardinalities))]
        probability = 1.0 / (1.0 + np.exp(-(self._bias + self._logit(normal, bags))))
        label = rng.random(num_rows) < probability
        columns: dict[str, pa.Array] = {"label": pa.array(label.astype(np.int8))}
        for name, values in zip(spec.dense_names, normal):
            # Heavy-tailed counts under the usual logarithm: ln(1 + e^(1.5 z + 1)) is smooth in z and >= 0.
            columns[name] = pa.array(np.logaddexp(0.0, 1.5 * values + 1.0).astype(np.float32))
        for name, (ids, lengths) in zip(spec.sparse_names, bags):
            columns[name] = pa.array(ids) if lengths is None else _list_array(ids, lengths)
        return Chunk(pa.table(columns), probability)

    def _draw_bags(self, f: int, time: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids of feature f, row by row, and the bag lengths (None: one id a row)."""
        spec = self.spec
        name = spec.sparse_names[f]
        num_ids = spec.num_ids[name]
        lengths = None
        if name in spec.multi_hot:
            lengths = rng.integers(0, 2 * spec.multi_hot[name] + 1, len(time))
            time = np.repeat(time, lengths)
        ranks = zipf_ranks(len(time), num_ids, spec.alpha, rng)
        if spec.drift > 0:
            # Each rank changes hands at its own moments, so that the hot set turns over gradually.
            phase = hash_to_unit(ranks, spec.seed, 1000 + f) / (2 * np.sqrt(3.0)) + 0.5
            version = np.floor(time * spec.drift + phase).astype(np.int64)
            ranks = (ranks + version * (num_ids // 2 + 7919)) % num_ids
        return scatter_ids(ranks, num_ids, seed=spec.seed + f), lengths

    def _logit(self, normal: np.ndarray, bags: list[tuple[np.ndarray, np.ndarray | None]]) -> np.ndarray:
        """The planted logit [n], without the bias."""
        spec = self.spec
        logit = self._dense_weights @ normal
        for f, (ids, lengths) in enumerate(bags):
            logit += self._effect_scale * _bag_mean(hash_to_unit(ids, spec.seed, 2000 + f), lengths)
        if self._pair_scale > 0:
            for i, j in self._pairs:
                for k in range(_INTERACTION_WIDTH):
                    left, right = (
                        _bag_mean(hash_to_unit(bags[f][0], spec.seed, 3000 + f * _INTERACTION_WIDTH + k), bags[f][1])
                        for f in (i, j)
                    )
                    logit += self._pair_scale * left * right
        return logit

    def _bias_for(self, label_mean: float) -> float:
        """The bias at which the first chunk's mean probability is ``label_mean``, by bisection."""
        p = np.clip(self.chunk(0).probability, 1e-12, 1 - 1e-12)
        logit = np.log(p / (1 - p))
        low, high = -30.0, 30.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            if np.mean(1 / (1 + np.exp(-(logit + middle)))) < label_mean:
                low = middle
            else:
                high = middle
        return 0.5 * (low + high)


def hash_to_unit(ids: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """A number of mean 0 and variance 1 for each id: float64, uniform in [-sqrt(3), sqrt(3)), a pure function of
    (seed, stream, id). The mixing steps are those of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    key = (seed * 0xD1B54A32D192ED03 + stream * 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF
    x = ids.astype(np.uint64) * _GOLDEN + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5) * (2 * np.sqrt(3.0))


def _bag_mean(values: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Mean of each bag; 0 for an empty one."""
    if lengths is None:
        return values
    sums = np.bincount(np.repeat(np.arange(len(lengths)), lengths), values, minlength=len(lengths))
    return sums / np.maximum(lengths, 1)


def _list_array(ids: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
