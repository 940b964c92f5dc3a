"""Writing a transcript: each observer its own view, the server the run's manifest."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.errors import TranscriptError
from fl_privacy.files import PART, append, replace, replacing, sync_folder
from fl_privacy.transcript import arrays as record_files, chain as links, heads as pins
from fl_privacy.transcript.chain import CHAIN, HEAD, Entry, file_names, read_chain, read_head
from fl_privacy.transcript.events import Event
from fl_privacy.transcript.files import canonical, check_name, file_sha256, plain, read_log, sha256, writing
from fl_privacy.transcript.run import (
    CLOSED,
    DETACHED,
    FORMATS,
    MANIFEST,
    METRICS,
    SIGNED_FIELDS,
    Signed,
    places,
    read_manifest,
    run_files,
    seal,
    view_folder,
)
from fl_privacy.transcript.signing import HEAD_DOMAIN, Signer, load_anchors, message_of, utc_now

FIXED = {"format", "run", "nonce", "serial", "created", "status", "files", "heads", "closed", "late"}
NONCE = 32  # bytes


class ViewWriter:
    """One observer's append-only record of what it received; an existing folder is continued."""

    def __init__(
        self,
        folder: str | Path,
        observer: str,
        run: str,
        key: ec.EllipticCurvePrivateKey,
        certificate_pem: bytes | str,
        nonce: str = "",
    ) -> None:
        """`nonce` is the run's (`RunWriter.nonce`): a view that has it cannot be moved into another run."""
        self.folder = Path(folder)
        self.observer = check_name("observer", observer)
        self.run = check_name("run", run)
        if nonce and not links.DIGEST.fullmatch(nonce):
            raise TranscriptError(f"nonce: {nonce!r:.80} is not {NONCE} bytes in lower-case hexadecimal")
        self.nonce = nonce
        self._signer = Signer(key, certificate_pem)
        self._unsettled = False
        with writing(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / HEAD).exists():
                self._continue()
            else:
                self._start()

    @property
    def signed_head(self) -> bytes:
        """What a party reports to the server, which pins it in the manifest (`RunWriter.pin`)."""
        return self._signed

    def record(
        self,
        round: int,
        attempt: int | str,
        arrays: Mapping[str, Any],
        tiers: Sequence[record_files.Tier] = (),
        events: Sequence[Event] = (),
    ) -> None:
        """Write one attempt's arrays and index, chain and sign them; when it returns they are on the disk."""
        if self._unsettled:
            with writing(str(self.folder)):
                self._continue()
        seq, round, attempt = self._seq + 1, int(round), str(attempt)
        if not 0 <= round <= links.MAX_ROUND or not links.ATTEMPT.fullmatch(attempt):
            where = f"round {round}, attempt {attempt!r:.80}"
            raise TranscriptError(f"{where}: needs a round from 0 and a short ASCII attempt")
        checked = record_files.check_arrays(arrays)
        data, index = (self.folder / name for name in file_names(round, seq))
        common = {"round": round, "attempt": attempt, "seq": seq, "file": data.name}
        table = record_files.encode_index(record_files.index_rows(checked, tiers, events, common))
        metadata = {"run": self.run, "observer": self.observer, "round": str(round), "attempt": attempt}
        with writing(f"{self.folder}: round {round}"):
            self._check_alone()
            self._unsettled = True
            try:
                with replacing(data) as file:
                    digest = record_files.write_arrays(file, checked, metadata)
                replace(index, table)
                self._commit(Entry(seq, round, attempt, {data.name: digest, index.name: sha256(table)}, self._head))
            except BaseException:
                with suppress(OSError, TranscriptError):
                    self._continue()
                raise

    def _commit(self, entry: Entry) -> None:
        """Append the entry, then sign it: until head.json is replaced, nothing of it counts."""
        append(self.folder / CHAIN, self._size, entry.line)
        self._sign(entry.seq, entry.head)
        self._size += len(entry.line)
        self._unsettled = False

    def _sign(self, seq: int, head: str) -> None:
        document = {**links.named(self.run, self.observer, self.nonce), "seq": seq, "head": head}
        signed = canonical(self._signer.sign(HEAD_DOMAIN, document)) + b"\n"
        replace(self.folder / HEAD, signed)
        self._seq, self._head, self._signed = seq, head, signed

    def _start(self) -> None:
        for path in self.folder.iterdir():
            if path.name != HEAD + PART and (path.name != CHAIN or path.stat().st_size):
                raise TranscriptError(f"{self.folder}: holds {path.name} but no {HEAD}; give the view an empty folder")
        self._size = append(self.folder / CHAIN, 0, b"")
        self._sign(0, links.genesis(self.run, self.observer, self.nonce))

    def _continue(self) -> None:
        """Go on after the last signed entry; what an interrupted record left behind is removed."""
        chain = read_chain(self.folder)
        observer, run = chain.head["observer"], chain.head["run"]
        if (observer, run) != (self.observer, self.run):
            raise TranscriptError(f"{self.folder}: is the view of {observer} in run {run}; give each its own folder")
        self._signer.check_own(message_of(HEAD_DOMAIN, chain.head), chain.head, str(self.folder / HEAD))
        if self.nonce and chain.head.get("nonce", self.nonce) != self.nonce:
            raise TranscriptError(f"{self.folder}: is of an earlier run named {run}; move the folder away")
        self.nonce = chain.head.get("nonce", "")
        leftovers, strangers = links.unsigned_files(self.folder, chain)
        if strangers or not links.is_interrupted(chain.tail):
            what = strangers[0] if strangers else CHAIN
            raise TranscriptError(f"{self.folder / what}: goes beyond the signed head; restore the latest {HEAD}")
        self._seq, self._head = len(chain.entries), chain.head["head"]
        self._size = sum(len(entry.line) for entry in chain.entries)
        self._signed = canonical(chain.head) + b"\n"
        append(self.folder / CHAIN, self._size, b"")
        for name in leftovers:
            (self.folder / name).unlink()
        sync_folder(self.folder)
        self._unsettled = False

    def _check_alone(self) -> None:
        if (self.folder / HEAD).read_bytes() != self._signed:
            raise TranscriptError(f"{self.folder / HEAD}: changed by someone else; a view has one writer")


