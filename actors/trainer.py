"""Trainer: the dense replica and the step loop of one rank.

The loop is the same for every world size, with or without Ray: it asks a BatchSource for this rank's slice of global
batch s, opens the step with the Session, runs the user's model, and closes the step. Everything random is re-seeded by
(seed, step) (S9); boundaries (log, evaluation, checkpoint, end) are pure functions of the step, or a flag that all
ranks see in the same header (S3).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shoal.actors.dense import DenseReplica, DenseSnapshot
from shoal.actors.feed import BatchSource
from shoal.actors.messages import Progress, WorkerPhase
from shoal.actors.phases import StepWindow
from shoal.actors.precision import Precision, autocast, warn_if_slow
from shoal.actors.session import NO_FLAGS, Session, StepHead, non_finite_error
from shoal.actors.step_inputs import StepInputs
from shoal.kernels import faults
from shoal.kernels.batch import Batch
from shoal.kernels.errors import ConfigError
from shoal.kernels.frame import Flag
from shoal.kernels.metrics import BinaryMetrics, Samples
from shoal.kernels.vbe import expand_inverse_indices

logger = logging.getLogger(__name__)


class LearningRates(Protocol):
    """Learning rates as pure functions of the step, counted from 0."""

    def tables(self, step: int) -> np.ndarray:
        """float32 [num tables], in the order of the model's tables."""
        ...

    def dense(self, step: int) -> float:
        """Learning rate of the dense optimizer."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """When the loop does what; the same on all ranks."""

    seed: int
    total_steps: int
    log_every_steps: int = 50
    eval_every_steps: int | None = None
    checkpoint_every_steps: int | None = None
    checkpoint_at_end: bool = True
    max_skipped_steps: int = 0
    #: Bound of the global norm of a step's gradients; None: not bounded.
    clip_grad_norm: float | None = None
    #: fp32 or bf16, of the dense part.
    precision: Precision = "fp32"
    #: Micro-batches of a step: the model runs on one after the other, rows are fetched and updated once.
    accumulation_steps: int = 1
    #: Whether header and ids of later steps ride in the exchanges of the present one; None: where ranks are on several
    #: hosts. The results are the same.
    overlap: bool | None = None
    #: Steps of one evaluation; 0: there is no evaluation data.
    eval_steps: int = 0
    #: How long ranks wait for each other at a checkpoint: one may still be writing the previous one.
    checkpoint_timeout_s: float = 3600.0
    #: How long a rank's next batch may take; its own feed then says what is missing.
    feed_timeout_s: float = 300.0


@dataclasses.dataclass(frozen=True)
class TrainerSnapshot:
    """One rank's training state at a boundary, without its rows."""

    step: int
    dense: DenseSnapshot
    metrics: BinaryMetrics
    num_samples: int
    skipped_steps: int
    last_checkpoint: int


@dataclasses.dataclass(frozen=True)
class _Result:
    """What a batch or micro-batch adds to loss and metrics, once its step is applied."""

    #: Its part of the step's loss.
    loss: float
    samples: Samples | None


