"""Exchanges in a world of one, and the judgement of headers that does not need peers (S1, S2, S3, S10)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from shoal.kernels import _shm
from shoal.kernels.errors import BadIdError, CapacityError, PeerError, ProtocolError
from shoal.kernels.exchange import Exchange, raise_for_status
from shoal.kernels.frame import AGREED_FIELDS, HEADER_DTYPE, Flag, Identity, Kind, Status, describe_disagreement
from shoal.kernels.transport import LoopbackTransport


def _alone() -> Exchange:
    return Exchange(LoopbackTransport(), Identity(run=2**64 - 1, epoch=0, rank=0, world_size=1, plan_hash=2**63))


def test_a_world_of_one_runs_the_same_exchanges() -> None:
    exchange = _alone()
    sections = np.array([[5], [0], [200]], np.int64)
    headers = exchange.header(
        Kind.BATCH, 3, sections=sections, denominator=2.5, numbers=(1.0, 4.0), flags=Flag.STOP, control=9
    )
    assert (headers.section_bytes == sections).all()
    assert headers.flags == Flag.STOP and headers.denominator == 2.5 and headers.control.tolist() == [9]
    assert headers.numbers.tolist() == [1.0, 4.0, 0.0, 0.0]
    opened = exchange.round(Kind.IDS, 3, sections, headers.section_bytes)
    assert (opened.send_addresses % 64 == 0).all()
    ctypes.memmove(int(opened.send_addresses[2, 0]), b"row!", 4)
    addresses = opened.run()
    assert ctypes.string_at(int(addresses[2, 0]), 4) == b"row!"
    assert opened.statuses.tolist() == [0]
    assert exchange.counts[Kind.IDS].num_collectives == 1 and exchange.num_collectives() == 2
    assert exchange.counts[Kind.IDS].bytes_sent == 0


def test_s2_a_step_is_committed_by_an_exchange_whose_headers_all_say_applied() -> None:
    exchange = _alone()
    exchange.applied = 0
    assert exchange.committed == -1
    exchange.close_step(0)
    assert exchange.committed == 0
    exchange.applied = 1
    exchange.round(Kind.DECIDE, 2, np.zeros((0, 1)), np.zeros((0, 1))).run()
    assert exchange.committed == 1
    exchange.acked = 1
    exchange.close_step(2)
    assert exchange.protected == 1


def _headers(world_size: int) -> np.ndarray:
    raw = np.zeros(world_size, HEADER_DTYPE)
    raw["rank"] = np.arange(world_size)
    raw["plan_hash"] = 77
    return raw


@pytest.mark.parametrize("field", ["run", "epoch", "plan_hash", "kind", "step", "num_sections", "micro_batch", "magic"])
def test_s1_the_rank_that_differs_is_named_with_the_field(field: str) -> None:
    raw = _headers(4)
    raw[field][2] += 1
    assert f"rank 2 disagrees about {field}: rank 2 says" in describe_disagreement(raw)


def test_s1_in_a_tie_the_lowest_ranks_value_counts() -> None:
    raw = _headers(2)
    raw["plan_hash"] = (1, 2)
    assert describe_disagreement(raw) == "rank 1 disagrees about plan_hash: rank 1 says 2, the others say 1"


def test_s1_native_code_sees_a_difference_in_every_agreed_field_and_a_wrong_sender() -> None:
    for field in (*AGREED_FIELDS, "rank"):
        raw = _headers(3)
        assert _read(raw)[0]
        raw[field][1] += 1
        assert not _read(raw)[0], field


def _read(raw: np.ndarray) -> tuple[bool, bool, int, int, int, float]:
    addresses = raw.ctypes.data + raw.itemsize * np.arange(len(raw))
    out, sections = np.empty((len(raw), 64), np.int64), np.empty((2, len(raw)), np.int64)
    return _shm.header_read(addresses, 1 << 40, out, sections)


def test_native_code_sums_up_headers_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    raw = _headers(5)
    raw["applied"], raw["acked"] = rng.integers(-1, 9, 5), rng.integers(-1, 9, 5)
    raw["flags"], raw["denominator"] = [1, 0, 8, 1, 0], rng.random(5)
    raw["section_bytes"] = rng.integers(0, 99, (5, 8))
    _, has_bad, applied, acked, flags, denominator = _read(raw)
    expected = 0.0
    for value in raw["denominator"].tolist():
        expected += value
    assert (has_bad, applied, acked, flags, denominator) == (
        False,
        raw["applied"].min(),
        raw["acked"].min(),
        9,
        expected,
    )


def test_impossible_section_sizes_are_refused() -> None:
    exchange = _alone()
    with pytest.raises(ProtocolError, match=r"rank 0 announces section_bytes \[-1\]"):
        exchange.header(Kind.BATCH, 1, sections=np.array([[-1]]))


def test_a_frame_that_is_not_what_was_agreed_names_rank_and_field() -> None:
    exchange = _alone()
    opened = exchange.round(Kind.IDS, 1, np.array([[64]]), np.array([[64]]))
    opened._in_sections = np.array([[60]], np.int64)
    with pytest.raises(ProtocolError, match=r"the frame from rank 0 has section_bytes 64, this rank .0. expects 60"):
        opened.run()


def test_statuses_become_the_typed_error_of_the_lowest_rank() -> None:
    raise_for_status(np.zeros(3, np.int64), [""] * 3, 1)
    with pytest.raises(
        BadIdError, match=r"step 7 was not applied on any rank. rank 1: feature 'x' has 9; rank 2: CAPACITY"
    ):
        raise_for_status(np.array([0, Status.BAD_ID, Status.CAPACITY]), ["", "feature 'x' has 9", ""], 7)
    with pytest.raises(PeerError, match="rank 0: status 99"):
        raise_for_status(np.array([99]), [""], 7)


def test_settle_does_nothing_without_an_error_and_raises_with_the_detail() -> None:
    exchange = _alone()
    exchange.settle(1, np.zeros(1, np.int64))
    assert exchange.num_collectives() == 0
    with pytest.raises(CapacityError, match="rank 0: table 't' is full"):
        exchange.settle(1, np.array([Status.CAPACITY]), Status.CAPACITY, "table 't' is full")
    assert exchange.counts[Kind.DETAILS].num_collectives == 1


def test_an_aborted_transport_refuses_further_exchanges() -> None:
    exchange = _alone()
    exchange._transport.abort("stop")
    with pytest.raises(PeerError, match="aborted by this rank: stop"):
        exchange.close_step(1)
