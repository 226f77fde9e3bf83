"""Wire: what is encoded comes back bit for bit, and damage is noticed (F7)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.wire import (
    HEADER_BYTES,
    NO_IDS,
    Header,
    Kind,
    Section,
    decode_header,
    decode_sections,
    encode,
    encode_sections,
    is_intact,
    signed,
    unsigned,
)
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import ProtocolError
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec

TABLES = tuple(
    TableSpec(
        name=str(kind), num_embeddings=0, embedding_dim=dim, num_blocks=2, seed=1, init_min=-1, init_max=1,
        data_type=data_type, optimizer=OptimizerSpec(kind=kind),
    )
    for data_type, kind, dim in (
        (DataType.FP32, OptimizerKind.ADAM, 5),
        (DataType.BF16, OptimizerKind.SGD, 3),
        (DataType.FP16, OptimizerKind.ROWWISE_ADAGRAD, 7),
    )
)  # fmt: skip


def make_rows(spec: TableSpec, num_rows: int, seed: int) -> BlockRows:
    generator = torch.Generator().manual_seed(seed)
    rows = BlockRows.empty(spec, num_rows)
    for column in (rows.ids, rows.last_step, rows.count):
        column.copy_(torch.randint(-(2**62), 2**62, column.shape, generator=generator))
    for column in (rows.weights, rows.slots):
        column.copy_(torch.randn(column.shape, generator=generator))
    return rows


def header(**changes) -> Header:
    return Header(**{"kind": Kind.BASE, "run": 7, "epoch": 3, "stream": 9, "sequence": 1, "sender": "w-1", **changes})


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 4), st.integers(-9, 9)), max_size=6))
def test_sections_come_back_bit_for_bit(shapes):
    sections = [
        Section(table, 1, make_rows(TABLES[table], n, i), torch.arange(m), origin=o, total=n, checksum=2**64 - 1 - i)
        for i, (table, n, m, o) in enumerate(shapes)
    ]
    payload = np.concatenate([np.empty(0, np.uint8), *encode_sections(sections)])
    found = list(decode_sections(payload, len(sections), TABLES))
    assert len(found) == len(sections)
    for a, b in zip(sections, found):
        for name in ("ids", "weights", "slots", "last_step", "count"):
            assert torch.equal(getattr(a.rows, name), getattr(b.rows, name))
        assert torch.equal(a.deleted, b.deleted)
        assert (a.table, a.block, a.origin, a.total, a.checksum) == (b.table, b.block, b.origin, b.total, b.checksum)


def test_large_columns_are_not_copied():
    rows = make_rows(TABLES[0], 20_000, 1)
    parts = encode_sections([Section(0, 0, rows, NO_IDS, 0, 20_000)])
    assert any(part.ctypes.data == rows.weights.data_ptr() for part in parts)


def test_a_payload_that_is_cut_short_or_names_an_unknown_table_is_refused():
    payload = np.concatenate(encode_sections([Section(0, 0, make_rows(TABLES[0], 3, 1), NO_IDS, 0, 3)]))
    with pytest.raises(ProtocolError, match="cut short"):
        list(decode_sections(payload[:-8].copy(), 1, TABLES))
    with pytest.raises(ProtocolError, match="do not fit"):
        list(decode_sections(payload[:8].copy(), 1, TABLES))
    payload[:8].view(np.int64)[0] = 99
    with pytest.raises(ProtocolError, match="table 99"):
        list(decode_sections(payload, 1, TABLES))


@pytest.mark.parametrize("position", [12, 40, HEADER_BYTES + 2, -1])
def test_every_flipped_bit_is_noticed(position):
    data = bytearray(b"".join(encode(header(), {"step": 4}, [b"abc", b"defgh"])))

    def check() -> bool:
        head = decode_header(data[:HEADER_BYTES])
        at = HEADER_BYTES + head.meta_bytes
        return is_intact(head, data[HEADER_BYTES:at], np.frombuffer(data[at:], np.uint8))

    assert check()
    data[position] ^= 4
    assert not check()


def test_what_is_not_ours_or_too_large_is_refused_before_it_is_read():
    data = bytearray(encode(header(), {}, [])[0][:HEADER_BYTES])
    with pytest.raises(ProtocolError, match="not a transfer message"):
        decode_header(b"HTTP" + data[4:])
    with pytest.raises(ValueError, match="above the limit"):
        encode(header(), {}, [np.empty(2**27, np.uint8)])
    with pytest.raises(ValueError, match="longer than"):
        encode(header(sender="x" * 65), {}, [])


@given(st.integers(0, 2**64 - 1))
def test_checksums_survive_int64(value):
    assert unsigned(signed(value)) == value
    assert -(2**63) <= signed(value) < 2**63
