"""Wire: what is encoded comes back bit for bit, and damage is noticed (F7)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.wire import (
    HEADER_BYTES,
    Header,
    Kind,
    decode_header,
    decode_sections,
    encode,
    is_intact,
    signed,
    unsigned,
)
from shoal.kernels.cut import BlockRows, rows_checksum
from shoal.kernels.errors import ProtocolError
from shoal.kernels.hashing import row_blocks
from shoal.kernels.packed import BlockPack, crc32c, crc32c_quarters, pack, unpack
from shoal.kernels.rowstore import RowStore
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
    rows.ids.copy_(torch.randint(-(2**62), 2**62, rows.ids.shape, generator=generator))
    for column in (rows.last_step, rows.count):
        column.copy_(torch.randint(0, 2**30, column.shape, generator=generator))
    for column in (rows.weights, rows.slots):
        column.copy_(torch.randn(column.shape, generator=generator))
    return rows


def header(**changes) -> Header:
    return Header(**{"kind": Kind.BASE, "run": 7, "epoch": 3, "stream": 9, "sequence": 1, "sender": "w-1", **changes})


def make_store(seed: int) -> RowStore:
    """Rows of every table in both blocks."""
    store = RowStore(TABLES, undo_steps=0)
    for table in range(len(TABLES)):
        for block in range(2):
            store.add_block(table, block)
            ids = torch.from_numpy(ids_of_block(2, block, 5 + 3 * table + seed))
            rows = make_rows(TABLES[table], len(ids), 10 * table + block + seed)
            store.import_block(table, block, dataclasses.replace(rows, ids=ids))
    return store


def ids_of_block(num_blocks: int, block: int, count: int) -> np.ndarray:
    ids = np.arange(-100, 100)
    return ids[row_blocks(ids, num_blocks) == block][:count]


def filled(rows: BlockPack, size: int) -> list[np.ndarray]:
    """Payloads of one section each."""
    found = []
    while not rows.is_done:
        found.append(np.zeros(size, np.uint8))
        assert rows.fill(found[-1].ctypes.data, size)
    return found


@pytest.mark.parametrize("size", [144, 200, 4096])
def test_a_block_arrives_bit_for_bit_in_pieces_of_any_size(size):
    """The numpy twin of the packed record reads what the native code writes."""
    store, copied = make_store(0), RowStore(TABLES, undo_steps=0)
    for table in range(len(TABLES)):
        for block in range(2):
            pieces = filled(store.pack_block(table, block), size)
            copied.add_block(table, block, is_replica=True)
            expected, num_rows = store.export_block(table, block), 0
            for i, payload in enumerate(pieces):
                (section,) = decode_sections(payload, 1, TABLES)
                assert (section.key, section.origin) == ((table, block), num_rows)
                assert section.is_last == (payload is pieces[-1])
                delta = copied.import_packed(
                    table, block, section.address, section.num_rows, replace=i == 0, expected=section.total
                )
                rows, _ = unpack(payload[64:], section.num_rows, 0, TABLES[table])
                assert delta == rows_checksum(rows)
                num_rows += section.num_rows
            assert (section.total, section.checksum) == (num_rows, rows_checksum(expected))
            found = copied.export_block(table, block)
            assert all(torch.equal(a, b) for a, b in zip(expected.columns(), found.columns()))


@given(st.integers(0, 2), st.integers(0, 9), st.integers(0, 4))
def test_packed_rows_come_back_bit_for_bit(table, num_rows, num_deleted):
    rows, deleted = make_rows(TABLES[table], num_rows, 3), torch.arange(num_deleted)
    found, gone = unpack(pack(rows, deleted, TABLES[table]), num_rows, num_deleted, TABLES[table])
    order = np.argsort(rows.ids.numpy().view(np.uint64))
    assert all(torch.equal(a[order], b) for a, b in zip(rows.columns(), found.columns()))
    assert torch.equal(gone, deleted)


def test_a_payload_that_is_cut_short_or_names_an_unknown_block_is_refused():
    (payload,) = filled(make_store(0).pack_block(0, 0), 4096)
    section = decode_sections(payload, 1, TABLES)[0]
    end = 64 + section.nbytes
    with pytest.raises(ProtocolError, match="cut short"):
        decode_sections(payload[: end - 8].copy(), 1, TABLES)
    with pytest.raises(ProtocolError, match="do not fit"):
        decode_sections(payload[:8].copy(), 1, TABLES)
    for place, value, match in ((0, 99, "table 99"), (1, 2, "block 2 of table 0"), (2, -1, "cut short")):
        damaged = payload.copy()
        damaged[:64].view(np.int64)[place] = value
        with pytest.raises(ProtocolError, match=match):
            decode_sections(damaged, 1, TABLES)


def test_a_check_of_a_large_buffer_sees_every_byte():
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283, "the published check value of CRC-32C"
    for size in (0, 7, 31, 32, 100):
        data = np.arange(size, dtype=np.uint8)
        expected = crc32c_quarters(data)
        for at in range(size):
            data[at] ^= 1
            assert crc32c_quarters(data) != expected
            data[at] ^= 1
        assert crc32c_quarters(data) == expected


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
