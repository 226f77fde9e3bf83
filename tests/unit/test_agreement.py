"""Before the first step of a view all ranks compare what their numbers depend on; a difference is named (issue 4.6)."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from session_ranks import SameRates, build_ranks
from thread_ranks import Switch, ThreadTransport, run_ranks

from shoal.actors.embedding import EmbeddingBagCollection
from shoal.actors.messages import Member, View
from shoal.actors.open_view import OpenOptions, OpenView
from shoal.actors.rank_facts import view_facts, view_hash, worker_facts
from shoal.actors.trainer import LoopSpec
from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels.agreement import agree, describe_difference
from shoal.kernels.errors import ConfigError, ProtocolError
from shoal.kernels.exchange import Exchange
from shoal.kernels.facts import Facts, facts_of, first_difference, hash_facts
from shoal.kernels.frame import Identity
from shoal.kernels.spec import Codec, Flow, OptimizerKind, OptimizerSpec, TableSpec, WireCodecs
from shoal.kernels.tables import EmbeddingBagConfig, table_seed, table_spec

SGD = OptimizerSpec(kind=OptimizerKind.SGD, lr=0.1)


def _exchanges(world: int) -> list[Exchange]:
    switch = Switch(world)
    return [
        Exchange(ThreadTransport(switch, rank, world), Identity(run=1, epoch=3, rank=rank, world_size=world))
        for rank in range(world)
    ]


def _outcome(facts: list[Facts], hashes: list[int] | None = None) -> tuple[str | None, list[bool | None], list[int]]:
    """(the error's text, the same on all ranks; who is its origin; collectives per rank)."""
    exchanges = _exchanges(len(facts))

    def body(rank: int) -> tuple[str | None, bool | None]:
        value = hash_facts(facts[rank]) if hashes is None else hashes[rank]
        try:
            agree(exchanges[rank], 0, value, lambda: facts[rank], 5.0)
        except (ConfigError, ProtocolError) as error:
            return str(error), error.is_origin
        return None, None

    found = run_ranks(len(facts), body)
    assert len({text for text, _ in found}) == 1
    return found[0][0], [origin for _, origin in found], [exchange.num_collectives() for exchange in exchanges]


BASE = (("version", "1"), ("tables[0]", "'user'"), ("lr", "0.1"), ("dense parameters[0]", "'a'"))


def _changed(index: int, value: str) -> Facts:
    return (*BASE[:index], (BASE[index][0], value), *BASE[index + 1 :])


def test_ranks_that_agree_exchange_one_header():
    assert _outcome([BASE] * 3) == (None, [None] * 3, [1, 1, 1])


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_rank_is_named_with_the_path_and_both_values(odd):
    text, origins, _ = _outcome([_changed(2, "0.2") if rank == odd else BASE for rank in range(3)])
    others = ", ".join(str(rank) for rank in range(3) if rank != odd)
    assert f"lr: rank {odd} has 0.2; ranks {others} have 0.1." in text
    assert origins == [rank == odd for rank in range(3)]


def test_the_first_difference_of_several_is_named():
    text, _, _ = _outcome([BASE, _changed(3, "'b'"), _changed(1, "'item'")])
    assert "tables[0]: rank 2 has 'item'; ranks 0, 1 have 'user'." in text
    assert "dense parameters" not in text


def test_three_values_of_one_fact_are_all_named():
    text, _, _ = _outcome([BASE, _changed(0, "2"), _changed(0, "3")])
    assert all(part in text for part in ("rank 0 has 1", "rank 1 has 2", "rank 2 has 3"))


def test_a_fact_that_one_rank_lacks_is_named():
    assert "dense parameters[0]: rank 1 has nothing; rank 0 has 'a'" in _outcome([BASE, BASE[:3]])[0]
    assert "dense parameters[0]: rank 1 has 'a'; rank 0 has nothing" in _outcome([BASE[:3], BASE])[0]
    assert "lr: rank 1 has other = 5" in _outcome([BASE, (*BASE[:2], ("other", "5"))])[0]


def test_values_too_long_for_a_header_are_cut():
    text, _, _ = _outcome([_changed(2, "x" * 1000), BASE])
    assert "xxx..." in text and len(text) < 600


def test_hashes_that_differ_over_equal_facts_are_an_error_of_the_protocol():
    text, _, _ = _outcome([BASE, BASE], [1, 2])
    assert "not in what they say" in text


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_first_difference_is_the_end_of_the_common_beginning(facts, data):
    other = list(facts)
    at = data.draw(st.integers(0, len(facts)))
    other[at:] = data.draw(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=4))
    found = first_difference(facts, other)
    if facts == other:
        assert found == -1 and hash_facts(facts) == hash_facts(other)
    else:
        assert facts[:found] == other[:found] and facts[found : found + 1] != other[found : found + 1]
        assert hash_facts(facts) != hash_facts(other)


