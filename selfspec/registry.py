"""Names of draft methods. A method registers itself; nothing else in the package names it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from selfspec.errors import ConfigError
from selfspec.head import DraftHead

_BUILT_IN = "selfspec.heads"
_METHODS: dict[str, type[Any]] = {}
_JOINING: list[str] = []

T = TypeVar("T", bound=type[Any])


def register(kind: str, joins: bool = False) -> Callable[[T], T]:
    """Class decorator: make a draft method known as `kind`.

    Args:
        kind: its name.
        joins: the one method that a list of drafts means; it has a class method `of(parts)`.
    """

    def add(cls: T) -> T:
        if _METHODS.get(kind, cls) is not cls:
            raise ConfigError(f"draft method {kind!r} is already {_METHODS[kind].__qualname__}; choose another name")
        cls.kind = kind
        _METHODS[kind] = cls
        if joins and kind not in _JOINING:
            _JOINING.append(kind)
        return cls

    return add


def kinds() -> list[str]:
    """All known draft methods, sorted."""
    importlib.import_module(_BUILT_IN)
    return sorted(_METHODS)


def method(kind: str) -> type[Any]:
    """The class of a draft method.

    Raises:
        ConfigError: no such method; the message lists the known ones.
    """
    known = kinds()
    if kind not in _METHODS:
        raise ConfigError(f"no draft method is called {kind!r}; known methods: {', '.join(known)}")
    return _METHODS[kind]


def joining() -> type[Any]:
    """The class of the method that a list of drafts means."""
    kinds()
    return _METHODS[_JOINING[0]]


def ready() -> list[str]:
    """Methods that a bare name makes: without training, and without anything to be named after a colon."""
    untrained = [kind for kind in kinds() if not issubclass(_METHODS[kind], DraftHead)]
    return [kind for kind in untrained if getattr(_METHODS[kind], "by_name", True)]
