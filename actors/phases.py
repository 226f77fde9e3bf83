"""Where a step's time goes, and what happened since the last progress record."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.actors.flow_meter import flow_costs
from shoal.actors.messages import Progress
from shoal.kernels.metrics import BinaryMetrics

if TYPE_CHECKING:
    from shoal.actors.trainer import Trainer

#: What a Progress counts over all ranks since the previous one, besides samples: see ``StepWindow.counts``.
COUNTER_NAMES = ("ids_dropped", "ids_remapped", "data_policy_hits")


class PhaseClock:
    """Seconds per named phase of the current step; ``take`` returns and clears them."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        """Start a phase whose name is known only at its end."""
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End the running phase as ``phase``; the next begins."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class StepWindow:
    """What happened since the last progress record."""

    def __init__(self) -> None:
        self.last_values: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        self.steps = 0
        self.samples = 0
        self.loss_sum = 0.0
        self.grad_norms: list[float] = []
        #: Of this rank: ids dropped, ids replaced, and rows or values a data policy acted on.
        self.counts = [0, 0, 0]
        #: Of this rank: bytes sent within its host and to other hosts.
        self.bytes_sent = (0, 0)
        #: Of this rank's last step, if it was looked at (``flow_meter``).
        self.flow_counts: list[float] = []
        self.started = time.perf_counter()
        self.phases: defaultdict[str, float] = defaultdict(float)

    def add(self, samples: int, phases: Mapping[str, float]) -> None:
        self.steps += 1
        self.samples += samples
        for name, value in phases.items():
            self.phases[name] += value

    def add_counts(self, *counts: int) -> None:
        self.counts = [total + count for total, count in zip(self.counts, counts)]

    def add_bytes(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        """``Session.bytes_sent`` before and after a step."""
        within, across = self.bytes_sent
        self.bytes_sent = (within + after[0] - before[0], across + after[1] - before[1])

    def sums(self) -> tuple[float, ...]:
        """What is summed over ranks for ``progress``, as many numbers on each."""
        return (self.loss_sum, *self.counts, *self.bytes_sent, *self.flow_counts)

    def add_loss(self, loss: float) -> None:
        self.loss_sum += loss

    def add_grad_norm(self, norm: float) -> None:
        self.grad_norms.append(norm)

    def progress(self, trainer: Trainer, metrics: BinaryMetrics, totals: Sequence[float]) -> Progress:
        """The record of this window; ``totals``: over all ranks of the rows and ``sums``."""
        num_rows, loss, *rest = totals
        counts, rest = rest[: len(COUNTER_NAMES)], rest[len(COUNTER_NAMES) :]
        within, across, *flow_counts = rest
        elapsed = max(time.perf_counter() - self.started, 1e-9)
        steps = max(self.steps, 1)
        window = metrics.compute(window=True)
        exchange_s = self.phases["F"] + self.phases["B"]
        self.last_values = {
            "loss": loss / steps,
            "samples": float(trainer.num_samples),
            "samples_per_s": self.samples / elapsed,
            "step_ms": 1e3 * elapsed / steps,
            "exchange_ms": 1e3 * exchange_s / steps,
            "ne": window["ne"],
            "auc": window["auc"],
            "calibration": window["calibration"],
            "log_loss": window["log_loss"],
            "lifetime/auc": metrics.compute()["auc"],
            "rows": num_rows,
            "skipped_steps": float(trainer.skipped_steps),
            **({"grad_norm": sum(self.grad_norms) / len(self.grad_norms)} if self.grad_norms else {}),
            "bytes_within_hosts": within / steps,
            "bytes_across_hosts": across / steps,
            **dict(zip(COUNTER_NAMES, counts, strict=True)),
            **{f"phase_ms/{name}": 1e3 * seconds / steps for name, seconds in sorted(self.phases.items())},
        }
        return Progress(
            kind="train",
            step=trainer.step,
            values=dict(self.last_values),
            seconds=elapsed,
            flows=flow_costs(trainer.session.plan, flow_counts),
        )
