"""Settings read from files: is every value of the type that its field declares?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from selfspec.errors import ConfigError


def check_types(cls: type, values: Mapping[str, Any]) -> None:
    """Compare values with the annotations of a dataclass; keys that it does not have are left to the caller.

    Raises:
        ConfigError: a value of another type; it names the key, the value and the type.
    """
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            kind = hints[name]
            wanted = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise ConfigError(
                f"{name}={value!r} is no {wanted.replace('collections.abc.', '').replace('None', 'null')}"
            )


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type: plain ones, lists, mappings and unions of them. A whole number is a float, too."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(fits(item, inner[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(fits(item, inner[1]) for item in value.values())
    if kind is NoneType:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
