"""The pooled flow among ranks that are threads: results, placement, what peers may send (D3, S5, S6, S10)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import test_row_exchange as ranks_of
from test_plan import RankBatch

from shoal.kernels.errors import ConfigError, ProtocolError
from shoal.kernels.frame import Kind
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import Codec, Flow, WireCodecs

POOLED = {flow: [WireCodecs(flow=flow)] * 2 + [WireCodecs()] for flow in Flow}


def _run(world: int, seed: int, codecs: list[WireCodecs], num_blocks: int = 8) -> ranks_of._Ranks:
    hosts = "a" * world
    placement = [owners[:num_blocks] for owners in ranks_of._placement(world, seed)]
    return ranks_of._Ranks(hosts, placement, ranks_of._batches(hosts, 5), wire=codecs, num_blocks=num_blocks)


def _is_equal(a: ranks_of._Ranks, b: ranks_of._Ranks) -> bool:
    return a.rows == b.rows and all(
        torch.equal(x, y) for one, other in zip(a.outputs, b.outputs) for x, y in zip(one, other)
    )


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("flow", [Flow.POOLED, Flow.POOLED_BY_OWNER])
def test_pooled_equals_rows_up_to_rounding_in_as_many_collectives(world: int, flow: Flow) -> None:
    rows, pooled = _run(world, 3, POOLED[Flow.ROWS]), _run(world, 3, POOLED[flow])
    for a, b in zip(rows.outputs, pooled.outputs):
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert rows.rows.keys() == pooled.rows.keys()
    for key, (weights, slots) in rows.rows.items():
        for x, y in zip((weights, slots), pooled.rows[key]):
            np.testing.assert_allclose(np.frombuffer(x, np.float32), np.frombuffer(y, np.float32), rtol=1e-4, atol=1e-5)
    assert [e.num_collectives() for e in rows.exchanges] == [e.num_collectives() for e in pooled.exchanges]


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("world", [2, 3])
def test_s5_placement_does_not_change_bits_whatever_the_codec(world: int, codec: Codec) -> None:
    codecs = [WireCodecs(codec, codec, Flow.POOLED)] * 2 + [WireCodecs(codec, codec)]
    assert _is_equal(_run(world, 1, codecs), _run(world, 2, codecs))


def test_with_one_row_block_pooled_has_the_bits_of_rows() -> None:
    assert _is_equal(_run(3, 1, POOLED[Flow.ROWS], 1), _run(3, 2, POOLED[Flow.POOLED], 1))


@pytest.mark.parametrize("flow", [Flow.POOLED, Flow.POOLED_BY_OWNER])
@pytest.mark.parametrize("hosts", ["ab", "aab", "abab", "aaabbc"])
def test_pooled_tables_have_the_bits_of_flat_beside_rows_that_go_hierarchical(hosts: str, flow: Flow) -> None:
    """S8: their sections go straight to the owners, in the same rounds; here beside a mirrored table, too."""
    batches, placement = ranks_of._batches(hosts, 5), ranks_of._placement(len(hosts), 3)
    flat, ours, mirrored = (
        ranks_of._Ranks(hosts, placement, batches, wire=POOLED[flow], **options)
        for options in ({}, {"is_hierarchical": True}, {"is_hierarchical": True, "mirrored": (2,)})
    )
    for other in (ours, mirrored):
        assert {key: row for key, row in other.rows.items() if key[0] < 2} == {
            key: row for key, row in flat.rows.items() if key[0] < 2
        }
        for a, b in zip(other.outputs, flat.outputs):
            # Collection 0 is pooled; the sequences of the rows flow differ from flat in rounding once they are trained.
            assert all(torch.equal(x, y) for x, y in zip(a[0::2], b[0::2]))
            assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(a[1::2], b[1::2]))
    assert ours.rows == mirrored.rows
    assert {e.num_collectives() for e in ours.exchanges} == {5 * len(batches)}


@pytest.mark.parametrize("codec", [Codec.FP32, Codec.INT8])
def test_s5_placement_does_not_change_bits_under_hierarchical(codec: Codec) -> None:
    codecs = [WireCodecs(codec, codec, Flow.POOLED), WireCodecs(codec, codec), WireCodecs(codec, codec)]
    batches = ranks_of._batches("aabb", 5)
    runs = [
        ranks_of._Ranks("aabb", ranks_of._placement(4, seed), batches, wire=codecs, is_hierarchical=True)
        for seed in (1, 2)
    ]
    assert _is_equal(*runs)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_hot_rows_and_threads_do_not_change_bits(num_threads: int) -> None:
    """A row of more than 512 positions is summed in segments, as in the rows flow."""
    generator = torch.Generator().manual_seed(1)
    values, offsets = torch.randint(0, 3, (8000,), generator=generator), torch.arange(0, 8001, 4)
    batches = [[RankBatch(values, offsets, torch.rand(8000, generator=generator), 500)] * 2] * 2
    placement = [np.zeros(1, np.uint16)] * 3
    rows = ranks_of._Ranks("aa", placement, batches, wire=POOLED[Flow.ROWS], num_blocks=1)
    pooled = ranks_of._Ranks("aa", placement, batches, wire=POOLED[Flow.POOLED], num_blocks=1, num_threads=num_threads)
    assert _is_equal(rows, pooled)


def test_long_bags_over_one_block_take_fewer_bytes_pooled() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(2):
        values = torch.randint(0, 40, (4 * 400,), generator=generator)
        offsets = torch.arange(0, 4 * 400 + 1, 100)
        batches.append([RankBatch(values, offsets, torch.rand(1600, generator=generator), 4)] * 2)
    placement = [np.zeros(1, np.uint16)] * 3
    sent = {
        flow: sum(
            e.counts[kind].bytes_sent
            for e in ranks_of._Ranks("aa", placement, batches, wire=POOLED[flow], num_blocks=1).exchanges
            for kind in (Kind.VALUES, Kind.GRADIENTS)
        )
        for flow in (Flow.ROWS, Flow.POOLED)
    }
    assert sent[Flow.POOLED] < 0.7 * sent[Flow.ROWS]


def _plan(**options: object) -> StepPlan:
    tables = ranks_of._tables()
    store = RowStore(tables)
    for t in range(3):
        for block in range(8):
            store.add_block(t, block)
    arguments = {"rank": 0, "world_size": 2, "codecs": POOLED[Flow.POOLED]} | options
    return StepPlan(store, tables, ranks_of._FEATURES, [np.zeros(8, np.uint16)] * 3, **arguments)  # type: ignore[arg-type]


def test_tables_that_cannot_be_pooled_are_named() -> None:
    with pytest.raises(ConfigError, match="'words' needs flow rows: its rows are read one by one"):
        _plan(codecs=[WireCodecs(flow=Flow.POOLED)] * 3)
    with pytest.raises(ConfigError, match="'static' needs flow rows: it is data parallel"):
        _plan(mirrored=(0,))
    assert _plan().hash != _plan(codecs=POOLED[Flow.ROWS]).hash


def test_learned_weights_need_rows() -> None:
    with pytest.raises(ConfigError, match="'static': learned per-sample weights need flow rows"):
        _plan().new_lookup().weight_grad([])


def _section(hosts: tuple[int, ...] = ()) -> np.ndarray:
    """What rank 1 sends to rank 0 for a batch of two samples; to another host: that part which goes straight."""
    tables = ranks_of._tables()
    plan = StepPlan(
        RowStore(tables), tables, ranks_of._FEATURES, [np.zeros(8, np.uint16)] * 3, rank=1, world_size=2,
        codecs=POOLED[Flow.POOLED], hosts=hosts,
    )  # fmt: skip
    lookup = plan.new_lookup()
    values, offsets = torch.arange(16) % 5, torch.arange(0, 17, 2)
    lookup.route(values, offsets, torch.ones(16), np.arange(4, dtype=np.int32), 2)
    section = np.zeros(int((lookup.straight_id_bytes() if hosts else lookup.id_bytes())[0]), np.uint8)
    write = lookup.write_straight_ids if hosts else lookup.write_ids
    write(np.array([section.ctypes.data, 0], np.int64))
    return section


def _receive(section: np.ndarray, hosts: tuple[int, ...] = (), *, is_straight: bool = True) -> None:
    lookup = _plan(hosts=hosts).new_lookup()
    nothing = torch.zeros(0, dtype=torch.int64)
    lookup.route(nothing, torch.zeros(1, dtype=torch.int64), None, np.full(4, -1, np.int32), 0)
    sent = np.array([0, section.ctypes.data], np.int64), np.array([0, len(section)], np.int64)
    none = np.zeros(2, np.int64), np.zeros(2, np.int64)
    if not hosts:
        lookup.resolve(*sent)
    elif is_straight:
        lookup.resolve(*none, *sent)
    else:
        lookup.resolve(*sent, *none)
    sums = np.zeros(int(lookup.row_bytes_out()[1]) + 64, np.uint8)
    lookup.write_rows(np.array([0, sums.ctypes.data], np.int64))


def test_ids_that_take_the_wrong_way_are_refused() -> None:
    _receive(_section((0, 1)), (0, 1))
    section = _section((0, 1))
    with pytest.raises(ProtocolError, match="rank 1"):
        _receive(section, (0, 1), is_straight=False)
    tables = ranks_of._tables()
    rows = StepPlan(
        RowStore(tables), tables, ranks_of._FEATURES, [np.zeros(8, np.uint16)] * 3, rank=1, world_size=2
    ).new_lookup()
    rows.route(torch.arange(16) % 5, torch.arange(0, 17, 2), torch.ones(16), np.arange(4, dtype=np.int32), 2)
    section = np.zeros(int(rows.id_bytes()[0]), np.uint8)
    rows.write_ids(np.array([section.ctypes.data, 0], np.int64))
    with pytest.raises(ProtocolError, match="table 2, whose ids take another way"):
        _receive(section, (0, 1))


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 2**32 - 1)), max_size=3),
    st.integers(0, 40),
    st.sampled_from([(), (0, 1)]),
)
@settings(max_examples=200, deadline=None)
def test_bags_that_cannot_be_are_refused_with_the_rank(
    changes: list[tuple[int, int]], cut: int, hosts: tuple[int, ...]
) -> None:
    """S10: a changed or shortened section is refused, or is another sound one."""
    section = _section(hosts)
    words = section.view(np.uint32)
    for place, value in changes:
        words[place % len(words)] = value if value % 3 else value % 7
    section = section[: len(section) - cut].copy()
    try:
        _receive(section, hosts)
    except ProtocolError as error:
        assert "rank 1" in str(error)
    else:
        assert cut == 0
