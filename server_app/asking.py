"""Attempts as the server makes them: their terms, and the last one on its disk for a run that resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fl_privacy.config import Federation
from fl_privacy.files import replace
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.pki import load_key
from fl_privacy.identity.signing import fingerprint
from fl_privacy.round.cohort import Cohort, salt_of
from fl_privacy.round.terms import Terms
from fl_privacy.routes.ends import Ask
from fl_privacy.vector import Layout

FILE = "attempt.json"


class Asked(BaseModel):
    """The last attempt that was asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    round: int
    number: int
    cohort: tuple[str, ...]
    counts: int
    farewell: int
    best: int
    name: str

    @property
    def wanted(self) -> dict[str, int]:
        return {"counts": self.counts, "farewell": self.farewell, "best": self.best}


class Asking:
    """Makes the terms of every attempt from what the server holds."""

    def __init__(
        self, federation: Federation, layout: Layout, keys: Keyring, run: str, nonce: bytes, folder: Path
    ) -> None:
        self._federation, self._layout, self._run, self._nonce = federation, layout, run, nonce
        self._secret, self._roster = keys.key_file.read_bytes(), keys.roster()
        self._own = fingerprint(load_key(keys.key_file).public_key())
        self._path = folder / FILE
        self._last = _read(self._path)

    def make(self, round: int, cohort: Sequence[str], number: int, wanted: dict[str, int], model: bytes) -> Ask:
        """An attempt at a round that starts from the model with this digest."""
        asked = {"counts": 0, "farewell": 0, "best": 0, **wanted}
        salt = salt_of(self._secret, self._run, model)
        floor, quorum = self._federation.floor, min(self._federation.quorum, len(cohort))
        terms = Terms(
            run=self._run,
            nonce=self._nonce,
            round=round,
            number=number,
            federation=self._federation.digest,
            roster=self._roster.digest,
            model=model,
            root=Cohort(cohort, salt).root,
            cohort=len(cohort),
            organisations=self._roster.organisations(cohort),
            quorum=floor if asked["farewell"] else quorum,  # a farewell is for whoever is there
            layout=self._layout.digest,
            recipient=self._own,
            **asked,
        )
        return Ask.of(terms, list(cohort), salt)

    def keep(self, ask: Ask) -> bool:
        """On the disk when this returns; whether this is another attempt than the last one."""
        terms = ask.terms
        facts = {name: getattr(terms, name) for name in ("round", "number", "counts", "farewell", "best", "name")}
        made, before = Asked(cohort=tuple(ask.cohort), **facts), self._last
        if made != before:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace(self._path, made.model_dump_json().encode())
            self._last = made
        return before is None or before.name != made.name

    def unfinished(self, round: int, farewell: int, present: Sequence[str], quorum: int) -> Asked | None:
        """The attempt at this round that the server was killed in, if enough of its sites are here to complete it."""
        last = self._last
        if last is None or (last.round, last.farewell) != (round, farewell):
            return None
        return last if len(set(last.cohort) & set(present)) >= min(quorum, len(last.cohort)) else None


def _read(path: Path) -> Asked | None:
    try:
        return Asked.model_validate(json.loads(path.read_text()))
    except (OSError, ValueError, ValidationError):
        return None
