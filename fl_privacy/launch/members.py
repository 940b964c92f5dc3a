"""The SuperLink's members: the SuperNodes whose public keys lie in its kit's `nodes/`, and no others."""

from __future__ import annotations

from pathlib import Path

import httpx
from cryptography.hazmat.primitives import serialization

from fl_privacy.launch.flower import Control
from fl_privacy.log import Log

MAX_KEY = 4096


def keys_in(folder: Path, log: Log) -> dict[bytes, str]:
    """Public key to name, of every readable NAME.pub."""
    found: dict[bytes, str] = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            data = path.read_bytes()[:MAX_KEY]
            key = serialization.load_pem_public_key(data)
        except (OSError, ValueError) as error:
            log("refused", reason=f"{path.name}: not a public key ({error}); take it from the site's signed request")
            continue
        made = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        found[made] = path.stem
    return found


class Members:
    """Keeps Flower's list in step with the folder: joining is adding a file, removing is deleting it."""

    def __init__(self, control: Control, folder: Path, log: Log) -> None:
        self._control, self._folder, self._log = control, folder, log
        self._seen: tuple[tuple[str, float], ...] | None = None

    def keep(self) -> None:
        """Register who is new, unregister who is gone; an unreachable SuperLink is asked at the next call."""
        now = tuple((path.name, path.stat().st_mtime) for path in sorted(self._folder.glob("*.pub")))
        if now == self._seen:
            return
        try:
            wanted, there = keys_in(self._folder, self._log), self._control.nodes()
            for key in wanted.keys() - there.keys():
                self._control.register(key, wanted[key])
                self._log("joined", site=wanted[key])
            for key in there.keys() - wanted.keys():
                self._control.unregister(there[key])
                self._log("removed", node=there[key])
            self._seen = now
        except httpx.HTTPError as error:
            self._log("members", reason=type(error).__name__)
