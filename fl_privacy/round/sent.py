"""What a site has sent, on its own disk: the same model must not serve to compare two cohorts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from fl_privacy.errors import FederationError, require
from fl_privacy.files import append, locked, make_folder, sync_folder, whole_lines
from fl_privacy.round.terms import Terms

FOLDER = "rounds"
DENIED = "PERMISSION_DENIED"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Sent:
    """One line per attempt and run, in a site's folder; in memory only for a site without one."""

    def __init__(self, state: Path | None) -> None:
        self._folder = state / FOLDER if state else None
        self._seen: dict[str, list[dict[str, Any]]] = {}
        self._sizes: dict[str, int] = {}

    def check(self, terms: Terms, void: Set[str], journals: Sequence[str] = ()) -> None:
        """Refuse a second cohort for a model, unless the first one's attempts are void: nothing of them left.

        Only the `journals` that the first one was opened in can tell: others have lost what they released. They could
        release the same cohort again with one site more or less, unless every site had to be there both times.
        """
        for line in self._lines(terms.run):
            same = line["nonce"] == terms.nonce.hex()
            require(same, "nonce: this site took part in another run of this name", DENIED)
            other = (line["model"], line["farewell"]) == (terms.model.hex(), False) and not terms.farewell
            void_there = line["attempt"] in void and line.get("journals", []) == list(journals)
            free = not other or line["root"] == terms.root.hex() or void_there
            require(free, "cohort: this site sent its update for this model to another one, which is not void", DENIED)
            everybody = terms.quorum == terms.cohort and line.get("whole", False) and line["root"] == terms.root.hex()
            kept = everybody or not _lost(line, terms, journals)
            fix = "start a new run; with quorum at the cohort, a run goes on"
            require(
                kept, f"journal: a middleware lost its own, and could release this model for other sites; {fix}", DENIED
            )

    def keep(self, terms: Terms, journals: Sequence[str] = ()) -> None:
        """On the disk when this returns, before anything is sent."""
        line: dict[str, Any] = {"nonce": terms.nonce.hex(), "model": terms.model.hex(), "root": terms.root.hex()}
        line |= {"attempt": terms.name, "farewell": terms.farewell > 0, "journals": list(journals)}
        line["whole"] = terms.quorum == terms.cohort
        known = self._lines(terms.run)
        if line in known:
            return
        if self._folder is None:
            known.append(line)
            return
        path = self._path(terms.run)
        try:
            make_folder(self._folder)
            with locked(path.with_suffix(".lock")):
                end = sum(len(one) + 1 for one in whole_lines(path.read_bytes())) if path.exists() else 0
                append(path, end, json.dumps(line).encode() + b"\n")
                sync_folder(self._folder)
        except OSError as error:
            raise FederationError(f"state {path}: {error.strerror}; free some disk space, nothing was sent") from None

    def _lines(self, run: str) -> list[dict[str, Any]]:
        """Read again only if another process of the site wrote to it."""
        if self._folder is None:
            return self._seen.setdefault(run, [])
        path = self._path(run)
        size = path.stat().st_size if path.exists() else 0
        if self._sizes.get(run) != size:
            data = path.read_bytes() if size else b""
            try:
                self._seen[run] = [json.loads(line) for line in whole_lines(data)]
            except ValueError:
                raise FederationError(f"state {path}: damaged; restore it from a backup, nothing was sent") from None
            self._sizes[run] = size
        return self._seen.setdefault(run, [])

    def _path(self, run: str) -> Path:
        assert self._folder is not None
        require(_NAME.fullmatch(run) is not None, "run: letters, digits, dots and dashes only")
        return self._folder / f"{run}.jsonl"


def _lost(line: dict[str, Any], terms: Terms, journals: Sequence[str]) -> bool:
    """Whether a middleware that got something for this model has another journal now; one that is gone has none."""
    updates = not (terms.farewell or line["farewell"])
    if line["model"] != terms.model.hex() or not (updates or terms.counts):
        return False
    return any(
        before and now and before != now for before, now in zip(line.get("journals", []), journals, strict=False)
    )
