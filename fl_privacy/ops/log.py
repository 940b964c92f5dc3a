"""Structured events, one JSON line each: run, round and role, never a key, an update or a record.

Every event goes to standard error, or to a file instead, and the launcher decides where that ends up. `--events FILE`
also keeps them in a file of the role's own that is rotated by size: the record that a compliance officer reads.
"""

from __future__ import annotations

import datetime as dt
import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_privacy.errors import LaunchError
from fl_privacy.files import locked, rotate

SIZE = 10 * 2**20  # bytes of one event file
FILES = 10  # event files to keep, including the current one
LONGEST_TEXT = 500  # characters of one field: a reason may quote a peer
PER_MINUTE = 60  # events that a peer can trigger at will


class EventFile:
    """An append-only file of lines. When full it becomes FILE.1, and FILE.1 becomes FILE.2. Any number may write.

    It is opened for every line, under a lock of its own, so that no thread or process writes to a rotated file.
    """

    def __init__(self, path: Path, size: int = SIZE, files: int = FILES) -> None:
        assert files > 1
        self.path, self.size, self.files = Path(path), size, files
        # Not the event file itself: anyone who can read that could hold a lock on it for ever.
        self._lock = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._lock, os.O_NOFOLLOW):
                os.close(self._open())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise LaunchError(f"events {path}: {error.strerror or error}; choose another --events") from None

    def append(self, line: bytes) -> None:
        """Append the whole line or, with an OSError, nothing."""
        with locked(self._lock, os.O_NOFOLLOW):
            handle = self._open()
            try:
                end = os.fstat(handle).st_size
                if end and end + len(line) > self.size and self._rotated():
                    os.close(handle)
                    handle, end = self._open(), 0
                _write(handle, line, end)
            finally:
                os.close(handle)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(FileExistsError):
            handle = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o640)
            os.fchmod(handle, 0o640)
            return handle
        return os.open(self.path, flags)

    def _rotated(self) -> bool:
        """Rotate; False if that failed, and then the file keeps growing, which loses nothing."""
        names = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self.files))]
        try:
            rotate(names)
        except OSError:
            return False
        return True


def _write(handle: int, line: bytes, end: int) -> None:
    """Write at the end of the file, on a new line even if a crash cut off the last one."""
    if end and os.pread(handle, 1, end - 1) != b"\n":
        line = b"\n" + line
    try:
        if os.write(handle, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):
            os.ftruncate(handle, end)
        raise


class Log:
    """The event log of one process: standard error or a file, and with `events` also a file that is kept."""

    def __init__(self, role: str, path: Path | None = None, events: Path | None = None) -> None:
        self.role = role
        self._out = path.open("a", encoding="utf-8") if path else sys.stderr
        self._guard = threading.Lock()
        self._file: EventFile | None = None
        self._lost = 0
        self._recent: dict[str, tuple[float, int]] = {}
        self.keep(events)

    def keep(self, events: Path | None) -> None:
        """From now on, write events to this file too."""
        if events is not None:
            self._file = EventFile(events)

    def __call__(self, event: str, /, *, own: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Log an event; `own` fields go only to the kept file, which stays with this role's operator."""
        with self._guard:
            self._tell(event, fields)
            self._keep(event, {**fields, **(own or {})})

    def own(self, event: str, /, **fields: Any) -> None:
        """Log an event only to the kept file."""
        with self._guard:
            self._keep(event, fields)

    def rate_limited(self, event: str, /, *, own: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Log an event that a peer can trigger at will: at most 60 a minute, then the number that was left out."""
        began, count = self._recent.get(event, (0.0, 0))
        now = time.monotonic()
        if now - began < 60 and count >= PER_MINUTE:
            self._recent[event] = (began, count + 1)
            return
        if now - began >= 60:
            if count > PER_MINUTE:
                fields["left_out"] = count - PER_MINUTE
            began, count = now, 0
        self._recent[event] = (began, count + 1)
        self(event, own=own, **fields)

    def _tell(self, event: str, fields: Mapping[str, Any]) -> None:
        line = {"time": round(time.time(), 3), "role": self.role, "event": event, **fields}
        with suppress(OSError):
            self._out.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")
            self._out.flush()

    def _keep(self, event: str, fields: Mapping[str, Any]) -> None:
        """A full disk must not stop the role: it is reported once, and later how many events are missing."""
        if self._file is None:
            return
        try:
            if self._lost:
                self._file.append(self._line("events-lost", {"count": self._lost}))
                self._lost = 0
            self._file.append(self._line(event, fields))
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                reason = f"{self._file.path}: {error.strerror or error}; free some space"
                self._tell("events-failing", {"reason": reason})

    def _line(self, event: str, fields: Mapping[str, Any]) -> bytes:
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": now, "role": self.role, "event": event, "run": None, "round": None}
        line |= {name: _plain(value) for name, value in fields.items()}
        return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """A value as JSON, of bounded length."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value[:100]]
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
