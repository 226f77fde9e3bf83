"""Tables cut into column blocks through the real worker: parity with plain torch, and what it costs (S6, S7)."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import parity
import world as worlds
from cut_tables import blocks_of, cut, whole_rows
from test_session import OPTIMIZERS, STEPS, assert_close

from shoal.kernels.spec import Flow, WireCodecs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = parity.write_data(tmp_path_factory.mktemp("data") / "train")
    return parity.source_of(parity.job_config(folder, max_steps=STEPS))


@pytest.fixture(scope="module")
def oracles(source):
    torch.set_num_threads(1)
    return {name: parity.oracle(source, optimizer, STEPS) for name, optimizer in OPTIMIZERS.items()}


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.timeout(400)
def test_training_over_column_blocks_equals_plain_torch(num_workers, source, oracles, tmp_path):
    """Promise 1: shared features, SUM, MEAN and a sequence; uneven widths; any world size; 1e-5 after 50 steps."""
    # Optimizers whose state is all by element do not know of columns: one world size will do.
    names = list(OPTIMIZERS) if num_workers == 2 else ["rowwise_adagrad", "adam"]
    specs = [cut(parity.worker_spec(f"c{n}", source, OPTIMIZERS[n], tmp_path, checkpoint_at_end=False)) for n in names]
    outcomes = worlds.run_world(num_workers, specs)
    for name, spec, outcome in zip(names, specs, outcomes):
        assert outcome.errors == [None] * num_workers, outcome.errors
        whole = dataclasses.replace(outcome, rows=whole_rows(outcome.rows, blocks_of(spec)))
        assert_close(whole, oracles[name], OPTIMIZERS[name])


def test_only_shared_row_wise_state_costs_a_collective(source, tmp_path):
    def collectives(name: str, steps: int, is_cut: bool) -> int:
        spec = parity.worker_spec("n", source, OPTIMIZERS[name], tmp_path, checkpoint_at_end=False, total_steps=steps)
        outcome = worlds.run_world(1, [cut(spec) if is_cut else spec])[0]
        assert outcome.errors == [None]
        return outcome.collectives

    def per_step(name: str, is_cut: bool) -> int:
        return collectives(name, 6, is_cut) - collectives(name, 5, is_cut)

    whole = per_step("adagrad", False)
    assert per_step("adagrad", True) == whole == per_step("rowwise_adagrad", False)
    assert per_step("rowwise_adagrad", True) == whole + 1


@pytest.mark.parametrize("hosts", ["abab"])
@pytest.mark.timeout(400)
def test_hierarchical_exchange_of_column_blocks_equals_plain_torch(hosts, source, oracles, tmp_path):
    """S7 over merged requests: owners on different hosts still agree on a row block's rows and their order."""
    names = ["rowwise_adagrad", "adam"]
    specs = [cut(parity.worker_spec(f"h{n}", source, OPTIMIZERS[n], tmp_path, checkpoint_at_end=False)) for n in names]
    outcomes = worlds.run_world(len(hosts), specs, hosts=hosts, exchange="hierarchical", mirrored=("genre",))
    for name, spec, outcome in zip(names, specs, outcomes):
        assert outcome.errors == [None] * len(hosts), outcome.errors
        whole = dataclasses.replace(outcome, rows=whole_rows(outcome.rows, blocks_of(spec)))
        assert_close(whole, oracles[name], OPTIMIZERS[name])


@pytest.mark.timeout(400)
def test_the_pooled_flow_of_column_blocks_equals_plain_torch(source, oracles, tmp_path):
    """S7, D3: sums of squares come from the gradients of bags."""
    names = ["rowwise_adagrad", "adam"]
    specs = [cut(parity.worker_spec(f"f{n}", source, OPTIMIZERS[n], tmp_path, checkpoint_at_end=False)) for n in names]
    pooled = [block.name for block in blocks_of(specs[0]) if block.logical_name in parity.BAGS]
    codecs = {name: WireCodecs(flow=Flow.POOLED) for name in pooled}
    outcomes = worlds.run_world(2, specs, codecs=codecs)
    for name, spec, outcome in zip(names, specs, outcomes):
        assert outcome.errors == [None, None], outcome.errors
        whole = dataclasses.replace(outcome, rows=whole_rows(outcome.rows, blocks_of(spec)))
        assert_close(whole, oracles[name], OPTIMIZERS[name])


def test_clipping_counts_all_column_blocks_of_a_row(source, tmp_path):
    """S4, S7: the norm of the logical table's gradients, before the exchange of sums of squares."""
    name, clip = "rowwise_adagrad", 0.05
    spec = cut(
        parity.worker_spec("clip", source, OPTIMIZERS[name], tmp_path, checkpoint_at_end=False, clip_grad_norm=clip)
    )
    (outcome,) = worlds.run_world(2, [spec])
    assert outcome.errors == [None, None]
    whole = dataclasses.replace(outcome, rows=whole_rows(outcome.rows, blocks_of(spec)))
    assert_close(whole, parity.oracle(source, OPTIMIZERS[name], STEPS, clip_norm=clip), OPTIMIZERS[name])
