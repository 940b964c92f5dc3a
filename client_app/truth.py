"""The clean updates of a site, recorded only with `audit: true`, for attacks to be scored."""

from __future__ import annotations

from pathlib import Path

from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.steps.base import At
from fl_privacy.transcript import ViewWriter
from fl_privacy.vector import Vector


class Truth:
    """Writes nothing unless it has a folder."""

    def __init__(self, folder: Path | None, site: str, keys: Keyring) -> None:
        self._folder, self._site, self._keys = folder, site, keys

    @property
    def wanted(self) -> bool:
        return self._folder is not None

    def record(self, at: At, update: Vector) -> None:
        if self._folder is None:
            return
        key, certificate = load_key(self._keys.key_file), self._keys.certificate_file.read_bytes()
        # Opened for every record: in simulation a site moves from one actor to another.
        writer = ViewWriter(self._folder, self._site, at.run, key, certificate)
        writer.record(at.round, at.attempt, {"update": update})
