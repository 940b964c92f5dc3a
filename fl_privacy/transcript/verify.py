"""Whether a run folder is what its observers signed, judged by a CA certificate from outside the folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.x509.verification import Store

from fl_privacy.errors import TranscriptError
from fl_privacy.roles import ROLES
from fl_privacy.transcript.chain import CHAIN, HEAD, Chain, is_interrupted, read_chain, unsigned_files
from fl_privacy.transcript.files import file_sha256
from fl_privacy.transcript.heads import Expected, Head, check, place
from fl_privacy.transcript.read import View
from fl_privacy.transcript.run import (
    CLOSED,
    DETACHED,
    MANIFEST,
    VIEWS,
    Signed,
    changes_of,
    places,
    read_manifest,
    run_files,
    stray_files,
    view_folder,
)
from fl_privacy.transcript.signing import Identity, identify, load_anchors

# What `verify` cannot find in a run of an older format.
OLDER = {
    1: "as format 2, and it states neither what the run guarantees nor its rounds",
    2: "not detected: views added after the close, views of another run of this name, and a closed run that was put "
    "back to the manifest before it, with other metrics and without truth",
}
STALE = "put back, or left by a crash, which this format cannot distinguish"


@dataclass(frozen=True)
class Finding:
    """One thing that was found: where it lies in the run, whether it is in order, and what it is.

    A `note` is in order, but says what the checks do not cover, or what happened to the run.
    """

    where: str
    ok: bool
    message: str
    note: bool = False

    def __str__(self) -> str:
        return f"{'PROBLEM' if not self.ok else 'note' if self.note else 'ok'} {self.where}: {self.message}"


@dataclass
class Report:
    """All findings of a run, the manifest first and then every view and truth."""

    findings: list[Finding] = field(default_factory=list)
    unpinned: list[str] = field(default_factory=list)  # sound views that a closed run's manifest does not pin

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.ok]

    def holds(self, where: str, message: str) -> None:
        self.findings.append(Finding(where, True, message))

    def note(self, where: str, message: str) -> None:
        self.findings.append(Finding(where, True, message, note=True))

    def problem(self, where: str, message: str) -> None:
        self.findings.append(Finding(where, False, message))


def verify(path: str | Path, ca_pem: bytes, head: str | None = None) -> Report:
    """Check every signature, chain, digest and file of a run against the CA, and its head if you kept that."""
    root, report = Path(path), Report()
    expected, manifest = Expected(load_anchors(ca_pem)), None
    if not root.is_dir():
        raise TranscriptError(f"{root}: no such folder; give the folder of a run")
    found = places(root)
    try:
        signed, server = _check_manifest(root, expected.anchors)
    except TranscriptError as error:
        report.problem(MANIFEST, str(error))
    else:
        manifest = signed.manifest
        expected = replace(expected, run=manifest["run"], nonce=manifest.get("nonce", ""), federation=server.federation)
        found += [*manifest["observers"].values(), *manifest["heads"]]
        _report_manifest(signed, server, head, report)
        _check_history(root, manifest, report)
        _check_run_files(root, manifest, report)
    for where in dict.fromkeys(found):
        _check_view(root, where, expected, manifest or {}, report)
    return report


def signed_manifest(root: Path, ca_pem: bytes) -> dict[str, Any]:
    """The manifest of a run, if a server of this authority signed it; a TranscriptError otherwise."""
    return _check_manifest(root, load_anchors(ca_pem))[0].manifest


def _check_manifest(root: Path, anchors: Store) -> tuple[Signed, Identity]:
    found, where = read_manifest(root), str(root / MANIFEST)
    signer = identify(found.message, found.document, anchors, where)
    known = ROLES.get(signer.role)
    if known is None or not known.starts_runs:
        raise TranscriptError(f"{where}: signed by {signer.role} {signer.name}; a manifest is the server's to sign")
    return found, signer


def _report_manifest(signed: Signed, server: Identity, head: str | None, report: Report) -> None:
    """What the manifest says of itself, and whether it is the one whose head was kept elsewhere."""
    manifest = signed.manifest
    status, format = manifest.get("status"), manifest["format"]
    serial = f", version {manifest['serial']}" if "serial" in manifest else ""
    report.holds(MANIFEST, f"signed by {server.name}, status {status}{serial}, head {signed.head}")
    if signed.stale:
        report.problem(MANIFEST, f"is not what {DETACHED} signed last, but the one before it: {STALE}")
    if format in OLDER:
        report.note(MANIFEST, f"format {format}: {OLDER[format]}")
    closed = {one["head"]: one["status"] for one in manifest.get("closed", ())}
    for before, ended in closed.items():
        report.note(MANIFEST, f"was {ended} before, with head {before}, and signed again since")
    if status not in CLOSED:
        report.note(MANIFEST, "not closed: metrics, checkpoints and missing records are not covered")
    if head is None or head == signed.head:
        return
    if head in closed:
        report.problem(MANIFEST, "was signed again after the head given: resumed, or views were pinned late")
    else:
        report.problem(MANIFEST, f"its head is not {head:.80}: put back to another state, or another run")


def _check_history(root: Path, manifest: dict[str, Any], report: Report) -> None:
    """Which changes a resumed run states, and whether a completed run has as many rounds as it states."""
    try:
        for change in changes_of(manifest, root / MANIFEST):
            report.note(MANIFEST, f"states a change {change}")
    except TranscriptError as error:
        report.problem(MANIFEST, str(error))
    if _completed(manifest) and "guarantee" in manifest:
        with suppress(TranscriptError):  # a view that cannot be read is a problem of its own
            rounds = View(view_folder(root, f"{VIEWS}/server")).rounds
            stated, seen = manifest.get("rounds"), max(rounds, default=0)
            if stated not in (seen, seen - 1):  # the farewell, in which sites get the final model, comes after the last
                report.problem(MANIFEST, f"states {stated} rounds, and the server's view ends with round {seen}")


def _check_run_files(root: Path, manifest: dict[str, Any], report: Report) -> None:
    """The run's own files are pinned when it is closed; what came later (a report, scores) is named, not judged."""
    found = set(run_files(root)) - ({DETACHED} if manifest["format"] in OLDER else set())
    wrong, missing = "its SHA-256 is not the one in the manifest", "missing, though the manifest lists it"
    for name, digest in manifest["files"].items():
        for message in _changed(root / name, digest, wrong) if name in found else [missing]:
            report.problem(name, message)
    if covered := len(manifest["files"]):
        report.holds("files", f"{covered} files of the run checked against the manifest")
    if loose := sorted(found - manifest["files"].keys()):
        report.note("files", f"not covered by the manifest: {', '.join(loose)}")
    if stray := stray_files(root):
        report.note("files", f"links and unfinished files, which no manifest covers: {', '.join(stray)}")


