"""Which parts of which checkpoints are written: what a manifest waits for (PROTOCOLS K1, K2). Pure bookkeeping."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from shoal.actors.messages import SnapshotPart, View
from shoal.platform.checkpoint_health import CheckpointHealth


@dataclasses.dataclass
class _Pending:
    """A checkpoint under way: the ranks' parts, and whether its manifest is being written."""

    view: View
    parts: dict[int, SnapshotPart] = dataclasses.field(default_factory=dict)
    is_writing: bool = False

    @property
    def error(self) -> str | None:
        return next((f"rank {p.rank}: {p.error}" for _, p in sorted(self.parts.items()) if p.error is not None), None)

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.view.world_size and self.error is None


class CheckpointLedger:
    """Checkpoints that are not visible yet, by (epoch, step)."""

    def __init__(self, durable_step: int | None) -> None:
        #: Newest visible checkpoint of this lineage; None: there is none.
        self.durable_step = durable_step
        #: Step -> why the newest attempt at a checkpoint of it failed.
        self.not_written: dict[int, str] = {}
        #: Those that failed in a row; not the ones that were given up because a worker was lost.
        self.health = CheckpointHealth()
        self._pending: dict[tuple[int, int], _Pending] = {}
        #: Epoch -> step beyond which its checkpoints are abandoned (K2).
        self._closed: dict[int, int] = {}

    def add(self, part: SnapshotPart, view: View | None) -> tuple[SnapshotPart, ...] | None:
        """Take in a part of ``view`` (None: of an epoch that is not known any more, which is ignored). Returns all
        parts once they are complete, once per checkpoint."""
        if view is None or part.step > self._closed.get(view.epoch, part.step):
            return None
        pending = self._pending.setdefault((part.epoch, part.step), _Pending(view))
        pending.parts[part.rank] = part
        if part.error is not None:
            self.not_written[part.step] = f"rank {part.rank}: {part.error}"
            if not part.is_cancelled:
                self.health = self.health.not_written(part.step, self.not_written[part.step])
        if not pending.is_complete or pending.is_writing:
            return None
        pending.is_writing = True
        return tuple(pending.parts[rank] for rank in sorted(pending.parts))

    def written(self, epoch: int, step: int, error: str | None) -> None:
        """The manifest is visible, or ``error`` says why not."""
        self._pending.pop((epoch, step), None)
        if error is not None:
            self.not_written[step] = error
            self.health = self.health.not_written(step, error)
        elif step <= self._closed.get(epoch, step):
            self.durable_step = max(step, self.durable_step or 0)
            self.not_written.pop(step, None)
            self.health = self.health.written(step)

    def close(self, epoch: int, first_step: int) -> None:
        """A view of a higher epoch begins at ``first_step``: checkpoints of ``epoch`` and earlier beyond it are
        abandoned (K2)."""
        self.health = self.health.went_back(first_step)
        for known in {epoch, *self._closed, *(e for e, _ in self._pending)}:
            if known <= epoch:
                self._closed[known] = min(first_step, self._closed.get(known, first_step))
        for key in [key for key in self._pending if key[0] <= epoch and key[1] > first_step]:
            del self._pending[key]

    def waits_for(self, epoch: int, living: Collection[str]) -> bool:
        """Whether a checkpoint may still become visible: its manifest is being written, or nothing of it failed and
        who owes a part lives and is in the present view, of ``epoch``. In an earlier one it may have failed meanwhile.

        A worker delivers its parts in order, so what is older than a visible checkpoint is not waited for: its parts
        went to a controller that died.
        """
        durable = -1 if self.durable_step is None else self.durable_step
        return any(
            p.is_writing
            or (
                step > durable
                and p.error is None
                and p.view.epoch == epoch
                and all(m.worker_id in living for m in p.view.members if m.rank not in p.parts)
            )
            for (_, step), p in self._pending.items()
        )
