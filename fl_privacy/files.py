"""Files that are whole or not there at all, and locks that end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from fl_privacy.errors import LaunchError

PART = ".part"  # what the name of an unfinished file ends with
POLL = 0.1
OTHERS = 0o077  # what group and others may do

Stamp = tuple[tuple[int, int, int], ...]


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = True, unique: bool = False) -> Iterator[BinaryIO]:
    """A file that appears under its name only when all of it is written and, if `durable`, on the disk.

    With `unique`, several processes may write it at once, and the last one wins.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}" if unique else path.name + PART)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
        settle(part, path, durable)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def settle(part: Path, path: Path, durable: bool = True) -> None:
    """Give a finished file its name; if `durable`, file and name are on the disk when this returns."""
    if durable:
        _sync(part)
    part.replace(path)
    if durable:
        _sync(path.parent)


def replace(path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True, unique: bool = False) -> None:
    """Put a file in place as a whole: a reader gets the old one or the new one."""
    with replacing(path, mode=mode, durable=durable, unique=unique) as file:
        file.write(data)


def create(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Make a file that is whole and on the disk before it has its name; False if there is one, which stays."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        _sync(part)
        os.link(part, path)
        made = True
    except FileExistsError:
        made = False
    finally:
        part.unlink(missing_ok=True)
    _sync(path.parent)
    return made


def make_folder(path: Path) -> None:
    """Make a folder and those above it; they are on the disk when this returns."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def write_public(path: Path, data: bytes) -> None:
    """As `replace`, for files that can be made again; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, data, durable=False, unique=True)


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, never for a moment otherwise; an existing one keeps its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o600)
        file.write(data)


def mode_of(path: Path) -> int:
    """Who may do what with a file or folder; 0 if it does not exist."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0


def check_private(path: Path) -> None:
    """Refuse a secret that other users could read."""
    if (mode := mode_of(path)) & OTHERS:
        raise LaunchError(f"{path}: mode {mode:04o} lets other users read it; run chmod 600 {path}")


def append(path: Path, at: int, line: bytes) -> int:
    """Write `line` at offset `at`, over whatever a failed append left there; returns the offset of the next one."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(handle, at)
        write_all(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)
    return at + len(line)


def whole_lines(data: bytes) -> list[bytes]:
    """The lines of a file that lines are appended to, without what a crash left of the last one.

    That has no end, or after a power cut zeros where something was not on the disk yet.
    """
    *lines, rest = data.split(b"\n")
    return lines[:-1] if lines and not rest and b"\0" in lines[-1] else lines


def write_all(handle: int, data: bytes) -> None:
    """Write all of it, however many calls the system needs for it, or raise an OSError."""
    rest = memoryview(data)
    while rest:
        written = os.write(handle, rest)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[written:]


def sync_folder(folder: Path) -> None:
    """See that files made, renamed or removed in a folder stay so after a power cut."""
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(path: Path, flags: int = 0, wait: float | None = None, make: bool = True) -> int:
    """Lock a file, which `make` makes if there is none, or a folder; closing the returned handle releases it.

    BlockingIOError if another process still holds it after `wait` seconds; None waits for ever.
    """
    own = os.O_RDONLY if path.is_dir() else os.O_RDWR | flags | (os.O_CREAT if make else 0)
    handle = os.open(path, own | os.O_CLOEXEC, 0o600)
    until = None if wait is None else time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX if until is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if until is not None and time.monotonic() >= until:
                    raise
                time.sleep(POLL)
    except BaseException:
        os.close(handle)
        raise


@contextmanager
def locked(path: Path, flags: int = 0, wait: float | None = None) -> Iterator[None]:
    """Hold a lock for the block; however the process ends, the lock ends with it."""
    handle = lock(path, flags, wait)
    try:
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def stamp(files: Iterable[Path]) -> Stamp:
    """Differs once a file was written or replaced; a missing file has one too."""
    return tuple(_stamp(file) for file in files)


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def allow_open_files(wanted: int) -> int:
    """Let this process open so many files if the system allows it, and return how many: a connection is one too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def rotate(names: Sequence[Path]) -> None:
    """Every file takes the next name; what bore the last one is deleted."""
    for old, new in reversed(list(pairwise(names))):
        if old.exists():
            old.replace(new)
