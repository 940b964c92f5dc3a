"""Whether a run folder is what its observers signed, judged by a CA certificate from outside the folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.x509.verification import Store

from fl_privacy.errors import TranscriptError
from fl_privacy.transcript.chain import CHAIN, HEAD, Chain, is_interrupted, read_chain, unsigned_files
from fl_privacy.transcript.files import file_sha256
from fl_privacy.transcript.read import View
from fl_privacy.transcript.run import (
    MANIFEST,
    SIGNATURE,
    TRUTH,
    VIEWS,
    changes_of,
    places,
    read_manifest,
    run_files,
    view_folder,
)
from fl_privacy.transcript.signing import HEAD_DOMAIN, MANIFEST_DOMAIN, Identity, identify, load_anchors


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: where it lies in the run, whether it holds, and what was found."""

    where: str
    ok: bool
    message: str

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'PROBLEM'} {self.where}: {self.message}"


@dataclass
class Report:
    """All findings of a run, the manifest first and then every view and truth."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.ok]

    def note(self, where: str, message: str) -> None:
        self.findings.append(Finding(where, True, message))

    def problem(self, where: str, message: str) -> None:
        self.findings.append(Finding(where, False, message))


@dataclass(frozen=True)
class _Expected:
    """What the manifest says about the views; without a manifest that holds, each view is judged alone."""

    anchors: Store
    run: str | None = None
    federation: str | None = None
    completed: bool = False
    heads: Mapping[str, Any] = field(default_factory=dict)


def verify(path: str | Path, ca_pem: bytes) -> Report:
    """Check every signature, chain, digest and file of a run against the CA."""
    root, report = Path(path), Report()
    expected = _Expected(load_anchors(ca_pem))
    if not root.is_dir():
        raise TranscriptError(f"{root}: no such folder; give the folder of a run")
    found = places(root)
    try:
        manifest, server = _check_manifest(root, expected.anchors)
    except TranscriptError as error:
        report.problem(MANIFEST, str(error))
    else:
        completed = manifest.get("status") == "completed"
        expected = replace(
            expected, run=manifest["run"], federation=server.federation, completed=completed, heads=manifest["heads"]
        )
        found += [*manifest["observers"].values(), *manifest["heads"]]
        report.note(MANIFEST, f"signed by {server.name}, status {manifest.get('status')}")
        _check_history(root, manifest, completed, report)
        _check_run_files(root, manifest, report)
    for where in dict.fromkeys(found):
        _check_view(root, where, expected, report)
    return report


def _check_manifest(root: Path, anchors: Store) -> tuple[dict[str, Any], Identity]:
    manifest, document, _ = read_manifest(root)
    where = str(root / SIGNATURE)
    signer = identify(MANIFEST_DOMAIN, document, anchors, where)
    if signer.role != "server":
        raise TranscriptError(f"{where}: signed by {signer.role} {signer.name}; a manifest is the server's to sign")
    return manifest, signer


def _check_history(root: Path, manifest: dict[str, Any], completed: bool, report: Report) -> None:
    """Which changes a resumed run states, and whether a completed run has as many rounds as it states."""
    try:
        for change in changes_of(manifest, root / MANIFEST):
            report.note(MANIFEST, f"states a change {change}")
    except TranscriptError as error:
        report.problem(MANIFEST, str(error))
    if completed and "guarantee" in manifest:
        with suppress(TranscriptError):  # a view that cannot be read is a problem of its own
            rounds = View(view_folder(root, f"{VIEWS}/server")).rounds
            stated, seen = manifest.get("rounds"), max(rounds, default=0)
            if stated not in (seen, seen - 1):  # the farewell, in which sites get the final model, comes after the last
                report.problem(MANIFEST, f"states {stated} rounds, and the server's view ends with round {seen}")


def _check_run_files(root: Path, manifest: dict[str, Any], report: Report) -> None:
    """The run's own files are pinned when it is closed; what came later (a report, scores) is named, not judged."""
    found = set(run_files(root))
    wrong, missing = "its SHA-256 is not the one in the manifest", "missing, though the manifest lists it"
    for name, digest in manifest["files"].items():
        for message in _changed(root / name, digest, wrong) if name in found else [missing]:
            report.problem(name, message)
    if covered := len(manifest["files"]):
        report.note("files", f"{covered} files of the run checked against the manifest")
    if loose := sorted(found - manifest["files"].keys()):
        report.note("files", f"not covered by the manifest: {', '.join(loose)}")


def _check_view(root: Path, where: str, expected: _Expected, report: Report) -> None:
    try:
        folder = view_folder(root, where)
        chain = read_chain(folder)
        signer = _check_signer(folder, where, chain, expected)
        _check_pin(folder, chain, expected.heads.get(where))
        interrupted = _check_extra(folder, chain, expected.completed)
    except TranscriptError as error:
        report.problem(where, str(error))
        return
    if broken := _broken_files(folder, chain):
        for message in broken:
            report.problem(where, message)
        return
    rest = f"; left by an interrupted record and not part of the view: {', '.join(interrupted)}" if interrupted else ""
    report.note(where, f"{len(chain.entries)} records signed by {signer.role} {signer.name}{rest}")


def _check_signer(folder: Path, where: str, chain: Chain, expected: _Expected) -> Identity:
    """The head is signed by the very party whose folder this is: a site may sign truth, and nothing but truth."""
    path, head = folder / HEAD, chain.head
    signer = identify(HEAD_DOMAIN, head, expected.anchors, str(path))
    if expected.run not in (None, head["run"]):
        raise TranscriptError(f"{path}: is of run {head['run']}, not of {expected.run}")
    if not head["observer"] == signer.name == folder.name:
        raise TranscriptError(f"{path}: view of {head['observer']}, signed by {signer.name}, lies in {where}")
    if (signer.role == "site") != where.startswith(f"{TRUTH}/"):
        raise TranscriptError(f"{path}: a {signer.role} cannot sign {where}; sites sign truth, all others views")
    if expected.federation not in (None, signer.federation):
        raise TranscriptError(f"{path}: signed for federation {signer.federation}, not {expected.federation}")
    return signer


def _check_pin(folder: Path, chain: Chain, pin: dict[str, Any] | None) -> None:
    """A view may have grown since the manifest pinned its head, but never shrunk or changed."""
    if pin is None or pin["seq"] == 0:
        return
    if not 0 < pin["seq"] <= len(chain.entries):
        raise TranscriptError(f"{folder / CHAIN}: ends at entry {len(chain.entries)}, the manifest knew {pin['seq']}")
    if chain.entries[pin["seq"] - 1].head != pin["head"]:
        raise TranscriptError(f"{folder / CHAIN}: entry {pin['seq']} is not the one that the manifest knew")


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
