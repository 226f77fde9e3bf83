"""Which failure a run reports, and what crosses the process: the cause with its traceback, not a victim's timeout."""

from __future__ import annotations

import pickle

import pytest

from shoal.actors.failures import describe_failure
from shoal.actors.messages import WorkerPhase, WorkerPoll, WorkerStatus
from shoal.kernels.errors import BadIdError, DataError, ExchangeTimeoutError, PeerError, RowError
from shoal.platform.cause import CAUSE_TIMEOUT_S, decide_cause


def poll(failure: BaseException | None = None, **fields) -> WorkerPoll:
    phase = WorkerPhase.TRAINING if failure is None else WorkerPhase.FAILED
    status = WorkerStatus(worker_id="w", rank=0, epoch=0, step=3, phase=phase, since_s=0.0, pid=1, host="h")
    return WorkerPoll(status=status, failure=failure, **fields)


def decide(*answers, waited_s: float = 0.0) -> int | None:
    return decide_cause(answers, waited_s, saving_timeout_s=60.0)


VICTIM, ORIGIN = poll(PeerError("left")), poll(PeerError("broke"), is_origin=True)


@pytest.mark.parametrize(
    ("answers", "waited_s", "expected"),
    [
        ((poll(), poll()), 0.0, None),
        ((VICTIM, ORIGIN), 0.0, 1),
        ((VICTIM, RuntimeError("dead"), ORIGIN), 0.0, 1),
        ((VICTIM, poll()), 0.0, None),
        ((VICTIM, poll()), CAUSE_TIMEOUT_S, 0),
        ((VICTIM, VICTIM), 0.0, 0),
        ((VICTIM, poll(summary={})), 0.0, 0),
        ((ORIGIN, poll(PeerError("left"), is_saving=True)), 10.0, None),
        ((ORIGIN, poll(PeerError("left"), is_saving=True)), 60.0, 0),
        ((RuntimeError("dead"), poll(is_saving=True)), 0.0, 0),
    ],
)
def test_the_cause_is_reported_and_waited_for(answers, waited_s, expected):
    assert decide(*answers, waited_s=waited_s) == expected


def agreed(error: BaseException, cause: BaseException, *, is_origin: bool) -> BaseException:
    try:
        try:
            raise cause
        except BaseException as caught:
            error.is_origin = is_origin  # type: ignore[attr-defined]
            raise error from caught
    except BaseException as result:
        return result


def test_a_models_exception_crosses_with_its_traceback_where_it_happened():
    failure, is_origin = describe_failure(agreed(PeerError("rank 1: x"), KeyError("column"), is_origin=True))
    assert type(failure) is PeerError and is_origin
    assert "rank 1: x" in str(failure) and "raise cause" in str(failure) and "KeyError: 'column'" in str(failure)
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)
    failure, is_origin = describe_failure(agreed(PeerError("rank 1: x"), KeyError("column"), is_origin=False))
    assert str(failure).endswith("rank 1: x") and not is_origin


def test_shoal_errors_keep_type_and_code_and_their_whole_text():
    failure, _ = describe_failure(agreed(BadIdError("short"), DataError("a" * 900), is_origin=True))
    assert type(failure) is BadIdError and "a" * 900 in str(failure) and str(failure).startswith("[SHOAL-203]")
    failure, is_origin = describe_failure(RowError("c", 3, "is null"))
    assert isinstance(failure, RowError) and is_origin
    failure, _ = describe_failure(agreed(RowError("c", 3, "is null"), ValueError("no"), is_origin=True))
    assert type(failure) is DataError and "ValueError: no" in str(failure)


def test_transport_errors_are_consequences_and_foreign_classes_become_peer_errors():
    assert describe_failure(ExchangeTimeoutError("rank 1 did not arrive"))[1] is False

    class Odd(Exception):
        pass

    failure, is_origin = describe_failure(Odd("boom"))
    assert type(failure) is PeerError and "Odd: boom" in str(failure) and is_origin
