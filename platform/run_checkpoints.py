"""The checkpoints of a run as its controller uses them: where it starts, what a worker reads, manifests, epochs.

Called from the controller's thread and from those of its executor; what they share is replaced whole, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from shoal.actors.messages import BlockSet, SnapshotPart
from shoal.actors.shard_host import Restore
from shoal.kernels import faults
from shoal.kernels.errors import CheckpointError
from shoal.kernels.spec import TableSpec, WireCodecs
from shoal.platform.chain import CheckpointState, decide_base
from shoal.platform.checkpoint import collect, complete, decide_resume, list_checkpoints
from shoal.platform.epochs import claim_epoch, epoch_first_steps, newest_epoch
from shoal.platform.loadplan import plan_load
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.placement import ShardingType
from shoal.platform.run_plan import RunPlan
from shoal.platform.state_messages import JournalRecord


class RunCheckpoints:
    """Reads and writes below ``checkpoints/`` of one run, for one controller."""

    def __init__(self, plan: RunPlan, incarnation: int) -> None:
        self.plan = plan
        #: The model's tables, known once a worker has built it.
        self.tables: Sequence[TableSpec] = ()
        #: The newest checkpoint that counts: what is restored from. None: initial values.
        self.durable: Manifest | None = None
        #: Highest epoch number found on storage.
        self.epoch_used = -1
        #: Step of the checkpoint that the next one builds on (K3); None: the next one is full.
        self.base_step: int | None = None
        self._incarnation = incarnation
        self._first_steps: dict[int, int] = {}
        #: Step -> the newest usable checkpoint of it.
        self._usable: dict[int, Manifest] = {}

    @property
    def durable_step(self) -> int | None:
        return None if self.durable is None else self.durable.name.step

    @property
    def sharding(self) -> Mapping[str, ShardingType]:
        """How each of the model's tables is cut over workers."""
        return _ByTable(self, self.plan.sharding)

    @property
    def codecs(self) -> Mapping[str, WireCodecs]:
        """How the rows and gradients of each of the model's tables travel."""
        return _ByTable(self, self.plan.codecs)

    @property
    def loads(self) -> Mapping[str, float]:
        """What is evened out over workers, by table; empty: bytes."""
        return {} if self.plan.loads is None else _ByTable(self, self.plan.loads)

    def choose(self, policy: str | int, refused: frozenset[CheckpointName]) -> str | None:
        """Choose the checkpoint to start from; why this one, None where there was nothing to choose from.

        Raises CheckpointError as ``decide_resume`` does, and where everything there is was written by a newer Shoal.
        """
        storage = self.plan.storage
        infos = list_checkpoints(storage)
        decision = decide_resume(infos, policy, exclude=refused, where=f"run {self.plan.name!r}")
        # V1: an attempt that wrote no checkpoint has used its number all the same.
        self.epoch_used = max(newest_epoch(storage), *(info.name.epoch for info in infos), -1)
        self._first_steps = dict(epoch_first_steps(storage))
        usable = (i.manifest for i in infos if i.state is CheckpointState.COMPLETE and i.name not in refused)
        self._usable = {manifest.name.step: manifest for manifest in usable if manifest is not None}
        self.base_step = decide_base(infos, self.plan.full_every, self.tables).step if self.tables else None
        if decision.manifest is not None:
            self.plan.check_fingerprint(decision.manifest.cursor.get("order", {}))
        newer = [info for info in infos if info.state is CheckpointState.NEWER_FORMAT]
        if newer and decision.manifest is None and policy == "auto":
            raise CheckpointError(newer[-1].reason)
        self.durable = decision.manifest
        return decision.reason if infos else None

    def begin_epoch(self, record: JournalRecord) -> None:
        """Claim the record's epoch, from the step it goes on with: what older epochs wrote beyond it is void (K2)."""
        if record.view is None or record.step is None:
            return
        claim_epoch(self.plan.storage, record.view.epoch, record.step, self._incarnation)
        self._first_steps = {**self._first_steps, record.view.epoch: record.step}
        if self.durable is not None and self.durable.name.step > record.step:
            self.choose("auto", frozenset())

    def make_restore(self, step: int, worker_id: str, blocks: BlockSet) -> Restore | None:
        """What a worker reads of the checkpoint of ``step`` for ``blocks``; None where there is none."""
        manifest = self._usable.get(step)
        if manifest is None:
            return None
        dense = manifest.find("dense")
        if dense is None:
            raise CheckpointError(f"{manifest.name}: its manifest names no dense state")
        return Restore(
            step=manifest.name.step,
            directory=manifest.name.directory,
            parts=tuple(plan_load(manifest, self.tables, blocks.as_dict())),
            dense=dense,
        )

    def write(self, epoch: int, step: int, parts: Sequence[SnapshotPart]) -> str | None:
        """Make a checkpoint visible (K1) and collect old ones; why it failed, or None."""
        plan = self.plan
        summary: Mapping[str, Any] = next((part.summary for part in parts if part.summary is not None), {})
        faults.reach("checkpoint.manifest")
        try:
            complete(
                plan.storage,
                CheckpointName(epoch, step),
                parts,
                self.tables,
                run=plan.name,
                world_size=len(parts),
                cursor={"step": step, "order": dict(plan.data_fingerprint)},
                epoch_first_step=self._first_steps.get(epoch),
                data_fingerprint=str(plan.data_fingerprint.get("digest", "")) or None,
                versions=plan.versions,
                summary=dict(summary or {}),
            )
            faults.reach("checkpoint.collect")
            if plan.num_to_keep is not None:
                collect(plan.storage, plan.num_to_keep)
            self.choose("auto", frozenset())
        except Exception as error:  # training goes on without this checkpoint; the event says so
            return f"{type(error).__name__}: {error}"
        return None


_Choice = TypeVar("_Choice")


class _ByTable(Mapping[str, _Choice]):
    """What the job chooses for each of the tables that are known by the time somebody asks."""

    def __init__(self, checkpoints: RunCheckpoints, choose: Callable[[TableSpec], _Choice]) -> None:
        self._checkpoints, self._choose = checkpoints, choose
        self._tables: Sequence[TableSpec] = ()
        self._specs: dict[str, TableSpec] = {}

    def __getitem__(self, table: str) -> _Choice:
        return self._choose(self._by_name()[table])

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._checkpoints.tables)

    def _by_name(self) -> Mapping[str, TableSpec]:
        if self._tables is not self._checkpoints.tables:
            self._tables = self._checkpoints.tables
            self._specs = {spec.name: spec for spec in self._tables}
        return self._specs
