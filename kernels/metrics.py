"""Metrics of binary predictions that merge across workers exactly: the state is integers and merging is addition.

AUC, log loss, normalised entropy (NE), calibration and means, over the run's lifetime and over a window of the last
steps, for one or many tasks. Floating point sums depend on their order; here each sample's weight and loss are rounded
once to a fixed-point integer, and everything afterwards is integer addition. So the state after the same samples is
bit-equal whatever the number of workers, the order of merging, or the place at which a run was resumed.

Invariants (tests name them):

* M1 merge is associative and commutative, and equals one update with all the samples.
* M2 state is bounded: ``(window_slots + 1) * num_tasks * (2 * num_bins + 5)`` int64, whatever the number of updates.
* M3 the reported AUC differs from the exact (tie-aware) AUC of the same samples by at most ``auc_error_max``.
* M4 what is not defined (an empty state, AUC and NE of one class only) is ``nan``, never an exception.

AUC: predictions are counted in bins of equal width in the logit, positives and negatives apart. A pair in different
bins is ordered exactly; a pair in one bin counts 1/2 where the truth lies in [0, 1]. Hence M3 with
``auc_error_max = sum_b P_b N_b / (2 P N)`` (own derivation), computed from the same bins. Equal width in the logit
keeps that small at the low click rates where bins of equal width in the probability do not.

Torch is imported only by ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.kernels.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    import torch

#: Predictions are clipped to probabilities whose logit lies in [-LOGIT_MAX, LOGIT_MAX]: 1.1e-7 from 0 and from 1.
LOGIT_MAX = 16.0
PROBABILITY_MIN = 1.0 / (1.0 + float(np.exp(LOGIT_MAX)))

# Weights are integers of 2^-24: a lifetime holds a total weight of 2^39. Sums are a whole and a 2^-40 fraction part.
_WEIGHT_UNIT = 1 << 24
_FRACTION_BITS = 40
_FRACTION_UNIT = float(1 << _FRACTION_BITS)
_FRACTION_MASK = (1 << _FRACTION_BITS) - 1

# Columns of the sums: number of samples, then whole and fraction parts of sum(w * loss) and sum(w * prediction).
_SUMS = 5

#: What ``compute`` returns, in the order in which a table prints it.
METRIC_NAMES = (
    "auc",
    "auc_error_max",
    "log_loss",
    "ne",
    "calibration",
    "label_mean",
    "prediction_mean",
    "weight_sum",
    "num_samples",
)


class Samples(NamedTuple):
    """Samples that are fit to be counted: float64 [B, num_tasks], and their weights or None."""

    predictions: np.ndarray
    labels: np.ndarray
    weight_units: np.ndarray | None


class BinaryMetrics:
    """Mergeable metrics of one rank; the global ones are those of the merged state of all ranks.

    ``update`` needs about 0.1 ms for 2,048 samples of one task. Not thread-safe.
    """

    def __init__(
        self,
        tasks: Sequence[str] = ("",),
        *,
        num_bins: int = 8192,
        window_steps: int = 100,
        window_slots: int = 10,
    ) -> None:
        """Make an empty state.

        Args:
            tasks: names of the tasks, in the column order of ``update``; the names prefix the keys of ``compute``.
            num_bins: AUC bins in the logit range [-16, 16], >= 2.
            window_steps: length of the window in steps, >= 1, a multiple of ``window_slots``.
            window_slots: parts of the window, >= 1. The window drops whole parts: it covers the last ``window_steps``
                steps less at most ``window_steps / window_slots - 1``.

        Raises:
            ConfigError: an argument is out of range.
        """
        if not tasks or len(set(tasks)) != len(tasks):
            raise ConfigError(f"tasks is {list(tasks)}; it must name at least one task, each once")
        if num_bins < 2:
            raise ConfigError(f"num_bins is {num_bins}; it must be >= 2")
        if window_slots < 1 or window_steps < 1 or window_steps % window_slots:
            raise ConfigError(
                f"window_steps is {window_steps} and window_slots {window_slots}; "
                "both must be >= 1 and the first a multiple of the second"
            )
        self.tasks = tuple(tasks)
        self.num_bins = num_bins
        self.window_steps = window_steps
        self.window_slots = window_slots
        self._slot_steps = window_steps // window_slots
        # The last row holds what has left the window; lifetime = sum of all rows. So an update touches one row only.
        rows = window_slots + 1
        self._bins = np.zeros((rows, len(tasks), 2, num_bins), np.int64)
        self._sums = np.zeros((rows, len(tasks), _SUMS), np.int64)
        # Number of the newest slot (step // slot_steps) that was opened; -1 before the first update.
        self._slot = -1

    def update(self, predictions: Any, labels: Any, weights: Any = None, *, step: int = 0) -> None:
        """Count the samples of one step.

        Args:
            predictions: probabilities [B], or [B, num_tasks]; tensor or array of any float type, on any device.
            labels: same shape, in [0, 1]; a label between 0 and 1 counts as that part of a positive sample.
            weights: [B] or same shape, >= 0; None is 1. Rounded to multiples of 2^-24.
            step: global step, >= 0. It moves the window; call with an empty batch if this rank had no samples.

        Raises:
            DataError: shapes differ, or a value is not finite or out of range. The state is unchanged.
        """
        self.add(self.read(predictions, labels, weights), step=step)

    def read(self, predictions: Any, labels: Any, weights: Any = None) -> Samples:
        """Samples as ``add`` takes them. Arguments and errors as of ``update``; changes nothing."""
        p = _as_float64(predictions, "predictions").reshape(-1, len(self.tasks))
        y = _as_float64(labels, "labels").reshape(-1, len(self.tasks))
        if p.shape != y.shape:
            raise DataError(f"predictions are {p.shape[0]} x {p.shape[1]} but labels {y.shape[0]} x {y.shape[1]}")
        w = _weight_units(weights, p.shape)
        if p.shape[0]:
            _check_range(p, "prediction")
            _check_range(y, "label")
        return Samples(p, y, w)

    def add(self, samples: Samples, *, step: int = 0) -> None:
        """Count what ``read`` returned, as of step ``step``."""
        self._open_slot(step // self._slot_steps)
        if samples.predictions.shape[0]:
            row = self._slot % self.window_slots
            self._add(row, samples.predictions, samples.labels, samples.weight_units)

    def _add(self, row: int, p: np.ndarray, y: np.ndarray, w: np.ndarray | None) -> None:
        """Add checked samples to one row of the state. p, y [B, T] float64; w [B, T] whole float64 units, or None."""
        num_samples, num_tasks = p.shape
        p = np.clip(p, PROBABILITY_MIN, 1.0 - PROBABILITY_MIN)
        log_p, log_q = np.log(p), np.log1p(-p)
        logit = log_p - log_q
        loss = -(y * logit + log_q)  # -(y log p + (1 - y) log q)
        index = ((logit + LOGIT_MAX) * (self.num_bins / (2 * LOGIT_MAX))).astype(np.int64)
        np.clip(index, 0, self.num_bins - 1, out=index)
        positive = y * _WEIGHT_UNIT if w is None else y * w
        positive = np.rint(positive).astype(np.int64)
        negative = (_WEIGHT_UNIT if w is None else w.astype(np.int64)) - positive
        if num_tasks > 1:
            index += np.arange(num_tasks) * (2 * self.num_bins)
        flat = self._bins[row].reshape(-1)
        index = index.reshape(-1)
        np.add.at(flat, index, negative.reshape(-1))
        np.add.at(flat, index + self.num_bins, positive.reshape(-1))

        sums = self._sums[row]
        sums[:, 0] += num_samples
        for column, values in ((1, loss), (3, p)):
            whole, fraction = _fixed_point_sum(values if w is None else values * (w / _WEIGHT_UNIT))
            sums[:, column] += whole
            sums[:, column + 1] += fraction
        _carry(sums)

    def _open_slot(self, slot: int) -> None:
        """Advance the window to ``slot``: rows that leave it are added to the last row. Older steps count as now."""
        if slot <= self._slot:
            return
        first_lost = max(self._slot + 1, slot - self.window_slots + 1)
        for opened in range(first_lost, slot + 1):
            row = opened % self.window_slots
            self._bins[-1] += self._bins[row]
            self._sums[-1] += self._sums[row]
            self._bins[row] = 0
            self._sums[row] = 0
        _carry(self._sums[-1])
        self._slot = slot

    def merge_(self, other: BinaryMetrics) -> BinaryMetrics:
        """Add the samples of ``other`` (unchanged) to this state; exact and order-free (M1). Returns self.

        Raises:
            ConfigError: the two were made with different arguments.
        """
        if self._shape() != other._shape():
            raise ConfigError(f"metrics of {other._shape()} cannot be merged into {self._shape()}")
        if other._slot < self._slot:
            other = other.copy()
            other._open_slot(self._slot)
        self._open_slot(other._slot)
        self._bins += other._bins
        self._sums += other._sums
        _carry(self._sums)
        return self

    def copy(self) -> BinaryMetrics:
        """An independent copy."""
        result = BinaryMetrics(
            self.tasks, num_bins=self.num_bins, window_steps=self.window_steps, window_slots=self.window_slots
        )
        result._bins[:], result._sums[:], result._slot = self._bins, self._sums, self._slot
        return result

    def reset(self) -> None:
        """Forget everything."""
        self._bins[:], self._sums[:], self._slot = 0, 0, -1

    def compute(self, *, window: bool = False) -> dict[str, float]:
        """Values of METRIC_NAMES, keyed by name, or by ``task/name`` when there is more than one task.

        * auc: ties count 1/2. nan unless both classes have weight. True value within auc_error_max (M3).
        * log_loss: mean of -(y ln p + (1-y) ln(1-p)) by weight, p clipped to [1.1e-7, 1 - 1.1e-7].
        * ne: log_loss / entropy of the mean label (He et al., ADKDD 2014, section 3). nan for one class only.
        * calibration: sum of predictions / sum of labels. nan without a positive.
        * label_mean, prediction_mean: by weight. weight_sum: total weight. num_samples: unweighted count.

        Empty: the two counts are 0, the rest nan (M4).
        """
        used = slice(0, self.window_slots) if window else slice(None)
        bins, sums = self._bins[used].sum(axis=0), self._sums[used].sum(axis=0)
        _carry(sums)
        result: dict[str, float] = {}
        for t, task in enumerate(self.tasks):
            values = _values(bins[t], sums[t])
            result.update(values if len(self.tasks) == 1 else {f"{task}/{k}": v for k, v in values.items()})
        return result

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state as int64 CPU tensors (copies): bins, sums, slot. Ranks may be summed element by element
        only if their slots agree; ``merge_`` handles slots that differ."""
        import torch

        return {
            "bins": torch.from_numpy(self._bins.reshape(-1).copy()),
            "sums": torch.from_numpy(self._sums.reshape(-1).copy()),
            "slot": torch.tensor([self._slot], dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state, bit for bit.

        Raises:
            CheckpointError: a tensor is missing or has another size or dtype; the state is unchanged.
        """
        arrays = {}
        for name, size in (("bins", self._bins.size), ("sums", self._sums.size), ("slot", 1)):
            if name not in state:
                raise CheckpointError(f"metric state has no tensor {name!r}; it has {sorted(state)}")
            array = state[name].detach().cpu().numpy()
            if array.dtype != np.int64 or array.size != size:
                raise CheckpointError(
                    f"metric state {name!r} is {array.dtype}[{array.size}], expected int64[{size}]: it was written "
                    "with other tasks, num_bins, window_steps or window_slots"
                )
            arrays[name] = array
        self._bins[:] = arrays["bins"].reshape(self._bins.shape)
        self._sums[:] = arrays["sums"].reshape(self._sums.shape)
        self._slot = int(arrays["slot"].reshape(-1)[0])

    def _shape(self) -> dict[str, Any]:
        return {
            "tasks": self.tasks,
            "num_bins": self.num_bins,
            "window_steps": self.window_steps,
            "window_slots": self.window_slots,
        }


def _values(bins: np.ndarray, sums: np.ndarray) -> dict[str, float]:
    """Metrics of one task from its bins [2, num_bins] (negative, positive weight units) and its carried sums [5]."""
    negative, positive = bins.astype(np.float64) / _WEIGHT_UNIT
    num_negative, num_positive = float(negative.sum()), float(positive.sum())
    weight = num_negative + num_positive
    nan = float("nan")
    result = dict.fromkeys(METRIC_NAMES, nan)
    result["weight_sum"], result["num_samples"] = weight, int(sums[0])
    if not weight > 0:
        return result
    loss_sum, prediction_sum = (float(sums[i]) + float(sums[i + 1]) / _FRACTION_UNIT for i in (1, 3))
    label_mean = num_positive / weight
    result["log_loss"] = loss_sum / weight
    result["label_mean"] = label_mean
    result["prediction_mean"] = prediction_sum / weight
    if num_positive > 0:
        result["calibration"] = prediction_sum / num_positive
    if num_positive > 0 and num_negative > 0:
        entropy = -(label_mean * np.log(label_mean) + (1 - label_mean) * np.log1p(-label_mean))
        result["ne"] = float(result["log_loss"] / entropy)
        below = np.cumsum(negative) - negative
        pairs = num_positive * num_negative
        same_bin = float(positive @ negative)
        result["auc"] = (float(positive @ below) + 0.5 * same_bin) / pairs
        result["auc_error_max"] = 0.5 * same_bin / pairs
    return result


def auc_reference(predictions: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Exact, tie-aware AUC of 1-D arrays, O(B log B). The readable oracle of ``BinaryMetrics``; nan for one class."""
    w = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
    y = np.asarray(labels, np.float64)
    _, inverse = np.unique(predictions, return_inverse=True)
    positive, negative = np.bincount(inverse, w * y), np.bincount(inverse, w * (1 - y))
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive @ below + 0.5 * positive @ negative) / pairs) if pairs > 0 else float("nan")


