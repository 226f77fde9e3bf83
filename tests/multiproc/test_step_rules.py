"""Rules of the step through real workers: constant collectives, errors seen by all, skipped steps, odd batches."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import parity
import world as worlds

from shoal.actors.worker import Worker
from shoal.kernels.frame import Flag
from shoal.kernels.spec import OptimizerKind, OptimizerSpec
from shoal.platform.job import Source

SGD = OptimizerSpec(kind=OptimizerKind.SGD, lr=0.1)
pytestmark = pytest.mark.timeout(300)


class FailsOnRankOne(parity.TinyModel):
    """Raises in forward on the rank whose slice does not start the batch."""

    def forward(self, batch):
        if batch.position and batch.position % 50:
            raise RuntimeError("the model broke here")
        return super().forward(batch)


class TwoLookups(parity.TinyModel):
    """Looks its bags up a second time, with another KeyedJaggedTensor: the gradients of both are summed."""

    def forward(self, batch):
        kjt = batch.sparse_features
        order = list(range(len(kjt.keys())))[::-1]
        again = self.bags(kjt.permute(order)).values()
        losses, predictions = super().forward(batch)
        return losses + 0.1 * again.sum(dim=1), predictions


class LearnedWeights(nn.Module):
    """Per-sample weights that are parameters: position weights of a bag."""

    def __init__(self) -> None:
        super().__init__()
        from shoal.actors.embedding import EmbeddingBagCollection
        from shoal.kernels.tables import EmbeddingBagConfig

        self.bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="item", num_embeddings=800, embedding_dim=8, feature_names=["recent"])],
            is_weighted=True,
        )
        self.scale = nn.Parameter(torch.full((5,), 0.5))

    def forward(self, batch):
        from shoal.kernels.jagged import KeyedJaggedTensor

        recent = batch.sparse_features["recent"]
        lengths = recent.lengths()
        starts = torch.repeat_interleave(recent.offsets()[:-1].long(), lengths.long())
        weights = self.scale[torch.arange(recent.values().numel()) - starts]
        kjt = KeyedJaggedTensor(keys=["recent"], values=recent.values(), lengths=lengths, weights=weights)
        logits = self.bags(kjt).values().sum(dim=1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses, torch.sigmoid(logits)


class FailsBeforeItsSecondLookup(TwoLookups):
    """On one rank only: its peers are then in the extra lookup's header."""

    def forward(self, batch):
        if batch.position and batch.position % 50:
            raise RuntimeError("broke before the lookup")
        return super().forward(batch)


class FailsInEvaluation(parity.TinyModel):
    def forward(self, batch):
        if not self.training:
            raise RuntimeError("the evaluation broke here")
        return super().forward(batch)


class Regression(parity.TinyModel):
    def forward(self, batch):
        batch.labels.mul_(7.5)
        losses, predictions = super().forward(batch)
        return losses, predictions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return parity.write_data(tmp_path_factory.mktemp("data") / "train")


@pytest.fixture(scope="module")
def source(folder) -> Source:
    return parity.source_of(parity.job_config(folder, max_steps=8))


def run(world: int, *specs, **options) -> list[worlds.Outcome]:
    return worlds.run_world(world, specs, **options)


def same_rows(a: worlds.Outcome, b: worlds.Outcome) -> None:
    assert a.errors == [None] * len(a.errors) and b.errors == [None] * len(b.errors), (a.errors, b.errors)
    assert a.rows == b.rows
    assert a.dense.keys() == b.dense.keys()
    for name in a.dense:
        np.testing.assert_array_equal(a.dense[name], b.dense[name], err_msg=name)


def close_rows(a: worlds.Outcome, b: worlds.Outcome) -> None:
    assert a.errors == [None] * len(a.errors) and b.errors == [None] * len(b.errors), (a.errors, b.errors)
    for table in a.rows:
        assert a.rows[table].keys() == b.rows[table].keys()
        for row_id, (weights, _, count) in a.rows[table].items():
            other = b.rows[table][row_id]
            one, two = (np.frombuffer(w, dtype=np.float32) for w in (weights, other[0]))
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=2e-6, err_msg=f"{table} {row_id}")
            assert count == other[2]


