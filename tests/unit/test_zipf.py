"""Bounded Zipf ids: invariants Z1-Z3 of shoal.jobs.zipf, and the named workloads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.jobs import synth
from shoal.jobs.zipf import bounded_zipf, scatter_ids, zipf_ranks


@pytest.mark.parametrize("num_ids", [1, 2, 3, 5, 64, 1000, 65_537])
def test_scatter_is_a_bijection_z2(num_ids):
    scattered = scatter_ids(np.arange(num_ids), num_ids)
    assert scattered.dtype == np.int64
    assert np.array_equal(np.sort(scattered), np.arange(num_ids))


def test_scatter_moves_hot_ids_apart_and_depends_on_the_seed():
    hot = np.sort(scatter_ids(np.arange(1000), 10_000_000))
    assert np.quantile(np.diff(hot), 0.1) > 500  # Expected about 1,000 for a random placement's lower tenth.
    assert not np.array_equal(hot, np.sort(scatter_ids(np.arange(1000), 10_000_000, seed=1)))


@settings(max_examples=30, deadline=None)
@given(num_ids=st.integers(1, 2**40), alpha=st.floats(0, 3), seed=st.integers(0, 2**32))
def test_ids_lie_in_range_z1(num_ids, alpha, seed):
    for is_scattered in (True, False):
        ids = bounded_zipf(500, num_ids, alpha, np.random.default_rng(seed), is_scattered=is_scattered)
        assert ids.dtype == np.int64 and ids.shape == (500,)
        assert ids.min() >= 0 and ids.max() < num_ids


@pytest.mark.parametrize(("num_ids", "alpha"), [(10, 1.2), (1000, 0.8), (200_000, 1.05), (200_000, 1.0), (50_000, 1.2)])
def test_frequencies_follow_the_exact_law_z3(num_ids, alpha):
    n = 400_000
    ranks = zipf_ranks(n, num_ids, alpha, np.random.default_rng(0))
    p = np.arange(1, num_ids + 1, dtype=np.float64) ** -alpha
    p /= p.sum()
    # Ranks in 40 classes of about equal probability: chi-square with 39 degrees of freedom, 99.99 % quantile 83.
    edges = np.unique(np.searchsorted(np.cumsum(p), np.arange(1, 40) / 40))
    classes = np.digitize(np.arange(num_ids), edges)
    want = n * np.bincount(classes, p)
    got = np.bincount(classes[ranks], minlength=len(want))
    assert ((got - want)[want > 0] ** 2 / want[want > 0]).sum() < 83


def test_unbounded_memory_is_never_needed():
    assert bounded_zipf(1000, 2**62, 1.1, np.random.default_rng(0)).max() < 2**62


def test_same_seed_same_ids():
    a, b = (bounded_zipf(1000, 12345, 1.2, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(a, b)


@pytest.mark.parametrize(("num_ids", "alpha"), [(0, 1.0), (5, -0.1), (5, float("nan"))])
def test_bad_arguments_are_refused(num_ids, alpha):
    with pytest.raises(ValueError, match="bounded_zipf"):
        bounded_zipf(3, num_ids, alpha, np.random.default_rng(0))


def test_workloads_have_the_shapes_and_duplication_they_claim():
    for workload in (synth.embedding_op("zipf", 20), synth.many_tables(), synth.dlrm_step(128), synth.wide_rows()):
        values, offsets, lengths = workload.values(3), workload.offsets(), workload.lengths()
        assert len(values) == offsets[-1] == lengths.sum() == workload.ids_per_batch
        assert np.array_equal(np.diff(offsets), lengths)
        assert values.min() >= 0 and values.max() < workload.num_embeddings
        assert np.array_equal(values, workload.values(3))
        assert not np.array_equal(values, workload.values(4))
    report = synth.embedding_op("zipf", 1).describe(1)
    assert report["duplication_factor"] * report["unique_ids_per_batch"] == pytest.approx(81_920)
    assert 2 < report["duplication_factor"] < 8
    assert synth.embedding_op("uniform", 1).describe(1)["duplication_factor"] < 1.1


def test_workload_as_arrow_holds_the_same_ids():
    workload = synth.wide_rows()
    batch = workload.record_batch(0)
    assert batch.num_rows == workload.batch_size
    ids = workload.values(0).reshape(workload.num_features, -1)
    assert batch.column("c1000").flatten().to_pylist() == ids[-1].tolist()
    scalar = synth.dlrm_step(64).record_batch(0)
    assert scalar.schema.names[:3] == ["label", "i1", "i2"] and len(scalar.schema) == 1 + 13 + 26
