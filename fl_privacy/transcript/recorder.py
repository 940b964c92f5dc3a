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
from fl_privacy.transcript.heads import signed_head
from fl_privacy.transcript.run import MANIFEST, load_manifest
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
        nonce: str = "",
    ) -> None:
        """Write what was received in one attempt at a round; when it returns, the record is on the disk.

        `nonce` is the run's; without it, it is read from the manifest if the view lies in the run's own folder.
        """
        with self._lock:
            self._open(run, nonce).record(round, attempt, arrays, tiers, events)

    def head(self, run: str) -> bytes | None:
        """The signed head of the run's view, for the server to pin; None if nothing is recorded."""
        with self._lock:
            return signed_head(self._folder(run))

    def _folder(self, run: str) -> Path:
        return Path(str(self._place).replace(RUN, check_name("run", run)))

    def _open(self, run: str, nonce: str) -> ViewWriter:
        known = self._writer
        if self._reopen or known is None or known.run != run or (nonce and known.nonce != nonce):
            folder = self._folder(run)
            key, certificate = load_key(self._keys.key_file), self._keys.certificate_file.read_bytes()
            given = nonce or _nonce_beside(folder)
            self._writer = ViewWriter(folder, self._observer, run, key, certificate, given)
        assert self._writer is not None
        return self._writer


def _nonce_beside(folder: Path) -> str:
    """The nonce in the manifest of the run that a view lies in; empty where the party keeps its views elsewhere."""
    run = folder.parent.parent
    return str(load_manifest(run)[0].get("nonce", "")) if (run / MANIFEST).exists() else ""
