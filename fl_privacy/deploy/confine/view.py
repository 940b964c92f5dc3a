"""A file system of its own: a process sees the named paths at their places, and nothing else exists for it.

Landlock forbids opening other files, but before version 9 not connecting to Unix sockets by their path (an agent's,
say), and never changing the modes of files that belong to the same user. What is not there can be neither reached nor
changed. This needs a mount namespace: root makes one, and others do where the kernel permits them user namespaces.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from fl_privacy.deploy.confine import kernel

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH = 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY = 1
SCAFFOLD = Path("/sys")  # covered while the new root is built; whatever is in it has been taken hold of before


class _Attributes(ctypes.Structure):
    """struct mount_attr"""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def enter(read: Iterable[Path], write: Iterable[Path]) -> None:
    """See only these from now on, those to `read` read-only. OSError if this is not permitted: then nothing changed."""
    _unshare()
    _mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    trees: dict[Path, int] = {}
    try:
        for paths, attributes in ((write, 0), (read, MOUNT_ATTR_RDONLY)):
            for path in paths:
                # Programs use the path that they were given, or ask where it leads.
                for place in {path.absolute(), path.resolve()}:
                    if place.exists() and place not in trees:
                        trees[place] = _clone(place, attributes)
        _mount("tmpfs", SCAFFOLD, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
        try:
            _build(trees)
        except OSError:
            kernel.checked(kernel.libc().umount2(os.fsencode(SCAFFOLD), MNT_DETACH))
            raise
    finally:
        for handle in trees.values():
            os.close(handle)


def _unshare() -> None:
    """Namespaces of our own. Only root needs no user namespace; in one, everybody keeps their own number."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.checked(kernel.libc().unshare(CLONE_NEWNS | CLONE_NEWIPC | (CLONE_NEWUSER if uid else 0)))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)


def _build(trees: dict[Path, int]) -> None:
    """Put everything in its place, folders before what lies in them, and make that the root."""
    before = os.umask(0o022)
    try:
        for path in sorted(trees):
            target = SCAFFOLD / path.relative_to("/")
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            empty = ctypes.c_char_p(b"")
            kernel.syscall(kernel.MOVE_MOUNT, trees[path], empty, AT_FDCWD, _name(target), MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.umask(before)
    _set(AT_FDCWD, _name(SCAFFOLD), MOUNT_ATTR_RDONLY, 0)
    os.chdir(SCAFFOLD)
    # Old and new root in one place: the old one then lies on top, and is taken off.
    kernel.syscall(kernel.number("pivot_root"), _name(Path(".")), _name(Path(".")))
    kernel.checked(kernel.libc().umount2(b".", MNT_DETACH))
    os.chdir("/")


def _clone(path: Path, attributes: int) -> int:
    """Take hold of a path and everything mounted beneath it."""
    handle = kernel.syscall(kernel.OPEN_TREE, AT_FDCWD, _name(path), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE)
    if attributes:
        _set(handle, ctypes.c_char_p(b""), attributes, AT_EMPTY_PATH | AT_RECURSIVE)
    return handle


def _set(handle: int, path: ctypes.c_char_p, attributes: int, flags: int) -> None:
    given = _Attributes(attributes)
    kernel.syscall(kernel.MOUNT_SETATTR, handle, path, flags, ctypes.byref(given), ctypes.sizeof(given))


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    what, where, how = source.encode(), os.fsencode(target), options.encode()
    kernel.checked(kernel.libc().mount(what, where, kind.encode(), ctypes.c_ulong(flags), how))


def _name(path: Path) -> ctypes.c_char_p:
    return ctypes.c_char_p(os.fsencode(path))
