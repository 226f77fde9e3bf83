"""A simulated worker: executes what the production ``WorkerState`` tells it, over simulated rows and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.actors.messages import (
    Holdings,
    Order,
    PrepareProgress,
    RecoveryPlan,
    Shipment,
    SnapshotPart,
    View,
    WorkerInfo,
    WorkerPhase,
    WorkerStatus,
)
from shoal.actors.protocol_messages import (
    BeginPreparing,
    CancelPreparing,
    ControllerBack,
    ControllerSilent,
    CutOverCalled,
    CutOverDone,
    CutOverFailed,
    DestroyGroups,
    DropOthers,
    Event,
    Exit,
    FinishLoop,
    Instruction,
    Joined,
    JoinFailed,
    JoinView,
    LoopEnded,
    News,
    OrderArrived,
    PerformCutOver,
    PerformRecover,
    PrepareFailed,
    PrepareReady,
    Protect,
    RaiseFlag,
    Recovered,
    RecoverFailed,
    RunStep,
    StepDone,
    StepFailed,
    TakeSnapshot,
    WaitForOrder,
)
from shoal.kernels.frame import Flag
from shoal.platform.sim_network import Group, Header, Process, SimulationError
from shoal.platform.sim_rows import TABLES, Content, Key, Snapshot, initial_content

if TYPE_CHECKING:
    from shoal.platform.sim import History

#: How often a worker looks at how long its controller has been silent.
WATCH_S = 0.5
#: A transfer or a rendezvous that has not ended by then has failed.
TRANSFER_TIMEOUT_S = 4.0


class SimWorker(Process):
    """One worker process. ``state`` is the production machine, ``rows`` its data."""

    def __init__(self, history: History, worker_id: str, host: str) -> None:
        super().__init__(worker_id, host)
        self.history = history
        self.world = history.world
        self.state = history.make_worker_state(worker_id)
        self.rows = history.make_rows(worker_id)
        self.parts: list[SnapshotPart] = []
        self.saving = 0
        self.num_answers = 0
        #: The model is built: it can be spoken to.
        self.is_ready = False
        self.summary: dict[str, Any] | None = None
        self.last_contact_s = self.world.now_s
        self.is_silent = False
        self.num_samples = 0
        self._inbox: list[News] = []
        self._flags, self._control = Flag(0), 0
        self._token = 0
        self._blocking: Any = WaitForOrder()
        self._groups: dict[int, Group] = {}
        self._acked = -1
        #: (worker, block) -> newest step whose snapshot that worker has acknowledged.
        self._channels: dict[tuple[str, Key], int] = {}
        #: Workers that have not acknowledged the newest snapshot, of step ``_sent``.
        self._owing: set[str] = set()
        self._sent = -1
        self._rounds = 0
        self._is_formed_next = False
        self._progress: object = None
        #: Dense state, counts and shipments sent and not acknowledged.
        self._unacked_state = 0
        #: What a cutover or recovery has received: dense state, counts, blocks; and who has sent its part.
        self._received: dict[tuple[int, str], Any] = {}
        self._on_received: Callable[[], None] = lambda: None
        self.world.after(WATCH_S, self, self._watch)

    # ---- as the controller sees it --------------------------------------------------------------------------------

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.name,
            host=self.host,
            pid=1,
            tables=TABLES,
            model_hash=1,
            dense_parameters=1,
            address=self.name,
        )

    def status(self) -> WorkerStatus:
        state, preparing = self.state, self.state.preparing
        return WorkerStatus(
            worker_id=self.name,
            rank=state.rank,
            epoch=state.epoch,
            step=state.step,
            phase=state.phase,
            since_s=0.0,
            pid=1,
            host=self.host,
            error=state.reason or None,
            protected=state.protected,
            fence=state.fence,
            unreachable=state.unreachable,
            preparing=-1 if preparing is None else preparing.epoch,
            prepare=PrepareProgress(is_ready=state.is_prepared, rounds=self._rounds, error=state.prepare_error),
        )

    def holdings(self) -> Holdings:
        state = self.state
        fence = state.fence if state.is_resting else 0
        return self.rows.holdings(state.view, state.step, state.protected, fence)

    @property
    def has_groups(self) -> bool:
        return bool(self._groups)

    @property
    def doing(self) -> str:
        """The blocking instruction under way."""
        return type(self._blocking).__name__

    def contact(self) -> None:
        """A poll came."""
        self.last_contact_s = self.world.now_s
        if self.is_silent:
            self.is_silent = False
            self._news(ControllerBack())

    def order(self, order: Order) -> None:
        """An order came, on the thread that answers calls."""
        self.contact()
        if self.state.is_urgent(order):
            self._break_groups()
            self._news(OrderArrived(order))
            self._fail("told to stop")
        else:
            self._news(OrderArrived(order))

    def request(self, flag: Flag) -> None:
        """Raise ``flag`` in the next header."""
        self._flags |= flag

    def die(self, *, is_silent: bool) -> None:
        """The process ends at this instant."""
        self.is_alive = False
        self._break_groups(is_silent=is_silent)

    def _watch(self) -> None:
        silent_s = self.world.now_s - self.last_contact_s
        if silent_s >= 1.0:
            self.is_silent = True
            self._news(ControllerSilent(silent_s))
        self.world.after(WATCH_S, self, self._watch)

    # ---- the step loop's thread -----------------------------------------------------------------------------------

    def _news(self, news: News) -> None:
        if isinstance(self._blocking, WaitForOrder):
            self._execute(news, self.state.handle(news))
        elif not isinstance(self._blocking, Exit):
            self._inbox.append(news)

    def _finish(self, token: int, event: Event) -> None:
        """The blocking instruction under way has ended."""
        if token != self._token:
            return
        self._token += 1
        inbox, self._inbox = self._inbox, []
        for news in inbox:
            self._execute(news, self.state.handle(news))
        self._execute(event, self.state.handle(event))

    def _execute(self, event: Event, instructions: Sequence[Instruction]) -> None:
        self.history.on_answer(self, event, instructions)
        for instruction in instructions:
            self._perform(instruction)

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case RaiseFlag(flag, control):
                self._flags |= flag
                self._control = control or self._control
            case TakeSnapshot(step):
                self.rows.cut(step)
                self._send_snapshot(step)
            case Protect(step):
                self.rows.protect(step)
            case BeginPreparing(view):
                self._begin_preparing(view)
            case CancelPreparing(epoch):
                self._leave_group(epoch)
                self._forget_targets()
            case DestroyGroups():
                self._break_groups()
                self.rows.park()
            case DropOthers(view, keep):
                self.rows.drop_others((v, v.rank_of(self.name)) for v in (view, keep) if v is not None)
            case _:
                self._blocking = instruction
                self._begin(instruction, self._token)

    def _begin(self, instruction: Instruction, token: int) -> None:
        match instruction:
            case WaitForOrder():
                pass
            case Exit():
                self.history.on_exit(self)
            case JoinView(view, restore):
                self._join_view(view, restore, token)
            case RunStep():
                self.world.after(self.history.step_s(), self, lambda: self._run_step(token))
            case FinishLoop():
                self._exchange(token, self.state.epoch, ("end", self.state.step), lambda posts: self._end(token))
            case PerformCutOver(view, old, step):
                self._cut_over(view, old, step, token)
            case PerformRecover(view, plan):
                self._recover(view, plan, token)
            case _:
                raise AssertionError(f"unknown instruction {instruction!r}")

    def _fail(self, reason: str, missing: tuple[int, ...] = ()) -> None:
        """The blocking instruction under way fails because of others."""
        match self._blocking:
            case JoinView(view=view):
                event: Event = JoinFailed(view.epoch, reason, missing)
            case RunStep() | FinishLoop():
                event = StepFailed(reason, missing)
            case PerformCutOver(view=view):
                event = CutOverFailed(view.epoch, reason, missing)
            case PerformRecover(view=view):
                event = RecoverFailed(view.epoch, reason, missing)
            case _:
                return
        self._finish(self._token, event)

    # ---- groups ---------------------------------------------------------------------------------------------------

    def _exchange(
        self, token: int, epoch: int, key: tuple[Any, ...], then: Callable[[Any], None], **header: Any
    ) -> None:
        """An exchange of ``epoch``; ``then`` only if this is still what the worker does."""
        header.setdefault("acked", self._acked)

        def on_fail(reason: str, missing: tuple[int, ...]) -> None:
            if token == self._token:
                is_old = isinstance(self._blocking, PerformCutOver) and epoch != self._blocking.view.epoch
                self._fail(f"{key}: {reason}", () if is_old else missing)

        def on_done(posts: Any) -> None:
            if token == self._token:
                then(posts)

        group = self._groups.get(epoch)
        if group is None:
            self.world.after(0.0, self, lambda: on_fail("no group", ()))
            return
        group.exchange(self.name, key, Header(**header), on_done, on_fail)

    def _form(self, view: View, token: int, then: Callable[[], None]) -> None:
        group = self.history.group(view)
        self._groups[view.epoch] = group
        group.join(self.name, self, lambda: token == self._token and then())
        self._deadline(token, f"groups of epoch {view.epoch} were not formed")

    def _deadline(self, token: int, reason: str) -> None:
        step = self._progress = object()

        def check() -> None:
            if token == self._token and self._progress is step:
                self._fail(reason)

        self.world.after(TRANSFER_TIMEOUT_S, self, check)

    def _break_groups(self, *, is_silent: bool = False) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.leave(self.name, is_silent=is_silent)

    def _leave_group(self, epoch: int) -> None:
        group = self._groups.pop(epoch, None)
        if group is not None:
            group.leave(self.name)

    # ---- the first view, steps, the end ---------------------------------------------------------------------------

    def _join_view(self, view: View, restore: Any, token: int) -> None:
        def formed() -> None:
            self._exchange(token, view.epoch, ("first",), joined)

        def joined(posts: Any) -> None:
            step = self._load(view, self.history.durable_step(restore))
            self.history.on_view(self, view)
            self._reset_channels(view, step, periodic=True)
            self._finish(token, Joined(view.epoch, step))

        self._form(view, token, formed)

    def _load(self, view: View, step: int | None) -> int:
        """Rows, dense state and counts from a checkpoint, or as they are at first. Returns the step."""
        rank = view.rank_of(self.name)
        assert rank is not None
        saved = self.history.saved(step)
        contents = {key: initial_content(key) if saved is None else saved.rows[key] for key in view.owned_by(rank)}
        dense, bins = (1, 0) if saved is None else (saved.dense, saved.bins if rank == 0 else 0)
        self.rows.copies, self.rows.aux, self.rows.owned = {}, {}, {}
        self.rows.flip(contents, 0 if saved is None else saved.step, dense=dense, bins=bins, handed={})
        return 0 if saved is None else saved.step

    def _run_step(self, token: int) -> None:
        if token != self._token:
            return
        state = self.state
        step, view = self.rows.cursor_after_rollback(state.step), state.view
        assert view is not None
        flags, self._flags = self._flags, Flag(0)
        control, self._control = self._control, 0

        def applied(posts: dict[str, Header]) -> None:
            self.rows.apply(step, state.rank, view.world_size)
            seen = Flag(0)
            for header in posts.values():
                seen |= header.flags
            done = StepDone(
                state.step + 1,
                seen,
                max(header.control for header in posts.values()),
                min(header.acked for header in posts.values()),
            )
            every = self.history.spec.checkpoint_every_steps
            if (every and done.step % every == 0) or Flag.CHECKPOINT in seen:
                self._checkpoint(token, done.step, lambda: self._finish(token, done))
            else:
                self._finish(token, done)

        self._exchange(token, view.epoch, ("step", step), applied, flags=flags, control=control)

    def _checkpoint(self, token: int, step: int, then: Callable[[], None]) -> None:
        """Counts are gathered on rank 0, then every rank writes its rows in the background."""
        state = self.state

        def gathered(posts: dict[str, Header]) -> None:
            self.rows.bins = sum(int(str(h.payload)) for h in posts.values()) if state.rank == 0 else 0
            part = SnapshotPart(
                epoch=state.epoch,
                step=step,
                rank=state.rank,
                files=tuple(self.rows.owned.items()),
                summary={"dense": self.rows.dense, "bins": self.rows.bins},
            )
            self.saving += 1
            self.world.after(self.world.delay_s(0.1), self, lambda: self._written(part))
            then()

        self._exchange(token, state.epoch, ("checkpoint", step), gathered, payload=str(self.rows.bins))

    def _written(self, part: SnapshotPart) -> None:
        self.saving -= 1
        self.parts.append(part)

    def _end(self, token: int) -> None:
        def ended() -> None:
            if self.saving:
                self.world.after(0.05, self, ended)
                return
            # The groups stay: a peer may not have heard yet how the last exchange went.
            self.summary = {"step": self.state.step}
            self._finish(token, LoopEnded(self.state.step))

        every = self.history.spec.checkpoint_every_steps
        if every and self.state.step % every == 0:
            ended()  # that very step has been saved, after it was done
        else:
            self._checkpoint(token, self.state.step, ended)

    # ---- snapshots ------------------------------------------------------------------------------------------------

    def _holders(self, view: View, key: Key) -> set[str]:
        owner = view.placement[key[0]][key[1]]
        buddy = view.buddy(owner)
        return {view.members[r].worker_id for r in (owner, buddy) if r is not None} - {self.name}

    def _views(self) -> list[View]:
        return [v for v in (self.state.view, self.state.preparing) if v is not None]

    def _send_snapshot(self, step: int, *, views: list[View] | None = None) -> None:
        """Changes since the last acknowledged snapshot, or whole blocks, to everybody who holds or is to hold them."""
        self._sent = step
        due: dict[str, list[tuple[Key, int | None, Any]]] = {}
        cut = self.rows.snapshots[step]
        for view in views if views is not None else self._views():
            for key in cut.rows:
                for target in self._holders(view, key):
                    change = self._change(target, key, step)
                    if change not in due.setdefault(target, []):
                        due[target].append(change)
            if view.buddies and view.rank_of(self.name) is not None:
                buddy = view.buddy(view.rank_of(self.name) or 0)
                if buddy is not None:
                    due.setdefault(view.members[buddy].worker_id, [])
        self._owing = set(due)
        for target, changes in due.items():
            self._send_changes(target, step, changes, {self.name: cut.bins, **self.rows.handed_at(step)})
        self._check_acked()

    def _change(self, target: str, key: Key, step: int) -> tuple[Key, int | None, Any]:
        start = self._channels.get((target, key))
        content = self.rows.snapshots[step].rows[key]
        if start is None or start not in self.rows.snapshots or key not in self.rows.snapshots[start].rows:
            return key, None, content
        old = self.rows.snapshots[start].rows[key]
        return key, start, tuple((i, row) for i, (before, row) in enumerate(zip(old, content)) if before != row)

    def _send_changes(
        self, target: str, step: int, changes: list[tuple[Key, int | None, Any]], bins: dict[str, int]
    ) -> None:
        other = self.history.workers.get(target)
        epoch = self.state.epoch
        next_epoch = -1 if self.state.preparing is None else self.state.preparing.epoch
        if other is None:
            return

        def arrived() -> None:
            assert other is not None
            if not other.accepts_data(epoch, next_epoch):
                # A typed refusal: it may not be there yet, or not be a peer any more.
                self.world.after(0.1, self, again)
                return
            taken = all(other.rows.stage(key, step, start, change) for key, start, change in changes)
            for origin, counted in bins.items():
                if origin != other.name:
                    other.rows.aux.setdefault(origin, {})[step] = counted
            if taken:
                self.world.transfer(other, self, lambda: self._acknowledged(epoch, target, step, changes))
            other.news_of_data()

        def again() -> None:
            if self.state.epoch == epoch and step == self._sent and target in self._owing and not self.state.is_resting:
                self.world.transfer(self, other, arrived)

        self.world.transfer(self, other, arrived)

    def accepts_data(self, epoch: int, next_epoch: int) -> bool:
        """F7: changes of another epoch, or from a worker that is no peer any more, are refused."""
        state = self.state
        if state.view is None:
            return state.preparing is not None and state.preparing.epoch == next_epoch
        is_at_work = state.phase in (WorkerPhase.TRAINING, WorkerPhase.CUTTING_OVER, WorkerPhase.FINISHED)
        return state.epoch == epoch and is_at_work

    def news_of_data(self) -> None:
        self._on_received()

    def _acknowledged(self, epoch: int, target: str, step: int, changes: list[tuple[Key, int | None, Any]]) -> None:
        if epoch != self.state.epoch:
            return
        for key, _, _ in changes:
            self._channels[target, key] = max(step, self._channels.get((target, key), -1))
        if step == self._sent:
            self._owing.discard(target)
            self._check_acked()
        self._on_received()

    def _check_acked(self) -> None:
        if self._owing:
            return
        if self._sent > self._acked:
            self._acked = self._sent
        self._rounds += 1
        self._check_ready()

    def _reset_channels(self, view: View, step: int, *, periodic: bool) -> None:
        """A view begins with a snapshot of ``step``; whole blocks go to its holders in the background (F5)."""
        self._channels, self._acked, self._rounds = {}, -1, 0
        self._owing, self._sent = set(), step
        if periodic and (view.buddies or self.history.has_local_snapshots):
            self._send_snapshot(step, views=[view])
        else:
            self._acked = step
        self._on_received = lambda: None

    # ---- preparing ------------------------------------------------------------------------------------------------

    def _begin_preparing(self, view: View) -> None:
        self._rounds, self._is_formed_next = 0, False
        if view.rank_of(self.name) is None:
            self._is_formed_next = True
            self._check_ready()
            return
        group = self.history.group(view)
        self._groups[view.epoch] = group

        def formed() -> None:
            self._is_formed_next = True
            self._check_ready()

        def check() -> None:
            preparing = self.state.preparing
            if preparing is not None and preparing.epoch == view.epoch and not group.is_formed:
                self._news(PrepareFailed(view.epoch, "groups were not formed"))

        group.join(self.name, self, formed)
        self.world.after(TRANSFER_TIMEOUT_S, self, check)

    def _check_ready(self) -> None:
        """Ready: groups formed, and (of a member) every holder has the whole and two rounds of changes."""
        view = self.state.preparing
        if view is None or not self._is_formed_next or self.state.is_prepared:
            return
        if self.state.view is not None:
            holders = {(h, key) for key in self.rows.owned for h in self._holders(view, key)}
            if self._rounds < 2 or holders - self._channels.keys():
                return
        self._news(PrepareReady(view.epoch))

    def _forget_targets(self) -> None:
        """Whoever was only a target of the view that will not be owes nothing any more."""
        if self.state.view is None:
            return
        view = self.state.view
        kept = {w for key in self.rows.owned for w in self._holders(view, key)}
        buddy = view.buddy(self.state.rank) if self.state.rank >= 0 else None
        kept |= {view.members[buddy].worker_id} if buddy is not None else set()
        self._channels = {c: s for c, s in self._channels.items() if c[0] in kept}
        self._owing &= kept
        self._check_acked()

    # ---- cutover --------------------------------------------------------------------------------------------------

    def _cut_over(self, view: View, old: View | None, step: int, token: int) -> None:
        rank = view.rank_of(self.name)
        self._deadline(token, "the cutover took too long")
        self._unacked_state = 0

        def closed(posts: Any) -> None:
            assert old is not None
            self.rows.cut(step)
            self._send_snapshot(step, views=[old, view])
            if old.rank_of(self.name) == 0:
                self._call_joiners(view, step)
            if rank is None:
                buddy = view.buddy(0)
                for heir in {0, 0 if buddy is None else buddy}:
                    target = view.members[heir].worker_id
                    self._send_state(target, view.epoch, f"bins {self.name}", self.rows.bins)
            self._on_received = sent
            sent()

        def sent() -> None:
            if token == self._token and not self._owing and not self._unacked_state:
                self._on_received = lambda: None
                assert old is not None
                self._exchange(token, old.epoch, ("held", step), held)

        def held(posts: Any) -> None:
            if rank is None:
                self._finish(token, CutOverDone(view.epoch, step))
            else:
                self._enter(view, old, step, token)

        if old is not None:
            self._exchange(token, old.epoch, ("close", step), closed)
        else:
            self._await_state(view, step, token)

    def _await_state(self, view: View, step: int, token: int) -> None:
        """A joiner goes on once it has the dense state and all its blocks of ``step``."""
        rank = view.rank_of(self.name)
        assert rank is not None

        def check() -> None:
            has_all = (view.epoch, "dense") in self._received
            if has_all and rank == 0:  # nobody else can tell that the leavers' counts have come
                leavers = self._received[view.epoch, "dense"][1]
                has_all = all((view.epoch, f"bins {leaver}") in self._received for leaver in leavers)
            if token == self._token and has_all and all(self.rows.content_at(k, step) for k in view.owned_by(rank)):
                self._on_received = lambda: None
                self._enter(view, None, step, token)

        self._on_received = check
        check()

    def _call_joiners(self, view: View, step: int) -> None:
        old = self.state.view
        assert old is not None
        leavers = tuple(m.worker_id for m in old.members if view.rank_of(m.worker_id) is None)
        for member in view.members:
            if old.rank_of(member.worker_id) is None:
                state = (self.rows.dense, leavers)
                self._send_state(member.worker_id, view.epoch, "dense", state, called=step)

    def _send_state(self, target: str, epoch: int, kind: str, value: Any, called: int | None = None) -> None:
        other = self.history.workers.get(target)
        if other is None:
            return
        self._unacked_state += 1
        token = self._token

        def arrived() -> None:
            assert other is not None
            if other is not self and not other.expects(epoch):
                # It has not got its order yet.
                if token == self._token:
                    self.world.after(0.1, self, lambda: self.world.transfer(self, other, arrived))
                return
            other.receive(epoch, kind, value)
            if called is not None:
                other._news(CutOverCalled(epoch, called))
            self.world.transfer(other, self, acknowledged)

        def acknowledged() -> None:
            if token == self._token:
                self._unacked_state -= 1
                self._on_received()

        self.world.transfer(self, other, arrived)

    def expects(self, epoch: int) -> bool:
        """Whether this worker takes part in coming to ``epoch``."""
        preparing = self.state.preparing
        performing = getattr(self._blocking, "view", None)
        return (preparing is not None and preparing.epoch == epoch) or (
            performing is not None and performing.epoch == epoch
        )

    def receive(self, epoch: int, kind: str, value: Any) -> None:
        key = (epoch, kind)
        self._received[key] = value
        self._on_received()

    def _enter(self, view: View, old: View | None, step: int, token: int) -> None:
        """The first header exchange of the new view: it is decided when that completes (V4)."""
        rank = view.rank_of(self.name)
        assert rank is not None
        dense = self.rows.dense if old is not None else self._received[view.epoch, "dense"][0]
        contents = {key: self.rows.content_at(key, step) for key in view.owned_by(rank)}
        missing = [key for key, content in contents.items() if content is None]
        if missing:
            raise SimulationError(f"V4: {self.name} lacks {missing} at the cutover to epoch {view.epoch}")

        def entered(posts: dict[str, Header]) -> None:
            if len({h.payload for h in posts.values()}) != 1:
                raise SimulationError(f"V4: dense states differ at the cutover to epoch {view.epoch}")
            found = {key: content for key, content in contents.items() if content is not None}
            # Only now are leavers' counts known to be here: a joiner that is rank 0 may have come first.
            left = {k[5:]: value for (e, k), value in self._received.items() if e == view.epoch and k[:5] == "bins "}
            bins = self.rows.bins if old is not None else 0
            if old is None:
                self.rows.count_from(step)
            self.rows.flip(found, step, dense=dense, bins=bins, handed=left if rank == 0 else {})
            if rank != 0:
                for origin, counted in left.items():
                    self.rows.aux.setdefault(origin, {})[step] = counted
            self.history.on_view(self, view)
            self._channels = {(h, key): step for key in found for h in self._holders(view, key)}
            self._acked = self._sent = step
            self._owing, self._received = set(), {}
            self._finish(token, CutOverDone(view.epoch, step))

        self._exchange(token, view.epoch, ("first",), entered, payload=dense)

    # ---- recovery -------------------------------------------------------------------------------------------------

    def _recover(self, view: View, plan: RecoveryPlan, token: int) -> None:
        rank = view.rank_of(self.name)
        self._unacked_state = 0
        self._received = {k: v for k, v in self._received.items() if k[0] == view.epoch}
        self._deadline(token, "the recovery took too long")
        self.rows.count_from(0 if plan.from_checkpoint else plan.step)
        if plan.from_checkpoint:
            self._form(view, token, lambda: self._enter_from_checkpoint(view, plan, token))
            return
        incoming = {s.source for s in plan.shipments if s.target == self.name}
        outgoing = [s for s in plan.shipments if s.source == self.name]

        def formed() -> None:
            for shipment in outgoing:
                if not self._ship(view, plan.step, shipment):
                    self._fail(f"cannot bring step {plan.step}")
                    return
            self._on_received = check
            check()

        def check() -> None:
            if token != self._token or self._unacked_state or self._on_received is not check:
                return
            if rank is None:
                self._on_received = lambda: None
                self._finish(token, Recovered(view.epoch, plan.step))
            elif all((view.epoch, f"from {source}") in self._received for source in incoming):
                self._on_received = lambda: None
                self._enter_recovered(view, plan, token)

        if rank is None:
            self.world.after(0.0, self, lambda: token == self._token and formed())
        else:
            self._form(view, token, formed)

    def _ship(self, view: View, step: int, shipment: Shipment) -> bool:
        contents = {key: self.rows.content_at(key, step) for key in shipment.blocks}
        bins = {origin: self.rows.bins_at(origin, step) for origin in shipment.aux_of}
        cut = self.rows.snapshots.get(step)
        if None in contents.values() or None in bins.values() or (shipment.has_dense and cut is None):
            self.history.on_infeasible(self, step, shipment)
            return False
        value = (contents, cut.dense if shipment.has_dense and cut is not None else None, bins)
        self._send_state(shipment.target, view.epoch, f"from {self.name}", value)
        return True

    def _enter_recovered(self, view: View, plan: RecoveryPlan, token: int) -> None:
        rank = view.rank_of(self.name)
        assert rank is not None
        cut = self.rows.snapshots.get(plan.step) if self.state.view is not None else None
        contents: dict[Key, Content | None] = {}
        dense = cut.dense if cut is not None else None
        bins = cut.bins if cut is not None else 0
        handed: dict[str, int] = {}
        for (epoch, kind), value in self._received.items():
            if epoch == view.epoch and kind.startswith("from "):
                contents |= value[0]
                dense = value[1] if dense is None else dense
                handed |= value[2]
        saved = self.history.saved(self.history.durable_step(plan.restores))
        for key in view.owned_by(rank):
            if key in plan.lost_blocks:
                contents[key] = initial_content(key) if saved is None else saved.rows[key]
            elif key not in contents:
                contents[key] = self.rows.content_at(key, plan.step)
        contents = {key: contents[key] for key in view.owned_by(rank)}
        if None in contents.values() or dense is None:
            self.history.on_infeasible(self, plan.step, None)
            self._fail(f"cannot come to step {plan.step}")
            return
        found = {key: content for key, content in contents.items() if content is not None}
        self.rows.pending = (plan.step, Snapshot(found, dense, bins))
        # A worker that has fallen behind its own buddy gets its own counts back.
        bins += handed.pop(self.name, 0)
        self._enter_with(view, plan.step, found, (dense, bins, handed), token)

    def _enter_from_checkpoint(self, view: View, plan: RecoveryPlan, token: int) -> None:
        def entered(posts: Any) -> None:
            self._load(view, plan.step if plan.restores else None)
            self.history.on_view(self, view)
            self._reset_channels(view, plan.step, periodic=True)
            self._finish(token, Recovered(view.epoch, plan.step))

        self._exchange(token, view.epoch, ("first",), entered)

    def _enter_with(
        self, view: View, step: int, contents: dict[Key, Content], state: tuple[int, int, dict[str, int]], token: int
    ) -> None:
        dense, bins, handed = state

        def entered(posts: dict[str, Header]) -> None:
            if len({h.payload for h in posts.values()}) != 1:
                raise SimulationError(f"F4: dense states differ in the recovery to epoch {view.epoch}")
            self.rows.flip(contents, step, dense=dense, bins=bins, handed=handed)
            self.history.on_view(self, view)
            self._received = {}
            self._reset_channels(view, step, periodic=True)
            self._finish(token, Recovered(view.epoch, step))

        self._exchange(token, view.epoch, ("first",), entered, payload=dense)
