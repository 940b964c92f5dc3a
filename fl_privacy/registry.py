"""Choices by name: those of this package, and those that installed packages add through Python entry points."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from fl_privacy.errors import ConfigError

T = TypeVar("T")
HERE = "fl-privacy"


@dataclass(frozen=True)
class Plugin:
    """One choice as `fl-privacy plugins` lists it."""

    group: str
    name: str
    target: str  # module:attribute
    package: str  # the distribution it comes from, with its version


class Registry(Generic[T]):
    """Name to object. Modules are imported when a name is asked for, so that listing names costs nothing.

    An installed package cannot replace a choice of ours: our own names come first.
    """

    def __init__(self, group: str, ours: Mapping[str, str]) -> None:
        self.group = group
        self._ours = dict(ours)
        self._added: dict[str, T] = {}

    def add(self, name: str, choice: T) -> None:
        """Register an object of this process, for tests and notebooks."""
        self._added[name] = choice

    def remove(self, name: str) -> None:
        self._added.pop(name, None)

    def names(self) -> list[str]:
        return list(dict.fromkeys((*self._ours, *self._added, *_installed(self.group))))

    def ours(self, prefix: str = "") -> list[str]:
        """The names of this package's own choices."""
        return [name for name in self._ours if name.startswith(prefix)]

    def __contains__(self, name: object) -> bool:
        return name in self._ours or name in self._added or name in _installed(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def get(self, name: str) -> T:
        """The choice of this name; an unknown name and a plug-in that cannot be loaded are one-line errors."""
        if name in self._added:
            return self._added[name]
        if name in self._ours:
            found: T = resolve(self._ours[name])
            return found
        point = _installed(self.group).get(name)
        if point is None:
            what = self.group.rpartition(".")[2]
            raise ConfigError(f"{what}: {name!r} is unknown; use one of {', '.join(self.names())}")
        try:
            loaded: T = point.load()
        except Exception as error:  # whatever a stranger's module raises
            raise ConfigError(f"plug-in {name!r} of {_package(point)}: {type(error).__name__}: {error}") from None
        return loaded

    def plugins(self) -> list[Plugin]:
        """Where every choice comes from."""
        from importlib.metadata import version

        ours = [Plugin(self.group, name, target, f"{HERE} {version(HERE)}") for name, target in self._ours.items()]
        return ours + [
            Plugin(self.group, name, point.value, _package(point))
            for name, point in sorted(_installed(self.group).items())
            if name not in self._ours
        ]


def resolve(target: str) -> Any:
    """What `module:attribute` names, imported now."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _installed(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
