"""Writing a transcript: each observer its own view, the server the run's manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.errors import TranscriptError
from fl_privacy.files import PART, append, replace, replacing, sync_folder
from fl_privacy.transcript import arrays as record_files, chain as links
from fl_privacy.transcript.chain import CHAIN, FORMAT, HEAD, Entry, file_names, read_chain, read_head
from fl_privacy.transcript.events import Event
from fl_privacy.transcript.files import canonical, check_name, file_sha256, plain, read_log, sha256, writing
from fl_privacy.transcript.run import (
    FORMATS,
    MANIFEST,
    METRICS,
    SIGNATURE,
    places,
    pretty,
    read_manifest,
    run_files,
    view_folder,
)
from fl_privacy.transcript.signing import HEAD_DOMAIN, MANIFEST_DOMAIN, Signer, utc_now


class ViewWriter:
    """One observer's append-only record of what it received; an existing folder is continued."""

    def __init__(
        self, folder: str | Path, observer: str, run: str, key: ec.EllipticCurvePrivateKey, certificate_pem: bytes | str
    ) -> None:
        self.folder = Path(folder)
        self.observer = check_name("observer", observer)
        self.run = check_name("run", run)
        self._signer = Signer(key, certificate_pem)
        self._unsettled = False
        with writing(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / HEAD).exists():
                self._continue()
            else:
                self._start()

    @property
    def head(self) -> dict[str, Any]:
        """What a party tells the server, so that the manifest can pin this view: seq and head."""
        return {"seq": self._seq, "head": self._head}

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
        document = {"format": FORMAT, "run": self.run, "observer": self.observer, "seq": seq, "head": head}
        signed = canonical(self._signer.sign(HEAD_DOMAIN, document)) + b"\n"
        replace(self.folder / HEAD, signed)
        self._seq, self._head, self._signed = seq, head, signed

    def _start(self) -> None:
        for path in self.folder.iterdir():
            if path.name != HEAD + PART and (path.name != CHAIN or path.stat().st_size):
                raise TranscriptError(f"{self.folder}: holds {path.name} but no {HEAD}; give the view an empty folder")
        self._size = append(self.folder / CHAIN, 0, b"")
        self._sign(0, links.genesis(self.run, self.observer))

    def _continue(self) -> None:
        """Go on after the last signed entry; what an interrupted record left behind is removed."""
        chain = read_chain(self.folder)
        observer, run = chain.head["observer"], chain.head["run"]
        if (observer, run) != (self.observer, self.run):
            raise TranscriptError(f"{self.folder}: is the view of {observer} in run {run}; give each its own folder")
        self._signer.check_own(HEAD_DOMAIN, chain.head, str(self.folder / HEAD))
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
    """The server's side of a run folder: manifest, metrics, and the digests that close it."""

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
        with writing(str(self.path)):
            self.path.mkdir(parents=True, exist_ok=True)
            kept, self._digest = self._resume() if (self.path / MANIFEST).exists() else ({}, "")
            kept.pop("private", None)  # of format 1
            fresh = {"rounds": 0, "observers": {}, "heads": {}}
            fixed = {"created": kept.get("created", utc_now()), "format": FORMATS[-1], "status": "running", "files": {}}
            self._metrics_size = read_log(self.path / METRICS)[1]
            self._write({**fresh, **kept, **plain(manifest, "manifest"), **fixed})

    def update(self, **fields: Any) -> None:
        """Change fields of the manifest, and sign it again."""
        if fixed := sorted(fields.keys() & {"format", "run", "created", "status", "files"}):
            raise TranscriptError(f"manifest.{fixed[0]}: cannot be updated; close() sets status and files")
        with writing(str(self.path / MANIFEST)):
            self._write({**self.manifest, **plain(fields, "manifest")})

    def metric(self, row: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; a number that is not finite is written as null."""
        line = canonical(plain(row, "metric")) + b"\n"
        with writing(str(self.path / METRICS)):
            self._metrics_size = append(self.path / METRICS, self._metrics_size, line)

    def close(self, status: str, **fields: Any) -> None:
        """Pin the run's own files and the heads of the views that are here, and sign with these last fields."""
        if status not in ("completed", "failed"):
            raise TranscriptError(f"status: {status!r} does not close a run; use completed or failed")
        with writing(str(self.path / MANIFEST)):
            files = {name: file_sha256(self.path / name) for name in run_files(self.path)}
            ended = {"files": files, "heads": self._latest_heads(), "status": status}
            self._write({**self.manifest, **plain(fields, "manifest"), **ended})

    def _latest_heads(self) -> dict[str, Any]:
        """The heads reported by `update(heads=...)`, and those on this disk where they are newer."""
        heads = dict(self.manifest["heads"])
        for where in places(self.path):
            with suppress(TranscriptError):
                head = read_head(view_folder(self.path, where))
                if where not in heads or heads[where]["seq"] < head["seq"]:
                    heads[where] = {"seq": head["seq"], "head": head["head"]}
        return heads

    def _write(self, manifest: dict[str, Any]) -> None:
        """Signature first: it covers the old manifest and the new, so a crash between the two leaves a valid run."""
        data = pretty(manifest, self.path / MANIFEST)
        digest = sha256(data)
        document = {"format": FORMAT, "run": self.run, "sha256": digest, "previous": self._digest}
        signed = self._signer.sign(MANIFEST_DOMAIN, document)
        replace(self.path / SIGNATURE, canonical(signed) + b"\n")
        replace(self.path / MANIFEST, data)
        self.manifest, self._digest = manifest, digest

    def _resume(self) -> tuple[dict[str, Any], str]:
        manifest, signature, digest = read_manifest(self.path)
        if manifest["run"] != self.run:
            raise TranscriptError(f"{self.path}: holds run {manifest['run']}, not {self.run}; give each its own folder")
        self._signer.check_own(MANIFEST_DOMAIN, signature, str(self.path / SIGNATURE))
        return manifest, digest