def test_transports_and_repeats_give_the_same_bits_and_a_constant_number_of_collectives(source, tmp_path):
    spec = parity.worker_spec("same", source, SGD, tmp_path, checkpoint_at_end=False)
    shorter = dataclasses.replace(spec, loop=dataclasses.replace(spec.loop, total_steps=4, log_every_steps=100))
    longer = dataclasses.replace(spec, loop=dataclasses.replace(spec.loop, log_every_steps=100))
    shm, again, few = run(2, longer, longer, shorter, transport="shm")
    (gloo,) = run(2, longer, transport="gloo")
    same_rows(shm, again)
    same_rows(shm, gloo)
    # Header, ids, values, gradients: four collectives a step (S6).
    assert shm.collectives - few.collectives == 4 * 4


def test_several_lookups_of_a_collection_are_summed(source, tmp_path):
    spec = parity.worker_spec("two", source, SGD, tmp_path, model=TwoLookups, checkpoint_at_end=False)
    (alone,) = run(0, spec)
    (spread,) = run(2, spec)
    close_rows(alone, spread)
    (plain,) = run(0, parity.worker_spec("one", source, SGD, tmp_path, checkpoint_at_end=False))
    assert plain.rows["user"] != alone.rows["user"]


def test_learned_per_sample_weights_get_their_gradient(source, tmp_path):
    spec = parity.worker_spec("weights", source, SGD, tmp_path, model=LearnedWeights, checkpoint_at_end=False)
    (alone,) = run(0, spec)
    (spread,) = run(2, spec)
    close_rows(alone, spread)
    assert np.abs(alone.dense["model.scale"] - 0.5).max() > 1e-4
    np.testing.assert_allclose(alone.dense["model.scale"], spread.dense["model.scale"], rtol=1e-5)


def test_one_row_and_three_workers(tmp_path):
    # Data fault 48: ranks beyond the data take part with 0 samples.
    folder = parity.write_data(tmp_path / "one", num_rows=1, num_files=1)
    source = parity.source_of(parity.job_config(folder, max_steps=3))
    spec = parity.worker_spec("tiny", source, SGD, tmp_path, checkpoint_at_end=False)
    (alone,) = run(0, spec)
    (spread,) = run(3, spec)
    close_rows(alone, spread)


def test_non_finite_loss_is_skipped_by_all_ranks_within_its_budget(source, tmp_path):
    # Data fault 46, S4: no owner applies when any rank's loss is NaN.
    spec = parity.worker_spec(
        "nan", source, SGD, tmp_path, model=AlwaysNanAtThree, checkpoint_at_end=False, max_skipped_steps=1
    )
    strict = dataclasses.replace(spec, loop=dataclasses.replace(spec.loop, max_skipped_steps=0))
    skipped, stopped = run(2, spec, strict)
    assert skipped.errors == [None, None] and skipped.summary["skipped_steps"] == 1
    assert all(np.isfinite(np.frombuffer(w, dtype=np.float32)).all() for w, _, _ in skipped.rows["user"].values())
    assert all("SHOAL-204" in e and "step 3" in e for e in stopped.errors), stopped.errors


class AlwaysNanAtThree(parity.TinyModel):
    """A NaN loss on one rank only: the one whose slice starts the fourth global batch."""

    def forward(self, batch):
        losses, predictions = super().forward(batch)
        self.calls = getattr(self, "calls", 0) + self.training
        if self.calls == 4 and batch.position % 50 == 0:
            losses = losses * float("nan")
        return losses, predictions


def test_error_in_one_ranks_model_is_raised_on_all(source, tmp_path):
    spec = parity.worker_spec("broken", source, SGD, tmp_path, model=FailsOnRankOne, checkpoint_at_end=False)
    (outcome,) = run(2, spec)
    assert all(e is not None and "rank 1" in e and "the model broke here" in e for e in outcome.errors), outcome.errors


def test_bad_id_is_raised_on_all_ranks_and_names_feature_table_and_value(source, tmp_path):
    # Data fault 34: the item table is declared smaller than the ids in the data.
    spec = parity.worker_spec("bad", source, SGD, tmp_path, model=SmallTable, checkpoint_at_end=False)
    (outcome,) = run(2, spec)
    for error in outcome.errors:
        assert error is not None and "SHOAL-203" in error and "'user'" in error and "[0, 3)" in error, outcome.errors


class SmallTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from shoal.actors.embedding import EmbeddingBagCollection
        from shoal.kernels.tables import EmbeddingBagConfig

        self.bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="user", num_embeddings=3, embedding_dim=8, feature_names=["user"])]
        )

    def forward(self, batch):
        return self.bags(batch.sparse_features).values().sum(dim=1)


