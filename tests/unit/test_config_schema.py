"""The JSON schema accepts what is accepted and refuses what is refused; the reference pages are fresh."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import jsonschema
import pytest

from shoal.platform.config import (
    DataConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TableConfig,
    TablesConfig,
)
from shoal.platform.config_fields import Config, typed_fields
from shoal.platform.config_schema import field_texts, job_schema

ROOT = Path(__file__).resolve().parents[2]


def subclasses(cls: type) -> list[type]:
    return [c for sub in cls.__subclasses__() for c in (sub, *subclasses(sub)) if c.__module__.startswith("shoal.")]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_every_field_of_every_class_is_documented():
    for cls in subclasses(Config):
        assert cls.__doc__, cls
        assert set(field_texts(cls)) == {field.name for field, _ in typed_fields(cls)}, cls
        assert all(text.endswith((".", ")")) for text in field_texts(cls).values()), cls


def test_schema_accepts_resolved_jobs(validator):
    job = JobConfig(
        model=ModelConfig(factory="a:b", args={"x": [1, {"y": None}]}),
        data=DataConfig(train=["a"], sparse=["u", {"name": "v", "max_length": 2}]),
        tables=TablesConfig(
            defaults=TableConfig(data_type="fp16"),
            overrides={"t": TableConfig(optimizer=OptimizerConfig(kind="adam", betas=(0.8, 0.9)))},
        ),
        scaling=ScalingConfig(num_workers=2, memory_per_worker=1 << 30, resources_per_worker={"CPU": 1.5}),
        run=RunConfig(name="r", resume=7),
    )
    validator.validate(job.to_dict())


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"model": "a.b:c"},
        {"data": {"train": "x.parquet", "sparse": ["user", {"name": "item"}]}},
        {"scaling": {"memory_per_worker": "8GiB", "num_workers": [2, 4]}},
        {"run": {"failure": {"on_loss": "standby", "num_standby": 1, "version_bytes_max": "1GiB"}}},
        {"run": {"resume": "must", "checkpoint": {"rate_limit_bytes_per_s": "200MB"}}},
    ],
)
def test_schema_accepts_short_forms(validator, job):
    validator.validate(job)


@pytest.mark.parametrize(
    "job",
    [
        {"dta": {}},
        {"data": {"batch_size": 0}},
        {"data": {"batch_size": "big"}},
        {"data": {"sparse": [{"kind": "list"}]}},
        {"data": {"sparse": [{"name": "a", "kind": "lists"}]}},
        {"train": {"lr": -1}},
        {"train": {"sparse_optimizer": {"betas": [0.9]}}},
        {"scaling": {"memory_per_worker": "8 gigs"}},
        {"run": {"resume": "perhaps"}},
        {"run": {"failure": {"recovery": "hope"}}},
        {"run": {"failure": {"max_failures": -2}}},
    ],
)
def test_schema_refuses_what_loading_refuses(validator, job):
    assert not validator.is_valid(job)


def test_defaults_in_the_schema_are_the_defaults():
    data = job_schema()["$defs"]["DataConfig"]["properties"]
    defaults = {field.name: field.default for field in dataclasses.fields(DataConfig)}
    assert data["batch_size"]["default"] == defaults["batch_size"]
    assert data["batch_size"]["minimum"] == 1


def test_reference_pages_are_fresh():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, make in generate.PAGES.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == make(), "run: python docs/generate.py"
