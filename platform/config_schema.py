"""The JSON schema of job files, for editors, and the texts that document every field.

Pure: both come from the configuration classes themselves (types, defaults, ``bounded`` ranges, and the string literal
after each field), so they cannot differ from what is accepted.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import types
import typing
from typing import Any

from shoal.platform.config import JobConfig
from shoal.platform.config_fields import ByteSize, is_required, typed_fields

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

#: How ``bounded`` limits are called in JSON schema.
_LIMITS = {"low": "minimum", "above": "exclusiveMinimum", "high": "maximum", "below": "exclusiveMaximum"}


@functools.cache
def field_texts(cls: type) -> dict[str, str]:
    """Field name -> the string literal that follows it in the class, with line breaks turned into spaces."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    texts = {}
    for field, text in itertools.pairwise(body):
        is_text = (
            isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        )
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            texts[field.target.id] = " ".join(text.value.value.split())  # type: ignore[attr-defined]
    return texts


def class_text(cls: type) -> str:
    """The class's docstring on one line."""
    return " ".join((cls.__doc__ or "").split())


def job_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a job file."""
    definitions: dict[str, Any] = {}
    root = _object_schema(JobConfig, definitions)
    return {"$schema": SCHEMA_DIALECT, "title": "Shoal job", **root, "$defs": definitions}


def _object_schema(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    texts = field_texts(cls)
    properties = {}
    for field, hint in typed_fields(cls):
        schema = _type_schema(hint, dict(field.metadata), definitions)
        default = _plain_default(field)
        described = {"description": texts[field.name], **({} if default is None else {"default": default})}
        # A reference may stand beside other keywords since draft 2019-09.
        properties[field.name] = {**schema, **described}
    schema = {
        "type": "object",
        "description": class_text(cls),
        "properties": properties,
        "additionalProperties": False,
    }
    required = [field.name for field, _ in typed_fields(cls) if is_required(field)]
    return {**schema, "required": required} if required else schema


def _type_schema(hint: Any, limits: dict[str, float], definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    numeric = {_LIMITS[name]: value for name, value in limits.items()}
    if hint is Any:
        return {}
    if hint == ByteSize:
        size = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTkmgt][iI]?)?[bB]?\s*$"}
        return {"anyOf": [{"type": "integer", **numeric}, size]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(arg, limits, definitions) for arg in args]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return _list_schema(args, limits, definitions)
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(args[1], {}, definitions)}
    if dataclasses.is_dataclass(hint):
        return _reference(typing.cast(type, hint), definitions)
    names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    return {"type": names[hint], **(numeric if hint in (int, float) else {})}


def _list_schema(args: tuple, limits: dict[str, float], definitions: dict[str, Any]) -> dict[str, Any]:
    items = _type_schema(args[0], limits, definitions)
    if args[-1] is not Ellipsis:
        return {"type": "array", "items": items, "minItems": len(args), "maxItems": len(args)}
    array = {"type": "array", "items": items}
    return {"anyOf": [{"type": "string"}, array]} if args[0] is str else array


def _reference(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    if cls.__name__ not in definitions:
        definitions[cls.__name__] = {}
        definitions[cls.__name__].update(_object_schema(cls, definitions))
    reference = {"$ref": f"#/$defs/{cls.__name__}"}
    return {"anyOf": [{"type": "string"}, reference]} if getattr(cls, "SHORT_FORM", "") else reference


def _plain_default(field: dataclasses.Field) -> Any:
    """A simple default as JSON holds it; None where there is none worth showing."""
    default = field.default
    if isinstance(default, tuple):
        return list(default) or None
    return default if isinstance(default, str | int | float | bool) else None
