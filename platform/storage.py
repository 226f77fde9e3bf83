"""Storage: files below one URI, on a local path or in an object store, through ``pyarrow.fs``.

Guarantees, and what is deliberately not relied on:

1. Nothing here renames, appends or locks, because object stores have neither an atomic rename nor an append
   (PROTOCOLS F7). A set of files becomes visible by writing its manifest last.
2. When ``write_object`` returns, the object is complete; on a local path its bytes and its directory entry are synced.
3. When it raises, what was written of the object has been removed, as far as the storage still answers.
4. Transient errors are retried with exponential back-off until a deadline; the last cause is kept. Errors name the
   operation and the URI, never the credentials inside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import random
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from pyarrow import fs

from shoal.kernels.errors import ConfigError, StorageError, StorageFullError, StorageMissingError

T = TypeVar("T")

# Errors that say "this place takes no data": retrying cannot help, and the operator has to act.
_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_FULL_TEXT = re.compile(r"ACCESS_DENIED|QUOTA|InsufficientStorage|No space left|Read-only file system", re.IGNORECASE)
_MISSING_TEXT = re.compile(
    r"NO_SUCH_(BUCKET|KEY)|RESOURCE_NOT_FOUND|Path does not exist|bucket .* does not exist", re.IGNORECASE
)
_PERMANENT_TEXT = re.compile(
    r"INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN|MISSING_AUTHENTICATION|INVALID_PARAMETER|"
    r"UNRECOGNIZED_CLIENT|AUTH_FAILURE|InvalidBucketName",
    re.IGNORECASE,
)
_PERMANENT_ERRNOS = {errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long a failing operation is tried again."""

    #: Attempts in all, >= 1.
    attempts_max: int = 6
    #: Wait before the second attempt; doubles each time. Seconds.
    backoff_s: float = 0.2
    #: Longest single wait. Seconds.
    backoff_max_s: float = 10.0
    #: No new attempt starts later than this after the first. Seconds.
    deadline_s: float = 120.0


