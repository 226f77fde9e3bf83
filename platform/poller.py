"""Polls of all workers at once: a worker that does not answer holds up nobody (F2).

At most one call to a worker is under way. A round waits a little for the answers and takes what has come; what comes
later belongs to a later round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from shoal.actors.messages import Holdings, WorkerPhase, WorkerPoll
from shoal.platform.clock import Clock
from shoal.platform.launch import WorkerGoneError, WorkerHandle

#: Phases in which what a worker holds does not change under the question.
_RESTING = (WorkerPhase.PARKED, WorkerPhase.LEFT, WorkerPhase.FINISHED, WorkerPhase.STARTING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of one poll: an answer, or the news that the worker is gone."""

    worker_id: str
    poll: WorkerPoll | None = None
    #: Where they were asked for and the worker rests.
    holdings: Holdings | None = None
    #: Why the worker will never answer again.
    gone: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """The outcome of one round."""

    answers: tuple[Answer, ...]
    #: Worker id -> seconds since its last answer was asked for, for those whose answer is still out.
    silent_s: Mapping[str, float]


class Poller:
    """Calls workers through a pool of threads."""

    def __init__(self, pool: ThreadPoolExecutor, clock: Clock, call_timeout_s: float) -> None:
        self._pool = pool
        self._clock = clock
        self._call_timeout_s = call_timeout_s
        self._calls: dict[str, Future[Answer]] = {}
        #: When each worker was first asked without having answered since.
        self._asked: dict[str, float] = {}

    def round(self, handles: Mapping[str, WorkerHandle], ask_holdings: frozenset[str], wait_s: float) -> Round:
        """Poll ``handles``; take what answers within ``wait_s``. Those no longer named are forgotten."""
        for worker_id in [w for w in self._calls if w not in handles]:
            self._calls.pop(worker_id).cancel()
        self._asked = {w: at for w, at in self._asked.items() if w in handles}
        now_s = self._clock.now_s()
        for worker_id, handle in handles.items():
            if worker_id not in self._calls:
                self._asked.setdefault(worker_id, now_s)
                self._calls[worker_id] = self._pool.submit(self._call, handle, worker_id in ask_holdings)
        wait(list(self._calls.values()), timeout=wait_s)
        answers: list[Answer] = []
        for worker_id in [w for w, call in self._calls.items() if call.done()]:
            answer = self._calls.pop(worker_id).result()
            if answer.poll is not None or answer.gone is not None:
                del self._asked[worker_id]
                answers.append(answer)
        now_s = self._clock.now_s()
        return Round(answers=tuple(answers), silent_s={w: now_s - at for w, at in self._asked.items()})

    def _call(self, handle: WorkerHandle, wants_holdings: bool) -> Answer:
        worker_id = handle.worker_id
        try:
            poll = handle.poll(self._call_timeout_s)
            rests = wants_holdings and poll.status.phase in _RESTING
            held = handle.holdings(self._call_timeout_s) if rests else None
            return Answer(worker_id=worker_id, poll=poll, holdings=held)
        except WorkerGoneError as error:
            return Answer(worker_id=worker_id, gone=str(error))
        except Exception:  # no answer in time, or a broken one: the worker is silent
            return Answer(worker_id=worker_id)
