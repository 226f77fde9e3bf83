"""Gather, segment sum, fused update and row creation on a device arena: launches of the Triton kernels.

Each gives the same bits as its native twin on the CPU. Slots come from the host's id maps; nothing here reads the
device back. The references are ``optim.apply_reference``, ``optim.initial_rows_reference``,
``pooling.segment_sum_reference`` and ``DeviceArena.read``.

Legend: N slots, U unique rows, P positions, D width.
"""

from __future__ import annotations

import numpy as np
import torch
import triton

from shoal.kernels import hashing
from shoal.kernels.device import triton_kernels as kernels
from shoal.kernels.device.arena import DeviceArena
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec, WeightDecayMode

#: Positions of one row are summed in segments of this many; part of the definition of the sum (pooling.SEGMENT).
SEGMENT = 512

_ROW_TYPES = {DataType.FP32: 0, DataType.FP16: 1, DataType.BF16: 2}
_MASK64 = (1 << 64) - 1
_FLOATS_PER_PROGRAM = 1024


def gather(arena: DeviceArena, slots: torch.Tensor) -> torch.Tensor:
    """Weights of int32 ``slots`` [N] as float32 [N, D]; 0 for NO_SLOT."""
    out = torch.empty((len(slots), arena.dim), dtype=torch.float32, device=arena.device)
    if len(slots):
        block_n, layout = _block_rows(arena), _layout(arena)
        kernels.gather_kernel[(triton.cdiv(len(slots), block_n),)](
            arena.addresses, slots, out, len(slots), DIM=arena.dim, BLOCK_N=block_n, **layout
        )
    return out


def plan_segments(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the segments of U rows with int64 ``counts`` [U] positions lie, on the host.

    Returns int32 [segments + 1] bounds over the positions and int32 [U + 1] bounds over the segments.
    """
    per_row = torch.clamp((counts + SEGMENT - 1) // SEGMENT, min=1)
    row_bounds = torch.cat([counts.new_zeros(1), torch.cumsum(per_row, 0)])
    starts = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, per_row)
    within = torch.arange(len(starts)) - torch.repeat_interleave(row_bounds[:-1], per_row)
    bounds = torch.cat([starts + within * SEGMENT, counts.sum().view(1)])
    return bounds.int(), row_bounds.int()


def segment_sum(
    grads: torch.Tensor,
    entries: torch.Tensor,
    counts: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the gradients of each row's positions: float32 [U, D], in a fixed order whatever the launch.

    Args:
        grads: float32 [rows, D], one row per bag or sequence element.
        entries: int32 [P], row of ``grads`` of each position, positions sorted by unique row (stable).
        counts: int64 [U] on the host, positions of each unique row.
        scales: float32 [P] or None, factor of each position.
    """
    dim, device = grads.shape[1], grads.device
    bounds, row_bounds = plan_segments(counts)
    sums = _sum_runs(grads, entries, bounds.to(device), scales)
    if len(bounds) == len(row_bounds):
        return sums.view(-1, dim)
    order = torch.arange(len(sums), dtype=torch.int32, device=device)
    return _sum_runs(sums, order, row_bounds.to(device), None)


def update(
    arena: DeviceArena,
    table: TableSpec,
    slots: torch.Tensor,
    ids: torch.Tensor,
    grads: torch.Tensor,
    *,
    step: int,
    lr: float,
) -> None:
    """One optimizer update of the rows in int32 ``slots`` [U] (distinct) with summed gradients float32 [U, D].

    ``ids`` int64 [U] key the rounding of fp16 and bf16 rows. ``step`` counts from 1 and is Adam's t.
    """
    if len(slots) == 0:
        return
    spec = table.optimizer
    block_n = _block_rows(arena)
    kernels.update_kernel[(triton.cdiv(len(slots), block_n),)](
        arena.addresses,
        slots,
        ids,
        grads,
        len(slots),
        _mixed_seed(table),
        _signed(hashing.GOLDEN64 * (step + 1)),
        torch.from_numpy(update_scalars(spec, step=step, lr=lr)).to(arena.device),
        DIM=arena.dim,
        KIND=int(spec.kind),
        DECAY=int(spec.weight_decay_mode) if spec.weight_decay != 0 else int(WeightDecayMode.NONE),
        BLOCK_N=block_n,
        enable_fp_fusion=False,
        **_layout(arena),
    )


def create(arena: DeviceArena, table: TableSpec, slots: torch.Tensor, ids: torch.Tensor) -> None:
    """Give the records in int32 ``slots`` [N] the initial weights and state of int64 ``ids`` [N]."""
    if len(slots) == 0:
        return
    low, unit, steps = hashing.init_range(table.init_min, table.init_max)
    is_adagrad = table.optimizer.kind in (OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)
    first = table.optimizer.initial_accumulator if is_adagrad else 0.0
    block_n = _block_rows(arena)
    kernels.create_kernel[(triton.cdiv(len(slots), block_n),)](
        arena.addresses,
        slots,
        ids,
        len(slots),
        _mixed_seed(table),
        _signed(hashing.GOLDEN64),
        steps,
        torch.tensor([low, unit, first], dtype=torch.float32, device=arena.device),
        DIM=arena.dim,
        SLOT_WIDTH=arena.slot_width,
        BLOCK_N=block_n,
        BLOCK_S=triton.next_power_of_2(max(arena.slot_width, 1)),
        enable_fp_fusion=False,
        **_layout(arena),
    )


def update_scalars(spec: OptimizerSpec, *, step: int, lr: float) -> np.ndarray:
    """The constants of a step as float32, each rounded where the native update rounds it."""
    rate, decay = np.float32(lr), np.float32(spec.weight_decay)
    beta1, beta2 = np.float32(spec.beta1), np.float32(spec.beta2)
    return np.array(
        [
            rate,
            rate * decay,
            float(rate) / (1.0 - spec.beta1**step),
            1.0 / (1.0 - spec.beta2**step),
            spec.eps,
            beta1,
            beta2,
            1.0 - spec.beta1,
            1.0 - spec.beta2,
            decay,
        ],
        dtype=np.float32,
    )


def _sum_runs(
    grads: torch.Tensor, entries: torch.Tensor, bounds: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    num_runs, dim = len(bounds) - 1, grads.shape[1]
    out = torch.empty((num_runs, dim), dtype=torch.float32, device=grads.device)
    if num_runs:
        kernels.segment_sum_kernel[(num_runs,)](
            grads,
            entries,
            grads if scales is None else scales,
            bounds,
            out,
            DIM=dim,
            IS_SCALED=scales is not None,
            BLOCK_D=triton.next_power_of_2(dim),
            enable_fp_fusion=False,
        )
    return out


def _layout(arena: DeviceArena) -> dict[str, int]:
    return {
        "ROW_TYPE": _ROW_TYPES[arena.data_type],
        "LOG2_ROWS": arena.log2_chunk_rows,
        "STRIDE": arena.stride,
        "WEIGHTS": arena.weights_offset,
        "BLOCK_D": triton.next_power_of_2(arena.dim),
    }


def _block_rows(arena: DeviceArena) -> int:
    return max(1, _FLOATS_PER_PROGRAM // triton.next_power_of_2(arena.dim))


def _mixed_seed(table: TableSpec) -> int:
    mixed = hashing.fmix64(np.array([(table.seed + hashing.GOLDEN64) & _MASK64], np.uint64))
    return _signed(int(mixed[0]))


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value
