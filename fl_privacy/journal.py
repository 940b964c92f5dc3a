"""A journal: JSON lines in one file, each bound to all before it by a hash. What was acknowledged is never lost.

The file appears with its first line in it. Beside it, `FILE.head` notes how far the journal has come, so that a file
that was deleted, cut or replaced by an older copy is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fl_privacy.errors import FederationError
from fl_privacy.files import create, lock, make_folder, replace, sync_folder, whole_lines, write_all

FORMATS = (1, 2)  # 2 has a nonce, so that no two journals ever have the same head
LONGEST_LINE = 4096
BROKEN = (ValueError, TypeError, KeyError, RecursionError)  # what reading damaged JSON raises


class Head(NamedTuple):
    """How far a journal has come: the number of its entries, and the hash of its last line, which covers them all."""

    entries: int
    digest: str


UNKNOWN = Head(0, "")


class Journal:
    """One journal, which several processes may share; a subclass says what it is about.

    The file is opened by name for every use, so one that was replaced in the meantime is checked again.
    """

    what: ClassVar[str] = "journal"
    error: ClassVar[type[FederationError]] = FederationError
    unsaved: ClassVar[str] = "nothing was recorded"
    fix: ClassVar[str] = "restore the newest copy of it"

    def __init__(self, path: Path, owner: str, notes: Sequence[Path] = ()) -> None:
        """`owner` is whose journal it is; `notes` are files in other folders that note its head too."""
        self.path, self.owner = path, owner
        self.entries: list[dict[str, Any]] = []
        self._digests: list[str] = []  # of the first line, and of each entry
        self._notes, self._placed = (beside(path), *notes), False
        with self._failing_closed():
            # Looked for in this order: also while another process makes both, a note never comes before its journal.
            if not [self._noted(note) for note in self._notes if note.exists()]:
                first, _ = _line({"format": FORMATS[-1], "site": owner, "nonce": secrets.token_hex(16)}, "")
                make_folder(path.parent)
                create(path, first, 0o600)
        with self.held(), self._failing_closed():
            for note in self._notes:
                if not note.exists():
                    make_folder(note.parent)
                    os.fsync(self._file)  # a note must not come further than what is on the disk
                    self._write(note)

    @property
    def head(self) -> Head:
        """As of the last time it was read."""
        return Head(len(self.entries), self._digests[-1])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the journal for this process alone, and read it again."""
        with self._failing_closed():
            self._file = self._opened()
        try:
            with self._failing_closed():
                self._read()
            yield
        finally:
            os.close(self._file)

    def append(self, fields: dict[str, Any]) -> None:
        """Add an entry, while held. It is on the disk when this returns; if this raises, do not act on it."""
        line, digest = _line(fields, self._digests[-1])
        if len(line) > LONGEST_LINE:
            raise self._problem(f"an entry has {len(line)} bytes; use at most {LONGEST_LINE}")
        with self._failing_closed():
            end = os.fstat(self._file).st_size
            try:
                write_all(self._file, line)
                os.fsync(self._file)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, end)  # nobody has acted on it
                raise
            self.entries.append(fields)
            self._digests.append(digest)
            self._place()

    def settle(self) -> None:
        """See, while held, that what was read is on the disk: whoever wrote it may have been killed before that."""
        with self._failing_closed():
            os.fsync(self._file)
            self._place()

    def check_head(self, head: Head, source: str) -> None:
        """Raise unless this journal, as last read, continues the one whose head `source` has seen."""
        ours = self.head.entries
        if not 0 <= head.entries <= ours:
            raise self._problem(f"has {ours} entries, and {source} has seen {head.entries}; {self.fix}")
        if self._digests[head.entries] != head.digest:
            raise self._problem(f"is not the one that {source} has seen; {self.fix}")

    def _loaded(self) -> None:
        """For a subclass: the entries were read again."""

    def _opened(self) -> int:
        """The file that has the name now, locked: another one may have had it when the wait for the lock began."""
        while True:
            handle = lock(self.path, os.O_APPEND, make=False)
            if os.path.samestat(os.fstat(handle), self.path.stat()):
                return handle
            os.close(handle)

    def _read(self) -> None:
        """Everything again. What a crash left of a last line that nobody acted on is removed, and only that."""
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        lines = whole_lines(data)
        if not lines:
            raise self._problem(f"has no complete first line; {self.fix}")
        digests, entries = [""], []
        for number, line in enumerate(lines, start=1):
            fields, digest = self._parsed(line, number, digests[-1])
            entries.append(fields)
            digests.append(digest)
        self._check_header(entries[0])
        self.entries, self._digests = entries[1:], digests[1:]
        for note in self._notes:
            if note.exists() and (head := self._noted(note)) != UNKNOWN:
                self.check_head(head, note.name)
        whole = sum(len(line) + 1 for line in lines)
        if whole < len(data):
            os.ftruncate(self._file, whole)
        self._loaded()

    def _parsed(self, line: bytes, number: int, before: str) -> tuple[dict[str, Any], str]:
        try:
            entry = json.loads(line[:LONGEST_LINE])
            fields, digest = dict(entry["entry"]), entry["head"]
        except BROKEN:
            raise self._damaged(number) from None
        if _line(fields, before)[0] != line + b"\n":  # to the last byte, also where another one means the same number
            raise self._damaged(number)
        return fields, digest

    def _check_header(self, fields: dict[str, Any]) -> None:
        form, owner = fields.get("format"), fields.get("site")
        if form not in FORMATS:
            raise self._problem(f"format {form!r} is unknown; update fl-privacy")
        if owner != self.owner:
            raise self._problem(f"belongs to {owner!r}, not {self.owner!r}; restore the right one")

    def _noted(self, note: Path) -> Head:
        """The head in a note, which is about this journal and no other. A power cut may have emptied a note."""
        try:
            found = json.loads(note.read_bytes())
            owner, head = str(found["of"]), Head(int(found["entries"]), str(found["head"]))
        except BROKEN:
            return UNKNOWN
        if owner != self.owner:
            fix = f"use that one, or remove {note} if the data are other ones now"
            raise self._problem(f"{owner!r} was used so far, not {self.owner!r}; {fix}")
        return head

    def _place(self) -> None:
        """Note the head; once per process, see that the names of the files and of their folders are on the disk."""
        for note in self._notes:
            self._write(note)
        if not self._placed:
            for folder in {note.parent for note in self._notes}:
                sync_folder(folder)
                sync_folder(folder.parent)
            self._placed = True

    def _write(self, note: Path) -> None:
        """Not synced: an older or an empty note is a weaker check, not a wrong one."""
        entries, digest = self.head
        text = json.dumps({"of": self.owner, "entries": entries, "head": digest})
        replace(note, text.encode(), mode=0o600, durable=False)

    @contextmanager
    def _failing_closed(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise self._problem(f"was here and is missing; {self.fix}") from None
        except OSError as error:
            raise self._problem(f"{error.strerror or error}; {self.unsaved}") from None

    def _damaged(self, number: int) -> FederationError:
        return self._problem(f"line {number} was changed or damaged; {self.fix}")

    def _problem(self, problem: str) -> FederationError:
        return self.error(f"{self.what} {self.path}: {problem}")


def beside(path: Path) -> Path:
    """The note of a journal in its own folder."""
    return path.with_name(path.name + ".head")


def _line(fields: dict[str, Any], before: str) -> tuple[bytes, str]:
    """An entry as a line, and the hash that binds it to the line before."""
    digest = _link(before, fields)
    return json.dumps({"entry": fields, "head": digest}, sort_keys=True).encode() + b"\n", digest


def _link(before: str, fields: dict[str, Any]) -> str:
    return hashlib.sha256((before + json.dumps(fields, sort_keys=True)).encode()).hexdigest()
