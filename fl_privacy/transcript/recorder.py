"""What a long-lived party records: it is started before any run, so the run's name comes with each record."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.roles import RUN
from fl_privacy.transcript.arrays import Tier
from fl_privacy.transcript.events import Event
from fl_privacy.transcript.files import check_name
from fl_privacy.transcript.write import ViewWriter


class RunRecorder:
    """One view per run, at a path with `{run}` in place of the run's name; opened when its first record is written."""

    def __init__(self, place: Path, observer: str, keys: Keyring, reopen: bool = False) -> None:
        """With `reopen`, every record opens its view again: in simulation a site moves between processes."""
        self._place, self._observer, self._keys, self._reopen = place, observer, keys, reopen
        self._writer: ViewWriter | None = None
        self._lock = threading.Lock()

    def record(
        self,
        run: str,
        round: int,
        attempt: int | str,
        arrays: Mapping[str, Any],
        tiers: Sequence[Tier] = (),
        events: Sequence[Event] = (),
    ) -> None:
        """Write what was received in one attempt at a round; when it returns, the record is on the disk."""
        with self._lock:
            self._open(run).record(round, attempt, arrays, tiers, events)

    def _open(self, run: str) -> ViewWriter:
        if self._reopen or self._writer is None or self._writer.run != run:
            folder = Path(str(self._place).replace(RUN, check_name("run", run)))
            key, certificate = load_key(self._keys.key_file), self._keys.certificate_file.read_bytes()
            self._writer = ViewWriter(folder, self._observer, run, key, certificate)
        return self._writer
