"""Job files: YAML to a JobConfig and back, with the line and column of every mistake.

Scalars follow YAML 1.2: ``1e-3`` is a number; ``no``, ``on`` and ``1:30`` are text. Duplicate keys, tags and merge
keys are refused. Options ``-o a.b=value`` are part of the file before it is converted, so they get the same types and
the same messages. PyYAML parses; no object is ever constructed from a tag.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from shoal.kernels.errors import ConfigError
from shoal.platform.config import JobConfig
from shoal.platform.config_fields import FieldError, build, join_path, raise_problems
from shoal.platform.secrets import is_secret_key, redact_tree

#: Top-level key under which a run's folder records where its configuration came from (versions, fingerprint).
PROVENANCE = "provenance"

#: A job file with more values than this is refused (aliases can multiply a small file without end).
MAX_VALUES = 200_000

_NULL = re.compile(r"^(~|null|Null|NULL|)$")
_TRUE = re.compile(r"^(true|True|TRUE)$")
_FALSE = re.compile(r"^(false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_BASE_INT = re.compile(r"^0(o[0-7]+|x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_SPECIAL_FLOAT = re.compile(r"^([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
_STANDARD_TAG = "tag:yaml.org,2002:"
_IMPLICIT_TAGS = {_STANDARD_TAG + n for n in ("null", "bool", "int", "float", "timestamp", "value", "merge", "str")}
# Text with anything else is written in double quotes, where PyYAML escapes what it would otherwise read differently.
_PLAIN_ASCII = re.compile("[\\x20-\\x7e]*")


@dataclasses.dataclass
class _Tree:
    """Plain values of a job file, and where each dotted path was written (``job.yaml:12:5``)."""

    values: dict[str, Any]
    places: dict[str, str]

    def place(self, path: str) -> str:
        """Where a path, or its nearest parent, was written."""
        parts = path.split(".")
        for n in range(len(parts), 0, -1):
            if ".".join(parts[:n]) in self.places:
                return self.places[".".join(parts[:n])] + ": "
        return ""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> JobConfig:
    """The validated job of a YAML file, with ``a.b=value`` overrides applied.

    ``run.name`` defaults to the file's name without its ending. Raises ConfigError that names file, line and column,
    the key, the value and what is allowed.
    """
    path = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the job file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the job file {path} is not UTF-8 text (byte {error.start})") from error
    stem = os.path.splitext(os.path.basename(path))[0]
    return parse_config(text, overrides, source=path, default_name=stem)


def parse_config(
    text: str, overrides: Sequence[str] = (), *, source: str = "<text>", default_name: str = ""
) -> JobConfig:
    """As ``load_config``, from text. ``source`` names it in messages."""
    tree = _read(text, source)
    tree.values.pop(PROVENANCE, None)
    for override in overrides:
        _apply_override(tree, override)
    run = tree.values.setdefault("run", {})
    if default_name and isinstance(run, dict):
        run.setdefault("name", re.sub(r"[^A-Za-z0-9_.-]+", "-", default_name).lstrip("-."))
    try:
        config = build(JobConfig, tree.values)
    except FieldError as error:
        raise ConfigError(f"{tree.place(error.path)}{error.path} {error.message}") from None
    raise_problems([f"{tree.place(problem.path)}{problem}" for problem in config.problems()])
    return config


def dump_config(config: JobConfig, provenance: Mapping[str, Any] | None = None) -> str:
    """YAML of a resolved job that ``parse_config`` reads back to an equal object; secrets are references or ``***``.

    ``provenance`` (versions, data fingerprint) is written under its own key, which reading ignores.
    """
    values = redact_tree(config.to_dict())
    if provenance:
        values[PROVENANCE] = dict(provenance)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_provenance(text: str) -> dict[str, Any]:
    """What ``dump_config`` recorded about the origin of a run's configuration; empty when nothing was."""
    found = _read(text, "<text>").values.get(PROVENANCE)
    return dict(found) if isinstance(found, dict) else {}


def _read(text: str, source: str) -> _Tree:
    loader = yaml.SafeLoader(text)
    loader.name = source
    try:
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error, source)) from None
    finally:
        loader.dispose()
    tree = _Tree(values={}, places={})
    if node is None:
        return tree
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_place(node, source)}: a job file is a mapping of model, data, train, ...")
    tree.values = _Plainer(source, tree.places).mapping(node, "")
    return tree


