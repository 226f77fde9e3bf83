"""Precision of the dense part: float32, or bfloat16 where torch's autocast lets an operation run in it.

Parameters, gradients, optimizer state, embedding rows and losses stay float32. bfloat16 has the range of float32, so
losses are not scaled (no GradScaler).
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from pathlib import Path
from typing import Literal

import torch

logger = logging.getLogger(__name__)

Precision = Literal["fp32", "bf16"]
#: Flags of CPUs that multiply bfloat16 in hardware, as Linux names them.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_PROBE_SIZE, _PROBE_ROUNDS = 256, 5


def autocast(precision: Precision, device_type: str = "cpu") -> contextlib.AbstractContextManager[object]:
    """The context a model's forward runs in."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=torch.bfloat16)


def has_bf16_units(cpu_info: str | None = None) -> bool:
    """Whether this CPU multiplies bfloat16 itself; ``cpu_info``: the text of /proc/cpuinfo, read if None."""
    if cpu_info is None:
        try:
            cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            return False
    lines = [line for line in cpu_info.splitlines() if line.lower().startswith(("flags", "features"))]
    return any(_BF16_FLAGS & set(line.partition(":")[2].split()) for line in lines)


def measured_slowdown() -> float:
    """Time of a bfloat16 matrix product over that of a float32 one, of 256 x 256, here and now; takes milliseconds.

    The sign of what to expect, not its measure: a model's products have other shapes.
    """
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(_PROBE_SIZE, _PROBE_SIZE).to(dtype)
        a @ a
        times = []
        for _ in range(_PROBE_ROUNDS):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        seconds[dtype] = statistics.median(times)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def warn_if_slow(precision: Precision) -> None:
    """One line where bfloat16 is asked for on a CPU that emulates it; the run goes on. A GPU makes no difference: the
    dense part runs on the CPU."""
    if precision == "bf16" and not has_bf16_units():
        logger.warning(
            "precision=bf16 reason='this CPU has no bfloat16 units' matmul_time_over_fp32=%.2f matmul_size=%d "
            "advice='use fp32 here'",
            measured_slowdown(),
            _PROBE_SIZE,
        )