def _fixed_point_sum(values: np.ndarray) -> tuple[np.ndarray | int, np.ndarray]:
    """Whole and fraction parts [T] of the column sums of values [B, T] >= 0, each value rounded to 2^-40."""
    if values.max() * values.shape[0] < 2.0**22:  # The sum fits the fraction alone; the result is the same integer.
        return 0, np.rint(values * _FRACTION_UNIT).astype(np.int64).sum(axis=0)
    whole = np.floor(values)
    fraction = np.rint((values - whole) * _FRACTION_UNIT)
    return whole.astype(np.int64).sum(axis=0), fraction.astype(np.int64).sum(axis=0)


def _carry(sums: np.ndarray) -> None:
    """Move whole units out of the fraction parts of sums [..., 5], in place; the pair's value is unchanged."""
    sums[..., 1::2] += sums[..., 2::2] >> _FRACTION_BITS
    sums[..., 2::2] &= _FRACTION_MASK


def _as_float64(values: Any, name: str) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values if values.dtype.itemsize >= 4 else values.float()).numpy()
    array = np.asarray(values, np.float64)
    if array.ndim not in (1, 2):
        raise DataError(f"{name} have {array.ndim} dimensions; they must be [B] or [B, num_tasks]")
    return array


def _weight_units(weights: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """Weights as whole numbers of 2^-24, float64 [B, T], or None."""
    if weights is None:
        return None
    w = _as_float64(weights, "weights")
    w = w.reshape(-1, 1) if w.ndim == 1 else w
    if w.shape[0] != shape[0] or w.shape[1] not in (1, shape[1]):
        raise DataError(f"weights are {w.shape[0]} x {w.shape[1]} but predictions {shape[0]} x {shape[1]}")
    # The comparison is written so that NaN fails it; 2^29 keeps sums over a batch of 2^10 below 2^63 / 2^24.
    if w.size and not (w.min() >= 0 and w.max() <= 2.0**29):
        raise DataError(f"a weight is {w[~((w >= 0) & (w <= 2.0**29))][0]}; it must be in [0, 2^29]")
    return np.broadcast_to(np.rint(w * _WEIGHT_UNIT), shape)


def _check_range(values: np.ndarray, name: str) -> None:
    # Written so that NaN fails the comparison.
    if not (values.min() >= 0.0 and values.max() <= 1.0):
        bad = values[~((values >= 0.0) & (values <= 1.0))][0]
        raise DataError(f"a {name} is {bad}; it must be in [0, 1]")
