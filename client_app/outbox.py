"""A site's update for an attempt, kept on its disk: a resend is the same bytes, whatever failed in between."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fl_privacy.coding import Payload
from fl_privacy.dp.ledger import LedgerError
from fl_privacy.files import locked, replacing
from fl_privacy.scores.form import Counts
from fl_privacy.steps.base import At

NONE = np.empty(0, np.uint64)


def name_of(at: At) -> str:
    """The name under which an attempt is kept and charged."""
    return hashlib.sha256(f"{at.run}\n{at.round}\n{at.attempt}".encode()).hexdigest()


def evaluation_of(at: At) -> str:
    """The name under which an attempt's evaluation is charged."""
    return hashlib.sha256(f"{name_of(at)}\nevaluation".encode()).hexdigest()


class Parcel(NamedTuple):
    """What a site sends for an attempt."""

    payload: Payload
    counts: Counts | None = None


class Outbox:
    """The last parcel of a site: in memory, and on disk where it was privatised (only noisy bytes go there)."""

    def __init__(self, state: Path | None) -> None:
        self._file = state / "outgoing.npy" if state else None
        self._last: tuple[str, Parcel] | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One process of a site at a time (a simulation may have two): the second finds the first one's update."""
        if self._file is None:
            yield
            return
        with locked(self._file.with_suffix(".lock")):
            yield

    def find(self, at: At) -> Parcel | None:
        """What was made for exactly this attempt."""
        name = name_of(at)
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        if self._file is None:
            return None
        try:
            with self._file.open("rb") as file:
                if file.read(hashlib.sha256().digest_size) != bytes.fromhex(name):
                    return None
                payload, counts = (np.asarray(np.load(file, allow_pickle=False)) for _ in range(2))
                return Parcel(payload, counts if counts.size else None)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            raise LedgerError(f"state {self._file}: cannot be read ({error}); the update is not sent") from None

    def keep(self, at: At, parcel: Parcel) -> None:
        """Durable when it returns, and readable by the site alone."""
        name = name_of(at)
        if self._file is not None:
            try:
                with replacing(self._file, mode=0o600) as file:
                    file.write(bytes.fromhex(name))
                    np.save(file, parcel.payload, allow_pickle=False)
                    np.save(file, NONE if parcel.counts is None else parcel.counts, allow_pickle=False)
            except OSError as error:
                problem = f"state {self._file}: {error.strerror or error}"
                raise LedgerError(f"{problem}; nothing was spent or sent, make room on the disk") from None
        self._last = name, parcel
