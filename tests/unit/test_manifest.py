"""The manifest: round trip, seal, format versions; listing, resume, abandonment and collection as decisions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.datafile import FORMAT_VERSION, FileEntry, checksum_of, folder_name, part_path
from shoal.actors.restore import load_rows, read_dense
from shoal.kernels.errors import CheckpointError
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec, WeightDecayMode
from shoal.platform.checkpoint import (
    CheckpointInfo,
    CheckpointState,
    decide_resume,
    list_checkpoints,
    next_name,
    plan_collect,
    verify_checkpoint,
    write_manifest,
)
from shoal.platform.loadplan import check_tables, plan_load
from shoal.platform.manifest import CheckpointName, Manifest, decode, encode
from shoal.platform.storage import Storage

FIXTURES = Path(__file__).parent / "fixtures"
TABLE = TableSpec(
    name="t",
    num_embeddings=10,
    embedding_dim=4,
    data_type=DataType.BF16,
    optimizer=OptimizerSpec(
        kind=OptimizerKind.ADAM, lr=0.1, weight_decay=1e-3, weight_decay_mode=WeightDecayMode.DECOUPLED
    ),
    init_min=-0.1,
    init_max=0.1,
    seed=2**63 + 5,
    num_blocks=4,
)


def manifest(step: int = 3, epoch: int = 0, attempt: int = 0, **changes: object) -> Manifest:
    values = {
        "name": CheckpointName(epoch, step, attempt),
        "run": "r",
        "world_size": 2,
        "tables": (TABLE,),
        "files": (FileEntry(path="dense.safetensors", kind="dense", size_bytes=3, checksum=checksum_of(b"abc")),),
        "cursor": {"epoch": 1, "batch": 17},
        "versions": {"shoal": "0"},
        "summary": {"loss": 0.1 + 0.2, "auc": None},
    }
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def write(storage: Storage, value: Manifest) -> Manifest:
    storage.write_bytes(f"{value.name.directory}/dense.safetensors", b"abc")
    return write_manifest(storage, value)


def test_decode_inverts_encode() -> None:
    """manifest invariant 3."""
    entry = FileEntry(path="tables/t/p", kind="table", size_bytes=9, checksum="c", table="t", num_rows=2, blocks=(1, 3))
    value = manifest(files=(entry,), parent="step-00000001.e0", epoch_first_step=1, data_fingerprint="f", created="now")
    assert decode(encode(value), "m") == value
    assert json.loads(encode(value))["step"] == 3


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_flipped_bit_or_cut_of_a_manifest_is_refused(data: st.DataObject) -> None:
    """manifest invariant 1; K1."""
    good = encode(manifest())
    position = data.draw(st.integers(0, len(good) - 1))
    bit = data.draw(st.integers(0, 7))
    bad = bytearray(good)
    bad[position] ^= 1 << bit
    for broken in (bytes(bad), good[:position]):
        with pytest.raises(CheckpointError, match="m: "):
            decode(broken, "m")


def test_newer_format_version_is_refused_by_number() -> None:
    """Faults row 32; also when the newer format is sealed in a way this version does not know."""
    newer = encode(dataclasses.replace(manifest(), format_version=FORMAT_VERSION + 1))
    for data in (newer, b'{"format_version": 4, "seal": "sha512:..."}\n'):
        with pytest.raises(CheckpointError, match=r"m: format version 4 is newer than this Shoal's 3"):
            decode(data, "m")


def test_stored_checkpoint_of_format_version_1_still_loads() -> None:
    """Faults row 32: the fixture was written once, by the first release of the format, and is never rewritten."""
    import torch

    storage = Storage(str(FIXTURES / "run-v1"))
    (info,) = list_checkpoints(storage)
    assert info.state is CheckpointState.COMPLETE and info.manifest is not None and info.manifest.format_version == 1
    stored = info.manifest
    assert verify_checkpoint(str(FIXTURES / "run-v1" / info.name.directory)).problems == ()
    assert [t.name for t in stored.tables] == ["adam_bf16", "adagrad_fp16", "rowwise_fp32", "sgd_fp32"]
    assert stored.cursor == {"epoch": 1, "batch": 42}

    class Sink:
        def __init__(self) -> None:
            self.rows: dict[int, list[tuple[int, list[float], list[float], int, int]]] = {}

        def import_block(self, table: int, block: int, rows: object, *, replace: bool = True) -> None:
            fields = (rows.ids, rows.weights.float(), rows.slots, rows.last_step, rows.count)  # type: ignore[attr-defined]
            self.rows.setdefault(table, []).extend(zip(*(f.tolist() for f in fields)))  # type: ignore[arg-type]

    sink = Sink()
    owned = {t.name: list(range(t.num_blocks)) for t in stored.tables}
    parts = plan_load(stored, stored.tables, owned)
    load_rows(sink, stored.tables, owned, parts, storage)  # type: ignore[arg-type]
    expected = json.loads((FIXTURES / "run-v1" / "expected.json").read_text())
    for number, spec in enumerate(stored.tables):
        found = sorted([list(row) for row in sink.rows[number]])
        assert found == sorted(expected[spec.name]), spec.name
    dense = stored.find("dense")
    assert dense is not None
    tensors, metadata = read_dense(storage, stored.name.directory, dense)
    assert torch.equal(tensors["model.w"], torch.tensor([1.5, -2.0])) and metadata == {"lr": 0.01}


def test_names_order_by_history_and_parse_back() -> None:
    names = [CheckpointName(0, 100), CheckpointName(0, 100, 1), CheckpointName(0, 2000), CheckpointName(1, 150)]
    assert sorted(names) == names
    for name in [*names, CheckpointName(12, 123456789, 3)]:
        assert CheckpointName.parse(str(name)) == name
    assert CheckpointName.parse("step-1.e0") is None and CheckpointName.parse("tmp") is None


def test_attempts_never_share_a_folder(tmp_path: Path) -> None:
    """F7."""
    storage = Storage(str(tmp_path))
    assert next_name(storage, 0, 5) == CheckpointName(0, 5)
    storage.write_bytes(f"{CheckpointName(0, 5).directory}/leftover", b"")
    assert next_name(storage, 0, 5) == CheckpointName(0, 5, 1)
    assert next_name(storage, 1, 5) == CheckpointName(1, 5)


def test_table_names_become_safe_folders() -> None:
    assert folder_name("user") == "user"
    assert [folder_name(n) for n in ("a/b", "..", ".hidden", "ü x")] == ["a%2Fb", "%2E.", "%2Ehidden", "%C3%BC%20x"]
    assert part_path("a/b", 3, 12) == "tables/a%2Fb/part-00003-00012.arrow"
    with pytest.raises(CheckpointError, match="not understood"):
        FileEntry.from_json({"path": "../../etc/passwd", "kind": "table", "size_bytes": 1, "checksum": "x"})


def test_manifest_is_not_written_over_or_without_its_files(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"dense\.safetensors: the file is missing"):
        write_manifest(storage, manifest())
    write(storage, manifest())
    with pytest.raises(CheckpointError, match=r"manifest\.json exists already"):
        write_manifest(storage, manifest())


def test_resume_policies(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    assert decide_resume(list_checkpoints(storage), "auto").manifest is None
    with pytest.raises(CheckpointError, match="has no complete checkpoint: there are none"):
        decide_resume(list_checkpoints(storage), "must")
    for step in (1, 2, 3):
        write(storage, manifest(step))
    infos = list_checkpoints(storage)
    assert decide_resume(infos, "never").manifest is None
    for policy in ("auto", "must"):
        chosen = decide_resume(infos, policy).manifest
        assert chosen is not None and chosen.name.step == 3
    chosen = decide_resume(infos, 2).manifest
    assert chosen is not None and chosen.name.step == 2
    with pytest.raises(CheckpointError, match="no checkpoint of step 9; complete ones: 1, 2, 3"):
        decide_resume(infos, "9")
    with pytest.raises(CheckpointError, match="'sometimes' is unknown; use auto, must, never or a step"):
        decide_resume(infos, "sometimes")


def test_checkpoint_beyond_the_start_of_a_later_epoch_is_abandoned(tmp_path: Path) -> None:
    """K2: known from the journal, or from a later epoch's manifest."""
    storage = Storage(str(tmp_path))
    for step in (10, 20, 30):
        write(storage, manifest(step, epoch=1))
    states = {i.name.step: i.state for i in list_checkpoints(storage, first_steps={2: 20})}
    assert [states[s] for s in (10, 20, 30)] == [
        CheckpointState.COMPLETE,
        CheckpointState.COMPLETE,
        CheckpointState.ABANDONED,
    ]
    write(storage, manifest(25, epoch=2, epoch_first_step=20))
    infos = list_checkpoints(storage)
    assert [i.state for i in infos if i.name == CheckpointName(1, 30)] == [CheckpointState.ABANDONED]
    newest = decide_resume(infos, "auto").manifest
    assert newest is not None and newest.name == CheckpointName(2, 25)
    older = decide_resume(infos, "auto", exclude=[CheckpointName(2, 25)])
    assert older.manifest is not None and older.manifest.name == CheckpointName(1, 20)
    assert decide_resume(infos, 30).manifest is not None  # asked for by number


