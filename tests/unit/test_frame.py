"""Frames and headers: the native code against the readable definition, and every fault it must see (S1, S10)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels import _shm, frame


def _aligned(num_bytes: int) -> np.ndarray:
    raw = np.zeros(num_bytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + num_bytes]


def _common(**fields: int) -> np.ndarray:
    prefix = np.zeros(1, frame.PREFIX_DTYPE)
    prefix["magic"] = frame.FRAME_MAGIC
    for name, value in fields.items():
        prefix[name] = value
    return prefix


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.data())
def test_layout_and_bytes_equal_the_reference(world_size: int, num_sections: int, data: st.DataObject) -> None:
    sizes = data.draw(
        st.lists(st.integers(0, 300), min_size=world_size * num_sections, max_size=world_size * num_sections)
    )
    sections = np.array(sizes, np.int64).reshape(num_sections, world_size)
    offsets, frame_sizes = np.empty_like(sections), np.empty(world_size, np.int64)
    _shm.frame_layout(sections, offsets, frame_sizes)
    expected_offsets, expected_sizes = frame.layout_reference(sections)
    assert (offsets == expected_offsets).all() and (frame_sizes == expected_sizes).all()
    prefix = _common(kind=3, num_sections=num_sections, epoch=7, step=2**40, plan_hash=2**63 + 5, sequence=2**31 + 9)
    frames = [_aligned(int(size)) for size in frame_sizes]
    rng = np.random.default_rng(sum(sizes))
    bodies = [[rng.bytes(int(sections[s, w])) for s in range(num_sections)] for w in range(world_size)]
    for w, buffer in enumerate(frames):
        for s, body in enumerate(bodies[w]):
            buffer[offsets[s, w] : offsets[s, w] + len(body)] = np.frombuffer(body, np.uint8)
    bases = np.array([buffer.ctypes.data for buffer in frames], np.int64)
    _shm.frame_write(prefix.view(np.uint8), bases, sections, frame_sizes)
    for w, buffer in enumerate(frames):
        assert buffer.tobytes() == frame.frame_reference(prefix[0], bodies[w])


def _written(sender: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    sections = np.array([[8], [100]], np.int64)
    offsets, sizes = np.empty_like(sections), np.empty(1, np.int64)
    _shm.frame_layout(sections, offsets, sizes)
    buffer = _aligned(int(sizes[0]))
    prefix = _common(
        kind=2, num_sections=2, epoch=1, step=5, plan_hash=9, sequence=3, sender=sender, status=4, applied=4
    )
    _shm.frame_write(prefix.view(np.uint8), np.array([buffer.ctypes.data]), sections, sizes)
    return buffer, prefix, sections, sizes


def _check(
    buffer: np.ndarray, prefix: np.ndarray, sections: np.ndarray, sizes: np.ndarray
) -> tuple[int, int, int, int]:
    statuses, applied = np.empty(1, np.int64), np.empty(1, np.int64)
    fault = _shm.frame_check(prefix.view(np.uint8), np.array([buffer.ctypes.data]), sections, sizes, statuses, applied)
    assert (statuses[0], applied[0]) == (4, 4)
    return fault


def test_a_right_frame_passes_and_gives_status_and_applied() -> None:
    assert _check(*_written())[0] == -1


@pytest.mark.parametrize("field", ["epoch", "step", "kind", "plan_hash", "sequence"])
def test_a_frame_of_another_exchange_is_named_by_field(field: str) -> None:
    buffer, prefix, sections, sizes = _written()
    prefix[field] += 1
    rank, index, got, expected = _check(buffer, prefix, sections, sizes)
    assert (rank, frame.FRAME_FIELDS[index], expected - got) == (0, field, 1)


def test_wrong_sender_sizes_order_and_a_torn_trailer_are_named() -> None:
    buffer, prefix, sections, sizes = _written(sender=3)
    assert frame.FRAME_FIELDS[_check(buffer, prefix, sections, sizes)[1]] == "sender"
    buffer, prefix, sections, sizes = _written()
    assert frame.FRAME_FIELDS[_check(buffer, prefix, sections[::-1].copy(), sizes)[1]] == "sections_hash"
    more = sections + np.array([[0], [1]])
    assert frame.FRAME_FIELDS[_check(buffer, prefix, more, sizes)[1]] == "section_bytes"
    buffer[-1] ^= 1
    assert frame.FRAME_FIELDS[_check(buffer, prefix, sections, sizes)[1]] == "trailer"


def test_detail_is_cut_at_a_character() -> None:
    assert frame.encode_detail("é" * 200).decode() == "é" * 128
    assert frame.encode_detail("x" * 255 + "é") == b"x" * 255
