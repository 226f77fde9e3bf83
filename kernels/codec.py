"""Wire formats of rows and gradients between ranks (``csrc/core/step/codec.h``), and what they cost in accuracy.

| codec | bytes of a row of D columns | \\|decoded - x\\| at most |
|---|---|---|
| fp32 | 4 D | 0 |
| fp16 | 2 D | 2^-11 \\|x\\| or 2^-25, whichever is more, up to 65504, where it saturates |
| bf16 | 2 D | 2^-8 \\|x\\| (or 2^-134) |
| int8 | 4 + D | scale / 2, scale <= (max - min + 2^-7 \\|min\\|) (1 + 2^-7) / 255 over the row |

The bounds follow from the formats: fp16 has 11 significant bits and a smallest step of 2^-24, bf16 8 significant bits
(half an ulp of nearest-even rounding each); an int8 row has 256 evenly spaced levels from its bias on, whose spacing is
rounded up to bfloat16 (at most 2^-7 more), and whose start is rounded down (at most 2^-7 of itself).

Rows are padded to 4 bytes. Gradients are small: below 6e-8 fp16 has nothing left, so bf16 or int8 serve them better.
int8 scales and biases are bfloat16 for that reason; FBGEMM's row-wise formats have fp16 or fp32 there.
"""

from __future__ import annotations

import torch

from shoal.kernels import _core
from shoal.kernels.spec import Codec, encoded_bytes


def encode(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    """float32 [n, D] -> uint8 [n, encoded_bytes]."""
    rows = rows.to(torch.float32).contiguous()
    out = torch.empty(len(rows), encoded_bytes(codec, rows.shape[1]), dtype=torch.uint8)
    _core.encode_rows(int(codec), rows.data_ptr(), len(rows), rows.shape[1], out.data_ptr())
    return out


def decode(codec: Codec, encoded: torch.Tensor, embedding_dim: int) -> torch.Tensor:
    """uint8 [n, encoded_bytes] -> float32 [n, D]."""
    encoded = encoded.contiguous()
    rows = torch.empty(len(encoded), embedding_dim)
    _core.decode_rows(int(codec), encoded.data_ptr(), len(encoded), embedding_dim, rows.data_ptr())
    return rows


def round_trip_reference(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    """What rows (finite float32 [n, D]) read as after travelling."""
    match codec:
        case Codec.FP32:
            return rows
        case Codec.FP16:
            return rows.clamp(-65504.0, 65504.0).to(torch.float16).float()
        case Codec.BF16:
            return rows.to(torch.bfloat16).float()
        case Codec.INT8:
            low = rows.amin(dim=1, keepdim=True)
            bias = _bfloat_below(low)
            scale = -_bfloat_below(-((rows.amax(dim=1, keepdim=True) - bias) / 255))
            codes = torch.where(scale > 0, (rows - bias) / scale + 0.5, 0.0).floor().clamp(0, 255)
            return bias + scale * codes


def error_bound(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    """The bound of the module's table for each element of finite float32 rows [n, D] within fp16's range."""
    match codec:
        case Codec.FP32:
            return torch.zeros_like(rows)
        case Codec.FP16:
            return torch.maximum(rows.abs() * 2**-11, torch.tensor(2.0**-25))
        case Codec.BF16:
            return torch.maximum(rows.abs() * 2**-8, torch.tensor(2.0**-134))
        case Codec.INT8:
            low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
            scale = (high - low + low.abs() * 2**-7) * (1 + 2**-7) / 255
            # Twice the spacing of float32 at the row's largest number: what computing in float32 adds.
            return scale / 2 + 2**-22 * torch.maximum(low.abs(), high.abs()) + 2.0**-133


def _bfloat_below(x: torch.Tensor) -> torch.Tensor:
    """The largest bfloat16 that is not above x."""
    bits = x.contiguous().view(torch.int32)
    moved = torch.where(x < 0, bits + 0xFFFF, bits)
    return (moved & -0x10000).view(torch.float32)