class _Plainer:
    """Turns YAML nodes into plain values and notes where each was written."""

    def __init__(self, source: str, places: dict[str, str]) -> None:
        self.source = source
        self.places = places
        self.num_values = 0
        self.open: set[int] = set()

    def value(self, node: yaml.Node, path: str) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise ConfigError(f"{self.source}: more than {MAX_VALUES} values; aliases may be multiplying them")
        self.places.setdefault(path, _place(node, self.source))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if id(node) in self.open:
            raise ConfigError(f"{_place(node, self.source)}: an alias refers to a value that contains it")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                self.check_tag(node, "seq")
                return [self.value(item, join_path(path, i)) for i, item in enumerate(node.value)]
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.Node, path: str) -> dict[str, Any]:
        self.check_tag(node, "map")
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = _place(key_node, self.source)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place}: a key must be text")
            key = key_node.value
            if key == "<<":
                raise ConfigError(f"{place}: merge keys (<<) are not part of YAML 1.2; repeat the values")
            if key in values:
                first = self.places.get(join_path(path, key), "")
                raise ConfigError(f"{place}: the key {key!r} is given twice (first at {first})")
            self.places[join_path(path, key)] = place
            values[key] = self.value(value_node, join_path(path, key))
        return values

    def scalar(self, node: yaml.ScalarNode) -> Any:
        if node.style in ("'", '"', "|", ">"):
            self.check_tag(node, "str")
            return node.value
        # An unquoted scalar without a tag of its own carries the one that YAML 1.1 would give it.
        if node.tag not in _IMPLICIT_TAGS:
            self.check_tag(node, "str")
        try:
            return plain_scalar(node.value)
        except ValueError:
            raise ConfigError(f"{_place(node, self.source)}: the number has too many digits") from None

    def check_tag(self, node: yaml.Node, standard: str) -> None:
        if node.tag != _STANDARD_TAG + standard:
            raise ConfigError(f"{_place(node, self.source)}: the tag {node.tag} is not allowed; write plain values")


def plain_scalar(text: str) -> Any:
    """The value of an unquoted scalar under YAML 1.2's core schema: null, boolean, integer, float or text."""
    if _NULL.match(text):
        return None
    if _TRUE.match(text):
        return True
    if _FALSE.match(text):
        return False
    if _INT.match(text):
        return int(text)
    if _BASE_INT.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    if _SPECIAL_FLOAT.match(text):
        return float(text.replace(".", ""))
    return text


def _apply_override(tree: _Tree, override: str) -> None:
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"the option -o {override} is not of the form key.path=value")
    place = f"-o {path.strip()}"
    try:
        # Wrapped in a list so that a value such as `a: b` or an empty one parses as what it is.
        node = yaml.SafeLoader(text).get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error, place)) from None
    value = None if node is None else _Plainer(place, {}).value(node, "")
    _set(tree.values, parts, value, place)
    dotted = ".".join(parts)
    for old in [old for old in tree.places if old == dotted or old.startswith(dotted + ".")]:
        del tree.places[old]
    tree.places[dotted] = "option " + (place if is_secret_key(parts[-1]) else f"-o {override}")


def _set(values: Any, parts: list[str], value: Any, place: str) -> None:
    """Set a value deep inside mappings and lists; mappings on the way are created, list entries must exist."""
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1
        if isinstance(values, list):
            if not part.isdigit() or int(part) >= len(values):
                where = ".".join(parts[:i])
                raise ConfigError(f"{place}: {where} is a list of {len(values)}; {part!r} is not one of its positions")
            key: Any = int(part)
        elif isinstance(values, dict):
            key = part
        else:
            raise ConfigError(f"{place}: {'.'.join(parts[:i])} is a single value; it has no {part!r}")
        if is_last:
            values[key] = value
            return
        if isinstance(values, dict) and values.get(key) is None:
            values[key] = {}
        values = values[key]


def _place(node: yaml.Node, source: str) -> str:
    if source.startswith("-o "):
        return source
    return f"{source}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _yaml_message(error: yaml.YAMLError, source: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark and not source.startswith("-o ") else source
    problem = getattr(error, "problem", None) or getattr(error, "context", None) or str(error).splitlines()[0]
    if "found character '\\t'" in problem:
        problem += "; indent with spaces, YAML allows no tabs"
    return f"{where}: not valid YAML: {problem}"


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes wherever YAML 1.1 or 1.2 would read it as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    is_other = len(text) < 400 and not isinstance(plain_scalar(text), str)
    style = '"' if not _PLAIN_ASCII.fullmatch(text) else "'" if is_other else None
    return dumper.represent_scalar(_STANDARD_TAG + "str", text, style=style)


def _represent_float(dumper: yaml.SafeDumper, number: float) -> yaml.Node:
    text = repr(number)
    if "." not in text:
        # YAML 1.1 wants a point before an exponent.
        text = text.replace("e", ".0e")
    text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
    return dumper.represent_scalar(_STANDARD_TAG + "float", text)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)