def info(step: int, state: CheckpointState = CheckpointState.COMPLETE, parent: str | None = None) -> CheckpointInfo:
    value = manifest(step, parent=parent) if state is CheckpointState.COMPLETE else None
    return CheckpointInfo(name=CheckpointName(0, step), uri="u", state=state, manifest=value)


def test_collection_keeps_newest_their_parents_active_writes_and_evidence() -> None:
    """checkpoint invariant 3; K3."""
    infos = [
        info(1),
        info(2),
        info(3, parent="step-00000001.e0"),
        info(4, CheckpointState.DAMAGED),
        info(5, CheckpointState.INCOMPLETE),
        info(6, CheckpointState.ABANDONED),
        info(7, CheckpointState.NEWER_FORMAT),
        info(8, CheckpointState.INCOMPLETE),
    ]
    doomed = plan_collect(infos, keep=1)
    assert [name.step for name in doomed] == [6, 2]  # 5 and 8 may be writes in progress
    doomed = plan_collect(
        [*infos, info(9), info(10, CheckpointState.INCOMPLETE)], keep=2, active=[CheckpointName(0, 8)]
    )
    assert [name.step for name in doomed] == [6, 5, 2]


def test_every_difference_between_model_and_checkpoint_is_listed_at_once() -> None:
    """Faults row 31; TorchEasyRec #600: growing is allowed, shrinking is refused by name and size."""

    def table(name: str, **changes: object) -> TableSpec:
        return dataclasses.replace(TABLE, **{"name": name, **changes})  # type: ignore[arg-type]

    names = ("dim", "type", "opt", "small", "gone", "dynamic", "same")
    stored = manifest(tables=tuple(table(n) for n in names))
    model = [
        table("dim", embedding_dim=8),
        table("type", data_type=DataType.FP32),
        table("opt", optimizer=OptimizerSpec(kind=OptimizerKind.SGD)),
        table("small", num_embeddings=9),
        table("new"),
        table("dynamic", num_embeddings=0),
        table("same", optimizer=dataclasses.replace(TABLE.optimizer, lr=0.5)),
    ]
    with pytest.raises(CheckpointError) as caught:
        check_tables(stored, model)
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    for expected in (
        "table 'dim': embedding_dim: expected 8, found 4",
        "table 'type': data_type: expected FP32, found BF16",
        "table 'opt': optimizer: expected sgd, found adam",
        "table 'small': num_embeddings: expected 9, found 10",
        "table 'new': not in the checkpoint",
        "table 'gone': not in the model",
    ):
        assert sum(expected in line for line in lines) == 1, expected
    notes = check_tables(stored, model, allow_missing=["new", "gone"], reinit=["dim", "type", "opt", "small"])
    assert any("'new' is not in the checkpoint: allowed" in note for note in notes)
    assert any("'dynamic': num_embeddings 10 -> 0" in note for note in notes)
    with pytest.raises(CheckpointError, match="expected 10, found a dynamic table"):
        check_tables(manifest(tables=(table("a", num_embeddings=0),)), [table("a")])
    assert plan_load(stored, [table("dim", embedding_dim=8)], {"dim": [0]}, allow_missing=["*"], reinit=["dim"]) == []
