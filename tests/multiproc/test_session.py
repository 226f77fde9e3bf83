"""Promises 1 and 3 through the real worker, feed, store and exchange: parity with plain torch for every world size."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import parity
import world as worlds

from shoal.kernels.spec import Flow, OptimizerKind, OptimizerSpec, WireCodecs

# With an accumulator (or eps) of 0, Adagrad's and Adam's first updates are lr * sign(g): where a gradient cancels to
# nearly 0 its sign is rounding noise in any implementation. These constants keep the comparison well conditioned.
OPTIMIZERS = {
    "sgd": OptimizerSpec(kind=OptimizerKind.SGD, lr=0.1),
    "adagrad": OptimizerSpec(kind=OptimizerKind.ADAGRAD, lr=0.05, initial_accumulator=0.01),
    "rowwise_adagrad": OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.05),
    "adam": OptimizerSpec(kind=OptimizerKind.ADAM, lr=0.01, eps=1e-3),
}
STEPS = 50


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = parity.write_data(tmp_path_factory.mktemp("data") / "train")
    return parity.source_of(parity.job_config(folder, max_steps=STEPS))


@pytest.fixture(scope="module")
def oracles(source):
    torch.set_num_threads(1)
    return {name: parity.oracle(source, optimizer, STEPS) for name, optimizer in OPTIMIZERS.items()}


def assert_close(outcome: worlds.Outcome, expected: dict, optimizer: OptimizerSpec) -> None:
    """Weights, optimizer state and dense parameters within 1e-5 relative (promise 1)."""
    assert outcome.errors == [None] * len(outcome.errors), outcome.errors
    for table, (weights, slots, touched) in expected["tables"].items():
        found = outcome.rows[table]
        assert set(found) == set(torch.nonzero(touched).reshape(-1).tolist()), f"{table}: other rows exist"
        for row_id, (weight_bytes, slot_bytes, _) in found.items():
            weight = np.frombuffer(weight_bytes, dtype=np.float32)
            where = f"{table} {row_id}"
            np.testing.assert_allclose(weight, weights[row_id].numpy(), rtol=1e-5, atol=2e-6, err_msg=where)
            slot = np.frombuffer(slot_bytes, dtype=np.float32)
            np.testing.assert_allclose(slot, slots[row_id].numpy(), rtol=2e-5, atol=1e-7, err_msg=where)
    for name, value in expected["dense"].items():
        np.testing.assert_allclose(outcome.dense[f"model.over.{name}"], value, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.timeout(400)
def test_training_equals_plain_torch_at_any_world_size(num_workers, source, oracles, tmp_path):
    specs = [parity.worker_spec(f"p{n}", source, o, tmp_path, checkpoint_at_end=False) for n, o in OPTIMIZERS.items()]
    outcomes = worlds.run_world(num_workers, specs)
    for (name, optimizer), outcome in zip(OPTIMIZERS.items(), outcomes):
        assert_close(outcome, oracles[name], optimizer)


@pytest.mark.parametrize(("hosts", "transport"), [("aab", "auto"), ("abab", "auto"), ("aab", "gloo")])
@pytest.mark.timeout(400)
def test_hierarchical_exchange_and_a_data_parallel_table_equal_plain_torch(hosts, transport, source, oracles, tmp_path):
    names = ("rowwise_adagrad", "adam")
    specs = [parity.worker_spec(f"h{n}", source, OPTIMIZERS[n], tmp_path, checkpoint_at_end=False) for n in names]
    outcomes = worlds.run_world(
        len(hosts), specs, hosts=hosts, transport=transport, exchange="hierarchical", mirrored=("genre",)
    )
    for name, outcome in zip(names, outcomes):
        assert_close(outcome, oracles[name], OPTIMIZERS[name])


@pytest.mark.parametrize("hosts", ["a", "aa", "aab"])
@pytest.mark.timeout(400)
def test_the_pooled_flow_equals_plain_torch(hosts, source, oracles, tmp_path):
    """Promise 1, D3: partial sums of bags per row block and per owner beside rows; with two hosts, these by carriers.

    The records tell how the tables travel and what was sent."""
    specs = [parity.worker_spec(f"f{n}", source, o, tmp_path, checkpoint_at_end=False) for n, o in OPTIMIZERS.items()]
    codecs = {
        "user": WireCodecs(flow=Flow.POOLED),
        "item": WireCodecs(flow=Flow.POOLED_BY_OWNER),
        "genre": WireCodecs(flow=Flow.POOLED),
    }
    outcomes = worlds.run_world(len(hosts), specs, hosts=hosts, exchange="hierarchical", codecs=codecs)
    for (name, optimizer), outcome in zip(OPTIMIZERS.items(), outcomes):
        assert_close(outcome, oracles[name], optimizer)
        record = outcome.records[-1]
        flows = {table: cost.flow for table, cost in record.flows.items()}
        assert flows == ({} if hosts == "a" else dict.fromkeys(codecs, "pooled") | {"word": "rows"})
        assert (record.values["bytes_within_hosts"] > 0) == (hosts != "a")
        assert (record.values["bytes_across_hosts"] > 0) == (hosts == "aab")


@pytest.mark.parametrize(("num_workers", "parts"), [(1, (2, 8)), (2, (1, 3, 8)), (3, (4,))])
@pytest.mark.timeout(400)
def test_micro_batches_equal_one_batch_in_as_many_collectives(num_workers, parts, source, oracles, tmp_path):
    """Issue 4.4, S6: gradients of all micro-batches add up, rows are fetched and updated once."""
    names = ("rowwise_adagrad", "adam")
    cases = [(name, part) for name in names for part in parts]
    specs = [
        parity.worker_spec(
            f"m{name}{part}", source, OPTIMIZERS[name], tmp_path, checkpoint_at_end=False, accumulation_steps=part
        )
        for name, part in cases
    ]
    outcomes = worlds.run_world(num_workers, specs)
    for (name, _), outcome in zip(cases, outcomes):
        assert_close(outcome, oracles[name], OPTIMIZERS[name])
    assert len({outcome.collectives for outcome in outcomes}) == 1
    # Every sample is counted once, as fixed-point weights.
    assert len({int(outcome.metrics["bins"].sum()) for outcome in outcomes[: len(parts)]}) == 1


@pytest.mark.parametrize(("hosts", "transport"), [("aab", "auto"), ("aa", "gloo")])
@pytest.mark.timeout(400)
def test_overlap_changes_no_bit_over_processes(hosts, transport, source, tmp_path):
    """DESIGN 4: two rounds a step instead of four, and the same rows, optimizer state, dense state and metrics."""
    codecs = {"user": WireCodecs(flow=Flow.POOLED)}
    specs = [
        parity.worker_spec(
            f"o{name}{overlap}", source, OPTIMIZERS[name], tmp_path, checkpoint_at_end=False, overlap=overlap
        )
        for name in ("rowwise_adagrad", "adam")
        for overlap in (False, True)
    ]
    outcomes = worlds.run_world(len(hosts), specs, hosts=hosts, transport=transport, codecs=codecs)
    for off, on in zip(outcomes[::2], outcomes[1::2]):
        assert off.errors == on.errors == [None] * len(hosts)
        assert off.rows == on.rows and off.rows["user"]
        assert all((value == on.dense[name]).all() for name, value in off.dense.items())
        assert all(bool((value == on.metrics[name]).all()) for name, value in off.metrics.items())


CLIP = 0.05


@pytest.mark.parametrize(
    ("num_workers", "view"),
    [(1, {}), (3, {}), (3, {"hosts": "aab", "exchange": "hierarchical", "mirrored": ("user",)})],
)
@pytest.mark.timeout(400)
def test_clipping_by_the_global_norm_equals_the_unsharded_model(num_workers, view, source, tmp_path):
    """S4: the norm counts every row once, after its gradients are summed, and the dense part once."""
    names = ("sgd", "rowwise_adagrad")
    specs = [
        parity.worker_spec(f"c{n}", source, OPTIMIZERS[n], tmp_path, checkpoint_at_end=False, clip_grad_norm=CLIP)
        for n in names
    ]
    outcomes = worlds.run_world(num_workers, specs, **view)
    for name, outcome in zip(names, outcomes):
        assert_close(outcome, parity.oracle(source, OPTIMIZERS[name], STEPS, clip_norm=CLIP), OPTIMIZERS[name])
        norms = [record.values["grad_norm"] for record in outcome.records if "grad_norm" in record.values]
        assert norms and max(norms) > CLIP, "nothing was clipped"


def test_promise_2_the_norm_does_not_depend_on_the_placement(source, tmp_path):
    spec = parity.worker_spec("norm", source, OPTIMIZERS["sgd"], tmp_path, checkpoint_at_end=False, clip_grad_norm=CLIP)
    spread, whole = (
        worlds.run_world(2, [dataclasses.replace(spec, make_table=parity.MakeTable(OPTIMIZERS["sgd"], 1, blocks))])[0]
        for blocks in (4, 1)
    )
    assert spread.errors == whole.errors == [None, None]
    assert spread.rows == whole.rows
