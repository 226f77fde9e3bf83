"""The Triton kernels compiled for a CUDA device: the same cases, the same bits as the native CPU store."""

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("TRITON_INTERPRET is set: the kernels would be interpreted; run with it unset", allow_module_level=True)
pytest.importorskip("triton", reason="Triton (extra gpu) is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from device_contract import DeviceRows, NativeRows, check_training, make_table

from shoal.kernels.device import ops
from shoal.kernels.pooling import segment_sum_reference
from shoal.kernels.spec import DataType, OptimizerKind, WeightDecayMode

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("kind", list(OptimizerKind))
@pytest.mark.parametrize("decay", list(WeightDecayMode))
@pytest.mark.parametrize("dim", [3, 32, 100])
def test_updates_have_the_bits_of_the_native_store(kind, data_type, dim, decay):
    table = make_table(kind, data_type, dim, decay)
    check_training(DeviceRows(table, CUDA), table, NativeRows(table))


def test_segment_sum_has_the_bits_of_its_reference():
    counts = torch.tensor([1, 3, 512, 513, 0, 1300, 2])
    inverse = torch.repeat_interleave(torch.arange(len(counts)), counts)[torch.randperm(int(counts.sum()))]
    entries = torch.argsort(inverse, stable=True).int()
    grads = torch.randn((len(inverse), 64))
    out = ops.segment_sum(grads.to(CUDA), entries.to(CUDA), counts).cpu()
    assert torch.equal(out, segment_sum_reference(grads, inverse, len(counts)))