def test_losses_of_the_wrong_shape_are_refused_with_the_fix(source, tmp_path):
    spec = parity.worker_spec("shape", source, SGD, tmp_path, model=MeanLoss, checkpoint_at_end=False)
    (outcome,) = run(0, spec)
    assert "reduction='none'" in (outcome.errors[0] or "")


def test_a_model_that_looks_up_features_of_its_own_cannot_run_on_micro_batches(source, tmp_path):
    spec = parity.worker_spec("own", source, SGD, tmp_path, model=TwoLookups, checkpoint_at_end=False)
    spec = dataclasses.replace(spec, loop=dataclasses.replace(spec.loop, accumulation_steps=2))
    (outcome,) = run(0, spec)
    assert "gradient_accumulation_steps" in (outcome.errors[0] or "")


def test_bf16_for_the_dense_part_stays_close_to_fp32_and_keeps_its_state_in_fp32(source, tmp_path):
    spec = parity.worker_spec("precise", source, SGD, tmp_path, checkpoint_at_end=False)
    half = dataclasses.replace(spec, run="half", loop=dataclasses.replace(spec.loop, precision="bf16"))
    exact, rounded = run(0, spec, half)
    assert rounded.errors == [None]
    for name, value in exact.dense.items():
        assert rounded.dense[name].dtype == value.dtype
        np.testing.assert_allclose(rounded.dense[name], value, atol=0.02)
    assert any((rounded.dense[name] != value).any() for name, value in exact.dense.items())


class MeanLoss(parity.TinyModel):
    def forward(self, batch):
        losses, _ = super().forward(batch)
        return losses.mean()


def test_a_rank_that_fails_before_an_extra_lookup_names_itself(source, tmp_path):
    # Its peers' header must not meet the frames of its gradients.
    spec = parity.worker_spec("early", source, SGD, tmp_path, model=FailsBeforeItsSecondLookup, checkpoint_at_end=False)
    (outcome,) = run(2, spec)
    assert outcome.errors[1] is not None and "broke before the lookup" in outcome.errors[1], outcome.errors
    assert outcome.errors[0] is not None and "SHOAL-502" in outcome.errors[0], outcome.errors


def test_the_checkpoint_comes_before_an_evaluation_that_fails(source, tmp_path):
    spec = parity.worker_spec("eval", source, SGD, tmp_path, model=FailsInEvaluation, eval_steps=1)
    worker = Worker("0", dataclasses.replace(spec, eval_feed=source.local_feed))
    worker.prepare("here")
    worker.start(worlds.make_view(worker, 1, run="eval", epoch=0, store=("", 0), transport="auto"))
    worker.join(60)
    assert worker._writer is not None
    worker._writer.wait(60)
    poll = worker.poll()
    assert poll.is_origin and "the evaluation broke here" in str(poll.failure)
    assert [part.step for part in poll.parts] == [8] and poll.parts[0].error is None


def test_a_stopped_run_writes_a_checkpoint_also_when_none_is_wanted_at_the_end(source, tmp_path):
    worker = Worker("0", parity.worker_spec("stop", source, SGD, tmp_path, checkpoint_at_end=False))
    worker.prepare("here")
    worker.request(int(Flag.STOP))
    worker.start(worlds.make_view(worker, 1, run="stop", epoch=0, store=("", 0), transport="auto"))
    worker.join(60)
    poll = worker.poll()
    assert poll.summary is not None and poll.summary["stopped"] and [part.step for part in poll.parts] == [1]


def test_labels_outside_0_1_switch_metrics_off(source, tmp_path):
    spec = parity.worker_spec("labels", source, SGD, tmp_path, model=Regression, checkpoint_at_end=False)
    (outcome,) = run(0, spec)
    assert outcome.errors == [None] and outcome.summary["step"] == 8


def test_initial_dense_values_are_part_of_what_ranks_compare(source, tmp_path):
    # A factory that draws from numpy's generator gives each process its own values.
    def build(value):
        model = parity.TinyModel()
        torch.nn.init.constant_(next(model.over.parameters()), value)
        return model

    spec = parity.worker_spec("values", source, SGD, tmp_path)
    hashes = [
        Worker("0", dataclasses.replace(spec, build_model=functools.partial(build, value))).prepare("here").model_hash
        for value in (0.1, 0.2, 0.1)
    ]
    assert hashes[0] == hashes[2] != hashes[1]
