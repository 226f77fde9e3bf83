"""How a configuration class declares, converts and checks its fields. Pure: no I/O, no third-party imports.

A configuration class derives from ``Config``, is a frozen keyword-only dataclass, and writes a string literal after
each field: its documentation. Types are converted when an object is built (a list becomes a tuple, ``"8GiB"`` becomes
bytes, a mapping becomes a nested object); ranges and cross-field rules are listed by ``problems`` and raised by
``validate``. The same conversion serves Python callers and job files, so both get the same messages.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shoal.kernels.errors import ConfigError

#: A number of bytes; text such as ``512MiB`` or ``8GB`` is understood.
ByteSize = typing.Annotated[int, "bytes"]

_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTE_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_BYTE_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*$", re.IGNORECASE)
_OLD_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration: the dotted path of the field, and what to do about it."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path} {self.message}" if self.path else self.message


class FieldError(ConfigError):
    """A value cannot be converted to its field's type. ``path`` is the field's dotted path."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path} {message}" if path else message)
        self.path = path
        self.message = message


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field whose number must be >= ``low``, > ``above``, <= ``high`` and < ``below``, where given."""
    limits = {"low": low, "above": above, "high": high, "below": below}
    return dataclasses.field(default=default, metadata={k: v for k, v in limits.items() if v is not None})


def join_path(*parts: str | int) -> str:
    """``("data", "sparse", 0, "name")`` -> ``data.sparse.0.name``; empty parts are left out."""
    return ".".join(str(part) for part in parts if part != "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or, where nothing is close, the list of known words."""
    known = list(known)
    close = difflib.get_close_matches(word.lower(), [k.lower() for k in known], n=1, cutoff=0.6)
    for name in known:
        if close and name.lower() == close[0]:
            return f"; did you mean {name!r}?"
    return f"; known here: {', '.join(known)}" if known else ""


