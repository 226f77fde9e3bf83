"""Transfer: messages between two workers over TCP, apart from the step's exchanges (PROTOCOLS V2, F7).

Guarantees:

1. A message is handled at most once, and those of a client in the order it sent them. One that is repeated, after a
   connection broke, gets the answer it got before.
2. A message of another run, of an epoch or sender that the fence does not know, with a wrong CRC or out of order is
   answered with a reason and changes nothing (F7).
3. Every wait has a deadline, and ``abort`` ends all of them at once.
4. Memory: one message per connection, WINDOW unanswered messages per client.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.actors.background import yield_to_training
from shoal.actors.snapshot import RateLimiter
from shoal.actors.wire import (
    HEADER_BYTES,
    Header,
    Kind,
    LinkError,
    Message,
    RefusedError,
    Reply,
    decode_header,
    encode,
    is_intact,
)
from shoal.kernels import faults
from shoal.kernels.errors import ExchangeTimeoutError, PeerError, ProtocolError

logger = logging.getLogger(__name__)

#: Messages a client may have sent without an answer: one travels while the receiver works on the other.
WINDOW = 2
#: Clients whose last answers a server remembers.
STREAMS_MAX = 256
_BUFFERS_PER_CALL = 256
# What is sent between two looks at the rate limit.
_PACED_BYTES = 2**20
_SOCKET_BYTES = 4 * 2**20

Handler = Callable[[Message], Reply]
Fence = Callable[[int, str], str | None]


class _Stream:
    """What a server remembers of one client."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last = 0
        self.answers: deque[tuple[int, Reply]] = deque(maxlen=2 * WINDOW)


