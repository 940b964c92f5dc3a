"""For tests: what a disk may hold if the process or the machine stops between any two file operations, or within one.

`recorded` runs code and notes its file operations. `crashes` gives every folder that a crash could leave behind: at
each byte of each write and before each other operation, if the process was killed (everything it did is there) and if
the power was cut (what was not synced may be missing, empty or zeros; names that were not synced may be older ones).
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from fl_privacy.files import PART

Tree = dict[str, bytes | None]  # content by path; None: a folder


class Event(NamedTuple):
    """One file operation; `node` is the file or folder that it changes."""

    kind: str
    node: int
    name: str = ""
    other: int = 0
    data: bytes = b""
    at: int = 0


@dataclass
class Node:
    """A file or a folder: as it is now, and what of it is certainly on the disk."""

    content: bytes | None = b""
    synced: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    older: list[dict[str, int]] = field(default_factory=lambda: [{}])  # since the folder was synced


class Disk:
    """All nodes; number 0 is the folder in which everything happens."""

    def __init__(self) -> None:
        self.nodes = {0: Node(None)}

    def apply(self, event: Event) -> None:
        node = self.nodes[event.node]
        if event.kind == "sync":
            node.synced, node.older = node.content or b"", [dict(node.names)]
        elif event.kind == "cut":
            node.content = (node.content or b"")[: event.at]
        elif event.kind == "write":
            before = node.content or b""
            node.content = before[: event.at] + event.data + before[event.at + len(event.data) :]
        elif event.kind != "done":
            if event.kind in ("file", "folder"):
                self.nodes[event.other] = Node(None if event.kind == "folder" else b"")
            if event.kind == "drop":
                node.names.pop(event.name)
            else:
                node.names[event.name] = event.other
            node.older.append(dict(node.names))

    def killed(self) -> Tree:
        return self._tree(lambda node: node.names, lambda node: node.content or b"")

    def cut(self) -> Iterator[Tree]:
        """After a power cut: older names or the present ones, with each kind of damage to what was not synced."""
        for age in range(max(len(node.older) for node in self.nodes.values())):
            for damage in DAMAGES:
                yield self._tree(partial(_names, age), damage)

    def _tree(self, names: Callable[[Node], dict[str, int]], content: Callable[[Node], bytes]) -> Tree:
        found: Tree = {}

        def walk(number: int, path: str) -> None:
            for name, below in names(self.nodes[number]).items():
                node = self.nodes[below]
                found[path + name] = None if node.content is None else content(node)
                if node.content is None:
                    walk(below, f"{path}{name}/")

        walk(0, "")
        return found


def _names(age: int, folder: Node) -> dict[str, int]:
    return folder.older[min(age, len(folder.older) - 1)]


def _zeros(node: Node) -> bytes:
    return node.synced + b"\0" * (len(node.content or b"") - len(node.synced))


def _half_zeros(node: Node) -> bytes:
    """The first of two blocks is missing."""
    rest = (node.content or b"")[len(node.synced) :]
    return node.synced + b"\0" * (len(rest) // 2) + rest[len(rest) // 2 :]


DAMAGES: tuple[Callable[[Node], bytes], ...] = (
    lambda node: node.content or b"",
    lambda node: node.synced,
    _zeros,
    _half_zeros,
)


class Recording:
    """Notes the operations of this process below a folder, while they really happen."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.events: list[Event] = []
        self._real = {name: getattr(os, name) for name in PATCHED}
        self._numbers: dict[int, int] = {os.stat(root).st_ino: 0}
        self._handles: dict[int, tuple[int, bool]] = {}  # the node, and whether it is appended to
        self._places: dict[int, int] = {}
        self._next = 1
        if disk is not None:
            self._next = max(disk.nodes) + 1
            self._known(root, disk, 0)

    def _known(self, folder: Path, disk: Disk, number: int) -> None:
        for name, below in disk.nodes[number].names.items():
            self._numbers[os.stat(folder / name).st_ino] = below
            if disk.nodes[below].content is None:
                self._known(folder / name, disk, below)

    def done(self, name: str) -> None:
        """The code has acknowledged something."""
        self.events.append(Event("done", 0, name))

    def _folder(self, path: Any) -> int:
        return self._numbers[os.stat(Path(path).parent).st_ino]

    def _new(self, kind: str, path: Any) -> int:
        number, self._next = self._next, self._next + 1
        self._numbers[os.stat(path).st_ino] = number
        self.events.append(Event(kind, self._folder(path), Path(path).name, number))
        return number

    def open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        new = flags & os.O_CREAT and not os.path.lexists(path)
        handle: int = self._real["open"](path, flags, mode, **more)
        if new:
            self._new("file", path)
        number = self._numbers[os.fstat(handle).st_ino]
        if flags & os.O_TRUNC and not new:
            self.events.append(Event("cut", number))
        self._handles[handle], self._places[handle] = (number, bool(flags & os.O_APPEND)), 0
        return handle

    def write(self, handle: int, data: Any) -> int:
        number, appends = self._handles[handle]
        at = os.fstat(handle).st_size if appends else self._places[handle]
        written: int = self._real["write"](handle, data)
        self.events.append(Event("write", number, data=bytes(data[:written]), at=at))
        self._places[handle] += written
        return written

    def fsync(self, handle: int) -> None:
        """Noted, but not done: this disk is never cut off."""
        self.events.append(Event("sync", self._handles[handle][0]))

    def ftruncate(self, handle: int, size: int) -> None:
        self._real["ftruncate"](handle, size)
        self.events.append(Event("cut", self._handles[handle][0], at=size))

    def link(self, old: Any, new: Any) -> None:
        self._real["link"](old, new)
        self.events.append(Event("link", self._folder(new), Path(new).name, self._numbers[os.stat(new).st_ino]))

    def unlink(self, path: Any) -> None:
        self._real["unlink"](path)
        self.events.append(Event("drop", self._folder(path), Path(path).name))

    def replace(self, old: Any, new: Any) -> None:
        """As two operations: nobody looks for the old name."""
        number = self._numbers[os.stat(old).st_ino]
        self._real["replace"](old, new)
        self.events.append(Event("link", self._folder(new), Path(new).name, number))
        self.events.append(Event("drop", self._folder(old), Path(old).name))

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._real["mkdir"](path, mode)
        self._new("folder", path)

    def fdopen(self, handle: int, mode: str) -> Any:
        return _Writer(handle)


