"""Wire codecs: native against their readable definition, the stated error bounds, and odd inputs (D4, S10)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.kernels import _core
from shoal.kernels.codec import decode, encode, encoded_bytes, error_bound, round_trip_reference
from shoal.kernels.spec import Codec

LOSSY = [Codec.FP16, Codec.BF16, Codec.INT8]
WIDTHS = [1, 3, 4, 8, 13, 64, 130]


def through(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    return decode(codec, encode(codec, rows), rows.shape[1])


def rows_of(dim: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(50, dim, generator=generator) * scale
    rows[0] = 0.0
    rows[1] = rows[1, 0]  # constant
    rows[2, 0] = 30 * scale  # an outlier
    rows[3] = rows[3].abs() + 5 * scale
    return rows


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 0.05, 1.0, 800.0])
def test_native_equals_the_reference_and_keeps_the_stated_bound(codec: Codec, dim: int, scale: float) -> None:
    rows = rows_of(dim, scale)
    ours, expected = through(codec, rows), round_trip_reference(codec, rows)
    if codec is Codec.INT8:  # 1 / scale is not exact: a number between two levels may take either
        torch.testing.assert_close(ours, expected, rtol=0, atol=float(error_bound(codec, rows).max()) * 2.01)
    else:
        assert torch.equal(ours, expected)
    assert bool(((ours - rows).abs() <= error_bound(codec, rows)).all())


@pytest.mark.parametrize("dim", WIDTHS)
def test_rows_are_a_multiple_of_four_bytes(dim: int) -> None:
    sizes = {codec: encoded_bytes(codec, dim) for codec in Codec}
    assert sizes == {codec: _core.encoded_bytes(int(codec), dim) for codec in Codec}, "spec and native agree"
    padded = -(-dim // 2) * 4
    assert sizes == {Codec.FP32: 4 * dim, Codec.FP16: padded, Codec.BF16: padded, Codec.INT8: 4 + -(-dim // 4) * 4}


@pytest.mark.parametrize("codec", list(Codec))
def test_the_same_row_gives_the_same_bytes_wherever_it_lies(codec: Codec) -> None:
    rows = rows_of(13, 0.1)
    whole = encode(codec, rows)
    assert all(torch.equal(encode(codec, rows[i : i + 1])[0], whole[i]) for i in range(len(rows)))
    if codec is not Codec.INT8:  # nothing is lost a second time
        assert torch.equal(through(codec, through(codec, rows)), through(codec, rows))


@given(st.lists(st.floats(width=32, allow_nan=False, min_value=-60000, max_value=60000), min_size=1))
@example([0.0, 2.0**-126])  # int8: the inverse of the scale is beyond float32
@settings(max_examples=300, deadline=None)
def test_any_finite_row_keeps_the_bound(values: list[float]) -> None:
    rows = torch.tensor([values], dtype=torch.float32)
    for codec in LOSSY:
        assert bool(((through(codec, rows) - rows).abs() <= error_bound(codec, rows)).all()), codec


def test_fp16_saturates_and_keeps_what_is_not_a_number() -> None:
    rows = torch.tensor([[1e9, -1e9, 65519.0, 65504.0, float("inf"), 1e-9, -0.0, 2.0**-25, 3 * 2.0**-25]])
    found = through(Codec.FP16, rows)[0].tolist()
    assert found == [65504.0, -65504.0, 65504.0, 65504.0, 65504.0, 0.0, 0.0, 0.0, 2.0**-23]
    for codec in (Codec.FP16, Codec.BF16):
        assert bool(through(codec, torch.tensor([[float("nan")] * 9])).isnan().all())