class Recycled:
    """Memory for received messages: what was given back is given out again, since a page fault costs more than filling
    the page. Any thread."""

    #: Given out for any size from KEPT_BYTES_MIN on; larger and smaller messages have memory of their own.
    PIECE_BYTES = 4 * 2**20
    KEPT_BYTES_MIN = 2**18
    KEPT_MAX = 64

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def take(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], until nobody refers to it: a view of it does not count."""
        if not self.KEPT_BYTES_MIN <= num_bytes <= self.PIECE_BYTES:
            return np.empty(num_bytes, np.uint8)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self.PIECE_BYTES, np.uint8)
        taken = memory[:num_bytes]
        weakref.finalize(taken, self._give_back, memory).atexit = False
        return taken

    def _give_back(self, memory: np.ndarray) -> None:
        if len(self._free) < self.KEPT_MAX:
            self._free.append(memory)


class TransferServer:
    """Listens on a free port; a thread per connection hands each message to ``handler``.

    Args:
        handler: Message -> Reply; called by several threads, one message of a client at a time. What it raises is
            answered as a refusal.
        run: 64-bit hash of the run.
        fence: (epoch, sender) -> None to accept, or the reason to refuse (F7); asked for every message.
        timeout_s: how long a message may take to arrive once it has begun.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        run: int,
        fence: Fence,
        bind_address: str = "127.0.0.1",
        timeout_s: float = 10.0,
    ) -> None:
        self._handler, self._run, self._fence, self._timeout_s = handler, run, fence, timeout_s
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._streams: OrderedDict[tuple[str, int], _Stream] = OrderedDict()
        self._memory = Recycled()
        self._is_closed = False
        self.num_refused = 0
        self.bytes_received = 0
        family = socket.AF_INET6 if ":" in bind_address else socket.AF_INET
        self._listener = socket.create_server((bind_address, 0), family=family, backlog=128)
        port = self._listener.getsockname()[1]
        #: Where clients connect: "host:port".
        self.address = f"[{bind_address}]:{port}" if ":" in bind_address else f"{bind_address}:{port}"
        threading.Thread(target=self._accept, name="transfer-accept", daemon=True).start()

    def abort(self) -> None:
        """Close all connections at once; new ones are accepted."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _shut(connection)

    def close(self) -> None:
        """Close the listener and all connections."""
        self._is_closed = True
        # Closing alone does not wake a thread in accept().
        _shut(self._listener)
        self._listener.close()
        self.abort()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            _tune(connection)
            with self._lock:
                self._connections.add(connection)
            if self._is_closed:
                _shut(connection)
            threading.Thread(target=self._serve, args=(connection,), name="transfer-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        yield_to_training()
        try:
            with connection:
                while self._serve_one(connection):
                    pass
        except (OSError, ProtocolError, ExchangeTimeoutError) as error:
            if not self._is_closed:
                logger.debug("transfer=%s ended reason=%r", self.address, str(error))
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _serve_one(self, connection: socket.socket) -> bool:
        """Answer one message; False at the end of the connection."""
        head = bytearray(HEADER_BYTES)
        connection.settimeout(None)
        if not _receive(connection, memoryview(head), None, may_end=True):
            return False
        deadline_s = time.monotonic() + self._timeout_s
        header = decode_header(head)
        text = bytearray(header.meta_bytes)
        payload = self._memory.take(header.payload_bytes)
        _receive(connection, memoryview(text), deadline_s)
        _receive(connection, memoryview(payload), deadline_s)
        self.bytes_received += HEADER_BYTES + len(text) + payload.size
        if faults.reach("wire.serve"):
            return True
        kind, reply = self._answer(header, text, payload)
        if kind is Kind.REFUSED:
            self.num_refused += 1
        answer = Header(
            kind=kind,
            run=self._run,
            epoch=header.epoch,
            stream=header.stream,
            sequence=header.sequence,
            sender="",
        )
        _send(connection, encode(answer, reply.meta, [reply.payload]), time.monotonic() + self._timeout_s)
        return True

    def _answer(self, header: Header, text: bytearray, payload: np.ndarray) -> tuple[Kind, Reply]:
        if not is_intact(header, text, payload):
            return _refused("the message is damaged: its CRC does not fit")
        if header.run != self._run:
            return _refused("it belongs to another run")
        with self._lock:
            key = header.sender, header.stream
            stream = self._streams.setdefault(key, _Stream())
            self._streams.move_to_end(key)
            while len(self._streams) > STREAMS_MAX:
                self._streams.popitem(last=False)
        # A message repeated over a new connection waits here for the first one to be done.
        with stream.lock:
            reason = self._fence(header.epoch, header.sender)
            if reason is not None:
                return _refused(reason)
            for sequence, reply in stream.answers:
                if sequence == header.sequence:
                    return Kind.OK, reply
            if header.sequence != stream.last + 1:
                return _refused(f"message {header.sequence} is out of order: {stream.last + 1} is next")
            try:
                meta = _parse(text)
                reply = self._handler(Message(header=header, meta=meta, payload=payload))
            except PeerError as error:
                return _refused(str(error.args[0]))
            except Exception as error:  # the process's edge: the sender hears what is wrong here
                logger.exception("transfer=%s kind=%s sender=%s failed", self.address, header.kind.name, header.sender)
                return _refused(f"{type(error).__name__}: {error}")
            stream.last = header.sequence
            stream.answers.append((header.sequence, reply))
            return Kind.OK, reply


def _refused(reason: str) -> tuple[Kind, Reply]:
    return Kind.REFUSED, Reply(meta={"reason": reason[:2000]})


def _parse(text: bytearray) -> Mapping[str, Any]:
    return json.loads(text.decode())


class TransferClient:
    """One worker's connection to another's server. Used by one thread; ``abort`` and ``close`` by any.

    Args:
        address: the server's "host:port".
        run: 64-bit hash of the run.
        sender: this worker's id.
        timeout_s: how long the server may take for an answer.
        limiter: holds back what is sent with ``is_paced``.
    """

    def __init__(
        self,
        address: str,
        *,
        run: int,
        sender: str,
        timeout_s: float = 10.0,
        limiter: RateLimiter | None = None,
    ) -> None:
        self.address = address
        self._run, self._sender, self._timeout_s = run, sender, timeout_s
        self._limiter = limiter or RateLimiter()
        self._stream = secrets.randbits(63)
        self._sequence = 0
        self._socket: socket.socket | None = None
        #: Sent and not yet answered: (sequence, the message's buffers).
        self._pending: deque[tuple[int, list[memoryview]]] = deque()
        self._answers: deque[Reply] = deque()
        self._is_aborted = False
        self._reconnects_left = 1
        self.bytes_sent = 0

    def post(
        self, kind: Kind, epoch: int, meta: Mapping[str, Any], payload: Sequence[Any] = (), *, is_paced: bool = False
    ) -> list[Reply]:
        """Send without waiting for the answer, except while WINDOW messages have none. The buffers must not change
        until they are answered. Returns the answers that have come meanwhile, in order.

        Raises RefusedError, LinkError, ExchangeTimeoutError; the client is of no use afterwards.
        """
        while len(self._pending) >= WINDOW:
            self._take_answer()
        self._sequence += 1
        header = Header(
            kind=kind,
            run=self._run,
            epoch=epoch,
            stream=self._stream,
            sequence=self._sequence,
            sender=self._sender,
        )
        buffers = encode(header, meta, payload)
        self._pending.append((self._sequence, buffers))
        self._transmit(buffers, is_paced)
        return self._taken()

    def drain(self) -> list[Reply]:
        """Wait for all answers; returns those not returned before. Raises as ``post`` does."""
        while self._pending:
            self._take_answer()
        return self._taken()

    def call(self, kind: Kind, epoch: int, meta: Mapping[str, Any], payload: Sequence[Any] = ()) -> Reply:
        """Send and wait for the answer; only while no other answer is awaited. Raises as ``post`` does."""
        assert not self._pending and not self._answers, "answers of posted messages are to be drained first"
        return (self.post(kind, epoch, meta, payload) or self.drain())[-1]

    def abort(self) -> None:
        """Close the connection at once; a thread that waits in this client gets LinkError."""
        # A wait for the rate limit is short (_PACED_BYTES) and finds the connection shut.
        self._is_aborted = True
        connection = self._socket
        if connection is not None:
            _shut(connection)

    close = abort

    def __enter__(self) -> TransferClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _taken(self) -> list[Reply]:
        taken = list(self._answers)
        self._answers.clear()
        return taken

    def _transmit(self, buffers: list[memoryview], is_paced: bool = False) -> None:
        try:
            connection = self._connected()
            if faults.reach("wire.send"):
                return
            for part in _paced(buffers, self._limiter) if is_paced and self._limiter.bytes_per_s else (buffers,):
                _send(connection, part, time.monotonic() + self._timeout_s)
            self.bytes_sent += sum(map(len, buffers))
        except TimeoutError:
            raise self._timed_out() from None
        except OSError as error:
            self._reconnect(error)

    def _take_answer(self) -> None:
        while True:
            try:
                header, reply = self._receive_answer()
                break
            except TimeoutError:
                raise self._timed_out() from None
            except OSError as error:
                self._reconnect(error)
        sequence, _ = self._pending.popleft()
        if header.kind is Kind.REFUSED:
            self.abort()
            raise RefusedError(f"worker at {self.address} refused: {reply.meta.get('reason')}")
        if header.sequence != sequence or header.kind is not Kind.OK:
            self.abort()
            raise ProtocolError(f"worker at {self.address} answered message {header.sequence}, not {sequence}")
        self._answers.append(reply)

    def _receive_answer(self) -> tuple[Header, Reply]:
        connection = self._connected()
        deadline_s = time.monotonic() + self._timeout_s
        head = bytearray(HEADER_BYTES)
        _receive(connection, memoryview(head), deadline_s)
        header = decode_header(head)
        text, payload = bytearray(header.meta_bytes), np.empty(header.payload_bytes, np.uint8)
        _receive(connection, memoryview(text), deadline_s)
        _receive(connection, memoryview(payload), deadline_s)
        if not is_intact(header, text, payload):
            raise OSError("an answer is damaged")
        return header, Reply(meta=_parse(text), payload=payload)

    def _connected(self) -> socket.socket:
        if self._is_aborted:
            raise LinkError(f"the connection to the worker at {self.address} was closed here")
        if self._socket is None:
            host, _, port = self.address.rpartition(":")
            host = host.strip("[]")
            found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            # Known before it connects, so that ``abort`` ends that wait as well.
            self._socket = found
            _tune(found)
            found.settimeout(self._timeout_s)
            found.connect((host, int(port)))
            if self._is_aborted:
                _shut(found)
        return self._socket

    def _reconnect(self, error: OSError) -> None:
        """After a broken connection: once more over a new one, beginning with what has no answer (guarantee 1)."""
        if self._socket is not None:
            _shut(self._socket)
            self._socket.close()
            self._socket = None
        if self._is_aborted or self._reconnects_left == 0:
            raise LinkError(f"worker at {self.address}: {error}") from error
        self._reconnects_left -= 1
        for _, buffers in self._pending:
            self._transmit(buffers)

    def _timed_out(self) -> ExchangeTimeoutError:
        self.abort()
        return ExchangeTimeoutError(f"worker at {self.address} did not answer within {self._timeout_s:g} s")


# ---- sockets ------------------------------------------------------------------------------------------------------


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)


def _shut(connection: socket.socket) -> None:
    """Wake whoever waits on the connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _remaining_s(deadline_s: float) -> float:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("deadline passed")
    return remaining_s