class RunWriter:
    """The server's side of a run folder: manifest, metrics, and the digests that close it.

    An existing run is resumed. If `manifest` states its `rounds`, metrics of later rounds are dropped: these rounds
    were not completed, and are made again.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: Mapping[str, Any],
        key: ec.EllipticCurvePrivateKey,
        certificate_pem: bytes | str,
    ) -> None:
        self.path = Path(path)
        self.run = check_name("manifest.run", manifest.get("run"))
        self._signer = Signer(key, certificate_pem)
        given = plain(manifest, "manifest")
        with writing(str(self.path)):
            self.path.mkdir(parents=True, exist_ok=True)
            kept = self._resume() if (self.path / MANIFEST).exists() else {}
            fixed = {
                "format": FORMATS[-1],
                "run": self.run,
                "nonce": kept.get("nonce") or secrets.token_hex(NONCE),
                "serial": kept.get("serial", 0),
                "created": kept.get("created") or utc_now(),
                "status": "running",
                "closed": kept.get("closed", []),
                "late": kept.get("late", []),
                "heads": kept.get("heads", {}),
                "files": {},
            }
            self._write({**fixed, "rounds": 0, "observers": {}, **kept, **given, **fixed})
            (self.path / DETACHED).unlink(missing_ok=True)
            self._metrics_size = _keep_metrics(self.path / METRICS, given.get("rounds"))  # no longer pinned

    @property
    def nonce(self) -> str:
        """32 random bytes in hexadecimal, drawn when the run started; a resumed run keeps them."""
        return str(self.manifest["nonce"])

    @property
    def closed(self) -> bool:
        return self.manifest["status"] in CLOSED

    def update(self, **fields: Any) -> None:
        """Change fields of the manifest, and sign it again."""
        if fixed := sorted(fields.keys() & FIXED):
            raise TranscriptError(f"manifest.{fixed[0]}: cannot be updated; close() sets status and files, pin() heads")
        with writing(str(self.path / MANIFEST)):
            self._write({**self.manifest, **plain(fields, "manifest")})

    def pin(self, reported: Iterable[bytes], ca_pem: bytes) -> list[str]:
        """Pin the heads that parties report (`ViewWriter.signed_head`); returns why others were refused."""
        expected = pins.Expected(load_anchors(ca_pem), self.run, self.nonce, self._signer.identity.federation)
        heads, refused = self.manifest["heads"], []
        for data in reported:
            try:
                head = links.parse_head(data, "head")
                where = pins.place(pins.check(head, expected, "head"), head, "head")
                heads = pins.newest(heads, where, head)
            except TranscriptError as error:
                refused.append(str(error))
        with writing(str(self.path / MANIFEST)):
            self._write({**self.manifest, "heads": heads})
        return refused

    def metric(self, row: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; a number that is not finite is written as null."""
        line = canonical(plain(row, "metric")) + b"\n"
        with writing(str(self.path / METRICS)):
            self._metrics_size = append(self.path / METRICS, self._metrics_size, line)

    def close(self, status: str, **fields: Any) -> None:
        """Pin the run's own files and the heads of the views that are here, and sign with these last fields."""
        if status not in CLOSED:
            raise TranscriptError(f"status: {status!r} does not close a run; use {' or '.join(CLOSED)}")
        with writing(str(self.path / MANIFEST)):
            files = {name: file_sha256(self.path / name) for name in run_files(self.path)}
            ended = {"files": files, "heads": self._latest_heads(), "late": [], "status": status}
            self._write({**self.manifest, **plain(fields, "manifest"), **ended})

    def _latest_heads(self) -> dict[str, Any]:
        """The heads that were reported, and those on this disk where they are newer."""
        heads = self.manifest["heads"]
        for where in places(self.path):
            with suppress(TranscriptError):  # what cannot be read is not pinned, and `verify` names it
                head = read_head(view_folder(self.path, where))
                if head["run"] == self.run and head.get("nonce", self.nonce) == self.nonce:
                    heads = pins.newest(heads, where, head)
        return dict(heads)

    def _write(self, manifest: dict[str, Any]) -> None:
        self.manifest = write_manifest(self.path, manifest, self._signer)

    def _resume(self) -> dict[str, Any]:
        """The fields of the manifest that is here, if this key signed it."""
        found = read_manifest(self.path)
        if (run := found.manifest["run"]) != self.run:
            raise TranscriptError(f"{self.path}: holds run {run}, not {self.run}; give each its own folder")
        self._signer.check_own(found.message, found.document, str(self.path / MANIFEST))
        return reopened(found)


