"""What a middleware has opened, voided and released, on its disk: the rules that must outlive its process.

- For one model of a run, updates of one set of sites are released, ever: the sums of two sets that differ by one site
  would show that site's update. The same holds for counts.
- An attempt that is released again, because its recipient asks again, is released with the same updates.
- Where sites aggregate, one statement is signed in an attempt: two would look like a cheat.
- An attempt whose release has arrived is not opened again: the keys that mixed it are forgotten.
- A void attempt is never released, and the middleware can say so under its signature. Only the journal that an attempt
  was opened in can tell: one that was lost and made again has another `id`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fl_privacy.errors import LaunchError, require
from fl_privacy.files import append, create, sync_folder, whole_lines

FILE = "rounds.jsonl"
MADE, OPENED, VOID, RELEASED, CONFIRMED, SIGNED = "made", "opened", "void", "released", "confirmed", "signed"
CLOSED = "FAILED_PRECONDITION"


class Entry(NamedTuple):
    """An attempt that was opened."""

    run: str
    round: int
    attempt: str
    model: str
    farewell: bool


class Release(NamedTuple):
    """A released attempt: digests of the sites whose updates and whose counts left, and of those updates.

    `bits` says which sites of its cohort these are, to whoever knows the cohort.
    """

    entry: Entry
    members: str
    content: str
    counted: str
    bits: str


class Journal:
    """One line per event, on the disk before the event takes effect, in the middleware's own folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._entries = folder / FILE, dict[str, Entry]()
        self._void, self._confirmed, self._released = set[str](), set[str](), dict[str, Release]()
        self._signed: dict[str, str] = {}
        self._of_model: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._of_round: dict[tuple[str, int, bool], str] = {}  # a released round's model; a farewell is another matter
        self.id = ""  # of a journal that an older version made
        create(self._path, _line({"kind": MADE, "id": secrets.token_hex(16)}), 0o600)
        sync_folder(folder.parent)
        lines = whole_lines(self._path.read_bytes())  # what a line that a crash cut off announces did not happen
        self._end = sum(len(line) + 1 for line in lines)
        for number, line in enumerate(lines, start=1):
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError):
                fix = "restore the file from a backup"
                raise LaunchError(f"journal {self._path}: line {number} is damaged; {fix}") from None

    def open(self, entry: Entry) -> None:
        """Before an attempt is opened. Earlier ones for the same model that were not released become void."""
        require(entry.attempt not in self._void, "attempt: it is void; open a new one", CLOSED)
        require(entry.attempt not in self._confirmed, "attempt: its release has arrived; open a new one", CLOSED)
        before = self._of_round.get((entry.run, entry.round, entry.farewell), entry.model)
        require(before == entry.model, f"round: {entry.round} was released for another model", CLOSED)
        for other in self._of_model[entry.run, entry.model]:
            if other != entry.attempt and self._entries[other].farewell == entry.farewell:
                self.void(other)
        if entry.attempt not in self._entries:
            self._write(kind=OPENED, **entry._asdict())

    def void(self, attempt: str) -> None:
        """Unless it was released: nothing of this attempt leaves, ever."""
        if attempt in self._entries and attempt not in self._void and attempt not in self._released:
            self._write(kind=VOID, attempt=attempt)

    def release(
        self, attempt: str, members: Iterable[str], bits: bytes, content: Iterable[bytes], counted: Iterable[str]
    ) -> bool:
        """Before anything of an attempt leaves; returns whether its counts may leave too.

        `bits` are the members within their cohort, `content` the digests of their updates.
        """
        require(attempt not in self._void, "attempt: it is void; open a new one", CLOSED)
        entry = self._entries[attempt]
        digests = (_digest(members), _digest(part.hex() for part in content), _digest(counted))
        made = Release(entry, *digests, bits.hex())
        earlier = [self._released[a] for a in self._of_model[entry.run, entry.model] if a in self._released]
        for one in earlier:
            sites = entry.farewell or one.entry.farewell or one.members == made.members
            require(sites, "members: this model was released for other sites; no other set is", CLOSED)
            again = one.entry.attempt != attempt or one.content == made.content
            require(again, "attempt: it was released with other updates; open a new one", CLOSED)
        free = all(_allows(one, made) for one in earlier)
        if attempt not in self._released:
            made = made if free else made._replace(counted=NOBODY)
            self._write(kind=RELEASED, attempt=attempt, **{k: v for k, v in made._asdict().items() if k != "entry"})
        return free

    def sign(self, attempt: str, said: str) -> None:
        """Before a statement about an attempt leaves, whose fingerprint this is."""
        before = self._signed.get(attempt, said)
        require(before == said, "attempt: another statement was signed in it; open a new one", CLOSED)
        if attempt not in self._signed:
            self._write(kind=SIGNED, attempt=attempt, said=said)

    def confirm(self, attempt: str) -> None:
        """The release of an attempt has arrived, if there was one: nothing of it leaves again."""
        if attempt in self._released and attempt not in self._confirmed:
            self._write(kind=CONFIRMED, attempt=attempt)

    def released(self, attempt: str) -> bytes | None:
        """Which sites of its cohort an attempt was released with, as bits; None if it was not released."""
        return bytes.fromhex(self._released[attempt].bits) if attempt in self._released else None

    def released_for(self, run: str, model: str) -> bytes | None:
        """The bits with which updates of this model were released, in whichever attempt; None if they were not."""
        named = (self._released[one] for one in self._of_model.get((run, model), ()) if one in self._released)
        return next((bytes.fromhex(one.bits) for one in named if not one.entry.farewell), None)

    def voided(self, run: str, model: str) -> list[str]:
        """The void attempts at rounds that start from this model."""
        return [attempt for attempt in self._of_model.get((run, model), ()) if attempt in self._void]

    def _write(self, **fields: Any) -> None:
        try:
            self._end = append(self._path, self._end, _line(fields))
        except OSError as error:
            require(False, f"journal: {error.strerror}; free some disk space", "RESOURCE_EXHAUSTED")
        self._apply(fields)

    def _apply(self, fields: dict[str, Any]) -> None:
        _EVENTS[fields["kind"]](self, fields)

    def _made(self, fields: dict[str, Any]) -> None:
        self.id = str(fields["id"])

    def _opened(self, fields: dict[str, Any]) -> None:
        entry = Entry(**{name: fields[name] for name in Entry._fields})
        self._entries[entry.attempt] = entry
        self._of_model[entry.run, entry.model].append(entry.attempt)

    def _voided(self, fields: dict[str, Any]) -> None:
        self._void.add(self._entries[fields["attempt"]].attempt)

    def _has_signed(self, fields: dict[str, Any]) -> None:
        self._signed[self._entries[fields["attempt"]].attempt] = str(fields["said"])

    def _has_confirmed(self, fields: dict[str, Any]) -> None:
        self._confirmed.add(self._entries[fields["attempt"]].attempt)

    def _has_released(self, fields: dict[str, Any]) -> None:
        entry = self._entries[fields["attempt"]]
        digests = {name: str(fields[name]) for name in Release._fields if name != "entry"}
        self._released[entry.attempt] = Release(entry, **digests)
        self._of_round[entry.run, entry.round, entry.farewell] = entry.model


_EVENTS = {
    MADE: Journal._made,
    OPENED: Journal._opened,
    VOID: Journal._voided,
    RELEASED: Journal._has_released,
    CONFIRMED: Journal._has_confirmed,
    SIGNED: Journal._has_signed,
}


def _allows(before: Release, made: Release) -> bool:
    """Whether the counts of a release may leave after an earlier one: one set of senders per model and per attempt."""
    if before.counted == made.counted:
        return True
    return before.counted == NOBODY and before.entry.attempt != made.entry.attempt


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode() + b"\n"


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


NOBODY = _digest(())