PATCHED = ("open", "write", "fsync", "ftruncate", "link", "unlink", "replace", "mkdir", "fdopen")


class _Writer(io.RawIOBase):
    """A file without a buffer, so that every write is noted."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def write(self, data: Any) -> int:
        return os.write(self._handle, data)

    def fileno(self) -> int:
        return self._handle

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._handle)


@contextmanager
def recorded(root: Path, disk: Disk | None = None) -> Iterator[Recording]:
    """Note what happens below `root`, which is empty or holds what `disk` does."""
    found = Recording(root, disk)
    with mock.patch.multiple(os, **{name: getattr(found, name) for name in PATCHED}):
        yield found


class Crash(NamedTuple):
    """What was acknowledged before a crash, and what is there after it."""

    acknowledged: tuple[str, ...]
    tree: Tree


def crashes(events: list[Event]) -> Iterator[Crash]:
    """Every different one. What is in an unfinished file makes no difference: nobody reads it."""
    disk, acknowledged, seen = Disk(), [], set()
    for event in [*events, None]:
        for stage in _stages(disk, event):
            for tree in (stage.killed(), *stage.cut()):
                key = (len(acknowledged), frozenset(item for item in tree.items() if not item[0].endswith(PART)))
                if key not in seen:
                    seen.add(key)
                    yield Crash(tuple(acknowledged), tree)
        if event is not None:
            disk.apply(event)
            acknowledged += [event.name] if event.kind == "done" else []


def _stages(disk: Disk, event: Event | None) -> Iterator[Disk]:
    """The disk before an operation, and for a write after each of its bytes but the last."""
    yield disk
    if event is not None and event.kind == "write":
        for size in range(1, len(event.data)):
            part = copy.copy(disk)
            part.nodes = {**disk.nodes, event.node: copy.copy(disk.nodes[event.node])}
            part.apply(event._replace(data=event.data[:size]))
            yield part


def moments(events: list[Event]) -> Iterator[Disk]:
    """The disk before each operation and after the last."""
    disk = Disk()
    for event in events:
        yield copy.deepcopy(disk)
        disk.apply(event)
    yield disk


def lay_out(tree: Tree, root: Path) -> Path:
    """Make a folder with this content."""
    root.mkdir()
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
    return root
