"""shoal doctor: every check states what it found and what to do, and none of them raises."""

from __future__ import annotations

import json

import pytest

from shoal.jobs import cli, doctor
from shoal.jobs.doctor import Level
from shoal.kernels.fbgemm_check import installed_problem, pair_problem
from shoal.platform.cluster_choice import choose_cluster
from shoal.platform.ray_probe import Answer, probe_cluster, read_token_setting

IN_JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_ADDRESS": "10.0.0.1:6379"}


@pytest.mark.parametrize(
    ("torch", "fbgemm", "words"),
    [
        ("2.13.0+cpu", {"fbgemm-gpu-cpu": "1.8.0"}, []),
        ("2.14.1", {"fbgemm-gpu": "1.9.0"}, []),
        ("2.13.0", {"fbgemm-gpu-cpu": "1.9.0"}, ["does not fit torch 2.13.0", "fbgemm-gpu-cpu==1.8.*"]),
        ("2.13.0", {"fbgemm-gpu": "1.9.0"}, ["fbgemm-gpu==1.8.*"]),
        ("2.13.0", {}, ["not installed", "fbgemm-gpu-cpu==1.8.*"]),
        ("2.15.0", {"fbgemm-gpu-cpu": "1.9.0"}, ["no fbgemm for torch 2.15", "torch==2.13.*", "fbgemm-gpu-cpu==1.8.*"]),
        (None, {}, ["torch is not installed"]),
        ("2.13.0", {"fbgemm-gpu-cpu": "1.8.0", "fbgemm-gpu": "1.8.0"}, ["both installed", "uninstall one"]),
        ("2.15.0", {"fbgemm-gpu-cpu": "2026.11.2"}, []),
    ],
)
def test_fbgemm_pair_is_judged_in_one_line_that_names_the_pair_that_works(torch, fbgemm, words):
    problem = pair_problem(torch, fbgemm)
    assert "\n" not in problem and bool(problem) == bool(words)
    assert all(word in problem for word in words), problem


def test_mismatched_fbgemm_is_found_before_its_library_is_loaded(monkeypatch):
    import importlib

    from shoal.kernels import fbgemm_check
    from shoal.kernels.errors import DependencyError

    versions = {"torch": "2.13.0", "fbgemm-gpu-cpu": "1.7.0"}
    monkeypatch.setattr(fbgemm_check, "installed_version", versions.get)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} was loaded"))
    assert "1.8.*" in installed_problem()
    with pytest.raises(DependencyError, match=r"\[SHOAL-102\].*1\.7\.0 does not fit torch 2\.13\.0"):
        fbgemm_check.require_fbgemm()


# Row 61 of the list of faults: the three ways a token can be wrong are told apart.
TOKEN, WRONG = "t" * 64, "w" * 64


def cluster(token: str | None):
    """A GCS that asks for ``token``, or for none."""

    def call(address: str, presented: str) -> tuple[Answer, bytes]:
        if token is None or presented == token:
            return Answer.OK, b"\n\x00\x12\x062.60.0 \x01"
        return Answer.UNAUTHENTICATED, b""

    return call


