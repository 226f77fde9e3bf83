"""Triton kernels in the interpreter, on the CPU: the same bits as the native store and the torch references."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton (extra gpu-dev) is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from device_contract import DeviceRows, NativeRows, bits, check_training, make_table

from shoal.kernels.device import ops
from shoal.kernels.device.arena import DeviceArena
from shoal.kernels.errors import CapacityError
from shoal.kernels.pooling import segment_sum_reference
from shoal.kernels.spec import DataType, OptimizerKind, WeightDecayMode

CPU = torch.device("cpu")

KINDS = list(OptimizerKind)
TYPES = [DataType.FP32, DataType.FP16, DataType.BF16]
DECAYS = list(WeightDecayMode)


@pytest.mark.parametrize("data_type", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "decay"), [(8, 0), (3, 1), (20, 2)])
def test_updates_have_the_bits_of_the_native_store(kind, data_type, dim, decay):
    table = make_table(kind, data_type, dim, DECAYS[decay])
    check_training(DeviceRows(table, CPU), table, NativeRows(table))


@pytest.mark.parametrize("decay", DECAYS)
def test_rowwise_statistic_has_the_native_order_at_every_width(decay):
    for dim in (1, 7, 9, 33):
        table = make_table(OptimizerKind.ROWWISE_ADAGRAD, DataType.BF16, dim, decay)
        check_training(DeviceRows(table, CPU), table, NativeRows(table))


def test_low_precision_updates_saturate_and_keep_infinities_like_the_native_store():
    for data_type in (DataType.FP16, DataType.BF16):
        table = make_table(OptimizerKind.SGD, data_type, 8, WeightDecayMode.NONE)
        device, native = DeviceRows(table, CPU), NativeRows(table)
        ids = torch.tensor([5, 6])
        grads = torch.tensor([[3e38, -3e38, 7e4, -1e-6, 1e-7, 2e-8, 0.0, 1e-40]] * 2)
        grads[1, :2] = torch.tensor([float("inf"), float("nan")])
        for rows in (device, native):
            rows.apply(ids, grads, step=1, lr=1.0)
        np.testing.assert_array_equal(bits(device.read(ids)[0]), bits(native.read(ids)[0]))


def test_gather_gives_zeros_for_ids_without_a_row():
    table = make_table(OptimizerKind.SGD, DataType.FP32, 5, WeightDecayMode.NONE)
    rows = DeviceRows(table, CPU)
    ids = torch.tensor([4, 9])
    rows.apply(ids, torch.zeros(2, 5), step=1, lr=1.0)
    out = rows.lookup(torch.tensor([9, 77, 4, 9]))
    assert torch.equal(out[1], torch.zeros(5)) and torch.equal(out[0], out[3]) and not torch.equal(out[0], out[2])
    assert rows.lookup(torch.empty(0, dtype=torch.int64)).shape == (0, 5)


def test_growth_copies_nothing_and_is_bounded():
    table = make_table(OptimizerKind.ADAM, DataType.FP16, 4, WeightDecayMode.NONE)
    arena = DeviceArena(table, CPU, log2_chunk_rows=2, num_slots_max=10)
    arena.reserve(4)
    first = arena.addresses[0].item()
    slots = torch.arange(4, dtype=torch.int32)
    weights, state = torch.randn(4, 4).half(), torch.randn(4, 8)
    arena.write(slots, weights, state)
    arena.reserve(9)
    assert len(arena.addresses) == 3 and arena.addresses[0].item() == first
    assert arena.nbytes == 3 * 4 * arena.stride and arena.stride % 16 == 0
    for left, right in zip(arena.read(slots), (weights, state)):
        assert torch.equal(left, right)
    assert torch.equal(ops.gather(arena, slots), weights.float())
    with pytest.raises(CapacityError, match="num_slots_max=10"):
        arena.reserve(11)
    with pytest.raises(IndexError):
        arena.read(torch.tensor([9]))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_segment_sum_has_the_bits_of_its_reference(is_scaled):
    generator = torch.Generator().manual_seed(1)
    counts = torch.tensor([1, 3, 512, 513, 0, 1300, 2])
    inverse = torch.repeat_interleave(torch.arange(len(counts)), counts)
    positions = torch.randperm(len(inverse), generator=generator)
    inverse = inverse[positions]
    entries = torch.argsort(inverse, stable=True).int()
    grads = torch.randn((len(inverse), 5), generator=generator)
    scales = torch.rand(len(inverse), generator=generator) if is_scaled else None
    scaled = grads if scales is None else grads * scales[:, None]
    out = ops.segment_sum(grads, entries, counts, None if scales is None else scales[entries.long()])
    expected = segment_sum_reference(scaled, inverse, len(counts))
    np.testing.assert_array_equal(bits(out), bits(expected))


def test_segment_sum_of_nothing():
    empty = torch.empty(0, dtype=torch.int32)
    assert ops.segment_sum(torch.empty(0, 4), empty, torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    one = ops.segment_sum(torch.ones(1, 4), torch.zeros(1, dtype=torch.int32), torch.tensor([1]))
    assert torch.equal(one, torch.ones(1, 4))


def test_segment_sum_is_the_gradient_of_pooling():
    weight = torch.randn(6, 4, requires_grad=True)
    ids, bags = torch.tensor([5, 0, 0, 3, 5, 5]), torch.tensor([0, 0, 1, 1, 1, 2])
    out = torch.zeros(3, 4).index_add(0, bags, weight[ids])
    grad = torch.randn(3, 4)
    out.backward(grad)
    unique, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    entries = bags[torch.argsort(inverse, stable=True)].int()
    torch.testing.assert_close(ops.segment_sum(grad, entries, counts), weight.grad[unique])