def test_facts_of_long_sequences_come_in_pieces():
    facts = list(facts_of("owners", np.arange(40, dtype=np.uint16)))
    assert facts[0] == ("number of owners", "40")
    assert [path for path, _ in facts[1:]] == ["owners[0:16]", "owners[16:32]", "owners[32:40]"]
    assert list(facts_of("codecs", WireCodecs())) == [
        ("codecs.values", "FP32"), ("codecs.gradients", "FP32"), ("codecs.flow", "ROWS"),
    ]  # fmt: skip
    assert list(facts_of("m", {"b": 1, "a": None})) == [("m['a']", "None"), ("m['b']", "1")]


def test_the_rarest_value_comes_first():
    assert describe_difference("p", ["x", "y", "x"]) == "p: rank 1 has y; ranks 0, 2 have x"


# ---- what the facts of a real worker tell apart ---------------------------------------------------------------------


class Model(nn.Module):
    """Its parts are registered in the order that ``names`` says, as a model does that iterates over a set."""

    def __init__(self, names: tuple[str, ...] = ("one", "two"), width: int = 4, is_frozen: bool = False) -> None:
        super().__init__()
        config = EmbeddingBagConfig(num_embeddings=64, embedding_dim=width, name="user", feature_names=["f"])
        self.bags = EmbeddingBagCollection([config])
        for name in names:
            self.add_module(name, nn.Linear(3, 2))
        self.one.bias.requires_grad_(not is_frozen)


def _spec(**changes) -> WorkerSpec:
    loop = LoopSpec(seed=1, total_steps=10, **changes)
    return WorkerSpec(
        run="r", build_model=Model, make_table=_make, policies={}, dense_optimizer=None, loop=loop,
        learning_rates=lambda tables: SameRates(np.full(len(tables), 0.1, np.float32), 0.1),
        train_feed=None, eval_feed=None, storage=None, checkpoint_directory=None,
    )  # fmt: skip


def _make(config) -> TableSpec:
    return table_spec(config, seed=table_seed(0, config.name), optimizer=SGD, num_blocks=32)


def _facts_of_world(build, make=lambda config, rank: _make(config), *, owners=None, codecs=None, spec=None):
    """Facts and hash of each of two ranks. Each argument is a function of the rank."""
    facts = []
    for rank in range(2):
        ranks = build_ranks(
            "aa",
            lambda rank=rank: build(rank),
            lambda config, rank=rank: make(config, rank),
            owners=None if owners is None else lambda table, rank=rank: owners(rank),
            codecs=None if codecs is None else codecs(rank),
        )
        mine = ranks[rank]
        members = tuple(Member(rank=r, worker_id=str(r), host="a", share=0.5) for r in range(2))
        view = View(run="r", epoch=0, members=members, placement={}, transport="auto", store_host="", store_port=0)
        worker = worker_facts(spec(rank) if spec else _spec(), mine.tables, mine.dense)
        plan = mine.session.plan
        facts.append((worker + view_facts(view, plan), view_hash(hash_facts(worker), view, plan)))
    return facts


def _text_of(*args, **kwargs) -> str | None:
    facts = _facts_of_world(*args, **kwargs)
    return _outcome([mine for mine, _ in facts], [value for _, value in facts])[0]


