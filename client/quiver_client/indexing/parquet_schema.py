"""The fields that the columns of a Parquet file become, and whether the files of a source have the same ones.

Binary and text columns and lists of numbers are byte fields; numbers are scalars.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

from quiver.errors import BadRequest
from quiver.malformed import MALFORMED
from quiver.manifest import BLOB_TYPE, KEY_FIELD, Field
from quiver.manifest.schema import SCALAR_TYPES
from quiver.origin.arrays import array_type
from quiver_client.indexing.report import Notices
from quiver_client.indexing.selection import Selection

_Features = dict[str, Any]


def fields_of(path: str, schema: pa.Schema, selection: Selection, notices: Notices) -> list[Field]:
    """Return the fields of a file, in the order of its columns."""
    features = _features(schema)
    fields = []
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise BadRequest(f"{path} has several columns named {twice[0]!r}; write it again with distinct names")
    for column in schema:
        if not selection.takes(column.name) or (column.name == KEY_FIELD and has_keys(schema, selection)):
            continue
        field = None if column.name in (KEY_FIELD, "") else _field(column, features)
        if field is None:
            notices.add(
                "columns left out, neither bytes, text, numbers nor lists of numbers", f"{column.name}: {column.type}"
            )
        else:
            fields.append(field)
    if not any(field.type == BLOB_TYPE for field in fields):
        columns = ", ".join(f"{column.name}: {column.type}" for column in schema)
        which = "has no column of" if selection.takes_all else "has, of the fields chosen, none of"
        raise BadRequest(
            f"{path} {which} bytes, text or lists of numbers, so there is nothing to cache; it has {columns[:300]}"
        )
    return fields


def _field(column: pa.Field, features: _Features) -> Field | None:
    kind = column.type
    if _is_bytes(kind):
        return Field(column.name, BLOB_TYPE, column=column.name)
    if pa.types.is_struct(kind):
        at = kind.get_field_index("bytes")
        if at >= 0 and _is_bytes(kind.field(at).type):
            return Field(column.name, BLOB_TYPE, column=f"{column.name}.bytes")
        return None
    array = array_type(kind)
    if array is not None:
        return Field(column.name, BLOB_TYPE, column=column.name, dtype=array.dtype, shape=array.shape)
    if str(kind) in SCALAR_TYPES:
        return Field(column.name, str(kind), classes=_class_names(features.get(column.name)))
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
    ) and not types.is_decimal(kind)


def _features(schema: pa.Schema) -> _Features:
    """Return how Hugging Face's datasets library describes the columns, if it wrote the file."""
    raw = (schema.metadata or {}).get(b"huggingface", b"")
    try:
        features = msgspec.json.decode(raw)["info"]["features"] if raw else {}
    except (*MALFORMED, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _class_names(feature: Any) -> tuple[str, ...]:
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return ()
    names = feature.get("names")
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def check_same(
    fields: list[Field], first: tuple[str, pa.Schema], path: str, schema: pa.Schema, selection: Selection
) -> None:
    """Raise ``BadRequest`` for a file whose columns differ from those of the first file."""
    if has_keys(schema, selection) != has_keys(first[1], selection):
        raise BadRequest(
            f"only one of {first[0]} and {path} names its samples in a column {KEY_FIELD}; leave it out with"
            f" --exclude {KEY_FIELD}, or index them apart"
        )
    others = {field.name: field for field in fields_of(path, schema, selection, Notices())}
    for field in fields:
        other = others.pop(field.name, None)
        if other is None or _kind(other, schema) != _kind(field, first[1]):
            there = "it is missing" if other is None else f"it is {_shown(other, schema)}"
            raise BadRequest(
                f"{path}: column {field.name} is {_shown(field, first[1])} in {first[0]} and here {there};"
                " index files of one schema at a time"
            )
    if others:
        raise BadRequest(
            f"{path} has columns that {first[0]} does not have: {', '.join(others)};"
            " index files of one schema at a time"
        )


def _kind(field: Field, schema: pa.Schema) -> tuple[object, ...]:
    array = array_type(schema.field(field.name).type) if field.is_array else None
    return field.type, field.column, field.dtype, field.shape, array and array.dimensions


def _shown(field: Field, schema: pa.Schema) -> str:
    return str(schema.field(field.name).type) if field.is_array else field.type


def has_keys(schema: pa.Schema, selection: Selection) -> bool:
    """Whether the files name their samples in a text column ``__key__``."""
    at = schema.get_field_index(KEY_FIELD)
    kind = schema.field(at).type if at >= 0 else None
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) if kind is not None else False
    return bool(text) and KEY_FIELD not in selection.excluded
