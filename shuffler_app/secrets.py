"""The keys that mix an attempt, on the shuffler's disk until the server has the result.

A release that breaks off is repeated as the same bytes, also by a restarted shuffler: other permutations or fresh noise
over the same updates would show more of them.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fl_privacy.crypto import keys
from fl_privacy.errors import ProtocolError, require
from fl_privacy.files import replace

NONCE = 12
KEPT = 16  # interrupted releases


class MixingKeys:
    """One file per attempt, encrypted under a key that is derived from the shuffler's own."""

    def __init__(self, folder: Path, own: bytes) -> None:
        self._folder = folder / "mixing"
        self._cipher = AESGCM(keys.derive(own, "", 0, "", "mixing keys"))

    def of(self, attempt: str) -> bytes:
        """The attempt's key: the same one whenever it is asked for, and on the disk when this returns."""
        path = self._folder / attempt
        try:
            data = path.read_bytes()
            return self._cipher.decrypt(data[:NONCE], data[NONCE:], attempt.encode())
        except FileNotFoundError:
            pass
        except (InvalidTag, ValueError):
            raise ProtocolError("DATA_LOSS", f"mixing key {path.name}: damaged; open a new attempt") from None
        key, nonce = keys.fresh(), os.urandom(NONCE)
        self._folder.mkdir(exist_ok=True, mode=0o700)
        replace(path, nonce + self._cipher.encrypt(nonce, key, attempt.encode()), mode=0o600)
        self._trim()
        return key

    def check(self, attempt: str) -> None:
        """Refuse to mix an attempt again whose key is gone: another one would show more of the same updates."""
        there = (self._folder / attempt).exists()
        require(there, "attempt: the key that mixed it is gone; open a new one", "FAILED_PRECONDITION")

    def forget(self, attempt: str) -> None:
        (self._folder / attempt).unlink(missing_ok=True)

    def _trim(self) -> None:
        """Drop the oldest keys: of releases that nobody asked for again."""
        found = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in found[:-KEPT]:
            path.unlink(missing_ok=True)
