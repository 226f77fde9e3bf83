"""Overlapped steps: the same numbers in two rounds a step (DESIGN 4; S2, S3, S6, V7)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from overlap_world import Rank, Trouble, state_of, train

from shoal.actors.trainer import LoopSpec
from shoal.kernels.frame import Flag

STEPS = 13
PLAIN = LoopSpec(seed=1, total_steps=STEPS, log_every_steps=4, checkpoint_at_end=False, overlap=False)
BUSY = dataclasses.replace(
    PLAIN, eval_every_steps=5, eval_steps=2, checkpoint_every_steps=4, checkpoint_at_end=True, max_skipped_steps=5
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks are threads: those of torch would wait for each other's processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(world: int, spec: LoopSpec, *, has_equal_records=True, **options) -> tuple[list[Rank], list[Rank]]:
    """The same run without and with overlap, which must end alike."""
    off = train(world, spec, **options)
    on = train(world, dataclasses.replace(spec, overlap=True), **options)
    expected, found = state_of(off), state_of(on)
    for part, value in expected.items():
        if part == "records" and not has_equal_records:
            continue
        assert found[part] == value, part
    assert off[0].rows() or off[0].error
    return off, on


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("changes", "mirrored"),
    [({}, ()), ({"accumulation_steps": 2, "clip_grad_norm": 0.05}, (3,))],
    ids=["plain", "micro-batches, clipped, a mirrored table"],
)
def test_overlap_changes_no_bit(world, changes, mirrored):
    off, _ = both(world, dataclasses.replace(PLAIN, **changes), mirrored=mirrored)
    assert off[0].error is None and off[0].trainer.num_samples


def test_a_model_that_computes_ids_of_its_own_gets_the_same_numbers():
    """Its further lookups, and the header before the gradients, lie between the rounds that carry something."""
    off, _ = both(2, BUSY, computes_ids=True)
    assert off[0].error is None and off[0].counts()["DECIDE"] == STEPS


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_takes_two_rounds_and_the_pipeline_two_more_to_fill(world):
    """S6: one cold start, as nothing interrupts the run."""
    off, on = both(world, PLAIN)
    logs = {"STATE": off[0].counts().get("STATE", 0), "CLOSE": 1, "DECIDE": 1}
    logs = {kind: number for kind, number in logs.items() if number}
    assert off[0].counts() == {"BATCH": STEPS, "IDS": STEPS, "VALUES": STEPS, "GRADIENTS": STEPS, **logs}
    assert on[0].counts() == {"BATCH": 1, "IDS": 1, "VALUES": STEPS, "GRADIENTS": STEPS, **logs}


def test_evaluations_checkpoints_and_skipped_steps_in_between():
    trouble = Trouble(nan=frozenset({(2, 1), (3, 0), (9, 2)}))
    _, on = both(3, BUSY, trouble=trouble)
    assert on[0].trainer.skipped_steps == 3
    assert on[0].checkpoints == [4, 8, 12, 13]
    assert on[0].trainer.session.exchange.committed == STEPS - 1


@pytest.mark.parametrize("times", [1, 4])
def test_a_late_batch_is_waited_for(times):
    late = {(step, step % 2): times for step in (0, 1, 3, 4, 8, 12)}
    _, on = both(2, BUSY, trouble=Trouble(late=late))
    assert on[0].feed.asked == list(range(STEPS)), "every batch is taken from the feed once, in order"


@pytest.mark.parametrize("kind", ["bad_ids", "feed_errors"])
@pytest.mark.parametrize("step", [0, 1, 7])
def test_an_error_is_raised_on_all_ranks_at_its_own_step(kind, step):
    _, on = both(2, PLAIN, trouble=Trouble(**{kind: frozenset({(step, 1)})}))
    for rank in on:
        assert f"step {step} was not applied on any rank. rank 1" in str(rank.error)
        assert rank.trainer.step == step
    assert [rank.error.is_origin for rank in on] == [False, True]


@pytest.mark.parametrize("flag", [Flag.STOP, Flag.CHECKPOINT])
@pytest.mark.parametrize("late", [{}, {(5, 0): 2, (6, 1): 3}])
def test_a_flag_takes_effect_on_all_ranks_after_the_same_step(flag, late):
    """S3: it names the step whose header it travels in, and nothing is opened behind that."""

    def body(rank, number, session):
        trainer = rank.trainer
        while not trainer.is_done:
            if number == 1 and trainer.step == 4:
                trainer.request(flag)
            trainer.advance()
            if trainer.is_stopped or rank.checkpoints[-1:] == [trainer.step]:
                assert not any(trainer.session.is_open(trainer.step + later) for later in range(3))
        trainer.finish()

    ranks = train(2, dataclasses.replace(PLAIN, overlap=True), trouble=Trouble(late=late), body=body)
    assert [rank.error for rank in ranks] == [None, None]
    assert ranks[0].checkpoints == ranks[1].checkpoints
    at = ranks[0].checkpoints[0]
    assert 5 <= at <= 7
    assert ranks[0].trainer.step == (at if flag is Flag.STOP else STEPS)


@pytest.mark.parametrize("is_announced", [True, False])
def test_v7_another_view_takes_over(is_announced):
    """After a flag the pipeline is empty; without one (a recovery) what was opened is forgotten and done again."""

    def body(rank, number, session):
        trainer, act_at = rank.trainer, 5
        while not trainer.is_done:
            is_raised = is_announced and number == 0 and trainer.step == 5
            head = trainer.advance(flags=Flag.CUTOVER if is_raised else Flag(0), control=1 if is_raised else 0)
            is_due = Flag.CUTOVER in head.flags if is_announced else trainer.step == act_at
            if is_due:
                assert head.control == int(is_announced)
                assert trainer.session.is_open(trainer.step) == (trainer.spec.overlap and not is_announced)
                trainer.session.close(trainer.step)
                trainer.session.abandon()
                trainer.bind(session(1))
                trainer.session.exchange.applied = trainer.step - 1
        rank.checkpoints.clear()
        trainer.finish()

    # What is counted since the last record starts anew in another view, which comes later where a flag takes longer.
    _, on = both(2, PLAIN, body=body, has_equal_records=not is_announced)
    assert on[0].trainer.session.exchange.identity.epoch == 1


def test_requests_survive_a_view_that_dies_with_them():
    """A stop that was announced for a step that is done again in another view is announced again."""

    def body(rank, number, session):
        trainer = rank.trainer
        while not trainer.is_done:
            if number == 1 and trainer.step == 4:
                trainer.request(Flag.STOP)
            trainer.advance()
            if trainer.step == 5 and trainer.session.exchange.identity.epoch == 0:
                trainer.bind(session(1))
                trainer.session.exchange.applied = trainer.step - 1

    ranks = train(2, dataclasses.replace(PLAIN, overlap=True), body=body)
    assert [(rank.error, rank.trainer.is_stopped, rank.trainer.step) for rank in ranks] == [(None, True, 6)] * 2
