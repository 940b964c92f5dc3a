"""The run folder around the views: the signed manifest, and where everything lies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fl_privacy.errors import TranscriptError
from fl_privacy.files import PART
from fl_privacy.transcript.chain import DIGEST, check_head
from fl_privacy.transcript.files import (
    NAME,
    check_format,
    check_name,
    file_sha256,
    parse_object,
    parse_signed,
    read_bounded,
    sha256,
)
from fl_privacy.transcript.signing import DETACHED_DOMAIN, MANIFEST_DOMAIN, Signer, message_of

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
VIEWS = "views"
TRUTH = "truth"
LOGS = "logs"  # still growing when the run is closed, and no part of the transcript
# Format 2 states the guarantee, the rounds done and the changes of a resumed run, where format 1 said `private`.
# Format 3 carries its own signature, a nonce, and the signed heads of all views.
FORMATS = (1, 2, 3)
CLOSED = ("completed", "failed", "interrupted")
DETACHED = "manifest.sig.json"  # the signature, before format 3
SIGNED_FIELDS = ("signed_at", "certificate", "signature")  # what signing adds
_DETACHED_FORM: dict[int, dict[str, type]] = {1: {"run": str, "sha256": str, "previous": str}}
_SIGNATURE = b',\n  "signature": "'
_REST = re.compile(rb'[0-9a-f]+"\n\}\n')


class Signed(NamedTuple):
    """A manifest, and what vouches for it: `document` has the certificate, and a signature over `message`."""

    manifest: dict[str, Any]
    document: Mapping[str, Any]
    message: bytes
    head: str  # SHA-256 of manifest.json
    stale: bool = False  # before format 3: not the manifest that was signed last, but the one before it


def seal(manifest: Mapping[str, Any], signer: Signer, path: Path) -> bytes:
    """The manifest, checked, as people read it; its signature is over all bytes before the signature itself."""
    dated = signer.dated(manifest)
    check_manifest(dated, path)
    text = json.dumps(dated, indent=2, allow_nan=False).encode("ascii").removesuffix(b"\n}")
    return text + _SIGNATURE + signer.signature(MANIFEST_DOMAIN + text).encode() + b'"\n}\n'


def check_manifest(manifest: dict[str, Any], path: Path) -> None:
    """The fields that readers rely on; `config` and the other fields are the caller's."""
    check_format(manifest, path, *FORMATS)
    check_name(f"{path}: run", manifest.get("run"))
    for field in ("observers", "heads", "files"):
        if not isinstance(manifest.get(field), dict):
            raise TranscriptError(f"{path}: {field} is missing or not an object")
    for name, where in manifest["observers"].items():
        if where != f"{VIEWS}/{check_name(f'{path}: observers', name)}":
            raise TranscriptError(f"{path}: observers.{name} is {where!r:.80}; its view lies in {VIEWS}/{name}")
    if manifest["format"] < 3:
        _check_old_heads(manifest, path)
        return
    for where, head in manifest["heads"].items():
        check_head(head, f"{path}: heads.{where:.80}")
    if not isinstance(manifest.get("nonce"), str) or not DIGEST.fullmatch(manifest["nonce"]):
        raise TranscriptError(f"{path}: nonce is not 32 bytes in lower-case hexadecimal")
    if type(manifest.get("serial")) is not int:
        raise TranscriptError(f"{path}: serial is missing or not a whole number")
    closed, late = manifest.get("closed"), manifest.get("late")
    if not isinstance(closed, list) or not all(map(_is_close, closed)):
        raise TranscriptError(f"{path}: closed is missing or malformed; it lists status and head")
    if not isinstance(late, list):
        raise TranscriptError(f"{path}: late is missing or not a list")


def _is_close(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("status"), str) and isinstance(one.get("head"), str)


def _check_old_heads(manifest: dict[str, Any], path: Path) -> None:
    for where, head in manifest["heads"].items():
        if not isinstance(head, dict) or type(head.get("seq")) is not int or not isinstance(head.get("head"), str):
            raise TranscriptError(f"{path}: heads.{where:.80} needs seq and head")


def changes_of(manifest: dict[str, Any], path: Path) -> list[str]:
    """What was changed each time the run was resumed, for people to read: `from round 6: rounds 5 -> 10`."""
    found = []
    try:
        for one in manifest.get("changes", ()):
            fields = ", ".join(f"{field['field']} {field['old']} -> {field['new']}" for field in one["fields"])
            found.append("".join(c for c in f"from round {one['from_round']:d}: {fields}" if c.isprintable()))
    except (TypeError, KeyError, ValueError):
        raise TranscriptError(f"{path}: changes is malformed; they are lists of from_round and fields") from None
    return found


