"""bfloat16 for the dense part (issue 4.4)."""

from __future__ import annotations

import logging

import torch
from torch import nn

from shoal.actors import precision


def test_a_cpu_with_bf16_units_is_recognised_by_its_flags() -> None:
    assert precision.has_bf16_units("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n")
    assert precision.has_bf16_units("Features\t: fp asimd bf16 i8mm\n")
    assert not precision.has_bf16_units("flags\t\t: fpu avx2 avx512f\n")


def test_autocast_runs_linear_layers_in_bfloat16_and_leaves_float32_alone() -> None:
    layer = nn.Linear(4, 4)
    with precision.autocast("bf16"):
        assert layer(torch.ones(2, 4)).dtype is torch.bfloat16
    with precision.autocast("fp32"):
        assert layer(torch.ones(2, 4)).dtype is torch.float32


def test_a_cpu_without_bf16_units_is_warned_of_once_with_the_measured_ratio(monkeypatch, caplog) -> None:
    monkeypatch.setattr(precision, "has_bf16_units", lambda: False)
    with caplog.at_level(logging.WARNING):
        precision.warn_if_slow("fp32")
        precision.warn_if_slow("bf16")
    (record,) = caplog.records
    ratio = float(record.getMessage().partition("matmul_time_over_fp32=")[2].split()[0])
    assert ratio > 0
