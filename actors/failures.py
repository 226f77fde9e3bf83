"""What an exception in a step loop means: trouble with peers, which is recovered from, or the run's own failure."""

from __future__ import annotations

import traceback

from shoal.kernels import errors
from shoal.kernels.errors import DataError, PeerError, ProtocolError, RowError, ShoalError

_PORTABLE = frozenset(c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.ShoalError))


def is_peer_trouble(error: BaseException) -> bool:
    """Whether ``error`` only says that other ranks are gone, silent or elsewhere.

    Errors that all ranks agreed on in a header have a mark (``is_origin``): they are somebody's own, and so is a
    disagreement about the protocol itself.
    """
    return isinstance(error, PeerError) and error.is_origin is None and not isinstance(error, ProtocolError)


def describe_failure(error: BaseException) -> tuple[BaseException, bool]:
    """(the error as it crosses processes, whether it arose on this rank).

    Shoal's errors keep type and code. Where this rank is the origin, the text gains the traceback of what the user's
    code raised, or the whole message of a Shoal error that the exchange had cut. Any other exception becomes a
    PeerError, since a user's class may not unpickle elsewhere.
    """
    mark = error.is_origin if isinstance(error, ShoalError) else None
    is_origin = not isinstance(error, PeerError) if mark is None else mark
    if not isinstance(error, ShoalError) or type(error) not in _PORTABLE:
        lines = "".join(traceback.format_exception(error))
        return PeerError(f"{type(error).__name__}: {error}\n{lines}"), is_origin
    cause = error.__cause__
    if mark is not True or cause is None:
        return error, is_origin
    addition = str(cause) if isinstance(cause, ShoalError) else "".join(traceback.format_exception(cause)).rstrip()
    text = str(error.args[0]) if error.args else ""
    if addition in text:
        return error, is_origin
    # RowError takes other arguments; as the DataError it is, its text is free.
    kind: type[ShoalError] = DataError if isinstance(error, RowError) else type(error)
    failure = kind(f"{text}\n{addition}")
    failure.is_origin = True
    return failure, is_origin