def load_manifest(root: Path) -> tuple[dict[str, Any], bytes]:
    """manifest.json, well-formed, and its bytes; the signature is not checked here."""
    path = root / MANIFEST
    data = read_bounded(path)
    manifest = parse_object(data, str(path))
    check_manifest(manifest, path)
    return manifest, data


def read_manifest(root: Path) -> Signed:
    """The manifest with its signature, which is not checked here."""
    manifest, data = load_manifest(root)
    if manifest["format"] < 3:
        return _read_detached(root, manifest, sha256(data))
    text, _, rest = data.rpartition(_SIGNATURE)
    if not _REST.fullmatch(rest):
        raise TranscriptError(f"{root / MANIFEST}: does not end with its signature, so it was changed")
    return Signed(manifest, manifest, MANIFEST_DOMAIN + text, sha256(data))


def _read_detached(root: Path, manifest: dict[str, Any], head: str) -> Signed:
    """A manifest whose signature lies beside it, and names the manifest before it too."""
    path = root / DETACHED
    document = parse_signed(read_bounded(path), str(path), _DETACHED_FORM)
    if head not in (document["sha256"], document["previous"]):
        raise TranscriptError(f"{root / MANIFEST}: its SHA-256 is not the one that {DETACHED} signs")
    if document["run"] != manifest["run"]:
        raise TranscriptError(f"{path}: signs the manifest of run {document['run']:.80}")
    stale = head != document["sha256"]
    return Signed(manifest, document, message_of(DETACHED_DOMAIN, document), head, stale)


def head_of(root: Path) -> str:
    """The head of a run: whoever keeps it elsewhere finds every later change. Empty if there is no manifest."""
    return file_sha256(root / MANIFEST) if (root / MANIFEST).exists() else ""


def folders(root: Path, group: str) -> list[str]:
    """What lies in views/ or truth/, by name."""
    return sorted(path.name for path in (root / group).iterdir()) if (root / group).is_dir() else []


def places(root: Path) -> list[str]:
    """Where the views and the truth that are here lie: `views/<name>` and `truth/<name>`."""
    return [f"{group}/{name}" for group in (VIEWS, TRUTH) for name in folders(root, group)]


def anchor(run_dir: Path) -> Path:
    """Where the authority of a run from elsewhere lies: beside the run, as not all runs of a folder share one."""
    return run_dir.with_name(f".{run_dir.name}.ca.pem")


def authority_of(run_dir: Path) -> Path:
    """The certificate to verify a run with; runs of the local engine share one, others have theirs beside them."""
    own = anchor(run_dir)
    return own if own.exists() else run_dir.parent / "pki" / "ca.pem"


def view_folder(root: Path, where: str) -> Path:
    """A view by its place, which an untrusted file may have named: `views/<name>` or `truth/<name>`, and no link."""
    group, _, name = where.partition("/")
    if group not in (VIEWS, TRUTH) or not NAME.fullmatch(name):
        raise TranscriptError(f"{root}: {where!r:.80} is no view of this run; views lie in {VIEWS}/<name>")
    folder = root / group / name
    if folder.is_symlink() or folder.parent.is_symlink():
        raise TranscriptError(f"{folder}: is a link, which may leave the run; copy the view here")
    if not folder.is_dir():
        raise TranscriptError(f"{folder}: missing: deleted, or not copied in yet; copy the party's folder here")
    return folder


def run_files(root: Path) -> list[str]:
    """The run's own files, by their place in it: all but the manifest, views, truth and logs."""
    return [name for name in _names(root) if not _is_stray(root, name)]


def stray_files(root: Path) -> list[str]:
    """What no close covers: links, which may lead anywhere, and files that were never finished."""
    return [name for name in _names(root) if _is_stray(root, name)]


def _is_stray(root: Path, name: str) -> bool:
    return name.endswith(PART) or (root / name).is_symlink()


def _names(root: Path) -> list[str]:
    found = []
    for folder, folders, names in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in (VIEWS, TRUTH, LOGS)]
            names = [name for name in names if name != MANIFEST]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in (*names, *links)]
    return sorted(found)