@pytest.mark.parametrize(
    ("token", "environ", "is_ok", "words"),
    [
        (None, {}, True, ["no token"]),
        (TOKEN, {}, False, ["token missing", "RAY_AUTH_TOKEN"]),
        (TOKEN, {"RAY_AUTH_TOKEN": WRONG}, False, ["token wrong", "get-auth-token"]),
        (TOKEN, {"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled"}, False, ["mode off", "RAY_AUTH_MODE=token"]),
        (TOKEN, {"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "token"}, True, ["accepts the token"]),
        (TOKEN, {"RAY_AUTH_TOKEN": TOKEN}, True, ["accepts the token"]),
    ],
)
def test_token_missing_wrong_and_mode_off_are_told_apart(token, environ, is_ok, words):
    result = probe_cluster("10.0.0.1:6379", {"HOME": "/nonexistent", **environ}, cluster(token))
    assert result.is_ok is is_ok
    assert all(word in f"{result.detail} {result.fix}" for word in words), result
    assert TOKEN not in result.detail and WRONG not in result.detail
    assert result.ray_version == ("2.60.0" if is_ok or "mode off" in words else "")


def test_address_that_is_none_or_answers_nothing_is_said_so():
    unreachable = probe_cluster("10.0.0.1:6379", {}, lambda address, token: (Answer.UNREACHABLE, b""))
    assert not unreachable.is_ok and "nothing answers" in unreachable.detail
    assert not probe_cluster("somewhere", {}).is_ok
    assert "Ray Client" in probe_cluster("ray://10.0.0.1:10001", {}).detail


def test_real_probe_of_a_closed_port_answers_within_its_deadline():
    assert "nothing answers" in probe_cluster("127.0.0.1:1", {"HOME": "/nonexistent"}).detail


def test_token_is_read_as_ray_reads_it(tmp_path):
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("from-home\n")
    home = {"HOME": str(tmp_path)}
    assert read_token_setting(home).token == "from-home"
    assert read_token_setting(home).is_token_mode
    assert read_token_setting({**home, "RAY_AUTH_TOKEN": "direct"}).token == "direct"
    assert not read_token_setting({**home, "RAY_AUTH_MODE": "disabled"}).is_token_mode
    assert read_token_setting({"RAY_AUTH_TOKEN_PATH": str(path)}).token == "from-home"


# Row 21: never join a cluster that nobody named; say which one it is and why.
@pytest.mark.parametrize(
    ("address", "environ", "chosen", "reason"),
    [
        (None, {}, "local", "no address given"),
        ("h:6379", IN_JOB, "h:6379", "--address"),
        (None, IN_JOB, "10.0.0.1:6379", "Ray job"),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, "local", "needs --address"),
        ("auto", {}, "auto", "--address"),
    ],
)
def test_cluster_is_chosen_with_a_reason(address, environ, chosen, reason):
    choice = choose_cluster(address, environ)
    assert choice.address == chosen and reason in choice.reason and chosen in str(choice)


def test_cpu_without_the_baseline_is_named():
    flags = "flags\t\t: fpu sse4_2 " + " ".join(flag for flag in doctor.X86_FLAGS if flag != "avx2")
    finding = doctor.check_cpu(flags, "x86_64")
    assert finding.level is Level.FAIL and "avx2" in finding.detail
    assert doctor.check_cpu(flags + " avx2", "x86_64").level is Level.OK
    assert doctor.check_cpu("", "aarch64").level is Level.OK


def test_small_shared_memory_is_a_warning_with_the_container_option(monkeypatch, tmp_path):
    assert doctor.check_shared_memory(str(tmp_path / "absent")).level is Level.WARN
    usage = type("Usage", (), {"total": 64 << 20, "used": 0, "free": 64 << 20})()
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    finding = doctor.check_shared_memory(str(tmp_path))
    assert finding.level is Level.WARN and "--shm-size" in finding.fix


def test_storage_is_written_read_listed_and_left_clean(tmp_path):
    assert doctor.check_storage(str(tmp_path / "runs")).level is Level.OK
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_storage_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").write_text("")
    finding = doctor.check_storage(str(tmp_path / "file" / "runs"))
    assert finding.level is Level.FAIL and "file/runs" in finding.detail


def test_cluster_of_another_ray_version_fails(monkeypatch):
    result = doctor.probe_cluster("h:1", {}, lambda address, token: (Answer.OK, b"\x062.59.1 "))
    monkeypatch.setattr(doctor, "probe_cluster", lambda address, environ: result)
    finding = doctor.check_cluster("h:1", {})
    assert finding.level is Level.FAIL and "2.59.1" in finding.detail and "ray==2.59.1" in finding.fix


def test_a_check_that_breaks_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "check_memory", lambda: 1 / 0)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["memory"].level is Level.WARN and "ZeroDivisionError" in findings["memory"].detail


def test_doctor_command_prints_json_and_succeeds_here(capsys, tmp_path):
    assert cli.main(["doctor", "--json", "--storage", str(tmp_path)]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["storage"]["level"] == "ok" and findings["native modules"]["level"] == "ok"
