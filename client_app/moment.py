"""When a site that sends nothing in a round says so: when its update would have come, whatever the reason."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path

from fl_privacy.files import write_public

FILE = "usual"  # in a site's state folder: how many seconds its last round took
CHANGED = 0.25  # a file that is less wrong than this stays as it is
# Before its first completed round a site does not know how long one takes, and it does not train for a round that it
# refuses. All it knows is that the deadline leaves time for a round; the others should not wait for much of it.
FIRST_PART, FIRST_MOST = 1 / 4, 5.0


class Moment:
    """Kept on the disk: the first refusal after a restart is not noticed by its time either."""

    def __init__(self, state: Path | None, deadline: float) -> None:
        self._file, self._most = state / FILE if state else None, deadline / 2
        self._first = min(deadline * FIRST_PART, FIRST_MOST)
        self._usual = self._kept = self._read()

    def learn(self, seconds: float) -> None:
        """A round with an update took so long."""
        self._usual = seconds
        if self._file is None or (self._kept and abs(seconds / self._kept - 1) < CHANGED):
            return
        with suppress(OSError):  # it is only about time
            write_public(self._file, f"{seconds:.3f}\n".encode())
            self._kept = seconds

    def wait(self, began: float) -> None:
        """Wait for it in a round that began then, by the monotonic clock."""
        usual = self._first if self._usual is None else min(self._usual, self._most)
        time.sleep(max(0.0, began + usual - time.monotonic()))

    def _read(self) -> float | None:
        with suppress(OSError, ValueError):
            found = float(self._file.read_text()) if self._file else math.nan
            return found if 0 <= found < math.inf else None
        return None
