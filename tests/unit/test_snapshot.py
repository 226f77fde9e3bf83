"""Snapshot writer: rate limit, cancellation, bounded parts, failure of one file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import IO

import pytest
import torch

from shoal.actors.snapshot import RateLimiter, SnapshotCancelledError, write_in_background, write_snapshot
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import StorageFullError
from shoal.kernels.spec import TableSpec
from shoal.platform.storage import Storage

TABLE = TableSpec(name="t", num_embeddings=0, embedding_dim=16, num_blocks=4)


class Source:
    """Four blocks of 1,000 rows of 92 bytes."""

    def export_block(self, table: int, block: int) -> BlockRows:
        ids = torch.arange(1000) + 1000 * block
        return BlockRows(ids, torch.rand(1000, 16), torch.rand(1000, 1), ids, ids)


OWNED = {"t": [0, 1, 2, 3]}


def test_parts_are_bounded_and_cover_every_row_once(tmp_path: Path) -> None:
    row_bytes = TABLE.row_bytes + 24
    for part_rows in (1, 999, 1000, 1500, 4000, 10_000):
        if part_rows == 1:
            continue
        storage = Storage(str(tmp_path / str(part_rows)))
        files = write_snapshot(Source(), OWNED, [TABLE], storage, "c", 3, part_bytes=part_rows * row_bytes)
        assert sum(f.num_rows for f in files) == 4000
        assert all(f.num_rows <= part_rows for f in files)
        assert [f.path for f in files] == [f"tables/t/part-00003-{n:05d}.arrow" for n in range(len(files))]
        assert {b for f in files for b in f.blocks} == {0, 1, 2, 3}
        assert storage.list_files("c") == {f.path: f.size_bytes for f in files}


def test_rate_limit_holds_the_mean_rate() -> None:
    limiter = RateLimiter(bytes_per_s=10e6)
    start = time.monotonic()
    for _ in range(20):
        limiter.acquire(100_000)
    elapsed = time.monotonic() - start
    assert elapsed >= 0.19  # 1.9 MB wait at 10 MB/s; the last piece is not waited for


def test_background_write_reports_its_result_and_can_be_cancelled(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))

    def write(limiter: RateLimiter) -> int:
        return len(write_snapshot(Source(), OWNED, [TABLE], storage, "a", 0, limiter=limiter, part_bytes=100_000))

    assert write_in_background(write).result(timeout=60) == 4
    slow = write_in_background(write, bytes_per_s=1.0)
    slow.cancel_write()
    with pytest.raises(SnapshotCancelledError):
        slow.result(timeout=60)


def test_failed_snapshot_is_removed_and_its_error_is_typed(tmp_path: Path) -> None:
    """Faults row 27: nothing of the snapshot stays, so that a full disk does not stay full."""

    class Full(Storage):
        written = 0

        def write_object(self, path, produce):  # type: ignore[no-untyped-def]
            def failing(stream: IO[bytes]) -> object:
                result = produce(stream)
                if path.endswith("-00002.arrow"):
                    raise OSError(28, "No space left on device")
                return result

            return super().write_object(path, failing)

    with pytest.raises(StorageFullError, match=r"part-00000-00002.arrow: .*No space left"):
        write_snapshot(Source(), OWNED, [TABLE], Full(str(tmp_path)), "c", 0, part_bytes=92_000)
    assert Storage(str(tmp_path)).list_files("c") == {}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_real_enospc_within_a_part_is_a_full_storage_error(tmp_path: Path) -> None:
    """Faults row 27: the error passes through Arrow's writer with its type."""
    part = tmp_path / "c" / "tables" / "t" / "part-00000-00001.arrow"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    with pytest.raises(StorageFullError, match=r"part-00000-00001.arrow: .*No space left on device"):
        write_snapshot(Source(), OWNED, [TABLE], Storage(str(tmp_path)), "c", 0, part_bytes=92_000)
    assert Storage(str(tmp_path)).list_files("c") == {} and not part.is_symlink()


def test_training_may_go_on_while_the_rate_is_waited_for(tmp_path: Path) -> None:
    """The writer waits outside every lock: another thread is not held up by a slow limit."""
    started = threading.Event()

    class Watched(Source):
        def export_block(self, table: int, block: int) -> BlockRows:
            started.set()
            return super().export_block(table, block)

    storage = Storage(str(tmp_path))
    pending = write_in_background(
        lambda limiter: write_snapshot(Watched(), OWNED, [TABLE], storage, "c", 0, limiter=limiter), bytes_per_s=1000
    )
    assert started.wait(timeout=30)
    assert not pending.done()
    pending.cancel_write()
    with pytest.raises(SnapshotCancelledError):
        pending.result(timeout=30)
