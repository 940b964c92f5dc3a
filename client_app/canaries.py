"""The records a site trains on in an audit: canaries are among them by a coin that is tossed once per run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from fl_privacy.config import Federation
from fl_privacy.crypto import keys
from fl_privacy.errors import FederationError
from fl_privacy.files import create
from fl_privacy.round.checkpoints import Arrays
from fl_privacy.tasks import canaries
from fl_privacy.tasks.data import Dataset


class Canaries:
    """A site's training records, of which some are canaries if the federation wants any.

    The coins are on the site's disk before they are used: a restarted site, and every process of a simulated one,
    continues a run with the same records.
    """

    def __init__(self, federation: Federation, site: str, data: Dataset, state: Path | None) -> None:
        self._federation, self._site, self._data = federation, site, data
        self._folder = state / "canaries" if state else None
        asked = federation.canaries
        self._rows = canaries.chosen(len(data), asked.fraction, federation.seed, site) if asked else np.empty(0, int)
        self._coins = lru_cache(maxsize=1)(self._toss)
        self.records = lru_cache(maxsize=1)(self._records)

    @property
    def expected(self) -> int:
        """How many records take part, whatever the coins say: noise is planned for it, and a plan is no secret."""
        return canaries.expected(len(self._data), len(self._rows))

    def truth(self, run: str) -> Arrays:
        """Which records are canaries and which of them take part, to score attacks."""
        return {"canaries": self._rows, "included": self._coins(run)} if len(self._rows) else {}

    def _records(self, run: str) -> Dataset:
        """What the site trains on in this run."""
        if not len(self._rows):
            return self._data
        kept = np.ones(len(self._data), bool)
        kept[self._rows] = self._coins(run)
        return self._data.take(np.flatnonzero(kept))

    def _toss(self, run: str) -> canaries.Coins:
        federation, count = self._federation, len(self._rows)
        if federation.reproducible:
            secret = federation.seed.to_bytes(32, "big")
            return canaries.tossed(count, keys.derive(secret, federation.name, 0, self._site, "canaries"))
        fresh = canaries.tossed(count, keys.fresh())
        if self._folder is None:
            return fresh
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / run
        create(path, np.packbits(fresh).tobytes(), mode=0o600)
        kept = np.unpackbits(np.frombuffer(path.read_bytes(), np.uint8))
        if not count <= len(kept) < count + 8:
            raise FederationError(f"canaries: {path} has coins for other records; use the data that the run began with")
        return kept[:count].astype(bool)
