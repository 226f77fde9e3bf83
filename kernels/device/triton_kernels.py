"""Triton kernels: gather, segment sum, fused sparse update and row creation on a device arena.

They give the same bits as the native CPU kernels: the same operations in the same order, correctly rounded division and
square root, no fused multiply-add (launched with ``enable_fp_fusion=False``), integer hashes for rounding bits.
Launched by ``ops``, which documents arguments; run on a CPU with TRITON_INTERPRET=1.

Legend: N slots or rows, D width, S floats of optimizer state.
"""

import triton
import triton.language as tl

GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
GOLDEN32 = tl.constexpr(0x9E3779B1)

#: Row types, as constants of the kernels.
F32 = tl.constexpr(0)
F16 = tl.constexpr(1)
BF16 = tl.constexpr(2)

#: Optimizers and decay modes; the values of spec.OptimizerKind and spec.WeightDecayMode.
SGD = tl.constexpr(0)
ADAGRAD = tl.constexpr(1)
ROWWISE_ADAGRAD = tl.constexpr(2)
ADAM = tl.constexpr(3)
L2 = tl.constexpr(1)
DECOUPLED = tl.constexpr(2)


@triton.jit
def _fmix64(h):
    h ^= h >> 33
    h *= 0xFF51AFD7ED558CCD
    h ^= h >> 33
    h *= 0xC4CEB9FE1A85EC53
    h ^= h >> 33
    return h


@triton.jit
def _row_keys(ids, mixed_seed):
    """The init key of each id, uint64 [N]; ``mixed_seed`` is fmix64(seed + GOLDEN64) as int64."""
    seed = tl.cast(mixed_seed, tl.int64).to(tl.uint64, bitcast=True)
    return _fmix64(ids.to(tl.uint64, bitcast=True) ^ seed)


@triton.jit
def _step_keys(keys, step_add):
    """Rounding keys of a step; ``step_add`` is GOLDEN64 * (step + 1) as int64."""
    return _fmix64(keys + tl.cast(step_add, tl.int64).to(tl.uint64, bitcast=True))


