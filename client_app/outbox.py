"""What a site has made for an attempt, kept on its disk: a resend is the same bytes, whatever broke off in between."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.dp.ledger import LedgerError
from fl_privacy.steps.base import At


def name_of(at: At) -> str:
    """The name that an attempt is kept and charged under."""
    return hashlib.sha256(f"{at.run}\n{at.round}\n{at.attempt}".encode()).hexdigest()


class Outbox:
    """The last update of a site: in memory, and on disk where it was privatised (only noisy bytes go there)."""

    def __init__(self, state: Path | None) -> None:
        self._file = state / "outgoing.npy" if state else None
        self._last: tuple[str, Payload] | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process of a site at a time (a simulation may have two): the second finds what the first has made."""
        if self._file is None:
            yield
            return
        handle = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def find(self, at: At) -> Payload | None:
        """What was made for this very attempt."""
        name = name_of(at)
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        if self._file is None:
            return None
        try:
            with self._file.open("rb") as file:
                if file.read(hashlib.sha256().digest_size) != bytes.fromhex(name):
                    return None
                return np.asarray(np.load(file, allow_pickle=False))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            raise LedgerError(f"state {self._file}: cannot be read ({error}); the attempt is not sent") from None

    def keep(self, at: At, payload: Payload) -> None:
        """Durable when it returns, and readable by the site alone."""
        self._last = (name_of(at), payload)
        if self._file is None:
            return
        draft = self._file.with_suffix(".part")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(bytes.fromhex(self._last[0]))
            np.save(file, payload, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._file)