@dataclasses.dataclass(frozen=True)
class Entry:
    """One child of a folder: its last name, whether it is a folder, its size in bytes (0 for folders)."""

    name: str
    is_dir: bool
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Storage:
    """Files below ``uri``. Picklable; opens its file system on first use. Paths are relative, with ``/``.

    ``uri``: a local path, ``file:///...``, ``s3://bucket/prefix`` or another scheme that ``pyarrow.fs`` knows.
    For S3 the query may give ``endpoint_override``, ``region``, ``scheme``, ``access_key``, ``secret_key`` and
    ``session_token``; what is absent comes from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
    ``AWS_ENDPOINT_URL``, ``AWS_REGION``) or the machine's role, as the AWS SDK does it.
    """

    uri: str
    retry: RetryPolicy = dataclasses.field(default_factory=RetryPolicy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown_uri!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.uri, self.retry)

    @functools.cached_property
    def _opened(self) -> tuple[fs.FileSystem, str]:
        return _open_filesystem(self.uri)

    @property
    def is_local(self) -> bool:
        return isinstance(self._opened[0], fs.LocalFileSystem)

    @property
    def shown_uri(self) -> str:
        """The URI without credentials and query, for messages and logs."""
        return shown(self.uri)

    def child(self, path: str) -> Storage:
        """The storage below the folder ``path`` of this one."""
        base, _, query = self.uri.partition("?") if "://" in self.uri else (self.uri, "", "")
        joined = f"{base.rstrip('/')}/{path.strip('/')}"
        return Storage(f"{joined}?{query}" if query else joined, self.retry)

    def split(self) -> tuple[Storage, str]:
        """The storage of the folder that holds this one, and this one's name in it."""
        base, _, query = self.uri.partition("?") if "://" in self.uri else (os.path.abspath(self.uri), "", "")
        parent, _, name = base.rstrip("/").rpartition("/")
        parent = parent or "/"
        return Storage(f"{parent}?{query}" if query else parent, self.retry), name

    def write_object(self, path: str, produce: Callable[[IO[bytes]], T]) -> T:
        """Write ``path`` with the bytes that ``produce(stream)`` writes; returns what it returned.

        ``produce`` is called again, on a fresh stream, when an attempt failed in a way worth retrying. An exception
        of its own passes unchanged. Raises StorageFullError or StorageError; the partial object is removed first.
        """

        def attempt() -> T:
            try:
                with self._open_output(path) as stream:
                    result = produce(stream)
                self._sync(path)
                return result
            except BaseException:
                self._remove_partial(path)
                raise

        return self.retrying("write", path, attempt)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a whole small object."""
        self.write_object(path, lambda stream: stream.write(data))

    def read_bytes(self, path: str) -> bytes:
        """The whole object. Raises StorageMissingError if there is none."""

        def attempt() -> bytes:
            with self.open_input(path) as stream:
                return stream.read()

        return self.retrying("read", path, attempt)

    @contextlib.contextmanager
    def open_input(self, path: str) -> Iterator[Any]:
        """A sequential reader (``read``, ``readinto``, ``size()``). Wrap its use in ``retrying``."""
        filesystem, root = self._opened
        target = _join(root, path)
        if self.is_local:
            _read_ahead(target)
        with filesystem.open_input_file(target) as stream:
            yield stream

    def size_bytes(self, path: str) -> int | None:
        """Size of the object, or None if there is none."""

        def attempt() -> int | None:
            filesystem, root = self._opened
            info = filesystem.get_file_info(_join(root, path))
            return info.size if info.type == fs.FileType.File else None

        return self.retrying("stat", path, attempt)

    def list_dir(self, path: str = "") -> list[Entry]:
        """Children of a folder, sorted by name; empty if the folder does not exist."""
        infos = self._list(path, recursive=False)
        entries = (Entry(i.base_name, i.type == fs.FileType.Directory, i.size or 0) for i in infos)
        return sorted((e for e in entries if e.name), key=lambda e: e.name)

    def list_files(self, path: str = "") -> dict[str, int]:
        """All files below a folder: path relative to that folder -> size in bytes."""
        base = _join(self._opened[1], path).rstrip("/") + "/"
        files = (i for i in self._list(path, recursive=True) if i.type == fs.FileType.File)
        return {i.path.removeprefix(base): i.size for i in files}

    def delete_file(self, path: str) -> None:
        """Delete an object; one that does not exist is not an error."""

        def attempt() -> None:
            filesystem, root = self._opened
            with contextlib.suppress(FileNotFoundError):
                filesystem.delete_file(_join(root, path))

        self.retrying("delete", path, attempt)

    def delete_dir(self, path: str) -> None:
        """Delete a folder and all below it; one that does not exist is not an error."""

        def attempt() -> None:
            filesystem, root = self._opened
            with contextlib.suppress(FileNotFoundError):
                filesystem.delete_dir(_join(root, path))

        self.retrying("delete", path, attempt)

    def retrying(self, operation: str, path: str, attempt: Callable[[], T]) -> T:
        """Run ``attempt`` until it succeeds, fails for good, or the policy is used up; converts OSErrors."""
        where = f"{self.shown_uri.rstrip('/')}/{path}" if path else self.shown_uri
        started = time.monotonic()
        for number in range(1, self.retry.attempts_max + 1):
            try:
                return attempt()
            except StorageError:
                raise
            except OSError as error:
                typed = _permanent_error(operation, where, error)
                if typed is not None:
                    raise typed from error
                wait_s = min(self.retry.backoff_max_s, self.retry.backoff_s * 2 ** (number - 1))
                wait_s *= random.uniform(0.5, 1.0)
                elapsed_s = time.monotonic() - started
                if number == self.retry.attempts_max or elapsed_s + wait_s > self.retry.deadline_s:
                    raise StorageError(
                        f"cannot {operation} {where}: {_reason(error)} (gave up after {number} attempts)"
                    ) from error
                time.sleep(wait_s)
        raise AssertionError("attempts_max must be at least 1")

    def _list(self, path: str, *, recursive: bool) -> list[fs.FileInfo]:
        def attempt() -> list[fs.FileInfo]:
            filesystem, root = self._opened
            selector = fs.FileSelector(_join(root, path), recursive=recursive, allow_not_found=True)
            return filesystem.get_file_info(selector)

        return self.retrying("list", path, attempt)

    @contextlib.contextmanager
    def _open_output(self, path: str) -> Iterator[IO[bytes]]:
        filesystem, root = self._opened
        target = _join(root, path)
        if self.is_local:
            _make_dirs(os.path.dirname(target))
        with filesystem.open_output_stream(target, compression=None) as stream:
            yield stream

    def _sync(self, path: str) -> None:
        # An object store makes an object durable when its upload completes; a local file needs fsync of the file
        # and of the folders that hold its name.
        if not self.is_local:
            return
        target = _join(self._opened[1], path)
        _fsync(target)
        _fsync(os.path.dirname(target))

    def _remove_partial(self, path: str) -> None:
        filesystem, root = self._opened
        with contextlib.suppress(OSError):
            filesystem.delete_file(_join(root, path))


def _make_dirs(path: str) -> None:
    """Like os.makedirs, with every new name synced in the folder that holds it."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_dirs(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    _fsync(parent)


