"""Which of many errors explains why a run failed."""

from __future__ import annotations

from shoal.kernels.errors import ClusterError, DataError, PeerError
from shoal.platform.failure_log import FailureLog


def test_own_failure_explains_those_of_its_peers():
    log = FailureLog()
    log.note("w0", PeerError("rank 1 left"), is_origin=False)
    log.note_gone("w2", "worker w2 died")
    log.note("w1", DataError("row 7"), is_origin=True)
    assert isinstance(log.cause(), DataError)


def test_death_of_a_worker_explains_more_than_what_its_peers_say():
    log = FailureLog()
    log.note("w0", PeerError("rank 1 left"), is_origin=False)
    log.note_gone("w1", "worker w1 died")
    assert isinstance(log.cause(), ClusterError) and "w1" in str(log.cause())


def test_what_a_worker_said_before_it_died_is_kept():
    log = FailureLog()
    log.note("w1", DataError("row 7"), is_origin=True)
    log.note("w1", PeerError("and then this"), is_origin=False)
    log.note_gone("w1", "worker w1 died")
    assert isinstance(log.cause(), DataError)
    log.clear()
    assert log.cause() is None
