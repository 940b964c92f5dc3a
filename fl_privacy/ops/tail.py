"""Reading the event log of a process as it grows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Tail:
    """The JSON lines of a growing log, each returned once; other lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._file = 0, -1

    def poll(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if file.seek(0, os.SEEK_END) < self._offset or number != self._file:
                self._offset, self._file = 0, number  # it was rotated
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [event for line in data[:whole].splitlines() if (event := _event(line)) is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    start = line.find(b'{"time":')
    if start < 0:
        return None
    try:
        event = json.loads(line[start:])
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
