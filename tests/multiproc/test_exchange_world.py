"""Exchanges among several ranks: agreement, flags, commit, statuses and counts are the same on every rank."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from shoal.kernels.dense_reduce import DenseReducer, sum_reference
from shoal.kernels.errors import ShoalError
from shoal.kernels.exchange import Exchange
from shoal.kernels.frame import Flag, Identity, Kind, Status

pytestmark = pytest.mark.usefixtures("no_shm_left")
TRANSPORTS = [
    pytest.param("aaa", "gloo", id="gloo"),
    pytest.param("aaa", "shm", id="shm"),
    pytest.param("aab", "auto", id="composite"),
]


def _exchange(groups: Any, **identity: int) -> Exchange:
    spec = groups.spec
    fields = {
        "run": 9,
        "epoch": spec.epoch,
        "rank": spec.rank,
        "world_size": spec.world_size,
        "plan_hash": 4,
    } | identity
    return Exchange(groups.transport, Identity(**fields), timeout_s=20)


def one_step(groups: Any) -> dict[str, Any]:
    exchange = _exchange(groups)
    rank, world_size = groups.spec.rank, groups.spec.world_size
    # A prime number of bytes, other for every pair and section, some 0.
    sections = np.array([[(rank + 1) * (peer + 2) * 7 * s for peer in range(world_size)] for s in range(3)], np.int64)
    headers = exchange.header(
        Kind.BATCH,
        0,
        sections=sections,
        denominator=0.1 * (rank + 1),
        numbers=(rank, 1.0),
        flags=Flag.CHECKPOINT if rank == 1 else 0,
        control=rank * 10,
    )
    opened = exchange.round(Kind.IDS, 0, sections, headers.section_bytes)
    for s in range(3):
        for peer in range(world_size):
            ctypes.memset(int(opened.send_addresses[s, peer]), 16 * s + 4 * rank + peer, int(sections[s, peer]))
    received = opened.run()
    for s in range(3):
        for peer in range(world_size):
            size = int(headers.section_bytes[s, peer])
            assert size == (peer + 1) * (rank + 2) * 7 * s
            assert ctypes.string_at(int(received[s, peer]), size) == bytes([16 * s + 4 * peer + rank]) * size
    # Rank 2 is a step behind: nothing is committed until it has caught up (S2).
    exchange.applied = 0 if rank != 2 else -1
    exchange.close_step(0)
    behind = exchange.committed
    exchange.applied = 0
    exchange.close_step(0)
    return {
        "flags": headers.flags,
        "denominator": headers.denominator,
        "numbers": headers.numbers.tolist(),
        "control": headers.control.tolist(),
        "committed": (behind, exchange.committed),
        "collectives": exchange.num_collectives(),
        "across": exchange.counts[Kind.IDS].bytes_sent_across_hosts > 0,
    }


@pytest.mark.parametrize(("hosts", "transport"), TRANSPORTS)
def test_all_ranks_see_the_same_flags_sums_and_commits(world: Any, hosts: str, transport: str) -> None:
    values = world.values(one_step, hosts, transport=transport)
    assert values[0] == values[1] == values[2]
    assert values[0] == {
        "flags": Flag.CHECKPOINT,
        "denominator": 0.1 + 0.2 + 0.1 * 3,
        "numbers": [3.0, 3.0, 0.0, 0.0],
        "control": [0, 10, 20],
        "committed": (-1, 0),
        "collectives": 4,
        "across": len(set(hosts)) > 1,
    }


def differ(groups: Any, field: str) -> str:
    exchange = _exchange(groups, **({field: 5} if groups.spec.rank == 1 and field == "plan_hash" else {}))
    step = 3 if groups.spec.rank == 1 and field == "step" else 2
    kind = Kind.EVALUATE if groups.spec.rank == 1 and field == "kind" else Kind.BATCH
    try:
        exchange.header(kind, step)
    except ShoalError as error:
        return f"{type(error).__name__} {error}".partition(": ")[2]
    return "no error"


@pytest.mark.parametrize("field", ["plan_hash", "step", "kind"])
def test_s1_a_disagreement_is_the_same_error_on_all_ranks(world: Any, field: str) -> None:
    values = world.values(differ, "aaa", field, transport="shm")
    assert len(set(values)) == 1
    assert values[0].startswith(f"rank 1 disagrees about {field}: rank 1 says")


def one_has_a_bad_id(groups: Any) -> str:
    exchange = _exchange(groups)
    rank, world_size = groups.spec.rank, groups.spec.world_size
    none = np.zeros((1, world_size), np.int64)
    status, detail = (Status.BAD_ID, "feature 'user': id 99 is outside table 'users'") if rank == 2 else (Status.OK, "")
    opened = exchange.round(Kind.IDS, 1, none, none)
    opened.run(status)
    try:
        exchange.settle(1, opened.statuses, status, detail)
    except ShoalError as error:
        # The exchanges stay usable: the ranks agreed on the error, none of them left.
        exchange.close_step(1)
        return f"{type(error).__name__} {error}"
    return "no error"


@pytest.mark.parametrize(("hosts", "transport"), TRANSPORTS[1:])
def test_s10_a_status_raises_the_same_typed_error_everywhere(world: Any, hosts: str, transport: str) -> None:
    values = world.values(one_has_a_bad_id, hosts, transport=transport)
    assert len(set(values)) == 1
    assert values[0].startswith("BadIdError") and "rank 2: feature 'user': id 99" in values[0]


def reduce_dense(groups: Any, num_elements: int, sliced_from_bytes: int) -> list[int]:
    exchange = _exchange(groups)
    rank, world_size = groups.spec.rank, groups.spec.world_size
    flats = [torch.randn(num_elements, generator=torch.Generator().manual_seed(r)) * 3.0**r for r in range(world_size)]
    flat = flats[rank].clone()
    reducer = DenseReducer(num_elements, rank, world_size, sliced_from_bytes=sliced_from_bytes)
    # The dense section rides behind another section of the same round.
    rows = np.full(world_size, 40, np.int64)
    first = exchange.round(Kind.GRADIENTS, 0, np.stack([rows, reducer.out_bytes]), np.stack([rows, reducer.in_bytes]))
    reducer.write(flat, first.send_addresses[1])
    reducer.read(flat, first.run()[1])
    if reducer.is_sliced:
        second = exchange.round(Kind.DENSE, 0, reducer.gather_out_bytes[None], reducer.gather_in_bytes[None])
        reducer.gather_write(flat, second.send_addresses[0])
        reducer.gather_read(flat, second.run()[0])
    assert torch.equal(flat, sum_reference(flats))
    return [exchange.num_collectives(), int(flat.view(torch.int32).sum())]


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_dense_gradients_ride_in_a_round_and_are_bit_equal_on_all_ranks(world: Any, limit: int) -> None:
    values = world.values(reduce_dense, "aab", 10_001, limit)
    assert values[0] == values[1] == values[2]
    assert values[0][0] == (2 if limit == 0 else 1)