def _read_ahead(path: str) -> None:
    """Ask the kernel to start reading the whole file: its own read-ahead is too short for a fast disk."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shown(uri: str) -> str:
    """``uri`` without user information and query: safe to print."""
    if "://" not in uri:
        return uri
    parts = urllib.parse.urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _join(root: str, path: str) -> str:
    assert not path.startswith("/") and ".." not in path.split("/"), path
    return f"{root.rstrip('/')}/{path}" if path else root


def _open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    if not uri:
        raise ConfigError("storage path is empty; give a folder or a URI such as s3://bucket/prefix")
    try:
        if "://" not in uri:
            return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(uri))
        scheme = urllib.parse.urlsplit(uri).scheme
        if scheme in ("s3", "s3a"):
            return _open_s3(uri)
        return fs.FileSystem.from_uri(uri)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot open storage {shown(uri)}: {_reason(error)}") from error


def _open_s3(uri: str) -> tuple[fs.FileSystem, str]:
    parts = urllib.parse.urlsplit(uri)
    # Not parse_qsl: it would turn the '+' that secret keys may contain into a space.
    pairs = (item.partition("=") for item in parts.query.split("&") if item)
    options = {key: urllib.parse.unquote(value) for key, _, value in pairs}
    unknown = set(options) - {"endpoint_override", "region", "scheme", "access_key", "secret_key", "session_token"}
    if unknown:
        raise ValueError(f"unknown S3 option {sorted(unknown)[0]!r} in the URI's query")
    endpoint = options.pop("endpoint_override", None) or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        scheme, separator, host = endpoint.partition("://")
        options["endpoint_override"] = host if separator else endpoint
        options.setdefault("scheme", scheme if separator else "https")
        # Other S3 servers take any region; without one the SDK asks AWS.
        options.setdefault("region", os.environ.get("AWS_REGION", "us-east-1"))
    user, _, host = parts.netloc.rpartition("@")
    if user:
        key, _, secret = user.partition(":")
        options.setdefault("access_key", urllib.parse.unquote(key))
        options.setdefault("secret_key", urllib.parse.unquote(secret))
    if not host:
        raise ValueError("the URI names no bucket; write s3://bucket/prefix")
    # background_writes would report a failed part upload only at close, and buffer without a bound.
    filesystem = fs.S3FileSystem(connect_timeout=10, request_timeout=60, background_writes=False, **options)
    return filesystem, f"{host}{parts.path}".rstrip("/")


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _permanent_error(operation: str, where: str, error: OSError) -> StorageError | None:
    text = str(error)
    if isinstance(error, FileNotFoundError) or error.errno == errno.ENOENT or _MISSING_TEXT.search(text):
        return StorageMissingError(f"cannot {operation} {where}: it does not exist")
    is_refused = error.errno in _FULL_ERRNOS or _FULL_TEXT.search(text) is not None
    if is_refused and operation == "write":
        return StorageFullError(
            f"cannot {operation} {where}: {_reason(error)}; free space or fix the permissions, then try again"
        )
    if is_refused or error.errno in _PERMANENT_ERRNOS or _PERMANENT_TEXT.search(text):
        return StorageError(f"cannot {operation} {where}: {_reason(error)}")
    return None
