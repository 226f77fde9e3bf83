"""The simulator's world: virtual time, processes, a network that misbehaves, and process groups over it."""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable, Hashable
from typing import Any

from shoal.actors.messages import View
from shoal.kernels.frame import Flag


class SimulationError(AssertionError):
    """A rule was broken in a simulated history."""


class Process:
    """Something that runs on a host; when it is killed what it had planned does not happen."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.is_alive = True
        self.is_stopped = False
        self.deferred: list[Callable[[], None]] = []


class World:
    """Virtual clock, events in time order, hosts and the links between them. All chance comes from one generator."""

    def __init__(self, seed: int, *, drop: float, duplicate: float) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.drop, self.duplicate = drop, duplicate
        self._events: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._count = 0
        #: Pairs of hosts that do not reach each other.
        self._cut_links: set[frozenset[str]] = set()

    # ---- time -----------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, process: Process | None, act: Callable[[], None]) -> None:
        """Run ``act`` in ``process`` after ``delay_s``; not if that is dead by then, later if it is stopped."""
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, process, act))

    def run(self, until_s: float, is_over: Callable[[], bool]) -> None:
        """Run events until ``is_over`` or the time is up."""
        while self._events and not is_over():
            at_s, _, process, act = heapq.heappop(self._events)
            if at_s > until_s:
                return
            self.now_s = at_s
            if process is not None:
                if not process.is_alive:
                    continue
                if process.is_stopped:
                    process.deferred.append(act)
                    continue
            act()

    def resume(self, process: Process) -> None:
        """Undo a stop: what came meanwhile happens now."""
        process.is_stopped = False
        acts, process.deferred = process.deferred, []
        for act in acts:
            self.after(0.0, process, act)

    def delay_s(self, mean_s: float = 0.01) -> float:
        """A delay with a tail: one in fifty is twenty times as long."""
        scale = 20.0 if self.random.random() < 0.02 else 1.0
        return scale * mean_s * (0.5 + self.random.random())

    # ---- links ----------------------------------------------------------------------------------------------------

    def cut(self, a: str, b: str) -> None:
        if a != b:
            self._cut_links.add(frozenset((a, b)))

    def heal(self) -> None:
        self._cut_links.clear()

    def is_linked(self, a: Process, b: Process) -> bool:
        return a.host == b.host or not self._cut_links or frozenset((a.host, b.host)) not in self._cut_links

    def send(self, source: Process, target: Process, act: Callable[[], None]) -> None:
        """A control message: may be lost, doubled, late."""
        if not self.is_linked(source, target) or self.random.random() < self.drop:
            return
        self.after(self.delay_s(), target, act)
        if self.random.random() < self.duplicate:
            self.after(self.delay_s(0.1), target, act)

    def transfer(self, source: Process, target: Process, act: Callable[[], None]) -> None:
        """Data over a connection: in time or late, tried again while the link is cut, lost only with a process."""

        def attempt() -> None:
            if self.is_linked(source, target):
                late_s = self.random.uniform(0.5, 4.0) if self.random.random() < 0.01 else 0.0
                self.after(self.delay_s(0.02) + late_s, target, act)
            else:
                self.after(0.3, source, attempt)

        self.after(0.0, source, attempt)


@dataclasses.dataclass(frozen=True)
class Header:
    """What a rank puts into an exchange."""

    flags: Flag = Flag(0)  # noqa: RUF009
    control: int = 0
    acked: int = -1
    payload: Hashable = None


class _Exchange:
    def __init__(self) -> None:
        self.posts: dict[str, Header] = {}
        #: Ranks that have not heard how it went.
        self.waiting: dict[str, tuple[Callable[[dict[str, Header]], None], Callable[[str, tuple[int, ...]], None]]] = {}
        self.is_done = False


class Group:
    """The process groups of one epoch. An exchange ends on every rank by itself: on some it may fail."""

    def __init__(self, world: World, view: View, timeout_s: float) -> None:
        self.world, self.view, self.timeout_s = world, view, timeout_s
        self.processes: dict[str, Process] = {}
        self.is_broken = False
        self._forming: dict[str, Callable[[], None]] = {}
        self._exchanges: dict[tuple[Any, ...], _Exchange] = {}

    @property
    def is_formed(self) -> bool:
        return len(self.processes) == self.view.world_size

    def join(self, name: str, process: Process, on_formed: Callable[[], None]) -> None:
        """Wait until all members are there. Nobody is told if they never are: callers have deadlines."""
        if self.is_broken:
            return
        self.processes[name] = process
        self._forming[name] = on_formed
        alive = all(p.is_alive for p in self.processes.values())
        if self.is_formed and alive and self._is_whole():
            for member, act in self._forming.items():
                self.world.after(self.world.delay_s(), self.processes[member], act)
            self._forming = {}

    def _is_whole(self) -> bool:
        members = list(self.processes.values())
        return all(self.world.is_linked(a, b) for i, a in enumerate(members) for b in members[:i])

    def exchange(
        self,
        name: str,
        key: tuple[Any, ...],
        header: Header,
        on_done: Callable[[dict[str, Header]], None],
        on_fail: Callable[[str, tuple[int, ...]], None],
    ) -> None:
        """Post this rank's part of exchange ``key``; exactly one of the callbacks follows, in this rank's process."""
        process = self.processes[name]
        if self.is_broken:
            self.world.after(0.01, process, lambda: on_fail("the group is gone", ()))
            return
        found = self._exchanges.setdefault(key, _Exchange())
        found.posts[name] = header
        found.waiting[name] = (on_done, on_fail)
        self.world.after(self.timeout_s, process, lambda: self._fail(found, name, "timed out"))
        others = [k for k, e in self._exchanges.items() if k != key and e.posts.keys() - found.posts.keys()]
        if any(not self._exchanges[k].is_done for k in others):
            raise SimulationError(f"S1: ranks of epoch {self.view.epoch} are in {key} and {others} at once")
        if len(found.posts) == self.view.world_size and self._is_whole():
            found.is_done = True
            for member in list(found.waiting):
                delay_s = self.world.delay_s()
                self.world.after(delay_s, self.processes[member], lambda m=member: self._complete(found, m))  # type: ignore[misc]

    def _complete(self, found: _Exchange, name: str) -> None:
        waiting = found.waiting.pop(name, None)
        if waiting is not None:
            waiting[0](found.posts)
        if not found.waiting:
            self._exchanges = {k: e for k, e in self._exchanges.items() if e is not found}

    def _fail(self, found: _Exchange, name: str, reason: str) -> None:
        waiting = found.waiting.pop(name, None)
        if waiting is not None:
            missing = tuple(m.rank for m in self.view.members if m.worker_id not in found.posts)
            waiting[1](reason, missing)

    def leave(self, name: str, *, is_silent: bool = False) -> None:
        """A member destroys its groups, or dies: peers notice at once (F1), or, if its host is gone, in time.

        An exchange that all have entered may end either way on each rank that has not heard yet.
        """
        if name not in self.processes and not self._forming:
            return
        self.is_broken = True
        self._forming.pop(name, None)
        for found in self._exchanges.values():
            found.waiting.pop(name, None)
            for member in list(found.waiting):
                if found.is_done and self.world.random.random() < 0.5:
                    continue
                if found.is_done:
                    self._lose(found, member, 0.0)
                elif not is_silent:
                    self._lose(found, member, 0.02)

    def _lose(self, found: _Exchange, member: str, delay_s: float) -> None:
        found_waiting = found.waiting.pop(member)
        missing = tuple(m.rank for m in self.view.members if m.worker_id not in found.posts)
        self.world.after(delay_s, self.processes[member], lambda: found_waiting[1]("connection closed", missing))
