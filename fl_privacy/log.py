"""Structured events, one JSON line each: run, round and role, never a key, an update or a record."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Log:
    """The event log of one process: a file, or standard error, which its launcher sends where it likes."""

    def __init__(self, role: str, path: Path | None = None) -> None:
        self.role = role
        self._out = path.open("a", encoding="utf-8") if path else sys.stderr

    def __call__(self, event: str, **fields: Any) -> None:
        line = {"time": round(time.time(), 3), "role": self.role, "event": event, **fields}
        self._out.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")
        self._out.flush()
