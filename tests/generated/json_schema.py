"""JSON Schema of messages and settings as the generated files have it, whichever release of msgspec made it."""

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec


def schema_components(kinds: Sequence[Any], ref_template: str) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """As msgspec's own, which from 0.23 on indents descriptions otherwise, and lists the keys of mappings."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template=ref_template)
    return tuple(_settled(each) for each in schemas), _settled(components)


def _settled(value: Any) -> Any:
    if isinstance(value, list):
        return [_settled(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inspect.cleandoc(each) if key == "description" and isinstance(each, str) else _settled(each)
        for key, each in value.items()
        if key != "propertyNames"
    }
