"""hashing: fixed bits (invariant 1), native equals numpy (2), every 64-bit id counts (3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels import hashing
from shoal.kernels.optim import initial_rows_reference
from shoal.kernels.rowstore import RowStore, initial_rows
from shoal.kernels.spec import DataType, TableSpec

EDGE_IDS = [0, 1, -1, 2, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 12345678901234567]
any_id = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EDGE_IDS)


def test_bits_are_fixed_for_ever():
    ids = np.array([0, 1, -1, 2**62], np.int64)
    # fmix64(1) is the published value of MurmurHash3's finaliser; the others pin our own construction.
    assert hashing.fmix64(ids.view(np.uint64))[:3].tolist() == [0, 0xB456BCFC34C2CB2C, 0x64B5720B4B825F21]
    assert hashing.init_keys(5, ids)[:2].tolist() == [0xC4213A90B4027C58, 0xC6F3B45DB117490D]
    assert hashing.rounding_keys(5, ids, 3)[:2].tolist() == [0x12856C84187E3E33, 0x6EB9B17AB072CCBE]
    bits = hashing.column_bits(hashing.init_keys(5, ids[1:2]), 3)
    assert bits.tolist() == [[0x94B23B8B, 0x1D914AF2, 0xD6528D01]]


@given(
    ids=st.lists(any_id, max_size=20),
    seed=st.integers(0, 2**64 - 1),
    dim=st.integers(1, 40),
    data_type=st.sampled_from([DataType.FP32, DataType.FP16, DataType.BF16]),
    bounds=st.tuples(st.floats(-10, 10), st.floats(-10, 10)).map(sorted),
)
@settings(max_examples=150, deadline=None)
def test_native_initial_rows_equal_numpy_bit_for_bit(ids, seed, dim, data_type, bounds):
    table = TableSpec(
        name="t", num_embeddings=0, embedding_dim=dim, seed=seed, data_type=data_type, init_min=bounds[0],
        init_max=bounds[1],
    )  # fmt: skip
    tensor = torch.tensor(ids, dtype=torch.int64)
    expected = initial_rows_reference(table, tensor).to(torch.float32)
    assert torch.equal(initial_rows(table, tensor), expected)


@given(low=st.floats(-1e3, 1e3), width=st.floats(0, 1e3))
@settings(max_examples=100, deadline=None)
def test_initial_values_stay_in_their_range(low, width):
    values = hashing.initial_values_reference(3, np.arange(500), 4, low, low + width)
    slack = abs(low + width) * 2**-23 + 1e-30
    assert values.min() >= np.float32(low) - slack and values.max() <= low + width + slack


def test_initial_values_are_uniform_and_use_id_seed_and_column():
    values = hashing.initial_values_reference(7, np.arange(50_000), 8, -0.5, 0.5)
    assert abs(values.mean()) < 0.002 and abs(values.std() - np.sqrt(1 / 12)) < 0.001
    correlation = np.corrcoef(values, rowvar=False) - np.eye(8)
    assert np.abs(correlation).max() < 0.03
    neighbours = np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]
    other_seed = hashing.initial_values_reference(8, np.arange(50_000), 8, -0.5, 0.5)
    assert abs(neighbours) < 0.03 and abs(np.corrcoef(values[:, 0], other_seed[:, 0])[0, 1]) < 0.03
    assert len(np.unique(values[:, 0])) > 49_000


def test_the_multiply_is_exact_so_fused_multiply_add_gives_the_same_bits():
    low, unit, steps = hashing.init_range(-0.013, 0.013)
    assert steps <= 2**24 and np.frexp(unit)[0] == 0.5
    units = np.arange(0, steps, 9973, dtype=np.uint32).astype(np.float32)
    fused = (units.astype(np.float64) * float(unit) + float(low)).astype(np.float32)
    assert np.array_equal(fused, low + units * unit)


@pytest.mark.parametrize("num_blocks", [1, 2, 64, 65536])
def test_row_blocks_are_the_top_bits_of_the_hash_and_even(num_blocks):
    ids = np.arange(-50_000, 50_000, dtype=np.int64)
    blocks = hashing.row_blocks(ids, num_blocks)
    assert blocks.max() < num_blocks
    hashes = hashing.fmix64(ids.view(np.uint64)).astype(object)
    assert blocks[:100].tolist() == [h * num_blocks >> 64 for h in hashes[:100]]
    if num_blocks == 64:
        counts = np.bincount(blocks, minlength=64)
        assert counts.min() > 1300 and counts.max() < 1830


def test_store_puts_ids_into_the_same_blocks_as_numpy():
    table = TableSpec(name="t", num_embeddings=0, embedding_dim=4, num_blocks=8)
    store = RowStore([table])
    store.add_all_blocks()
    ids = torch.arange(-500, 500)
    store.apply(0, ids, torch.ones(1000, 4), step=1, lr=0.1)
    for block in range(8):
        exported = store.export_block(0, block).ids.numpy()
        expected = ids.numpy()[hashing.row_blocks(ids.numpy(), 8) == block]
        assert np.array_equal(exported, np.sort(expected.view(np.uint64)).view(np.int64))


def decode_float16(patterns: np.ndarray) -> np.ndarray:
    return patterns.view(np.float16).astype(np.float64)


def decode_bfloat16(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("round_, decode, spacing", [
    (hashing.round_float16_reference, decode_float16, 2.0**-11),
    (hashing.round_bfloat16_reference, decode_bfloat16, 2.0**-8),
])  # fmt: skip
def test_stochastic_rounding_is_unbiased_and_keeps_representable_values(round_, decode, spacing):
    rng = np.random.default_rng(0)
    for value in (0.1, -0.7001, 3.3e-6, 1.0, 0.0, -2.0, 1e-7):
        values = np.full(20_000, value, np.float32)
        rounded = decode(round_(values, rng.integers(0, 2**32, values.size, dtype=np.uint32)))
        grid = max(abs(value) * 2 * spacing, 2.0**-24 if spacing < 2.0**-10 else 0)
        assert np.abs(rounded - value).max() <= grid
        assert abs(rounded.mean() - np.float64(np.float32(value))) <= grid * 0.02
        assert len(np.unique(rounded)) <= 2
    special = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, -0.0], np.float32)
    out = decode(round_(special, np.full(6, 2**32 - 1, np.uint32)))
    assert out[0] == np.inf and out[1] == -np.inf and np.isnan(out[2]) and np.isfinite(out[3:]).all()