@triton.jit
def _column_bits(keys, columns):
    """32 uniform bits per row and column: uint32 [N, D]."""
    low = (keys & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = (keys >> 32).to(tl.uint32)[:, None]
    x = low + columns.to(tl.uint32)[None, :] * GOLDEN32
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= high
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _addresses(bases, slots, mask, LOG2_ROWS: tl.constexpr, STRIDE: tl.constexpr):
    """Address of each slot's record, int64 [N]; meaningless where not ``mask``."""
    chunk = slots >> LOG2_ROWS
    row = slots & ((1 << LOG2_ROWS) - 1)
    return tl.load(bases + chunk, mask=mask, other=0) + row.to(tl.int64) * STRIDE


@triton.jit
def _load_weights(addresses, columns, mask, ROW_TYPE: tl.constexpr):
    """Weights as float32 [N, D]; ``addresses`` point at the first weight of each row."""
    if ROW_TYPE == F32:
        at = addresses[:, None] + columns[None, :] * 4
        return tl.load(at.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    at = addresses[:, None] + columns[None, :] * 2
    if ROW_TYPE == F16:
        return tl.load(at.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)
    pattern = tl.load(at.to(tl.pointer_type(tl.uint16)), mask=mask, other=0)
    return (pattern.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_bfloat(values, bits):
    pattern = values.to(tl.uint32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    sign = (pattern >> 16) & 0x8000
    rounded = tl.minimum((magnitude + (bits >> 16)) >> 16, 0x7F7F)
    rounded = tl.where(magnitude == 0x7F800000, 0x7F80, rounded)
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC0, rounded)
    return (rounded | sign).to(tl.uint16)


@triton.jit
def _to_half(values, bits):
    pattern = values.to(tl.uint32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    sign = (pattern >> 16) & 0x8000
    noise = bits >> 19
    normal = ((magnitude + noise) >> 13).to(tl.int32) - (112 << 10)
    is_small = magnitude < 0x38800000
    scaled = tl.where(is_small, magnitude.to(tl.float32, bitcast=True), 0.0) * 16777216.0
    small = (scaled + noise.to(tl.int32).to(tl.float32) * 0.0001220703125).to(tl.int32)
    rounded = tl.where(is_small, small, tl.minimum(normal, 0x7BFF))
    rounded = tl.where(magnitude == 0x7F800000, 0x7C00, rounded)
    rounded = tl.where(magnitude > 0x7F800000, 0x7E00, rounded)
    return (rounded.to(tl.uint32) | sign).to(tl.uint16)


@triton.jit
def _store_weights(addresses, columns, values, keys, mask, ROW_TYPE: tl.constexpr):
    """Round float32 [N, D] to the row type with the bits of ``keys`` and store."""
    if ROW_TYPE == F32:
        at = addresses[:, None] + columns[None, :] * 4
        tl.store(at.to(tl.pointer_type(tl.float32)), values, mask=mask)
    else:
        at = (addresses[:, None] + columns[None, :] * 2).to(tl.pointer_type(tl.uint16))
        bits = _column_bits(keys, columns)
        if ROW_TYPE == BF16:
            tl.store(at, _to_bfloat(values, bits), mask=mask)
        else:
            tl.store(at, _to_half(values, bits), mask=mask)


@triton.jit
def gather_kernel(
    bases,
    slots,
    out,
    num_rows,
    DIM: tl.constexpr,
    ROW_TYPE: tl.constexpr,
    LOG2_ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    is_present = slot >= 0
    addresses = _addresses(bases, slot, is_present, LOG2_ROWS, STRIDE) + WEIGHTS
    is_column = columns[None, :] < DIM
    values = _load_weights(addresses, columns, is_present[:, None] & is_column, ROW_TYPE)
    to = out + rows.to(tl.int64)[:, None] * DIM + columns[None, :]
    tl.store(to, values, mask=(rows < num_rows)[:, None] & is_column)


@triton.jit
def segment_sum_kernel(
    grads, entries, scales, bounds, out, DIM: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program sums positions bounds[i] .. bounds[i + 1] - 1 from left to right, starting from the first."""
    segment = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    is_column = columns < DIM
    begin = tl.load(bounds + segment)
    end = tl.load(bounds + segment + 1)
    total = tl.zeros((BLOCK_D,), tl.float32)
    if begin < end:
        first = tl.load(entries + begin).to(tl.int64)
        total = tl.load(grads + first * DIM + columns, mask=is_column, other=0.0)
        if IS_SCALED:
            total = total * tl.load(scales + begin)
    for position in range(begin + 1, end):
        entry = tl.load(entries + position).to(tl.int64)
        value = tl.load(grads + entry * DIM + columns, mask=is_column, other=0.0)
        if IS_SCALED:
            value = value * tl.load(scales + position)
        total = total + value
    tl.store(out + segment.to(tl.int64) * DIM + columns, total, mask=is_column)


@triton.jit
def _mean_square(
    grads,
    addresses,
    rows,
    is_row,
    weight_decay,
    DIM: tl.constexpr,
    ROW_TYPE: tl.constexpr,
    DECAY: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """mean(g * g) [N] in the written order: element i to lane i mod 8, then a fixed tree over the lanes."""
    lanes = tl.zeros((BLOCK_N, 8), tl.float32)
    for start in range(0, DIM, 8):
        columns = start + tl.arange(0, 8)
        mask = is_row[:, None] & (columns < DIM)[None, :]
        g = tl.load(grads + rows.to(tl.int64)[:, None] * DIM + columns[None, :], mask=mask, other=0.0)
        if DECAY == L2:
            g = g + weight_decay * _load_weights(addresses, columns, mask, ROW_TYPE)
        lanes = lanes + g * g
    # Each sum is of two elements, so its order cannot matter: distance 4, then 2, then 1.
    four = tl.sum(tl.reshape(lanes, (BLOCK_N, 2, 4)), axis=1)
    two = tl.sum(tl.reshape(four, (BLOCK_N, 2, 2)), axis=1)
    return tl.math.div_rn(tl.sum(two, axis=1), tl.zeros((BLOCK_N,), tl.float32) + DIM)


@triton.jit(do_not_specialize=["mixed_seed", "step_add"])
def update_kernel(
    bases,
    slots,
    ids,
    grads,
    num_rows,
    mixed_seed,
    step_add,
    scalars,
    DIM: tl.constexpr,
    KIND: tl.constexpr,
    DECAY: tl.constexpr,
    ROW_TYPE: tl.constexpr,
    LOG2_ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``scalars`` float32: lr, lr * decay, adam_lr, adam_inverse, eps, beta1, beta2, 1-beta1, 1-beta2, decay."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < DIM)[None, :]
    slot = tl.load(slots + rows, mask=is_row, other=0)
    records = _addresses(bases, slot, is_row, LOG2_ROWS, STRIDE)
    weights_at = records + WEIGHTS
    lr = tl.load(scalars)
    eps = tl.load(scalars + 4)
    decay = tl.load(scalars + 9)
    w = _load_weights(weights_at, columns, mask, ROW_TYPE)
    g = tl.load(grads + rows.to(tl.int64)[:, None] * DIM + columns[None, :], mask=mask, other=0.0)
    if DECAY == L2:
        g = g + decay * w
    if DECAY == DECOUPLED:
        w = w - tl.load(scalars + 1) * w
    state_at = (records[:, None] + columns[None, :] * 4).to(tl.pointer_type(tl.float32))
    if KIND == SGD:
        w = w - lr * g
    elif KIND == ADAGRAD:
        v = tl.load(state_at, mask=mask, other=0.0) + g * g
        tl.store(state_at, v, mask=mask)
        w = w - tl.math.div_rn(lr * g, tl.math.sqrt_rn(v) + eps)
    elif KIND == ROWWISE_ADAGRAD:
        momentum_at = records.to(tl.pointer_type(tl.float32))
        mean = _mean_square(grads, weights_at, rows, is_row, decay, DIM, ROW_TYPE, DECAY, BLOCK_N)
        m = tl.load(momentum_at, mask=is_row, other=0.0) + mean
        tl.store(momentum_at, m, mask=is_row)
        scale = tl.math.div_rn(tl.zeros((BLOCK_N,), tl.float32) + lr, tl.math.sqrt_rn(m) + eps)
        w = w - scale[:, None] * g
    else:
        second_at = (records[:, None] + (DIM + columns)[None, :] * 4).to(tl.pointer_type(tl.float32))
        m = tl.load(scalars + 5) * tl.load(state_at, mask=mask, other=0.0) + tl.load(scalars + 7) * g
        v = tl.load(scalars + 6) * tl.load(second_at, mask=mask, other=0.0) + (tl.load(scalars + 8) * g) * g
        tl.store(state_at, m, mask=mask)
        tl.store(second_at, v, mask=mask)
        root = tl.math.sqrt_rn(v * tl.load(scalars + 3))
        w = w - tl.math.div_rn(tl.load(scalars + 2) * m, root + eps)
    keys = tl.zeros((BLOCK_N,), tl.uint64)
    if ROW_TYPE != F32:
        row_ids = tl.load(ids + rows, mask=is_row, other=0)
        keys = _step_keys(_row_keys(row_ids, mixed_seed), step_add)
    _store_weights(weights_at, columns, w, keys, mask, ROW_TYPE)


@triton.jit(do_not_specialize=["mixed_seed", "step_add", "steps"])
def create_kernel(
    bases,
    slots,
    ids,
    num_rows,
    mixed_seed,
    step_add,
    steps,
    scalars,
    DIM: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    ROW_TYPE: tl.constexpr,
    LOG2_ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Fill records with initial weights and state. ``scalars`` float32: init minimum, unit, first accumulator."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    slot = tl.load(slots + rows, mask=is_row, other=0)
    records = _addresses(bases, slot, is_row, LOG2_ROWS, STRIDE)
    keys = _row_keys(tl.load(ids + rows, mask=is_row, other=0), mixed_seed)
    units = (_column_bits(keys, columns).to(tl.uint64) * tl.cast(steps, tl.uint64)) >> 32
    values = tl.load(scalars) + units.to(tl.int32).to(tl.float32) * tl.load(scalars + 1)
    mask = is_row[:, None] & (columns < DIM)[None, :]
    _store_weights(records + WEIGHTS, columns, values, _step_keys(keys, step_add), mask, ROW_TYPE)
    if SLOT_WIDTH > 0:
        places = tl.arange(0, BLOCK_S)
        at = (records[:, None] + places[None, :] * 4).to(tl.pointer_type(tl.float32))
        first = tl.zeros((BLOCK_N, BLOCK_S), tl.float32) + tl.load(scalars + 2)
        tl.store(at, first, mask=is_row[:, None] & (places < SLOT_WIDTH)[None, :])