def _receive(connection: socket.socket, into: memoryview, deadline_s: float | None, *, may_end: bool = False) -> bool:
    """Fill ``into``. False where the connection has ended before its first byte and ``may_end``; else that raises."""
    at = 0
    while at < len(into):
        if deadline_s is not None:
            connection.settimeout(_remaining_s(deadline_s))
        got = connection.recv_into(into[at:])
        if got == 0:
            if at == 0 and may_end:
                return False
            raise ConnectionError("the connection was closed")
        at += got
    return True


def _send(connection: socket.socket, buffers: Sequence[memoryview], deadline_s: float) -> None:
    """Send all of ``buffers`` without joining them."""
    left = deque(buffers)
    while left:
        connection.settimeout(_remaining_s(deadline_s))
        sent = connection.sendmsg([left[i] for i in range(min(len(left), _BUFFERS_PER_CALL))])
        while left and sent >= len(left[0]):
            sent -= len(left.popleft())
        if sent:
            left[0] = left[0][sent:]


def _paced(buffers: Sequence[memoryview], limiter: RateLimiter) -> Any:
    """Parts of at most _PACED_BYTES, each when the limiter lets it go."""
    for buffer in buffers:
        for start in range(0, len(buffer), _PACED_BYTES):
            part = buffer[start : start + _PACED_BYTES]
            limiter.acquire(len(part))
            yield [part]
