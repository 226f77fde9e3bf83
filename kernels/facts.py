"""Facts: what somebody's numbers depend on, as (path, value) pairs in an order that is the same for everybody.

Pure: values and texts, neither torch nor numpy. ``agreement`` compares the facts of all ranks.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: (path, value) in order.
Facts = tuple[tuple[str, str], ...]

#: Elements of a long sequence that make one fact: short enough to be shown whole.
_CHUNK = 16
#: Shown of a value, in characters.
_SHOWN = 100
_MASK_63 = (1 << 63) - 1


def facts_of(path: str, value: Any) -> Iterable[tuple[str, str]]:
    """``value`` as facts below ``path``: fields of dataclasses in their order, entries of mappings by key, items of
    sequences after their number; numbers of a long sequence in pieces; everything else as its ``repr``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from facts_of(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, enum.Enum):
        yield path, value.name
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from facts_of(f"{path}[{key!r}]", value[key])
    elif hasattr(value, "_asdict"):
        for name, part in value._asdict().items():
            yield from facts_of(f"{path}.{name}", part)
    elif isinstance(value, list | tuple) or hasattr(value, "tolist"):
        items = value.tolist() if hasattr(value, "tolist") else list(value)
        yield f"number of {path}", str(len(items))
        if all(isinstance(item, int | float) for item in items):
            for first in range(0, len(items), _CHUNK):
                part = items[first : first + _CHUNK]
                yield f"{path}[{first}:{first + len(part)}]", repr(part)
        else:
            for number, item in enumerate(items):
                yield from facts_of(f"{path}[{number}]", item)
    else:
        yield path, repr(value)


def hash_facts(facts: Iterable[tuple[str, str]]) -> int:
    """63-bit hash of facts, the same in all processes."""
    digest = hashlib.blake2b(digest_size=8)
    for path, value in facts:
        digest.update(f"{path}\0{value}\0".encode())
    return int.from_bytes(digest.digest(), "little") & _MASK_63


def first_difference(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> int:
    """Index of the first fact in which ``a`` and ``b`` differ; -1 if they are equal."""
    for index, (mine, other) in enumerate(zip(a, b)):
        if mine != other:
            return index
    return -1 if len(a) == len(b) else min(len(a), len(b))


def shown(value: str) -> str:
    """``value`` as messages show it."""
    return value if len(value) <= _SHOWN else f"{value[: _SHOWN - 3]}..."
