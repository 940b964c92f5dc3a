"""Choices by name: those of this package, and those that installed packages add through Python entry points."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, distributions, entry_points, version
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
    package: str  # the distribution it comes from
    version: str
    problem: str = ""  # why it cannot be used


class Registry(Generic[T]):
    """Name to object. Modules are imported when a name is asked for, so that listing names costs nothing.

    An installed package cannot replace a choice of ours: our own names come first. What it adds must be a `base`, or a
    class of that kind.
    """

    def __init__(self, group: str, ours: Mapping[str, str], base: type | None = None) -> None:
        self.group = group
        self._ours = dict(ours)
        self._base = base
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
        points = _installed(self.group).get(name, ())
        if not points:
            what = self.group.rpartition(".")[2]
            raise ConfigError(f"{what}: {name!r} is unknown; use one of {', '.join(self.names())}")
        if len(points) > 1:
            packages = " and ".join(sorted({" ".join(_package(point)) for point in points}))
            raise ConfigError(f"plug-in {name!r}: comes from {packages}; uninstall all but one")
        return self._load(points[0])

    def _load(self, point: EntryPoint) -> T:
        where = f"plug-in {point.name!r} of {' '.join(_package(point))}"
        try:
            loaded: T = point.load()
        except Exception as error:  # whatever a stranger's module raises
            raise ConfigError(f"{where}: {type(error).__name__}: {error}") from None
        kind = loaded if isinstance(loaded, type) else type(loaded)
        if self._base is not None and not issubclass(kind, self._base):
            raise ConfigError(f"{where}: {point.value} is not a {self._base.__name__}")
        return loaded

    def plugins(self) -> list[Plugin]:
        """Where every choice comes from. Those of other packages are loaded, to say whether they can be used."""
        found = [Plugin(self.group, name, target, HERE, version(HERE)) for name, target in self._ours.items()]
        for name, points in sorted(_installed(self.group).items()):
            problem = f"{HERE} has one of this name, which is used" if name in self._ours else self._problem(name)
            found += [Plugin(self.group, name, point.value, *_package(point), problem) for point in points]
        return found

    def _problem(self, name: str) -> str:
        try:
            self.get(name)
        except ConfigError as error:
            return str(error)
        return ""


def resolve(target: str) -> Any:
    """What `module:attribute` names, imported now."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _installed(group: str) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return found


def _package(point: EntryPoint) -> tuple[str, str]:
    """Name and version."""
    return (point.dist.name, point.dist.version) if point.dist else ("unknown", "")


def packages() -> dict[str, str]:
    """The other packages that add choices, with their versions: a run's results depend on them too."""
    adding = (d for d in distributions() if any(p.group.startswith("fl_privacy.") for p in d.entry_points))
    return {package.name: package.version for package in adding}
