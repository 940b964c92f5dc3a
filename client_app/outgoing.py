"""What leaves a site: privatised once, charged before it is sent, and kept, so that a resend is the same bytes."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_privacy.config import Federation
from fl_privacy.crypto import keys
from fl_privacy.dp.ledger import Ledger, LedgerError
from fl_privacy.dp.mechanism import Mechanism, Train, mechanism
from fl_privacy.dp.policy import Policy, open_ledger
from fl_privacy.errors import LaunchError

Array = NDArray[np.float32]


class Outgoing:
    """The last step of an update at its site. Policy and ledger are the site's own, and fail closed."""

    def __init__(self, federation: Federation, site: str, state: Path | None, records: int = 0) -> None:
        self._federation, self._site = federation, federation.site(site)
        if self._site.policy:
            Policy.load(self._site.policy).check(federation, site)
        self._last: tuple[str, Array] | None = None
        self.charged = False  # whether the last update was charged anew, and not sent before
        self.ledger: Ledger | None = None
        self._mechanism = mechanism(federation, self._site.epsilon, records)
        if self._mechanism is not None:
            if state is None:
                raise LaunchError("state: a site that privatises needs a folder for its ledger; give --state")
            self._box = state / "outgoing.npy"
            self.ledger = open_ledger(federation, site, state)

    @property
    def tier(self) -> str:
        """The privacy label that the update travels under."""
        return self._site.tier if self.ledger is not None else ""

    def prepare(self, run: str, round: int, attempt: str, train: Train) -> Array:
        """The update of an attempt: made once, whatever breaks off in between."""
        name = hashlib.sha256(f"{run}\n{round}\n{attempt}".encode()).hexdigest()
        if attempt and self._last is not None and self._last[0] == name:
            self.charged = False
            return self._last[1]
        if self._mechanism is None or self.ledger is None:
            update = train()
        else:
            with self._alone():
                update = self._private(name, round, train, self._mechanism, self.ledger)
        self._last = (name, update)
        return update

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process of a site at a time (a simulation may have two): the second finds what the first has made."""
        handle = os.open(self._box.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _private(self, name: str, round: int, train: Train, mechanism: Mechanism, ledger: Ledger) -> Array:
        update = self._kept(name)
        if update is None:
            if ledger.holds(name):
                raise LedgerError("ledger: this attempt was charged and its bytes are lost; it cannot be sent again")
            ledger.check(mechanism.charge)  # before the work, not after it
            update = mechanism.release(train, self._key(round))
            self._keep(name, update)
        self.charged = ledger.charge(name, mechanism.charge)
        return update

    def _key(self, round: int) -> bytes:
        """Fresh for every update; seeded only where the federation asks to be repeatable."""
        if not self._federation.reproducible:
            return keys.fresh()
        seed = self._federation.seed.to_bytes(32, "big")
        return keys.derive(seed, self._federation.name, round, self._site.name, "noise")

    def _keep(self, name: str, update: Array) -> None:
        """On disk before it is charged: only noisy bytes, readable by the site alone."""
        draft = self._box.with_suffix(".part")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(bytes.fromhex(name))
            np.save(file, update, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._box)

    def _kept(self, name: str) -> Array | None:
        try:
            with self._box.open("rb") as file:
                if file.read(hashlib.sha256().digest_size) != bytes.fromhex(name):
                    return None
                return np.asarray(np.load(file, allow_pickle=False), np.float32)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            raise LedgerError(f"state {self._box}: cannot be read ({error}); the attempt is not sent") from None