class Trainer:
    """One rank's training state and loop.

    Args:
        spec: the loop's boundaries.
        model: its collections are attached to ``session``.
        session: the data plane of the current view.
        dense: the dense replica of ``model``.
        feed: training batches from step ``start_step`` on.
        eval_feed: makes a fresh source of evaluation batches, numbered from 0; None without evaluation data.
        learning_rates: schedules.
        on_progress: takes a Progress record; called on rank 0 only.
        before_checkpoint: called at such a boundary before ranks meet; waits for the previous checkpoint's writing.
        on_checkpoint: takes the last applied step at a boundary where all ranks take a checkpoint of it.
        on_phase: told of every change of (phase, step).
    """

    def __init__(
        self,
        spec: LoopSpec,
        *,
        model: nn.Module,
        session: Session,
        dense: DenseReplica,
        feed: BatchSource,
        eval_feed: Callable[[], BatchSource] | None,
        learning_rates: LearningRates,
        start_step: int = 0,
        on_progress: Callable[[Progress], None] = lambda record: None,
        before_checkpoint: Callable[[], None] = lambda: None,
        on_checkpoint: Callable[[int], None] = lambda step: None,
        on_phase: Callable[[WorkerPhase, int], None] = lambda phase, step: None,
    ) -> None:
        self.spec = spec
        self.model = model
        self.session = session
        self.dense = dense
        self.metrics = BinaryMetrics()
        self.step = start_step
        self.skipped_steps = 0
        #: Samples of all ranks trained so far, over all attempts of the run.
        self.num_samples = 0
        self.last_eval: dict[str, float] = {}
        #: Seconds per phase of the last step; the step_breakdown bench reads it.
        self.phase_seconds: dict[str, float] = {}
        #: Training batches of this rank.
        self.feed = feed
        self._eval_feed = eval_feed
        self._learning_rates = learning_rates
        self._on_progress = on_progress
        self._before_checkpoint = before_checkpoint
        self._on_checkpoint = on_checkpoint
        self._on_phase = on_phase
        self._inputs = StepInputs(
            lambda step: self._next_batch(self.feed, step, is_training=True),
            lambda step: self.feed.is_ready(step, 0.0),
            self._is_boundary,
        )
        self._has_metrics = True
        self._window = StepWindow()
        self.is_stopped = False
        # What a resumed run starts from is saved already.
        self.last_checkpoint = start_step if start_step else -1
        if self.rank == 0:
            warn_if_slow(spec.precision)

    @property
    def rank(self) -> int:
        return self.session.exchange.identity.rank

    def request(self, flags: Flag) -> None:
        """Raise ``flags`` in the next header; all ranks act on them after that step (S3). Thread-safe."""
        self._inputs.request(flags)

    # ---- the loop -------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether no further step is to be taken: all are done, or all ranks agreed to stop."""
        return self.is_stopped or self.step >= self.spec.total_steps

    def run(self) -> dict[str, Any]:
        """Train to the end, or to a stop that all ranks agreed on; returns a summary (the same on all ranks)."""
        while not self.is_done:
            self.advance()
        return self.finish()

    def advance(self, *, flags: Flag = NO_FLAGS, control: int = 0) -> StepHead:
        """One step and the boundaries after it. ``flags`` and ``control`` go into its header.

        Returns what all ranks saw in that header.
        """
        self._on_phase(WorkerPhase.TRAINING, self.step)
        head = self.train_step(flags, control)
        self.is_stopped = Flag.STOP in head.flags
        done = self.step  # number of steps applied so far
        if self._is_logged(done) or self.is_stopped:
            self._log()
        # The checkpoint comes first: a failing evaluation must not cost what was trained.
        every = self.spec.checkpoint_every_steps
        if (every and done % every == 0) or Flag.CHECKPOINT in head.flags:
            self._checkpoint(done)
        if self.spec.eval_every_steps and done % self.spec.eval_every_steps == 0 and done < self.spec.total_steps:
            self.evaluate()
        return head

    def _is_logged(self, done: int) -> bool:
        return done % self.spec.log_every_steps == 0 or done == self.spec.total_steps

    def _is_boundary(self, done: int) -> bool:
        """Whether ranks meet for something else once ``done`` steps are applied; a pure function (S3)."""
        every = (self.spec.checkpoint_every_steps, self.spec.eval_every_steps)
        return done >= self.spec.total_steps or any(steps and done % steps == 0 for steps in every)

    def finish(self) -> dict[str, Any]:
        """The last checkpoint and evaluation; returns the summary of the run."""
        if (self.spec.checkpoint_at_end or self.is_stopped) and self.last_checkpoint != self.step:
            self._checkpoint(self.step)
        if self.spec.eval_steps and not self.is_stopped:
            self.evaluate()
        self.session.close(self.step)
        return {
            "step": self.step,
            "stopped": self.is_stopped,
            "skipped_steps": self.skipped_steps,
            "train": self._window.last_values,
            "eval": self.last_eval,
        }

    # ---- views and recoveries -------------------------------------------------------------------------------------

    def bind(self, session: Session) -> None:
        """Go on in another view, over ``session``."""
        self.session = session
        self._inputs.forget()
        self._window.restart()

    def take_snapshot(self) -> TrainerSnapshot:
        """All of this rank's training state at this boundary but for its rows (F3)."""
        return TrainerSnapshot(
            step=self.step,
            dense=self.dense.snapshot(),
            metrics=self.metrics.copy(),
            num_samples=self.num_samples,
            skipped_steps=self.skipped_steps,
            last_checkpoint=self.last_checkpoint,
        )

    def roll_back(self, snapshot: TrainerSnapshot) -> None:
        """Undo every step since ``snapshot``, which stays valid. Rows are the store's affair."""
        self.step = snapshot.step
        self.dense.roll_back(snapshot.dense)
        self.metrics = snapshot.metrics.copy()
        self.num_samples, self.skipped_steps = snapshot.num_samples, snapshot.skipped_steps
        self.last_checkpoint = snapshot.last_checkpoint
        self.is_stopped = False
        self._inputs.forget()
        self._window.restart()

    def start_over(self, fresh: nn.Module) -> None:
        """Back to step 0, with the dense state of ``fresh``: a recovery of a run that has no checkpoint yet."""
        self.dense.start_over(fresh)
        self.metrics.reset()
        self.step = self.num_samples = self.skipped_steps = 0
        self.last_checkpoint = -1
        self.is_stopped = False
        self._inputs.forget()
        self._window.restart()

    # ---- one step -------------------------------------------------------------------------------------------------

    def train_step(self, flags: Flag = NO_FLAGS, control: int = 0) -> StepHead:
        """One training step on every rank; returns what all ranks saw in its header."""
        clock, step = self.session.clock, self.step
        clock.take()
        sent = self.session.bytes_sent()
        is_open = self.session.is_open(step)
        self._inputs.wish(flags, control)
        taken = self._inputs.resume(step) if is_open else self._inputs.begin(step)
        batch, weights = taken.batch, taken.weights
        clock.mark("feed")
        torch.manual_seed(_mix(self.spec.seed, step, self.rank))
        faults.reach("step.begin")
        overlaps = self.session.exchange.crosses_hosts if self.spec.overlap is None else self.spec.overlap
        ahead = self._inputs if overlaps else None
        if is_open:
            head = self.session.resume(step, ahead)
        else:
            head = self.session.begin(
                step,
                batch.sparse_features,
                is_training=True,
                loss_weight=taken.loss_weight,
                flags=taken.flags,
                control=taken.control,
                error=taken.error,
                ahead=ahead,
            )
        results: list[_Result] = []
        is_finite, failure = self._forward_backward(batch, weights, head, results)
        if self._is_logged(step + 1):
            self._window.flow_counts = self.session.flow_counts()
        rates = self._learning_rates
        end = self.session.end(
            dense_grad=self.dense.grad if self.dense.num_parameters else None,
            learning_rates=rates.tables(step),
            is_finite=is_finite,
            error=failure,
            clip_norm=self.spec.clip_grad_norm,
        )
        if end.grad_norm is not None:
            self._window.add_grad_norm(end.grad_norm)
        if end.is_applied:
            self.dense.step(rates.dense(step))
            clock.mark("optimizer")
            self._count(results, step)
        else:
            self.skipped_steps += 1
            if self.skipped_steps > self.spec.max_skipped_steps:
                problem = non_finite_error(step, end.non_finite_ranks, self.skipped_steps - 1)
                problem.is_origin = self.rank in end.non_finite_ranks
                raise problem
        self.phase_seconds = clock.take()
        self.step = step + 1
        self.num_samples += head.num_samples
        self._window.add_counts(*self.session.take_counts(), sum(batch.counters.values()))
        self._window.add(head.num_samples, self.phase_seconds)
        self._window.add_bytes(sent, self.session.bytes_sent())
        faults.reach("step.applied")
        return head

    def _next_batch(self, source: BatchSource, step: int, *, is_training: bool) -> tuple[Batch, BaseException | None]:
        """This rank's batch, or an empty one and the reason: a rank with an error stays in the protocol.

        While the batch is not there yet, peers are told so several times within the deadline of an exchange.
        """
        deadline = time.monotonic() + self.spec.feed_timeout_s
        while time.monotonic() < deadline and not source.is_ready(step, self.session.exchange.timeout_s / 4):
            self.session.wait(step, is_training=is_training)
        try:
            return source.next_batch(step), None
        except Exception as error:  # converted at the edge: it is raised again, on all ranks, by session.begin
            return _blank_batch(self.session), error

    def _forward_backward(
        self, batch: Batch, weights: Tensor, head: StepHead, results: list[_Result]
    ) -> tuple[bool, BaseException | None]:
        """The user's model and its gradients. Returns (all losses finite, the exception it raised).

        ``results`` gets one entry for each.
        """
        clock = self.session.clock
        clock.start()
        try:
            self.dense.zero_grad()
            self.model.train()
            parts = self.spec.accumulation_steps
            if parts == 1:
                return self._run_model(batch, weights, head, results), None
            # The model sees parts of what the session has looked up: a batch whose keys differ in bags, spread out.
            batch = dataclasses.replace(batch, sparse_features=expand_inverse_indices(batch.sparse_features))
            is_finite, size = True, len(batch)
            for part in range(parts):
                start, stop = size * part // parts, size * (part + 1) // parts
                micro = batch.slice(start, stop)
                self.session.narrow(micro.sparse_features, start, stop)
                torch.manual_seed(_mix(self.spec.seed, head.step * parts + part, self.rank))
                is_finite &= self._run_model(micro, weights[start:stop], head, results)
            return is_finite, None
        except Exception as error:  # the rank stays in the protocol; session.end raises it on all ranks
            return True, error

    def _run_model(self, batch: Batch, weights: Tensor, head: StepHead, results: list[_Result]) -> bool:
        """Forward and backward of a batch or micro-batch; whether its loss was finite."""
        clock = self.session.clock
        with autocast(self.spec.precision):
            losses, predictions = split_outputs(self.model(batch), len(batch))
        losses = losses.float()
        # A sum over all ranks' weights as denominator makes the result independent of how samples are spread.
        loss = (losses * weights).sum() / (head.loss_weight or 1.0)
        is_finite = bool(torch.isfinite(loss))
        if is_finite and loss.requires_grad:
            loss.backward()
            self.dense.rebind_grads()
        clock.mark("dense")
        samples = self._samples(predictions.detach(), batch) if predictions is not None and is_finite else None
        results.append(_Result(float(loss.detach()), samples))
        clock.mark("metrics")
        return is_finite

    def _count(self, results: Sequence[_Result], step: int) -> None:
        """Count an applied step. One that is skipped counts nowhere: neither here nor on a rank that was well."""
        for result in results:
            self._window.add_loss(result.loss)
            if result.samples is not None:
                self.metrics.add(result.samples, step=step)
        self.session.clock.mark("metrics")

    # ---- boundaries -----------------------------------------------------------------------------------------------

    def _log(self) -> None:
        """Merge metrics on rank 0 and hand out a progress record."""
        window = self._window
        merged, totals = self._merge(self.metrics, (self.session.store.num_rows(), *window.sums()))
        if merged is not None:
            self._on_progress(window.progress(self, merged, totals))
        self._window.restart()

    def evaluate(self, num_steps: int | None = None) -> dict[str, float]:
        """Metrics over the evaluation data with the current rows and dense parameters; {} except on rank 0."""
        assert self._eval_feed is not None
        metrics = BinaryMetrics()
        source = self._eval_feed()
        started = time.perf_counter()
        try:
            for step in range(num_steps or self.spec.eval_steps):
                self._on_phase(WorkerPhase.EVALUATING, step)
                self.eval_step(source, step, metrics)
        finally:
            source.close()
            self.model.train()
        merged, _ = self._merge(metrics, ())
        if merged is not None:
            self.last_eval = merged.compute()
            self._on_progress(
                Progress(
                    kind="eval",
                    step=self.step,
                    values={f"eval/{k}": v for k, v in self.last_eval.items()},
                    seconds=time.perf_counter() - started,
                )
            )
        return self.last_eval

    def eval_step(self, source: BatchSource, step: int, metrics: BinaryMetrics) -> None:
        """Count one evaluation batch into ``metrics``; rows that were never trained read as their initial value."""
        batch, error = self._next_batch(source, step, is_training=False)
        with torch.no_grad():
            self.model.eval()
            self.session.begin(step, batch.sparse_features, is_training=False, loss_weight=0.0, error=error)
            with autocast(self.spec.precision):
                _, predictions = split_outputs(self.model(batch), len(batch))
        if predictions is None:
            raise ConfigError("the model returns losses only; return (losses, predictions) to evaluate it")
        samples = self._samples(predictions, batch)
        if samples is not None:
            metrics.add(samples)

    def _samples(self, predictions: Tensor, batch: Batch) -> Samples | None:
        """What metrics count of a batch; nothing once a label has shown that they do not apply: they are for labels in
        [0, 1]. DataError for values that no metric takes."""
        labels = batch.labels
        if self._has_metrics and labels.numel():
            low, high = (float(value) for value in torch.aminmax(labels))
            if low < 0.0 or high > 1.0:  # a label that is not a number is refused by the metrics
                self._has_metrics = False
                logger.warning("metrics=off reason='a label is outside [0, 1]' label_min=%g label_max=%g", low, high)
        return self.metrics.read(predictions.float(), labels, batch.weights) if self._has_metrics else None

    def _checkpoint(self, step: int) -> None:
        """Close the step on all ranks (S2), gather metrics on rank 0, and let the worker cut and write."""
        self._on_phase(WorkerPhase.CHECKPOINTING, step)
        self._before_checkpoint()
        self.session.close(step, self.spec.checkpoint_timeout_s)
        self.last_checkpoint = step
        merged, _ = self._merge(self.metrics, ())
        if merged is not None:
            self.metrics = merged
        else:
            self.metrics.reset()  # rank 0 holds all of it now, as it will after a resume
        self._on_checkpoint(step)

    def _merge(self, metrics: BinaryMetrics, values: Sequence[float]) -> tuple[BinaryMetrics | None, tuple[float, ...]]:
        """(metrics of all ranks, sums of ``values`` over ranks) on rank 0; (None, ()) elsewhere."""
        if self.session.exchange.identity.world_size == 1:
            return metrics.copy(), tuple(values)
        state = metrics.state_dict()
        head = np.array(values, dtype=np.float64)
        payload = head.tobytes() + b"".join(tensor.numpy().tobytes() for tensor in state.values())
        payloads = self.session.gather_bytes(self.step, payload)
        if payloads is None:
            return None, ()
        merged, total = BinaryMetrics(), np.zeros_like(head)
        for payload in payloads:
            total += np.frombuffer(payload, dtype=np.float64, count=head.size)
            integers = torch.from_numpy(np.frombuffer(payload, dtype=np.int64, offset=head.nbytes).copy())
            sizes = [tensor.numel() for tensor in state.values()]
            other = BinaryMetrics()
            other.load_state_dict(dict(zip(state, integers.split(sizes))))
            merged.merge_(other)
        return merged, tuple(total.tolist())


