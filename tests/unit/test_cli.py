"""The command line: start-up, exit codes, one-line errors, suggestions, and what each command calls."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import types
from typing import ClassVar

import pytest

from shoal.jobs import cli
from shoal.kernels.errors import BadIdError, ConfigError

JOB = """
model: {factory: "nowhere_to_be_found:build"}
data: {train: [data.parquet], sparse: [user]}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def run(*argv: str) -> int:
    return cli.main(argv)


def cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_costs_little_more_than_an_empty_interpreter():
    # CPU time in units of this machine's own `python -c pass`, so that a slow or busy machine does not matter: 0.5 s is
    # about 25 such units, and importing torch or ray alone about 50.
    empty = min(cpu_seconds(sys.executable, "-c", "pass") for _ in range(3))
    shown = min(cpu_seconds(sys.executable, "-m", "shoal.jobs.cli", "--help") for _ in range(3))
    assert shown < 15 * empty


def test_module_and_help_name_every_command():
    done = subprocess.run(
        [sys.executable, "-m", "shoal.jobs.cli", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_every_command_has_help_of_its_own(capsys):
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as caught:
            run(name, "--help")
        assert caught.value.code == 0 and f"shoal {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian", "x"], "did you mean 'train'"),
        (["config", "shwo", "x"], "did you mean 'show'"),
        (["train"], "JOB"),
        (["train", "a", "--nope"], "--nope"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_exits_with_2(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_error_is_one_line_with_its_code_and_exit_1(job, capsys):
    assert run("config", "show", job, "-o", "data.bach_size=3") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: [SHOAL-101] option -o data.bach_size=3: data.bach_size")


def test_debug_adds_the_traceback(job, capsys):
    assert run("config", "show", job, "-o", "data.bach_size=3", "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_unexpected_error_names_its_type_and_debug(monkeypatch, job, capsys):
    monkeypatch.setattr("shoal.platform.config_file.load_config", lambda *args: {}["k"])
    assert run("config", "show", job) == 1
    assert capsys.readouterr().err == "error: [SHOAL-000] unexpected KeyError: 'k' (--debug shows the traceback)\n"


def test_interrupt_exits_with_130(monkeypatch, job, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.platform.config_file.load_config", interrupt)
    assert run("config", "show", job) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_error_of_a_remote_call_is_shown_as_its_cause():
    error = RuntimeError("pages of remote traceback")
    error.cause = BadIdError("feature 'user', table 'users': 7")
    assert cli.error_line(error) == "[SHOAL-203] feature 'user', table 'users': 7"


def test_closed_pipe_is_no_error_message(job):
    command = f"{sys.executable} -m shoal.jobs.cli config schema | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{\n" and done.stderr == ""


def test_config_show_prints_a_job_that_loads(job, capsys, tmp_path):
    assert run("config", "show", job, "-o", "train.lr=1e-3") == 0
    copy = tmp_path / "copy.yaml"
    copy.write_text(capsys.readouterr().out)
    assert run("config", "show", str(copy), "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["train"]["lr"] == 1e-3 and values["run"]["name"] == "job"


def test_config_show_never_shows_a_secret(job, capsys):
    assert run("config", "show", job, "-o", "model.args.token=${env:TOKEN}") == 0
    assert "${env:TOKEN}" in capsys.readouterr().out


def test_config_validate_static_checks_only_what_is_written(job, capsys):
    assert run("config", "validate", "--static", job) == 0
    assert "valid" in capsys.readouterr().out


# Rows 47 and 56 of the list of faults: everything that can be known is said before any actor starts.
def test_config_validate_reports_all_that_is_wrong_outside_the_file(job, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert run("config", "validate", job, "-o", f"run.storage_path={tmp_path}/file/x") == 1
    message = capsys.readouterr().err
    assert "nowhere_to_be_found" in message
    assert "data.parquet" in message
    assert "run.storage_path is not writable" in message


@pytest.fixture
def good_job(tmp_path):
    """A job that passes every check before a cluster is started."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"label": [0, 1], "user": [1, 2]}), path)
    text = f"model: shoal.jobs.models.dlrm:build\ndata: {{train: [{path}], sparse: [user]}}\n"
    (tmp_path / "good.yaml").write_text(text + f"run: {{storage_path: {tmp_path}/runs}}\n")
    return str(tmp_path / "good.yaml")


def test_config_validate_accepts_a_good_job_and_leaves_nothing_behind(good_job, tmp_path, capsys):
    assert run("config", "validate", good_job) == 0
    assert list((tmp_path / "runs").iterdir()) == []


def test_empty_data_set_is_refused_before_the_cluster_starts(good_job, trainer_only, tmp_path, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"label": pa.array([], pa.int64()), "user": pa.array([], pa.int64())}), tmp_path / "none.pq"
    )
    assert run("train", good_job, "-o", f"data.train={tmp_path}/none.pq") == 1
    assert "is empty" in capsys.readouterr().err
    assert trainer_only.seen == []


def test_column_that_the_files_lack_is_refused_before_the_cluster_starts(good_job, trainer_only, capsys):
    assert run("train", good_job, "-o", "data.sparse=[user, itm]") == 1
    message = capsys.readouterr().err
    assert "itm" in message and "data.parquet" in message and trainer_only.seen == []


def test_absent_gpu_is_refused_before_the_cluster_starts(good_job, trainer_only, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("train", good_job, "-o", "scaling.use_gpu=true") == 1
    assert "scaling.use_gpu is true, but this machine has no GPU" in capsys.readouterr().err
    assert trainer_only.seen == []


def test_config_schema_is_json(capsys):
    assert run("config", "schema") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Shoal job"


class FakeTrainer:
    """Stands for ElasticTrainer: remembers the job and returns a result."""

    seen: ClassVar[list] = []
    is_stopped: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config):
        cls.seen.append(config)
        return cls()

    def fit(self):
        metrics = {"loss": 0.5, "auc": 0.75, "phase_ms/route": 1.0}
        checkpoint = "runs/job/checkpoints/x"
        return types.SimpleNamespace(
            path="runs/job", checkpoint=checkpoint, metrics=metrics, steps=7, is_stopped=self.is_stopped
        )


@pytest.fixture
def trainer_only(monkeypatch):
    """ElasticTrainer replaced, the checks before it left as they are."""
    FakeTrainer.seen = []
    module = types.ModuleType("shoal.jobs.train")
    module.ElasticTrainer = FakeTrainer
    monkeypatch.setitem(sys.modules, "shoal.jobs.train", module)
    return FakeTrainer


@pytest.fixture
def trainer(monkeypatch, trainer_only):
    monkeypatch.setattr("shoal.platform.preflight.check_job", lambda config: None)
    return trainer_only


def test_train_passes_overrides_and_address_and_prints_what_is_next(trainer, job, capsys):
    assert run("train", job, "-o", "train.lr=0.1", "-o", "data.test=t", "--address", "h:6379") == 0
    (config,) = trainer.seen
    assert (config.train.lr, config.scaling.address, config.run.resume) == (0.1, "h:6379", "auto")
    out = capsys.readouterr().out
    assert out.startswith("run job finished: steps=7 loss=0.5 auc=0.75\n")
    assert all(command in out for command in ("shoal eval runs/job", "shoal ckpt ls runs/job", "tensorboard --logdir"))


def test_train_prints_json_for_machines(trainer, job, capsys):
    assert run("train", job, "--json") == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["auc"] == 0.75


def test_run_that_was_stopped_exits_with_130(trainer, job, monkeypatch, capsys):
    monkeypatch.setattr(trainer, "is_stopped", True)
    assert run("train", job) == 130 and "run job stopped" in capsys.readouterr().out
    assert run("train", job, "--json") == 130


def test_resume_reads_the_runs_own_config_and_must_find_a_checkpoint(trainer, tmp_path, capsys):
    from shoal.platform.config_file import parse_config
    from shoal.platform.run_folder import write_run_config
    from shoal.platform.storage import Storage

    folder = tmp_path / "runs" / "first"
    config = parse_config(JOB, ["run.name=old-name", "run.storage_path=/elsewhere"])
    write_run_config(Storage(str(folder)), config, {"versions": {"torch": "2.13.0"}})
    assert run("resume", str(folder), "-o", "train.epochs=3") == 0
    assert run("resume", str(folder), "--step", "40") == 0
    first, second = trainer.seen
    assert (first.train.epochs, first.run.resume, second.run.resume) == (3, "must", 40)
    assert first.run.run_dir == str(folder), "a run that was moved goes on where it is"


def test_resume_of_a_folder_that_is_no_run_says_so(tmp_path, capsys):
    assert run("resume", str(tmp_path)) == 1
    assert "is not the folder of a run: it has no config.yaml" in capsys.readouterr().err


def test_ckpt_ls_of_an_empty_run(tmp_path, capsys):
    assert run("ckpt", "ls", str(tmp_path)) == 0
    assert "no checkpoints" in capsys.readouterr().out
    assert run("ckpt", "ls", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_ckpt_verify_without_a_checkpoint_is_one_line(tmp_path, capsys):
    assert run("ckpt", "verify", str(tmp_path)) == 1
    assert capsys.readouterr().err.startswith("error: [SHOAL-301]")
    assert run("ckpt", "verify", str(tmp_path), "--step", "5") == 1
    assert "no checkpoint of step 5" in capsys.readouterr().err


def test_eval_without_data_says_which_key_to_set(job, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shoal.jobs.evaluate", types.SimpleNamespace(evaluate_run=None))
    assert run("eval", job) == 1
    assert "data.test" in capsys.readouterr().err


def test_synth_writes_what_it_reports(tmp_path, capsys):
    assert run("synth", str(tmp_path / "d"), "--rows", "2000", "--cardinality-max", "50", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 2000 and (tmp_path / "d" / "meta.json").exists()


def test_factory_errors_name_the_missing_part(monkeypatch, tmp_path):
    from shoal.platform.factory import build_model, load_factory

    (tmp_path / "my_models_for_test.py").write_text("value = 3\ndef build(width):\n    return width\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from shoal.platform.config import ModelConfig

    assert build_model(ModelConfig(factory="my_models_for_test:build", args={"width": 4})) == 4
    for path, words in [
        ("", "is not set"),
        ("no_such_module_x:f", "no module 'no_such_module_x'"),
        ("my_models_for_test:buidl", "did you mean 'build'"),
        ("my_models_for_test:value", "not a function"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_factory(path)
    with pytest.raises(ConfigError, match=r"model\.args does not fit"):
        build_model(ModelConfig(factory="my_models_for_test:build", args={"wdth": 4}))


def test_cluster_that_is_too_small_is_named_with_numbers():
    from shoal.platform.config import JobConfig, RunConfig, ScalingConfig
    from shoal.platform.preflight import cluster_problems

    scaling = ScalingConfig(num_workers=4, use_gpu=True, memory_per_worker="2GiB", resources_per_worker={"disk": 1})
    config = JobConfig(run=RunConfig(name="r"), scaling=scaling)
    totals = {"CPU": 8.0, "GPU": 2.0, "memory": 2.0**40, "disk": 4}
    (problem,) = cluster_problems(config, totals)
    assert "4 workers with 1 GPU each, 4 in all, but the cluster has 2" in problem.message


@pytest.mark.parametrize("problems", [(), ("epoch 3 after epoch 4",)])
def test_chaos_ends_with_1_and_names_the_promise_that_was_broken(job, monkeypatch, capsys, tmp_path, problems):
    from shoal.jobs import chaos
    from shoal.platform import preflight

    def run_chaos(config, plan, folder, say):
        verdict = chaos.Verdict(promise="epochs rise", problems=problems)
        return chaos.ChaosReport(plan=plan, fired=(), provocations=(), verdicts=(verdict,))

    monkeypatch.setattr(preflight, "check_job", lambda config: None)
    monkeypatch.setattr(chaos, "run_chaos", run_chaos)
    code = run("chaos", job, "-o", "scaling.num_workers=2", "--out", str(tmp_path / "kept"))
    said = capsys.readouterr().out
    assert code == len(problems)
    assert ("broken  epochs rise" in said and problems[0] in said) if problems else "held    epochs rise" in said
