"""What a site has signed about an attempt whose sums are checked, on its own disk: it never says two different things.

Two roots in one attempt would convict the site. Answers to two challenges would show more than their masks hide: a site
opens its nonce for one set of sums, which with the nonces of the others gives one challenge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from fl_privacy.errors import FederationError, require
from fl_privacy.files import append, locked, make_folder, sync_folder, whole_lines
from fl_privacy.mix.evidence import Commitment

FOLDER = "mixes"
DENIED = "PERMISSION_DENIED"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Spoken:
    """One file per run, in memory only for a site without a folder."""

    def __init__(self, state: Path | None) -> None:
        self._folder = state / FOLDER if state else None
        self._lines: dict[str, list[dict[str, str]]] = {}

    def commits(self, run: str, made: Commitment) -> Commitment:
        """The commitment as it was first signed; refuses another root in the same attempt."""
        before = self._once(run, {"attempt": made.attempt, "root": made.root, "signature": made.signature})
        return made.model_copy(update={"signature": before["signature"]})

    def opens(self, run: str, attempt: str, sums: str) -> None:
        """Before the nonce is opened for these sums; refuses others in the same attempt."""
        self._once(run, {"attempt": attempt, "sums": sums})

    def _once(self, run: str, line: dict[str, str]) -> dict[str, str]:
        """The line that is kept of this kind in this attempt, which says the same."""
        require(_NAME.fullmatch(run) is not None, "run: letters, digits, dots and dashes only")
        if self._folder is None:
            lines = self._lines.setdefault(run, [])
            if (before := _said(lines, line)) is None:
                lines.append(line)
            return before or line
        path = self._folder / f"{run}.jsonl"
        try:
            make_folder(self._folder)
            with locked(path.with_suffix(".lock")):  # another process of this site may be about to say something else
                return self._kept(path, line)
        except OSError as error:
            raise FederationError(f"state {path}: {error.strerror}; free some disk space, nothing was sent") from None

    def _kept(self, path: Path, line: dict[str, str]) -> dict[str, str]:
        """On the disk when this returns, before anything is sent."""
        texts = list(whole_lines(path.read_bytes())) if path.exists() else []
        try:
            before = _said([json.loads(text) for text in texts], line)
        except ValueError:
            raise FederationError(f"state {path}: damaged; restore it from a backup, nothing was sent") from None
        if before is None:
            append(path, sum(len(text) + 1 for text in texts), json.dumps(line).encode() + b"\n")
            sync_folder(path.parent)
        return before or line


def _said(lines: Iterable[dict[str, str]], line: dict[str, str]) -> dict[str, str] | None:
    """The line of this kind about this attempt, if there is one; refuses one that says something else."""
    what = "root" if "root" in line else "sums"
    for kept in lines:
        if kept["attempt"] == line["attempt"] and what in kept:
            same = kept[what] == line[what]
            require(same, f"{what}: this site has signed for others in this attempt; nothing is sent", DENIED)
            return kept
    return None