def split_outputs(outputs: Any, num_samples: int) -> tuple[Tensor, Tensor | None]:
    """(losses [B], predictions [B] or None) of what a model returned. ConfigError says what is wrong with it."""
    losses, predictions = outputs if isinstance(outputs, tuple | list) and len(outputs) == 2 else (outputs, None)
    if not isinstance(losses, Tensor) or losses.shape != (num_samples,):
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(
            f"the model must return per-sample losses of shape ({num_samples},), or (losses, predictions); "
            f"it returned {found}. Use reduction='none' in its loss"
        )
    if predictions is not None and tuple(predictions.shape) != (num_samples,):
        raise ConfigError(f"predictions have shape {tuple(predictions.shape)}; they must be ({num_samples},)")
    return losses, predictions


def _blank_batch(session: Session) -> Batch:
    """A batch of 0 samples for a rank that has never seen one: only its keys matter."""
    from shoal.kernels.jagged import KeyedJaggedTensor

    keys = list(dict.fromkeys(feature.name for feature in session.model_tables.features))
    empty = torch.empty(0, dtype=torch.int64)
    kjt = KeyedJaggedTensor(keys=keys, values=empty, lengths=torch.empty(0, dtype=torch.int32))
    return Batch(dense_features=torch.empty(0, 0), sparse_features=kjt, labels=torch.empty(0))


def _mix(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed that differs by run, step and rank."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1