class Config:
    """Base of the configuration classes. Subclasses are frozen keyword-only dataclasses."""

    #: The field that a bare text stands for, where the class has a short form.
    SHORT_FORM: typing.ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field, hint in typed_fields(type(self)):
            value = convert(getattr(self, field.name), hint, f"{type(self).__name__}.{field.name}")
            object.__setattr__(self, field.name, value)

    def rules(self) -> Iterator[Problem]:
        """Cross-field problems of this object alone, with paths relative to it. Subclasses override it."""
        return iter(())

    def problems(self, path: str = "") -> list[Problem]:
        """Everything that is wrong here and in nested objects; empty when the configuration is valid."""
        found = [Problem(join_path(path, problem.path), problem.message) for problem in self.rules()]
        for field, _ in typed_fields(type(self)):
            value = getattr(self, field.name)
            where = join_path(path, field.name)
            message = _range_message(value, field.metadata)
            if message:
                found.append(Problem(where, message))
            for key, nested in _nested(value):
                found.extend(nested.problems(join_path(where, key)))
        return found

    def validate(self, path: str = "") -> None:
        """Raise ConfigError that names every wrong field, its value and what is allowed."""
        raise_problems([str(problem) for problem in self.problems(path)])

    def replace(self, **changes: Any) -> typing.Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and scalars, as a job file would hold them."""
        return {field.name: _plain(getattr(self, field.name)) for field, _ in typed_fields(type(self))}


def raise_problems(lines: list[str]) -> None:
    """Raise one ConfigError for all of ``lines``; nothing when there are none."""
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError(f"{len(lines)} problems\n  - " + "\n  - ".join(lines))


def typed_fields(cls: type) -> tuple[tuple[dataclasses.Field, Any], ...]:
    """The fields of a dataclass with their evaluated type hints, in order of declaration."""
    return _typed_fields(cls)


@functools.cache
def _typed_fields(cls: Any) -> tuple[tuple[dataclasses.Field, Any], ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(cls))


def build(cls: type, values: Mapping[str, Any], path: str = "") -> Any:
    """An object of ``cls`` from a mapping; unknown keys raise FieldError with a suggestion."""
    known = {field.name: hint for field, hint in typed_fields(cls)}
    for key in values:
        if key not in known:
            raise FieldError(join_path(path, key), f"is not a known key{_suggest(cls, str(key), path)}")
    missing = [f.name for f, _ in typed_fields(cls) if is_required(f) and f.name not in values]
    if missing:
        raise FieldError(join_path(path, missing[0]), "is required")
    return cls(**{key: convert(value, known[key], join_path(path, key)) for key, value in values.items()})


def is_required(field: dataclasses.Field) -> bool:
    """Whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def convert(value: Any, hint: Any, path: str) -> Any:
    """``value`` as the type ``hint``, or FieldError that names the path, the value and what is allowed."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if hint == ByteSize:
        return _convert_bytes(value, path)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, typing.get_args(hint), path)
    if origin is typing.Literal:
        return _convert_choice(value, typing.get_args(hint), path)
    if origin is tuple:
        return _convert_tuple(value, typing.get_args(hint), path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise FieldError(path, f"is {shown(value)}; it must be a mapping")
        item = typing.get_args(hint)[1]
        return {str(key): convert(entry, item, join_path(path, str(key))) for key, entry in value.items()}
    if dataclasses.is_dataclass(hint):
        return _convert_object(value, typing.cast(type, hint), path)
    return _convert_scalar(value, hint, path)


def shown(value: Any) -> str:
    """A value as an error message shows it: short, text in quotes, never a secret's dump."""
    text = f"the text {value!r}" if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def describe(hint: Any) -> str:
    """A type in a user's words: ``an integer``, ``auto or must``, ``a list of text``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint == ByteSize:
        return "a number of bytes such as 8GiB"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return ", ".join(str(arg) for arg in args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"a list ({describe(args[0])} each)"
        return f"a list of {len(args)} ({describe(args[0])} each)"
    if origin is dict:
        return "a mapping"
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    names = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
    return names.get(hint, "anything")


def _convert_scalar(value: Any, hint: type, path: str) -> Any:
    if hint is type(None) and value is None:
        return None
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise FieldError(path, f"is {shown(value)}; it must be {describe(hint)}{_scalar_hint(value, hint)}")


def _scalar_hint(value: Any, hint: type) -> str:
    if hint is bool and isinstance(value, str) and value.lower() in _OLD_BOOLEANS:
        return f": write {_OLD_BOOLEANS[value.lower()]} (yes, no, on and off are text in YAML 1.2)"
    if hint is str and isinstance(value, int | float):
        return ": put it in quotes"
    if hint in (int, float) and isinstance(value, str):
        if re.fullmatch(r"[0-9]+(:[0-9]+)+", value):
            return ": a colon makes it text, write plain seconds or units"
        if re.fullmatch(r"[-+0-9.eE_]+", value):
            return ": write it without quotes and underscores"
    return ""


def _convert_bytes(value: Any, path: str) -> int:
    match = _BYTE_SIZE.match(value) if isinstance(value, str) else None
    if match and match[2].upper() in _BYTE_UNITS:
        return int(float(match[1]) * _BYTE_UNITS[match[2].upper()])
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        return int(value)
    raise FieldError(path, f"is {shown(value)}; it must be {describe(ByteSize)}")


def _convert_union(value: Any, options: tuple, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:
        return convert(value, options[0], path)
    for option in options:
        try:
            return convert(value, option, path)
        except FieldError:
            continue
    raise FieldError(path, f"is {shown(value)}; it must be {' or '.join(describe(option) for option in options)}")


def _convert_choice(value: Any, choices: tuple, path: str) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    hint = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
    hint = hint if hint.startswith("; did") else ""
    raise FieldError(path, f"is {shown(value)}; it must be one of {', '.join(map(str, choices))}{hint}")


def _convert_tuple(value: Any, args: tuple, path: str) -> tuple:
    if isinstance(value, str) and args[0] is str:
        value = (value,)
    if not isinstance(value, list | tuple):
        raise FieldError(path, f"is {shown(value)}; it must be a list")
    if args[-1] is not Ellipsis and len(value) != len(args):
        raise FieldError(path, f"is {shown(value)}; it must have {len(args)} entries")
    item_types = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    return tuple(convert(item, kind, join_path(path, i)) for i, (item, kind) in enumerate(zip(value, item_types)))


def _convert_object(value: Any, cls: type, path: str) -> Any:
    if isinstance(value, cls):
        return value
    short_form = getattr(cls, "SHORT_FORM", "")
    if isinstance(value, str) and short_form:
        return build(cls, {short_form: value}, path)
    if not isinstance(value, Mapping):
        raise FieldError(path, f"is {shown(value)}; it must be a mapping")
    return build(cls, value, path)


def _suggest(cls: type, key: str, path: str) -> str:
    """A suggestion for an unknown key: a close field of the same object, else the same key in a nested object."""
    names = [field.name for field, _ in typed_fields(cls)]
    here = did_you_mean(key, names)
    if here.startswith("; did"):
        return here
    nested = [join_path(path, name) for name in nested_paths(cls) if name.split(".")[-1] == key]
    nearest = min(nested, key=lambda name: name.count("."), default="")
    return f"; did you mean {nearest!r}?" if nearest else here


def nested_paths(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted paths of the fields of nested objects (lists and mappings are not entered)."""
    for field, hint in typed_fields(cls):
        path = join_path(prefix, field.name)
        if prefix:
            yield path
        for option in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(option) and typing.get_origin(hint) not in (tuple, dict):
                yield from nested_paths(typing.cast(type, option), path)


def _range_message(value: Any, limits: Mapping[str, float]) -> str:
    if not limits or value is None or isinstance(value, str):
        return ""
    numbers = value if isinstance(value, tuple) else (value,)
    tests: dict[str, Callable[[float, float], bool]] = {
        "low": lambda x, limit: x >= limit,
        "above": lambda x, limit: x > limit,
        "high": lambda x, limit: x <= limit,
        "below": lambda x, limit: x < limit,
    }
    for number in numbers:
        if not all(math.isfinite(number) and tests[name](number, limit) for name, limit in limits.items()):
            return f"is {list(value) if isinstance(value, tuple) else value}; it must be {describe_range(limits)}"
    return ""


def describe_range(limits: Mapping[str, float]) -> str:
    """``>= 1 and <= 8`` for the limits that ``bounded`` declared."""
    signs = {"low": ">=", "above": ">", "high": "<=", "below": "<"}
    return " and ".join(f"{signs[name]} {limit:g}" for name, limit in limits.items())


def _nested(value: Any) -> Iterator[tuple[str | int, Config]]:
    """The Config objects directly inside a field's value, with their key."""
    if isinstance(value, Config):
        yield "", value
    elif isinstance(value, tuple):
        yield from ((i, item) for i, item in enumerate(value) if isinstance(item, Config))
    elif isinstance(value, Mapping):
        yield from ((key, item) for key, item in value.items() if isinstance(item, Config))


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
