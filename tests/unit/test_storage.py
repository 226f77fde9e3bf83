"""Storage on local paths: completeness, errors that name the URI, retries with a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import http.server
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from shoal.kernels.errors import ConfigError, StorageError, StorageFullError, StorageMissingError
from shoal.platform.storage import Entry, RetryPolicy, Storage, shown

FAST = RetryPolicy(attempts_max=4, backoff_s=0.001, backoff_max_s=0.002, deadline_s=5)


@dataclasses.dataclass(frozen=True)
class FailingStorage(Storage):
    """Raises the given OSErrors, in turn, when an object is being written; then works."""

    errors: list[OSError] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def _open_output(self, path: str) -> Iterator[IO[bytes]]:
        with super()._open_output(path) as stream:
            yield stream
            if self.errors:
                raise self.errors.pop(0)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_objects_are_written_listed_read_and_deleted(tmp_path: Path, prefix: str) -> None:
    storage = Storage(f"{prefix}{tmp_path}/run")
    storage.write_bytes("a/b/one.bin", b"1")
    storage.write_bytes("a/two.bin", b"22")
    assert storage.read_bytes("a/two.bin") == b"22"
    assert storage.size_bytes("a/two.bin") == 2 and storage.size_bytes("a/none") is None
    assert storage.list_dir("a") == [Entry("b", True, 0), Entry("two.bin", False, 2)]
    assert storage.list_files("a") == {"b/one.bin": 1, "two.bin": 2}
    assert storage.list_dir("nowhere") == [] and storage.list_files("nowhere") == {}
    assert storage.child("a").read_bytes("two.bin") == b"22"
    parent, name = storage.child("a").split()
    assert name == "a" and parent.list_files("a") == storage.list_files("a")
    for _ in range(2):
        storage.delete_file("a/two.bin")
        storage.delete_dir("a")
    assert storage.list_dir() == []


def test_storage_can_be_sent_to_another_process(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path), FAST)
    storage.write_bytes("x", b"1")
    assert pickle.loads(pickle.dumps(storage)) == storage
    assert pickle.loads(pickle.dumps(storage)).read_bytes("x") == b"1"


def test_missing_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageMissingError, match=rf"cannot read {tmp_path}/a/b: it does not exist"):
        Storage(str(tmp_path)).read_bytes("a/b")


def test_transient_errors_are_retried_from_the_start_of_the_object(tmp_path: Path) -> None:
    storage = FailingStorage(str(tmp_path), FAST, errors=[OSError("AWS Error SLOW_DOWN"), TimeoutError("slow")])
    calls = []

    def produce(stream: IO[bytes]) -> int:
        calls.append(stream.write(b"data"))
        return len(calls)

    assert storage.write_object("x", produce) == 3
    assert storage.read_bytes("x") == b"data"


def test_retries_end_at_the_limit_and_leave_nothing(tmp_path: Path) -> None:
    storage = FailingStorage(str(tmp_path), FAST, errors=[OSError("AWS Error SLOW_DOWN")] * 9)
    with pytest.raises(StorageError, match=r"cannot write .*/x: AWS Error SLOW_DOWN \(gave up after 4 attempts\)"):
        storage.write_bytes("x", b"data")
    assert len(storage.errors) == 5 and storage.list_dir() == []


def test_retries_end_at_the_deadline(tmp_path: Path) -> None:
    slow = RetryPolicy(attempts_max=100, backoff_s=10, backoff_max_s=10, deadline_s=1)
    storage = FailingStorage(str(tmp_path), slow, errors=[OSError("AWS Error SLOW_DOWN")])
    with pytest.raises(StorageError, match="gave up after 1 attempts"):
        storage.write_bytes("x", b"data")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_full_or_read_only_storage_fails_at_once_and_leaves_nothing(tmp_path: Path, code: int) -> None:
    """Faults row 27."""
    storage = FailingStorage(str(tmp_path), FAST, errors=[OSError(code, os.strerror(code))] * 2)
    with pytest.raises(StorageFullError, match=f"cannot write {tmp_path}/d/x: .*{os.strerror(code)}"):
        storage.write_bytes("d/x", b"data")
    assert len(storage.errors) == 1 and storage.list_files() == {}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_real_enospc_is_a_full_storage_error(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("/dev/full")
    with pytest.raises(StorageFullError, match="No space left on device"):
        Storage(str(tmp_path), FAST).write_bytes("x", b"d" * 2**20)
    assert not (tmp_path / "x").is_symlink()


def test_exception_of_the_producer_passes_and_the_partial_object_is_removed(tmp_path: Path) -> None:
    def produce(stream: IO[bytes]) -> None:
        stream.write(b"half")
        raise KeyError("mine")

    storage = Storage(str(tmp_path), FAST)
    with pytest.raises(KeyError, match="mine"):
        storage.write_object("x", produce)
    assert storage.list_dir() == []


def test_bad_uris_are_config_errors() -> None:
    for uri, reason in [
        ("", "storage path is empty"),
        ("nope://bucket/x", "cannot open storage nope://bucket/x"),
        ("s3://bucket/x?colour=red", "unknown S3 option 'colour'"),
        ("s3:///x", "names no bucket"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            Storage(uri).list_dir()


def test_credentials_are_never_shown() -> None:
    """Faults row 62."""
    uri = "s3://KEY:SECRET@bucket/run?access_key=KEY&secret_key=SECRET"
    assert shown(uri) == "s3://bucket/run"
    assert "SECRET" not in Storage(uri).child("x").shown_uri
    assert repr(Storage(uri)) == "Storage('s3://bucket/run')"


class _Busy(http.server.BaseHTTPRequestHandler):
    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_HEAD = _answer

    def log_message(self, *_: object) -> None:
        pass


def test_object_store_that_answers_503_is_given_up_on_within_the_deadline() -> None:
    """Faults row 28, over real HTTP."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Busy) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        uri = f"s3://bucket/run?endpoint_override=http://127.0.0.1:{server.server_port}&access_key=k&secret_key=s"
        try:
            with pytest.raises(StorageError, match=r"cannot write s3://bucket/run/x: .*gave up after 2 attempts"):
                Storage(uri, RetryPolicy(attempts_max=2, backoff_s=0.01, deadline_s=30)).write_bytes("x", b"data")
        finally:
            server.shutdown()
            thread.join(timeout=10)
