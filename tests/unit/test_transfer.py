"""Transfer: at most once and in order, refusals with a reason (F7), deadlines, abort."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from shoal.actors import transfer
from shoal.actors.snapshot import RateLimiter
from shoal.actors.transfer import TransferClient, TransferServer
from shoal.actors.wire import HEADER_BYTES, Header, Kind, LinkError, RefusedError, Reply, decode_header, encode
from shoal.kernels.errors import ExchangeTimeoutError, PeerError


class Recorder:
    """A handler that keeps what it got."""

    def __init__(self) -> None:
        self.got = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, message) -> Reply:
        assert self.gate.wait(10)
        if message.meta.get("fail"):
            raise PeerError("not today")
        self.got.append((message.meta.get("n"), bytes(message.payload)))
        return Reply(meta={"n": message.meta.get("n")}, payload=np.arange(3, dtype=np.uint8))


@pytest.fixture
def world():
    recorder = Recorder()
    refused = {}
    server = TransferServer(recorder, run=1, fence=lambda e, s: refused.get((e, s)), timeout_s=2.0)
    clients = []

    def connect(**options) -> TransferClient:
        made = TransferClient(server.address, **{"run": 1, "sender": "a", "timeout_s": 2.0, **options})
        clients.append(made)
        return made

    yield recorder, refused, server, connect
    recorder.gate.set()
    for client in clients:
        client.close()
    server.close()


def raw_socket(server) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), 5)


def frame(sequence: int, *, run: int = 1, epoch: int = 0, stream: int = 5, n: int = 0, payload: bytes = b"") -> bytes:
    header = Header(kind=Kind.BASE, run=run, epoch=epoch, stream=stream, sequence=sequence, sender="a")
    return b"".join(encode(header, {"n": n}, [payload]))


def answer(connection: socket.socket) -> tuple[Kind, bytes]:
    data = b""
    while len(data) < HEADER_BYTES:
        data += connection.recv(HEADER_BYTES - len(data))
    header = decode_header(data)
    rest = b""
    while len(rest) < header.meta_bytes + header.payload_bytes:
        rest += connection.recv(header.meta_bytes + header.payload_bytes - len(rest))
    return header.kind, rest


def test_messages_and_answers_come_back_in_order(world):
    recorder, _, _, connect = world
    client = connect()
    replies = []
    for n in range(10):
        replies += client.post(Kind.BASE, 0, {"n": n}, [b"x" * n, np.arange(n)])
    replies += client.drain()
    assert [reply.meta["n"] for reply in replies] == list(range(10))
    assert [n for n, _ in recorder.got] == list(range(10))
    assert recorder.got[3][1] == b"xxx" + np.arange(3).tobytes()
    assert bytes(replies[0].payload) == b"\0\1\2"


def test_many_and_large_buffers_are_sent_in_parts(world):
    recorder, _, _, connect = world
    parts = [np.full(50_000, i % 251, np.uint8) for i in range(600)]
    connect().call(Kind.BASE, 0, {}, parts)
    assert recorder.got[0][1] == b"".join(part.tobytes() for part in parts)


def test_a_repeated_message_gets_the_earlier_answer_and_is_not_handled_again(world):
    recorder, _, server, _ = world
    with raw_socket(server) as first, raw_socket(server) as second:
        first.sendall(frame(1, n=4))
        earlier = answer(first)
        second.sendall(frame(1, n=4))
        assert answer(second) == earlier
        second.sendall(frame(2, n=5))
        assert answer(second)[0] is Kind.OK
    assert [n for n, _ in recorder.got] == [4, 5]


def test_out_of_order_other_runs_other_epochs_and_damage_are_refused_and_change_nothing_f7(world):
    recorder, refused, server, _ = world
    refused[9, "a"] = "epoch 9 is over"
    with raw_socket(server) as link:
        damaged = bytearray(frame(1, payload=b"abcdef"))
        damaged[-1] ^= 1
        for data, reason in (
            (frame(2), b"out of order"),
            (frame(1, run=2), b"another run"),
            (frame(1, epoch=9), b"epoch 9 is over"),
            (bytes(damaged), b"damaged"),
        ):
            link.sendall(data)
            kind, text = answer(link)
            assert kind is Kind.REFUSED
            assert reason in text
        assert recorder.got == []
        link.sendall(frame(1))
        assert answer(link)[0] is Kind.OK
    assert server.num_refused == 4


def test_a_refusal_raises_with_the_handlers_reason(world):
    _, _, _, connect = world
    with pytest.raises(RefusedError, match="not today"):
        connect().call(Kind.BASE, 0, {"fail": 1})


def test_a_broken_connection_is_made_again_and_what_has_no_answer_repeated(world):
    recorder, _, server, connect = world
    client = connect()
    client.call(Kind.BASE, 0, {"n": 0})
    server.abort()
    assert client.call(Kind.BASE, 0, {"n": 1}).meta["n"] == 1
    assert [n for n, _ in recorder.got] == [0, 1]


def test_a_dead_server_is_named(world):
    _, _, server, connect = world
    client = connect()
    client.call(Kind.BASE, 0, {})
    server.close()
    with pytest.raises(LinkError, match=server.address):
        client.call(Kind.BASE, 0, {})


def test_a_server_that_does_not_answer_is_a_timeout(world):
    recorder, _, _, connect = world
    recorder.gate.clear()
    began_s = time.monotonic()
    with pytest.raises(ExchangeTimeoutError, match=r"within 0\.1 s"):
        connect(timeout_s=0.1).call(Kind.BASE, 0, {})
    assert time.monotonic() - began_s < 2


def test_a_message_that_stops_half_way_ends_the_connection_at_the_deadline():
    server = TransferServer(Recorder(), run=1, fence=lambda e, s: None, timeout_s=0.1)
    try:
        with raw_socket(server) as link:
            link.sendall(frame(1, payload=b"abcdef")[:-3])
            assert link.recv(1) == b""
    finally:
        server.close()


def test_abort_ends_a_wait_at_once(world):
    recorder, _, _, connect = world
    recorder.gate.clear()
    client = connect(timeout_s=30.0)
    errors = []

    def call() -> None:
        try:
            client.call(Kind.BASE, 0, {})
        except PeerError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not client._pending:
        time.sleep(0.001)
    client.abort()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], LinkError)


def test_paced_messages_keep_to_the_rate_and_others_do_not_wait(world):
    _, _, _, connect = world
    limiter = RateLimiter(10e6)
    client = connect(limiter=limiter)
    data = np.zeros(4 * 2**20, np.uint8)
    began_s = time.monotonic()
    client.post(Kind.BASE, 0, {}, [data], is_paced=True)
    client.drain()
    paced_s = time.monotonic() - began_s
    began_s = time.monotonic()
    client.call(Kind.BASE, 0, {}, [data])
    assert paced_s > 0.1
    assert time.monotonic() - began_s < paced_s


def test_unanswered_messages_are_bounded(world):
    recorder, _, _, connect = world
    recorder.gate.clear()
    client = connect(timeout_s=0.2)
    with pytest.raises(ExchangeTimeoutError):
        for n in range(transfer.WINDOW + 1):
            client.post(Kind.BASE, 0, {"n": n})
    assert len(client._pending) == transfer.WINDOW


def test_abort_ends_a_connect_that_hangs():
    # A listener whose backlog is full does not answer, as a machine that has died does not.
    with socket.socket() as listener, contextlib.ExitStack() as fill:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            link = fill.enter_context(socket.socket())
            link.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                link.connect(listener.getsockname())
        client = TransferClient(f"127.0.0.1:{listener.getsockname()[1]}", run=1, sender="a", timeout_s=60.0)
        errors = []

        def call() -> None:
            try:
                client.call(Kind.BASE, 0, {})
            except PeerError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while client._socket is None:
            time.sleep(0.001)
        client.abort()
        thread.join(10)
        assert not thread.is_alive()
        assert isinstance(errors[0], LinkError)