def _check_view(root: Path, where: str, expected: Expected, manifest: Mapping[str, Any], report: Report) -> None:
    pinned = manifest.get("heads", {}).get(where)
    try:
        folder = view_folder(root, where)
        chain = read_chain(folder)
        signer = _check_signer(folder, where, chain, expected)
        if pinned is not None:
            _check_pin(folder, where, chain, pinned, expected)
        interrupted = _check_extra(folder, chain, _completed(manifest))
    except TranscriptError as error:
        report.problem(where, str(error))
        return
    if broken := _broken_files(folder, chain):
        for message in broken:
            report.problem(where, message)
        return
    who = " ".join(dict.fromkeys((signer.role, signer.name)))  # a server is called server
    report.holds(where, f"{len(chain.entries)} records signed by {who}")
    if interrupted:
        report.note(where, f"left by an interrupted record and not part of the view: {', '.join(interrupted)}")
    _report_pin(where, chain, pinned, manifest, report)


def _report_pin(where: str, chain: Chain, pinned: Head | None, manifest: Mapping[str, Any], report: Report) -> None:
    """What a sound view's pin covers."""
    if not manifest or manifest["format"] in OLDER:
        return
    if "nonce" not in chain.head:
        report.note(where, "names no nonce: it is bound to the run's name and its pin alone")
    if pinned is None and manifest.get("status") in CLOSED:
        report.unpinned.append(where)
        say = report.problem if _completed(manifest) else report.note
        say(where, "not pinned: added after the run was closed; pin it with fl-privacy transcript pin")
    elif pinned is not None:
        if where in manifest["late"]:
            report.note(where, "pinned after the run was closed: an earlier change is not detected")
        if later := len(chain.entries) - pinned["seq"]:
            report.note(where, f"records after the pinned one, which does not cover them: {later}")


def _completed(manifest: Mapping[str, Any]) -> bool:
    return manifest.get("status") == "completed"


def _check_signer(folder: Path, where: str, chain: Chain, expected: Expected) -> Identity:
    """The head is signed by the very party whose folder this is: a site may sign truth, and nothing but truth."""
    path = str(folder / HEAD)
    signer = check(chain.head, expected, path)
    if (observer := chain.head["observer"]) != folder.name:
        raise TranscriptError(f"{path}: view of {observer} lies in {where}")
    if place(signer, chain.head, path) != where:
        raise TranscriptError(f"{path}: a {signer.role} cannot sign {where}; sites sign truth, all others views")
    return signer


def _check_pin(folder: Path, where: str, chain: Chain, pinned: Head, expected: Expected) -> None:
    """A view may have grown since the manifest pinned its head, but never shrunk or changed."""
    if "signature" in pinned:
        source = f"{MANIFEST}: heads.{where}"
        if place(check(pinned, expected, source), pinned, source) != where:
            raise TranscriptError(f"{source}: is the head of another view")
    seq = pinned["seq"]
    if seq == 0:
        return
    if not 0 < seq <= len(chain.entries):
        there = len(chain.entries)
        raise TranscriptError(f"{folder / CHAIN}: cut off after entry {there}; the manifest pins {seq}")
    if chain.entries[seq - 1].head != pinned["head"]:
        raise TranscriptError(f"{folder / CHAIN}: rewritten: entry {seq} is not the one that the manifest pins")


def _check_extra(folder: Path, chain: Chain, completed: bool) -> list[str]:
    """What an interrupted record left; in a completed run that is refused too, as strangers always are."""
    leftovers, strangers = unsigned_files(folder, chain)
    if chain.tail:
        (leftovers if is_interrupted(chain.tail) else strangers).append(CHAIN)
    if refused := strangers + (leftovers if completed else []):
        raise TranscriptError(f"{folder / refused[0]}: goes beyond what {HEAD} signs ({len(refused)} such files)")
    return leftovers


def _broken_files(folder: Path, chain: Chain) -> list[str]:
    files = [(folder / name, digest) for entry in chain.entries for name, digest in entry.files.items()]
    wrong = f"its SHA-256 is not the one in {CHAIN}"
    return [message for path, digest in files for message in _changed(path, digest, f"{path}: {wrong}")]


def _changed(path: Path, digest: str, wrong: str) -> list[str]:
    """Nothing if the file has this digest; else `wrong`, or why it cannot be read."""
    try:
        return [] if file_sha256(path) == digest else [wrong]
    except TranscriptError as error:
        return [str(error)]
