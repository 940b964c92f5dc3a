"""A view's hash chain: one entry per record, the last one signed in head.json."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fl_privacy.errors import TranscriptError
from fl_privacy.files import PART
from fl_privacy.transcript.files import (
    LOG_LIMIT,
    canonical,
    check_fields,
    parse_object,
    parse_signed,
    read_bounded,
    sha256,
)

HEAD = "head.json"
CHAIN = "chain.jsonl"
GENESIS_DOMAIN = b"fl-privacy/transcript/v1/view\0"
MAX_ROUND = 10**9
HEAD_LIMIT = 64 << 10  # bytes: a party sends its head to the server, which keeps it in the manifest
DIGEST = re.compile(r"[0-9a-f]{64}")
# A view of format 1 names its run by name alone; one of format 2 also by its nonce, which no other run has.
_FIELDS: dict[str, type] = {"run": str, "observer": str, "seq": int, "head": str}
FORMS: dict[int, dict[str, type]] = {1: _FIELDS, 2: {**_FIELDS, "nonce": str}}
ATTEMPT = re.compile(r"[\x21-\x7e]{1,128}")
RECORD = re.compile(r"round-[0-9]{5,}-([0-9]{6,})\.(?:safetensors|parquet)")


@dataclass(frozen=True)
class Entry:
    """One record: the attempt it belongs to, its two files, and the head before it."""

    seq: int
    round: int
    attempt: str
    files: dict[str, str]
    prev: str

    @property
    def head(self) -> str:
        return sha256(canonical(asdict(self)))

    @property
    def line(self) -> bytes:
        return canonical({**asdict(self), "head": self.head}) + b"\n"


class Chain(NamedTuple):
    """A view as its head signs it; `tail` is what stands in chain.jsonl beyond the signed part."""

    head: dict[str, Any]
    entries: list[Entry]
    tail: bytes


def named(run: str, observer: str, nonce: str = "") -> dict[str, Any]:
    """Whose view it is and of which run: the fields that head and genesis share."""
    fields: dict[str, Any] = {"format": 1, "run": run, "observer": observer}
    return fields | ({"format": 2, "nonce": nonce} if nonce else {})


def genesis(run: str, observer: str, nonce: str = "") -> str:
    """The head of a view in which nothing is recorded yet."""
    return sha256(GENESIS_DOMAIN + canonical(named(run, observer, nonce)))


def file_names(round: int, seq: int) -> tuple[str, str]:
    """Of a record's arrays and of their index."""
    return f"round-{round:05d}-{seq:06d}.safetensors", f"round-{round:05d}-{seq:06d}.parquet"


def parse_head(data: bytes, where: str) -> dict[str, Any]:
    """A head, well-formed; its signature is not checked here."""
    if len(data) > HEAD_LIMIT:
        raise TranscriptError(f"{where}: larger than the {HEAD_LIMIT >> 10} KiB this format allows")
    return parse_signed(data, where, FORMS)


def check_head(head: Any, where: str) -> None:
    """A head that is part of another document."""
    check_fields(head, where, FORMS)


def read_head(folder: Path) -> dict[str, Any]:
    """head.json, as `parse_head` reads it."""
    return parse_head(read_bounded(folder / HEAD, HEAD_LIMIT), str(folder / HEAD))


def read_chain(folder: Path) -> Chain:
    """The signed entries of a view, each linked to the one before and the last to the head."""
    head, path = read_head(folder), folder / CHAIN
    lines = read_bounded(path, LOG_LIMIT).split(b"\n")
    signed = head["seq"]
    if not 0 <= signed < len(lines):
        raise TranscriptError(f"{path}: holds {len(lines) - 1} entries, but {HEAD} signs {signed}")
    entries: list[Entry] = []
    prev = genesis(head["run"], head["observer"], head.get("nonce", ""))
    for seq, line in enumerate(lines[:signed], start=1):
        entry = _parse_entry(line, seq, prev, f"{path}: line {seq}")
        entries.append(entry)
        prev = entry.head
    if prev != head["head"]:
        raise TranscriptError(f"{path}: does not lead to the head that {HEAD} signs")
    return Chain(head, entries, b"\n".join(lines[signed:]))


def unsigned_files(folder: Path, chain: Chain) -> tuple[list[str], list[str]]:
    """Files that the chain does not list: what an interrupted record leaves, and strangers."""
    known = {HEAD, CHAIN, *(name for entry in chain.entries for name in entry.files)}
    extra = sorted(path.name for path in folder.iterdir() if path.name not in known)
    leftovers = [name for name in extra if _is_leftover(name, len(chain.entries) + 1)]
    return leftovers, [name for name in extra if name not in leftovers]


def is_interrupted(tail: bytes) -> bool:
    """Whether an interrupted record explains the unsigned tail: at most one entry, perhaps half written."""
    return tail.count(b"\n") + (not tail.endswith(b"\n")) <= 1


def _is_leftover(name: str, seq: int) -> bool:
    name = name.removesuffix(PART)
    found = RECORD.fullmatch(name)
    return int(found[1]) == seq if found else name == HEAD


def _parse_entry(line: bytes, seq: int, prev: str, where: str) -> Entry:
    """One line of chain.jsonl. File names follow from round and seq, so none can point out of the folder."""
    fields = parse_object(line, where)
    round, files, attempt = fields.get("round"), fields.get("files"), fields.get("attempt", "")
    well_named = isinstance(attempt, str) and ATTEMPT.fullmatch(attempt)
    if type(round) is not int or not 0 <= round <= MAX_ROUND or not well_named:
        raise TranscriptError(f"{where}: round or attempt is malformed")
    if not isinstance(files, dict) or set(files) != {*file_names(round, seq)}:
        listed = ", ".join(files) if isinstance(files, dict) else str(files)
        raise TranscriptError(f"{where}: files {listed!r:.120} are not those of round {round}, entry {seq}")
    if not all(isinstance(digest, str) and DIGEST.fullmatch(digest) for digest in files.values()):
        raise TranscriptError(f"{where}: a digest is not a SHA-256 in lower-case hexadecimal")
    entry = Entry(seq, round, attempt, files, prev)
    if entry.line != line + b"\n":
        raise TranscriptError(f"{where}: its head, link or form does not fit its content")
    return entry