def test_ranks_of_one_job_agree():
    assert _text_of(lambda rank: Model()) is None


def test_a_model_whose_parameters_are_in_another_order_on_a_rank_is_caught_and_named():
    text = _text_of(lambda rank: Model(("one", "two") if rank == 0 else ("two", "one")))
    assert "dense parameters[0]: rank 1 has 'two.weight'; rank 0 has 'one.weight'" in text


def test_shapes_and_initial_values_of_dense_parameters_are_compared():
    def wider(rank):
        model = Model()
        if rank == 1:
            model.two = nn.Linear(5, 2)
        return model

    assert "dense parameter 'two.weight': rank 1 has torch.float32 [2, 5]; rank 0 has torch.float32 [2, 3]" in _text_of(
        wider
    )

    def shifted(rank):
        model = Model()
        with torch.no_grad():
            model.two.bias += rank
        return model

    assert "initial values of 'two.bias': rank 1 has " in _text_of(shifted)
    assert "'one.bias': rank 1 has torch.float32 [2], frozen" in _text_of(lambda rank: Model(is_frozen=rank == 1))


def test_tables_and_their_settings_are_compared():
    def lr(config, rank):
        return dataclasses.replace(_make(config), optimizer=OptimizerSpec(kind=OptimizerKind.SGD, lr=0.1 + rank))

    assert "table 'user'.optimizer.lr: rank 1 has 1.1; rank 0 has 0.1" in _text_of(lambda rank: Model(), lr)
    assert "table 'user'.embedding_dim: rank 1 has 5; rank 0 has 4" in _text_of(lambda rank: Model(width=4 + rank))


def test_the_plan_is_compared_by_table_and_row_block():
    def owners(rank):
        return [0] * 20 + [rank] + [1] * 11

    text = _text_of(lambda rank: Model(), owners=owners)
    assert "table 'user': owners of row blocks[16:32]: rank 1 has [0, 0, 0, 0, 1, 1" in text

    def codecs(rank):
        return {"user": WireCodecs(Codec.INT8 if rank else Codec.FP32, Codec.FP32, Flow.ROWS)}

    assert "table 'user': wire.values: rank 1 has INT8; rank 0 has FP32" in _text_of(
        lambda rank: Model(), codecs=codecs
    )


def test_settings_of_training_are_compared():
    text = _text_of(lambda rank: Model(), spec=lambda rank: _spec(clip_grad_norm=None if rank else 1.0))
    assert "train.clip_grad_norm: rank 1 has None; rank 0 has 1.0" in text


def test_versions_are_compared_first(monkeypatch):
    facts = _facts_of_world(lambda rank: Model())
    monkeypatch.setattr(torch, "__version__", "9.9")
    others = _facts_of_world(lambda rank: Model(("two", "one")))
    text, _, _ = _outcome([facts[0][0], others[1][0]])
    assert "version of torch: rank 1 has '9.9'" in text or "version of torch: rank 1 has 9.9" in text


def test_a_view_names_what_differs_although_its_headers_would_only_compare_the_plans_hash():
    """``OpenView.agree`` comes before the first header that carries the hash of the plan."""
    switch = Switch(2)

    def body(rank: int) -> str:
        (mine,) = build_ranks("a", Model, _make, owners=lambda table: [0] * 32)
        opened = object.__new__(OpenView)
        members = tuple(Member(rank=r, worker_id=str(r), host="a", share=0.5) for r in range(2))
        opened.view = View(
            run="r", epoch=2, members=members, placement={}, transport="auto", store_host="", store_port=0
        )
        opened.rank, opened.plan, opened._model_tables = rank, mine.session.plan, mine.tables
        opened.plan.placement, opened.plan.hash = (np.full(32, rank, np.uint16),), rank
        opened.groups = SimpleNamespace(transport=ThreadTransport(switch, rank, 2))
        opened._options = OpenOptions(facts=(("version", "1"),), facts_hash=7)
        with pytest.raises(ConfigError) as caught:
            opened.agree(0, 5.0)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second and "table 'user': owners of row blocks[0:16]: rank 1 has [1, 1, " in first
