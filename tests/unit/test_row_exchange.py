"""Flat and hierarchical exchange of ids, rows and gradients among ranks that are threads (S5, S6, S8)."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from test_plan import RankBatch, random_batch
from thread_ranks import Switch, ThreadTransport, run_ranks

from shoal.kernels import _core
from shoal.kernels.errors import ConfigError, ProtocolError
from shoal.kernels.exchange import Exchange
from shoal.kernels.frame import Identity, Kind
from shoal.kernels.plan import StepPlan
from shoal.kernels.row_exchange import Carriers, FlatRows, HierarchicalRows, host_numbers
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import (
    Codec,
    FeatureSpec,
    OptimizerKind,
    OptimizerSpec,
    PoolingType,
    TableSpec,
    WireCodecs,
)

HOSTS = ["ab", "aab", "aaab", "aabb", "abab", "aaabbc", "abcabcc"]


def _tables(num_blocks: int = 8) -> list[TableSpec]:
    def table(name: str, rows: int, dim: int, kind: OptimizerKind) -> TableSpec:
        optimizer = OptimizerSpec(kind=kind, lr=0.1, initial_accumulator=0.1)
        return TableSpec(
            name=name, num_embeddings=rows, embedding_dim=dim, optimizer=optimizer, init_min=-0.3, init_max=0.3,
            seed=7, num_blocks=num_blocks,
        )  # fmt: skip

    return [
        table("static", 60, 8, OptimizerKind.ADAGRAD),
        table("dynamic", 0, 5, OptimizerKind.SGD),
        table("words", 40, 12, OptimizerKind.ROWWISE_ADAGRAD),
    ]


_FEATURES = [
    FeatureSpec(name="f", table=0, collection=0),
    FeatureSpec(name="g", table=0, collection=0, is_weighted=True),
    FeatureSpec(name="h", table=1, collection=0, pooling=PoolingType.MEAN),
    FeatureSpec(name="s", table=2, collection=1, pooling=PoolingType.NONE),
]


class _Ranks:
    """W ranks that train ``num_steps`` steps; keeps what they end with."""

    def __init__(
        self,
        hosts: str,
        placement: list[np.ndarray],
        batches: list[list[RankBatch]],
        *,
        is_hierarchical: bool = False,
        mirrored: tuple[int, ...] = (),
        new_view_after: int = 0,
        codec: Codec = Codec.FP32,
        wire: list[WireCodecs] | None = None,
        num_blocks: int = 8,
        num_threads: int = 1,
    ) -> None:
        world, tables = len(hosts), _tables(num_blocks)
        numbers = host_numbers(hosts)
        near = [[r for r in range(world) if hosts[r] == hosts[rank]] for rank in range(world)]
        switch = Switch(world)
        switches = {host: Switch(hosts.count(host)) for host in hosts}
        columns = np.arange(len(_FEATURES), dtype=np.int32)
        self.rows: dict[tuple[int, int], tuple[bytes, bytes]] = {}

        def train(rank: int) -> tuple[list[torch.Tensor], Exchange, RowStore, int]:
            store = RowStore(tables, undo_steps=0, num_threads=num_threads)
            for t, owners in enumerate(placement):
                for block in np.nonzero(owners == rank)[0]:
                    store.add_block(t, int(block))
            plan = StepPlan(
                store, tables, _FEATURES, placement, rank=rank, world_size=world,
                hosts=numbers if is_hierarchical else (), mirrored=mirrored,
                codecs=wire or [WireCodecs(codec, codec)] * len(tables), num_threads=num_threads,
            )  # fmt: skip
            identity = Identity(run=1, epoch=0, rank=rank, world_size=world, plan_hash=plan.hash)
            exchange = Exchange(ThreadTransport(switch, rank, world, frozenset(near[rank])), identity)
            rows: FlatRows | HierarchicalRows = FlatRows(exchange, plan)
            if is_hierarchical:
                size, mine = len(near[rank]), near[rank].index(rank)
                local = Identity(run=1, epoch=0, rank=mine, world_size=size, plan_hash=plan.hash)
                rows = HierarchicalRows(
                    exchange, Exchange(ThreadTransport(switches[hosts[rank]], mine, size), local), plan
                )
            outputs: list[torch.Tensor] = []
            lookup = plan.new_lookup()
            for step, batch in enumerate(batches):
                if step and step == new_view_after:
                    assert not is_hierarchical
                    plan = StepPlan(store, tables, _FEATURES, placement, rank=rank, world_size=world, mirrored=mirrored)
                    rows, lookup = FlatRows(exchange, plan), plan.new_lookup()
                own = batch[rank]
                lookup.route(own.values, own.offsets, own.weights, columns, own.batch_size)
                headers = exchange.header(Kind.BATCH, step, sections=rows.sections(lookup))
                found = lookup.new_outputs()
                lookup.pool(rows.fetch(lookup, step, headers, lambda name: None), found)
                outputs += [tensor.clone() for tensor in found]
                grads = [torch.sin(tensor + step) for tensor in found]
                rows.collect([lookup], [grads], step, 10.0)
                out, into = rows.gradient_bytes(lookup)
                round_ = exchange.round(Kind.GRADIENTS, step, out[None], into[None])
                rows.write_gradients(lookup, grads, round_.send_addresses[0])
                plan.apply([lookup], [round_.run()[0]], step + 1, np.full(len(tables), 0.1, np.float32))
            merged = rows.num_asked - rows.num_merged if isinstance(rows, HierarchicalRows) else 0
            return outputs, exchange, store, merged

        results = run_ranks(world, train)
        self.outputs = [outputs for outputs, _, _, _ in results]
        self.exchanges = [exchange for _, exchange, _, _ in results]
        self.num_saved = sum(saved for _, _, _, saved in results)
        for _, _, store, _ in results:
            for t in range(len(tables)):
                for block in store.owned_blocks(t):
                    part = store.export_block(t, block)
                    for i, row_id in enumerate(part.ids.tolist()):
                        self.rows[t, row_id] = (part.weights[i].numpy().tobytes(), part.slots[i].numpy().tobytes())

    def across(self, kind: Kind) -> int:
        return sum(e.counts[kind].bytes_sent_across_hosts for e in self.exchanges if kind in e.counts)


def _batches(hosts: str, seed: int, num_steps: int = 3) -> list[list[RankBatch]]:
    rng = np.random.default_rng(seed)
    sizes = [[int(rng.integers(0, 9)) for _ in hosts] for _ in range(num_steps)]
    return [[random_batch(_FEATURES, _tables(), n, rng, hot=True) for n in row] for row in sizes]


def _placement(world: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, world, table.num_blocks).astype(np.uint16) for table in _tables()]


@pytest.mark.parametrize("hosts", HOSTS)
def test_hierarchical_equals_flat_up_to_rounding_on_ragged_hosts(hosts: str) -> None:
    batches, placement = _batches(hosts, 1), _placement(len(hosts), 2)
    flat = _Ranks(hosts, placement, batches, is_hierarchical=False)
    ours = _Ranks(hosts, placement, batches, is_hierarchical=True)
    for mine, theirs in zip(ours.outputs, flat.outputs):
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # The first step's rows have seen no gradient yet: they arrive bit for bit.
    assert all(torch.equal(a, b) for mine, theirs in zip(ours.outputs, flat.outputs) for a, b in zip(mine[:2], theirs))
    assert ours.rows.keys() == flat.rows.keys()
    for key, (weights, slots) in ours.rows.items():
        for a, b in zip((weights, slots), flat.rows[key]):
            np.testing.assert_allclose(np.frombuffer(a, np.float32), np.frombuffer(b, np.float32), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab", "aaabbc"])
def test_s5_placement_does_not_change_bits_at_a_fixed_assignment_to_hosts(hosts: str) -> None:
    batches = _batches(hosts, 3)
    runs = [_Ranks(hosts, _placement(len(hosts), seed), batches, is_hierarchical=True) for seed in (4, 5)]
    assert runs[0].rows == runs[1].rows
    for a, b in zip(runs[0].outputs, runs[1].outputs):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_a_row_crosses_the_network_once_per_host() -> None:
    """With several ranks on a host that ask for the same hot ids, fewer rows and gradients cross; none more."""
    hosts = "aaaabbbb"
    batches, placement = _batches(hosts, 6), _placement(len(hosts), 7)
    flat = _Ranks(hosts, placement, batches, is_hierarchical=False)
    ours = _Ranks(hosts, placement, batches, is_hierarchical=True)
    assert ours.num_saved > 0
    for kind in (Kind.VALUES, Kind.GRADIENTS):
        assert ours.across(kind) < flat.across(kind)


def test_s6_the_number_of_collectives_is_constant() -> None:
    hosts = "aab"
    batches = _batches(hosts, 8)
    ranks = _Ranks(hosts, _placement(3, 9), batches, is_hierarchical=True)
    per_step = {exchange.num_collectives() / len(batches) for exchange in ranks.exchanges}
    assert per_step == {5.0}  # header, merged header, ids, values, gradients; three more among a host's ranks


@pytest.mark.parametrize("codec", [Codec.FP16, Codec.BF16, Codec.INT8])
@pytest.mark.parametrize("hosts", ["ab", "aabb", "aaab"])
@pytest.mark.parametrize("is_hierarchical", [False, True])
def test_s5_placement_does_not_change_bits_whatever_the_codec(hosts: str, is_hierarchical: bool, codec: Codec) -> None:
    """A rank's own rows and gradients are rounded as those that travel; a host's sums as a relay rounds them."""
    batches = _batches(hosts, 21)
    exact = _Ranks(hosts, _placement(len(hosts), 22), batches)
    runs = [
        _Ranks(hosts, _placement(len(hosts), seed), batches, is_hierarchical=is_hierarchical, codec=codec)
        for seed in (22, 23)
    ]
    assert runs[0].rows == runs[1].rows
    for a, b, near in zip(runs[0].outputs, runs[1].outputs, exact.outputs):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        assert all(float((x - y).abs().max()) < 0.05 for x, y in zip(a, near) if x.numel())
    assert runs[0].rows != exact.rows


@pytest.mark.parametrize("is_hierarchical", [False, True])
def test_promise_2_a_data_parallel_table_gives_the_same_bits_as_a_sharded_one(is_hierarchical: bool) -> None:
    hosts = "aab"
    batches, placement = _batches(hosts, 11, 4), _placement(3, 12)
    sharded = _Ranks(hosts, placement, batches, is_hierarchical=is_hierarchical)
    mirrored = _Ranks(hosts, placement, batches, is_hierarchical=is_hierarchical, mirrored=(0, 2))
    assert mirrored.rows == sharded.rows
    for a, b in zip(mirrored.outputs, sharded.outputs):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_a_new_view_fills_its_mirrors_from_the_owners() -> None:
    hosts = "ab"
    batches, placement = _batches(hosts, 13, 4), _placement(2, 14)
    sharded = _Ranks(hosts, placement, batches)
    mirrored = _Ranks(hosts, placement, batches, mirrored=(0, 2), new_view_after=2)
    assert mirrored.rows == sharded.rows


def test_a_table_that_no_rank_can_keep_whole_is_not_data_parallel() -> None:
    tables = _tables()
    with pytest.raises(ConfigError, match="'dynamic' cannot be data parallel"):
        StepPlan(RowStore(tables), tables, _FEATURES, [np.zeros(8, np.uint16)] * 3, rank=0, world_size=1, mirrored=(1,))


@given(st.binary(min_size=0, max_size=400), st.integers(-1, 400))
@settings(max_examples=200, deadline=None)
def test_changed_rows_that_cannot_be_are_refused(noise: bytes, claim: int) -> None:
    tables = _tables()
    store = RowStore(tables)
    plan = StepPlan(store, tables, _FEATURES, [np.ones(8, np.uint16)] * 3, rank=0, world_size=2, mirrored=(0,))
    section = np.zeros(64 + len(noise), np.uint8)
    section[64:] = np.frombuffer(noise, np.uint8)
    if claim == 0 and not noise:
        return  # a section without changes
    ctypes.memmove(section.ctypes.data, claim.to_bytes(8, "little", signed=True), 8)
    with pytest.raises(ProtocolError, match="rank 1"):
        plan.read_mirrors(np.array([0, section.ctypes.data], np.int64), np.array([0, len(section)], np.int64))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_s8_every_remote_rank_has_one_carrier_on_each_host_and_both_ends_agree(hosts: list[int]) -> None:
    numbers = host_numbers([str(host) for host in hosts])
    sides = [Carriers.of(numbers, rank) for rank in range(len(hosts))]
    for rank, side in enumerate(sides):
        assert side.locals[side.local_rank] == rank
        for other in range(len(hosts)):
            if numbers[other] == numbers[rank]:
                assert side.carrier[other] == -1 and other not in side.owners
                continue
            carrier = side.locals[side.carrier[other]]
            assert other in sides[carrier].owners
            position = sides[other].local_rank
            assert side.carrier[other] == position % len(side.locals)
        sizes = np.arange(len(hosts)) * 10
        offsets, totals = side.lay_out(sizes, has_index=True)
        for number in range(len(side.locals)):
            carried = np.flatnonzero(side.carrier == number)
            at = -(-8 * len(carried) // 64) * 64
            for other in carried:
                assert offsets[other] == at
                at += -(-int(sizes[other]) // 64) * 64
            assert totals[number] == (at if sizes[carried].sum() else 0)


def _relay() -> _core.Relay:
    tables = _tables()
    store = RowStore(tables)
    plan = StepPlan(store, tables, _FEATURES, [np.ones(8, np.uint16)] * 3, rank=0, world_size=2, hosts=(0, 1))
    return _core.Relay(plan.native, [1], [0])


@given(st.binary(min_size=0, max_size=300), st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_requests_that_cannot_be_are_refused_before_they_are_read_beyond_their_end(noise: bytes, claim: int) -> None:
    """S10: whatever a peer sends, a relay reads inside the message or raises."""
    message = np.zeros(64 + len(noise), np.uint8)
    message[64:] = np.frombuffer(noise, np.uint8)
    ctypes.memmove(message.ctypes.data, claim.to_bytes(8, "little"), 8)
    relay = _relay()
    try:
        relay.merge(np.array([message.ctypes.data], np.int64), np.array([len(message)], np.int64))
    except _core.ProtocolViolation as error:
        assert "rank 0" in str(error)
    else:
        assert relay.counts()[0] * 4 <= len(noise)
