"""Job files: YAML 1.2 scalars, places of mistakes, overrides, secrets, and that a dump reads back the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.errors import ConfigError
from shoal.platform.config import FailureConfig, JobConfig, ModelConfig, RunConfig, ScalingConfig, TrainConfig
from shoal.platform.config_file import dump_config, load_config, parse_config, plain_scalar, read_provenance
from shoal.platform.secrets import redact, redact_tree, reveal


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, source="job.yaml", default_name="job")
    return str(caught.value)


# Row 52 of the list of faults: a typo is rejected with a suggestion, line and column.
@pytest.mark.parametrize(
    ("text", "place", "suggestion"),
    [
        ("data:\n  bach_size: 3\n", "job.yaml:2:3", "did you mean 'batch_size'?"),
        ("dta: {}\n", "job.yaml:1:1", "did you mean 'data'?"),
        ("lr: 0.1\n", "job.yaml:1:1", "did you mean 'train.lr'?"),
        ("train:\n  sparse_optimizer:\n    knd: sgd\n", "job.yaml:3:5", "did you mean 'kind'?"),
        ("data:\n  sparse:\n  - {name: a, colunm: b}\n", "job.yaml:3:15", "did you mean 'column'?"),
        ("tables:\n  overrides:\n    user: {dim: 8}\n", "job.yaml:3:12", "known here: num_embeddings"),
    ],
)
def test_unknown_key_is_refused_with_place_and_suggestion(text, place, suggestion):
    message = error_of(text)
    assert place in message and suggestion in message


# Row 53: duplicate keys; numbers, booleans and times that YAML 1.1 reads differently.
def test_duplicate_key_is_refused_with_both_places():
    message = error_of("train:\n  lr: 1\n  epochs: 2\n  lr: 3\n")
    assert "job.yaml:4:3" in message and "'lr' is given twice" in message and "job.yaml:2:3" in message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-2.", -2.0),
        ("12", 12),
        ("+7", 7),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    found = plain_scalar(text)
    assert found == value and type(found) is type(value)
    config = parse_config(f"model: {{args: {{x: {text or '~'}}}}}", default_name="j")
    assert config.model.args["x"] == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {shuffle: no}", ["data.shuffle", "write false", "YAML 1.2"]),
        ("train: {lr: '1e-3'}", ["train.lr", "without quotes"]),
        ("run: {timeouts: {op_timeout_s: 1:30}}", ["op_timeout_s", "'1:30'", "seconds"]),
        ("run: {name: 12}", ["run.name", "quotes"]),
        ("train: [1]", ["train", "must be a mapping"]),
        ("- 1", ["job.yaml:1:1", "mapping"]),
        ("a: [1", ["job.yaml:1:", "not valid YAML"]),
        ("a:\n\tb: 1", ["job.yaml:2:1", "spaces"]),
        ("a: 1\n---\nb: 2", ["not valid YAML"]),
        ("run: !!python/object:os.system {}", ["job.yaml:1:6", "tag"]),
        ("run: {name: !!binary aGk=}", ["tag"]),
        ("a: &x [*x]", ["alias"]),
        ("x: &a {}\ntrain:\n  <<: *a", ["job.yaml:3:3", "merge keys"]),
        ("{[a]: 1}", ["key must be text"]),
        ("train: {seed: " + "9" * 5000 + "}", ["too many digits"]),
    ],
)
def test_malformed_input_is_refused_in_a_users_words(text, words):
    message = error_of(text)
    assert all(word in message for word in words), message


def test_aliases_that_multiply_are_bounded():
    text = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    for level in range(1, 9):
        text += f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n"
    assert "aliases" in error_of(text)


def test_range_error_has_a_place_too():
    assert "job.yaml:2:3: data.batch_size is 0; it must be >= 1" in error_of("data:\n  batch_size: 0\n")


def test_overrides_have_the_types_and_messages_of_the_file():
    config = parse_config(
        "data: {sparse: [{name: user}, {name: item}]}\ntrain: {lr: 1}",
        ["train.lr=1e-3", "data.sparse.1.kind=list", "tables.overrides.user.data_type=bf16", "run.name=x"],
    )
    assert config.train.lr == 1e-3
    assert [feature.kind for feature in config.data.sparse] == ["auto", "list"]
    assert config.tables.of("user").data_type == "bf16"
    assert config.run.name == "x"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lr", ["key.path=value"]),
        ("train.lrr=1", ["-o train.lrr=1", "did you mean 'lr'"]),
        ("train.lr=fast", ["option -o train.lr=fast", "'fast'"]),
        ("data.sparse.5.kind=id", ["list of 1", "'5'"]),
        ("train.lr.x=1", ["single value"]),
        ("run.name=[", ["-o run.name", "not valid YAML"]),
    ],
)
def test_wrong_override_is_named(override, words):
    message = error_of("data: {sparse: [{name: a}]}\ntrain: {lr: 1}\nrun: {name: r}", override)
    assert all(word in message for word in words), message


def test_override_replaces_a_value_with_a_structure():
    config = parse_config("run: {name: r}", ["data.train=[a, b]", "scaling={num_workers: 3}", "train.max_steps=null"])
    assert config.data.train == ("a", "b") and config.scaling.num_workers == 3


def test_run_is_named_after_the_file(tmp_path):
    path = tmp_path / "my job.yaml"
    path.write_text("train: {lr: 0.5}\n")
    assert load_config(path).run.name == "my-job"
    assert load_config(path, ["run.name=other"]).run.name == "other"


def test_unreadable_job_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml")


# Row 62: secrets are refused inline, referred to by name, and never shown.
@pytest.mark.parametrize(
    "text",
    [
        "model: {args: {api_key: hunter2}}",
        "model: {args: {db: {password: hunter2}}}",
        "model: {args: {auth_token: [hunter2]}}",
        "model: {args: {password: 12345}}",
        "run: {storage_path: 's3://user:hunter2@bucket/x'}",
        "data: {train: ['s3://bucket/x?access_key=hunter2']}",
    ],
)
def test_inline_secret_is_refused_without_showing_it(text):
    message = error_of(text)
    assert "hunter2" not in message and "12345" not in message
    assert "${env:NAME}" in message or "environment" in message


def test_secret_option_is_not_shown():
    message = error_of("run: {name: r}", "model.args.api_key=hunter2")
    assert "hunter2" not in message and "api_key" in message


def test_secret_reference_is_kept_until_it_is_used(monkeypatch):
    config = parse_config("model: {args: {api_key: '${env:SHOAL_TEST_KEY}', max_tokens: 3}}", default_name="j")
    assert "${env:SHOAL_TEST_KEY}" in dump_config(config)
    with pytest.raises(ConfigError, match="SHOAL_TEST_KEY, which is not set"):
        reveal(config.model.args, "model.args")
    monkeypatch.setenv("SHOAL_TEST_KEY", "hunter2")
    assert reveal(config.model.args) == {"api_key": "hunter2", "max_tokens": 3}


def test_reference_outside_a_secret_is_refused():
    assert "for secrets only" in error_of("run: {storage_path: '${env:HOME}'}")
    assert "alone" in error_of("run: {storage_path: 'a/${env:HOME}'}")


def test_redaction_leaves_what_is_not_secret():
    assert redact("s3://k:v@b/p?x=1&secret_key=abc") == "s3://***@b/p?x=1&secret_key=***"
    assert redact("https://host/path?q=1 a@b.c") == "https://host/path?q=1 a@b.c"
    tree = {"token": "a", "n": {"password": 3, "num_tokens": 4}, "ref_token": "${env:X}", "flag_secret": True}
    shown = {"token": "***", "n": {"password": "***", "num_tokens": 4}, "ref_token": "${env:X}", "flag_secret": True}
    assert redact_tree(tree) == shown


def test_dump_records_provenance_that_reading_ignores():
    config = JobConfig(run=RunConfig(name="r"))
    text = dump_config(config, {"versions": {"torch": "2.13.0"}, "fingerprint": "abc"})
    assert parse_config(text) == config
    assert read_provenance(text)["fingerprint"] == "abc"


_TEXT = st.text(max_size=12).filter(lambda text: "${" not in text and "://" not in text)
_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | _TEXT
_TRICKY = st.sampled_from(
    ["no", "yes", "1e-3", "1:30", "0o7", "010", ".inf", "~", "", "null", "true", "=", "<<", "#", "- a"]
)
_KEYS = st.sampled_from(["a", "no", "1e-3", "x y", "1"])
_VALUES = st.recursive(_SCALARS | _TRICKY, lambda x: st.lists(x, max_size=3) | st.dictionaries(_KEYS, x, max_size=3))


@settings(max_examples=50, deadline=None)
@given(
    args=st.dictionaries(st.sampled_from(["alpha", "on", "2", "k"]), _VALUES, max_size=4),
    lr=st.floats(0, 1e6),
    seed=st.integers(0, 2**63 - 1),
    memory=st.none() | st.integers(0, 2**50),
    workers=st.integers(0, 9) | st.tuples(st.integers(1, 4), st.integers(4, 9)),
    failure=st.builds(
        FailureConfig,
        max_failures=st.integers(-1, 5),
        recovery=st.sampled_from(["auto", "replicated", "checkpoint", "partial"]),
        on_loss=st.sampled_from(["auto", "shrink", "replace"]),
        replace_timeout_s=st.floats(0, 100),
        version_bytes_max=st.none() | st.integers(1, 2**40),
    ),
)
def test_dump_reads_back_to_an_equal_job(args, lr, seed, memory, workers, failure):
    config = JobConfig(
        model=ModelConfig(factory="a:b", args=args),
        train=TrainConfig(lr=lr, seed=seed),
        scaling=ScalingConfig(memory_per_worker=memory, num_workers=workers),
        run=RunConfig(name="r", failure=failure),
    )
    assert parse_config(dump_config(config)) == config


def test_an_elastic_job_is_read_with_its_units():
    text = """
scaling:
  num_workers: [2, 4]
run:
  name: r
  failure:
    on_loss: standby
    num_standby: 1
    version_bytes_max: 2GiB
    copy_rate_limit_bytes_per_s: 200MB
"""
    config = parse_config(text)
    assert (config.scaling.min_workers, config.scaling.max_workers) == (2, 4)
    assert config.run.failure.version_bytes_max == 2 << 30
    assert config.run.failure.copy_rate_limit_bytes_per_s == 200_000_000
    assert "lease_s <= controller_lease_s <= orphan_s must hold" in error_of(text + "    orphan_s: 1\n")
    assert "did you mean 'on_loss'" in error_of("run:\n  failure:\n    on_los: shrink\n")