def write_manifest(path: Path, manifest: dict[str, Any], signer: Signer) -> dict[str, Any]:
    """Sign a manifest and put it in place: one rename, so that a crash leaves this one or the one before."""
    counted = {**manifest, "serial": manifest["serial"] + 1}
    replace(path / MANIFEST, seal(counted, signer, path / MANIFEST))
    return counted


def reopened(found: Signed) -> dict[str, Any]:
    """The fields of a manifest that will be signed again; if it was closed, it says so and with which head."""
    older = found.manifest["format"] < FORMATS[-1]
    dropped = {*SIGNED_FIELDS, *(("private", "heads") if older else ())}  # older heads were not signed
    manifest = {name: value for name, value in found.manifest.items() if name not in dropped}
    if manifest.get("status") not in CLOSED:
        return manifest
    return {**manifest, "closed": [*manifest.get("closed", ()), {"status": manifest["status"], "head": found.head}]}


def _keep_metrics(path: Path, rounds: int | None) -> int:
    """Drop what is not the first line of a completed round, if their number is given; returns where the next goes."""
    lines, size = read_log(path)
    if rounds is None or not lines:
        return size
    kept: list[bytes] = []
    seen: set[int] = set()
    for line in lines:
        if isinstance(round := line.get("round"), int):
            if round > rounds or round in seen:
                continue
            seen.add(round)
        kept.append(canonical(line) + b"\n")
    text = b"".join(kept)
    if len(text) != size:
        replace(path, text)
    return len(text)
