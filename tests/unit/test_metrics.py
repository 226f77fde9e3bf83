"""Binary metrics: invariants M1-M4 of shoal.kernels.metrics, and parity with scikit-learn."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.errors import CheckpointError, ConfigError, DataError
from shoal.kernels.metrics import METRIC_NAMES, BinaryMetrics, auc_reference

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def clicks(n: int, seed: int = 0, spread: float = 1.5, bias: float = -1.0):
    """Predictions, labels and weights of n samples whose labels follow the predictions."""
    rng = np.random.default_rng(seed)
    p = 1 / (1 + np.exp(-(bias + spread * rng.standard_normal(n))))
    return p, (rng.random(n) < p).astype(np.float64), rng.random(n) * 3


def measured(*update_args, **options) -> dict[str, float]:
    metrics = BinaryMetrics(**options)
    metrics.update(*update_args)
    return metrics.compute()


def test_values_equal_scikit_learn():
    p, y, w = clicks(20_000)
    for weights in (None, w):
        got = measured(p, y, weights)
        want_auc = sklearn_metrics.roc_auc_score(y, p, sample_weight=weights)
        assert abs(got["auc"] - want_auc) <= got["auc_error_max"] + 1e-7
        assert abs(got["auc"] - want_auc) < 2e-5  # In practice far inside the bound.
        want_loss = sklearn_metrics.log_loss(y, p, sample_weight=weights)
        assert got["log_loss"] == pytest.approx(want_loss, abs=1e-6)
        mean = np.average(y, weights=weights)
        assert got["label_mean"] == pytest.approx(mean, abs=1e-7)
        entropy = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
        assert got["ne"] == pytest.approx(want_loss / entropy, abs=1e-6)
        calibration = np.average(p, weights=weights) / mean
        assert got["calibration"] == pytest.approx(calibration, abs=1e-6)
        assert got["num_samples"] == 20_000


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(2, 400),
    num_bins=st.sampled_from([2, 5, 64, 8192]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 20.0]),
    is_weighted=st.booleans(),
)
def test_auc_is_within_the_stated_bound_m3(seed, n, num_bins, spread, is_weighted):
    p, y, w = clicks(n, seed, spread)
    y[:2] = 0.0, 1.0
    p = np.clip(p, 1e-6, 1 - 1e-6)
    # Multiples of 2^-24, so that the rounding of weights is not part of the comparison.
    w = np.rint(w * 2**24) / 2**24 + 2**-20 if is_weighted else None
    got = measured(p, y, w, num_bins=num_bins)
    want = sklearn_metrics.roc_auc_score(y, p, sample_weight=w)
    assert auc_reference(p, y, w) == pytest.approx(want, abs=1e-12)
    assert abs(got["auc"] - want) <= got["auc_error_max"] + 1e-9


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 300), max_size=5), is_weighted=st.booleans())
def test_merge_of_any_split_in_any_order_equals_one_update_m1(seed, cuts, is_weighted):
    p, y, w = clicks(300, seed)
    w = w if is_weighted else None
    whole = BinaryMetrics()
    whole.update(p, y, w)
    parts = []
    edges = [0, *sorted(cuts), 300]
    for low, high in itertools.pairwise(edges):
        part = BinaryMetrics()
        part.update(p[low:high], y[low:high], None if w is None else w[low:high])
        parts.append(part)
    np.random.default_rng(seed).shuffle(parts)
    merged = parts[0]
    for part in parts[1:]:
        merged.merge_(part)
    assert_same_state(merged, whole)


def assert_same_state(a: BinaryMetrics, b: BinaryMetrics) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_merge_aligns_windows_of_ranks_at_different_steps_m1():
    p, y, _ = clicks(64)
    ahead, behind = (BinaryMetrics(window_steps=4, window_slots=2) for _ in range(2))
    for step in range(9):
        ahead.update(p, y, step=step)
    for step in range(5):
        behind.update(p, y, step=step)
    merged = behind.copy().merge_(ahead)
    other_way = ahead.copy().merge_(behind)
    assert_same_state(merged, other_way)
    assert merged.compute()["num_samples"] == 14 * 64
    # Steps 6..8 of the rank ahead are in the window (slots 3 and 4); those of the other rank have left it.
    assert merged.compute(window=True)["num_samples"] == 3 * 64


def test_window_covers_the_last_steps_and_state_stays_bounded_m2():
    p, y, _ = clicks(10)
    metrics = BinaryMetrics(window_steps=20, window_slots=4)
    size = sum(t.numel() for t in metrics.state_dict().values())
    for step in range(1000):
        metrics.update(p, y, step=step)
        covered = metrics.compute(window=True)["num_samples"] / 10
        assert min(step + 1, 16) <= covered <= 20
    assert metrics.compute()["num_samples"] == 10_000
    assert sum(t.numel() for t in metrics.state_dict().values()) == size == 5 * (2 * 8192 + 5) + 1


def test_window_forgets_after_a_jump_in_steps():
    p, y, _ = clicks(10)
    metrics = BinaryMetrics(window_steps=10, window_slots=5)
    metrics.update(p, y, step=3)
    metrics.update([], [], step=10**9)
    assert metrics.compute(window=True)["num_samples"] == 0
    assert metrics.compute()["num_samples"] == 10


def test_empty_and_one_class_are_nan_m4():
    empty = BinaryMetrics().compute()
    assert list(empty) == list(METRIC_NAMES)
    assert empty["num_samples"] == empty["weight_sum"] == 0
    assert all(math.isnan(empty[k]) for k in METRIC_NAMES if k not in ("num_samples", "weight_sum"))
    negatives = measured([0.1, 0.2], [0, 0])
    assert math.isnan(negatives["auc"]) and math.isnan(negatives["ne"]) and math.isnan(negatives["calibration"])
    assert negatives["log_loss"] == pytest.approx(-(math.log(0.9) + math.log(0.8)) / 2, abs=1e-9)
    positives = measured([0.1, 0.2], [1, 1])
    assert math.isnan(positives["auc"]) and positives["calibration"] == pytest.approx(0.15, abs=1e-9)
    weightless = measured([0.1, 0.9], [0, 1], [0.0, 0.0])
    assert math.isnan(weightless["auc"]) and math.isnan(weightless["log_loss"]) and weightless["num_samples"] == 2


def test_constant_prediction_has_auc_one_half():
    assert measured([0.5] * 10, [0, 1] * 5)["auc"] == 0.5


def test_saturated_predictions_are_finite():
    got = measured(torch.tensor([0.0, 1.0, 1.0, 0.0]), [0, 1, 0, 1])
    assert math.isfinite(got["log_loss"]) and got["auc"] == 0.5


def test_tasks_are_independent_and_share_weights():
    p, y, w = clicks(500)
    q, z, _ = clicks(500, seed=9)
    both = BinaryMetrics(("click", "like"))
    both.update(np.stack((p, q), 1), np.stack((y, z), 1), w)
    got = both.compute()
    for task, single in (("click", measured(p, y, w)), ("like", measured(q, z, w))):
        for name, value in single.items():
            assert got[f"{task}/{name}"] == pytest.approx(value, abs=1e-15), name


def test_soft_labels_count_as_parts_of_samples():
    soft = measured([0.2, 0.7], [0.25, 0.5])
    hard = measured([0.2, 0.2, 0.7, 0.7], [1, 0, 1, 0], [0.25, 0.75, 0.5, 0.5])
    for name in ("auc", "log_loss", "label_mean", "calibration"):
        assert soft[name] == pytest.approx(hard[name], abs=1e-9)


def test_large_weights_take_the_wide_sum_and_agree():
    p, y, w = clicks(1000)
    small, large = measured(p, y, w), measured(p, y, w * 2**20)
    for name in ("auc", "log_loss", "calibration", "label_mean"):
        assert large[name] == pytest.approx(small[name], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensor_dtypes(dtype):
    p = torch.tensor([0.25, 0.75], dtype=dtype, requires_grad=True)
    assert measured(p, torch.tensor([0, 1], dtype=torch.int64))["auc"] == 1.0


def test_state_dict_round_trip_is_bit_exact_and_flat_int64():
    p, y, w = clicks(3000)
    metrics = BinaryMetrics(window_steps=6, window_slots=3)
    for step in range(5):
        metrics.update(p, y, w, step=step)
    state = metrics.state_dict()
    assert all(t.dtype == torch.int64 and t.ndim == 1 for t in state.values())
    resumed = BinaryMetrics(window_steps=6, window_slots=3)
    resumed.load_state_dict(state)
    for step in range(5, 12):
        metrics.update(p, y, w, step=step)
        resumed.update(p, y, w, step=step)
    assert_same_state(metrics, resumed)
    assert resumed.compute(window=True) == metrics.compute(window=True)


def test_state_of_another_shape_is_refused():
    state = BinaryMetrics(num_bins=16).state_dict()
    with pytest.raises(CheckpointError, match="bins"):
        BinaryMetrics(num_bins=32).load_state_dict(state)
    del state["slot"]
    with pytest.raises(CheckpointError, match="slot"):
        BinaryMetrics(num_bins=16).load_state_dict(state)
    with pytest.raises(ConfigError, match="merged"):
        BinaryMetrics(num_bins=16).merge_(BinaryMetrics(num_bins=32))


@pytest.mark.parametrize(
    ("p", "y", "w", "message"),
    [
        ([0.5, math.nan], [0, 1], None, "prediction is nan"),
        ([0.5, 1.5], [0, 1], None, "prediction is 1.5"),
        ([0.5, 0.5], [0, -1], None, "label is -1"),
        ([0.5, 0.5], [0, 1], [1, -1], "weight is -1"),
        ([0.5, 0.5], [0, 1], [1, math.inf], "weight is inf"),
        ([0.5, 0.5], [0, 1, 1], None, "labels"),
        ([0.5, 0.5], [0, 1], [1], "weights"),
    ],
)
def test_bad_values_are_named_and_leave_the_state_unchanged(p, y, w, message):
    metrics = BinaryMetrics()
    with pytest.raises(DataError, match=message):
        metrics.update(p, y, w, step=500)
    assert_same_state(metrics, BinaryMetrics())


@pytest.mark.parametrize("options", [{"tasks": ()}, {"tasks": ("a", "a")}, {"num_bins": 1}, {"window_steps": 15}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        BinaryMetrics(**options)


def test_update_is_cheap():
    p, y, _ = clicks(2048)
    metrics = BinaryMetrics()
    seconds = []
    for step in range(200):
        start = time.perf_counter()
        metrics.update(p, y, step=step)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 300e-6  # About 80 us on the 2-core reference machine; the limit allows for a busy one.
