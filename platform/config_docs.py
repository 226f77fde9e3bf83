"""The reference page of job files, from the configuration classes. Pure; ``docs/generate.py`` writes it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from shoal.platform.config import JobConfig
from shoal.platform.config_fields import describe, describe_range, is_required, join_path, typed_fields
from shoal.platform.config_schema import class_text, field_texts

_INTRODUCTION = """# Job files

<!-- Generated from platform/config.py by docs/generate.py; edit the texts there. -->

A job file is YAML with the sections `model`, `data`, `tables`, `train`, `scaling` and `run`. The same names are the
arguments of `shoal.ElasticTrainer`. Everything has a default but the paths, the model and, in Python, the run's name.

* `shoal config show job.yaml` prints a job with all defaults filled in; `shoal config validate job.yaml` checks it.
* `shoal config schema > job.schema.json` writes a JSON schema; with the first line
  `# yaml-language-server: $schema=job.schema.json` in a job file, editors complete and check it.
* `-o train.lr=0.1` on any command overrides a value; list entries are named by position (`-o data.sparse.0.kind=list`).
* Scalars follow YAML 1.2: `1e-3` is a number; `no`, `on` and `1:30` are text. Unknown and duplicate keys are errors.
* A byte count may be written with a unit: `512MiB`, `8GB`.
* A secret is never written into a job file: `${env:NAME}` refers to an environment variable of the process that uses
  it. References are accepted only where a secret belongs (keys such as `password`, `token`, `api_key`).
"""


def config_markdown() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    for path, cls in _sections(JobConfig, "", set()):
        if path:
            parts.append(f"## `{path}`\n\n{_markdown(class_text(cls))}\n\n{_table(cls)}")
    return "\n".join(parts)


def _sections(cls: type, path: str, seen: set[type]) -> Iterator[tuple[str, type]]:
    """Every configuration class once, with the first path at which it is found, parents first."""
    if cls in seen:
        return
    seen.add(cls)
    yield path, cls
    for field, hint in typed_fields(cls):
        for nested, suffix in _nested_classes(hint):
            yield from _sections(nested, join_path(path, field.name) + suffix, seen)


def _nested_classes(hint: Any, suffix: str = "") -> Iterator[tuple[type, str]]:
    if dataclasses.is_dataclass(hint):
        yield typing.cast(type, hint), suffix
        return
    suffix = {tuple: "[]", dict: ".<name>"}.get(typing.get_origin(hint), suffix)
    for arg in typing.get_args(hint):
        yield from _nested_classes(arg, suffix)


def _table(cls: type) -> str:
    texts = field_texts(cls)
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for field, hint in typed_fields(cls):
        limits = describe_range(field.metadata)
        kind = describe(hint) + (f", {limits}" if limits else "")
        cells = [f"`{field.name}`", kind, _default(field), _markdown(texts[field.name])]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _markdown(text: str) -> str:
    """Docstrings mark code with two back-ticks, Markdown with one."""
    return text.replace("``", "`")


def _default(field: dataclasses.Field) -> str:
    if is_required(field):
        return "required"
    if field.default_factory is not dataclasses.MISSING:
        return "`{}`" if field.default_factory is dict else ""
    if isinstance(field.default, bool) or field.default is None:
        return "`null`" if field.default is None else f"`{str(field.default).lower()}`"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{field.default}`" if field.default != "" else ""
