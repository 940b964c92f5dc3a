"""The run folder around the views: manifest, its signature, and where everything lies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fl_privacy.errors import TranscriptError
from fl_privacy.files import PART
from fl_privacy.transcript.chain import FORMAT
from fl_privacy.transcript.files import NAME, check_format, check_name, parse_object, read_bounded, read_signed, sha256

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig.json"
METRICS = "metrics.jsonl"
VIEWS = "views"
TRUTH = "truth"
# Format 2 states the guarantee, the rounds done and the changes of a resumed run, where format 1 said `private`.
FORMATS = (1, 2)
LOGS = "logs"  # still growing when the run is closed, and no part of the transcript


def pretty(manifest: dict[str, Any], path: Path) -> bytes:
    """The manifest, checked, as people read it; its signature is over these very bytes."""
    check_manifest(manifest, path)
    return json.dumps(manifest, indent=2, allow_nan=False).encode("ascii") + b"\n"


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


def read_manifest(root: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The manifest, the document that signs it, and its digest, which that document names."""
    manifest, data = load_manifest(root)
    path, digest = root / SIGNATURE, sha256(data)
    signature = read_signed(path, FORMAT, {"run": str, "sha256": str, "previous": str})
    if digest not in (signature["sha256"], signature["previous"]):
        raise TranscriptError(f"{root / MANIFEST}: its SHA-256 is not the one that {SIGNATURE} signs")
    if signature["run"] != manifest["run"]:
        raise TranscriptError(f"{path}: signs the manifest of run {signature['run']:.80}")
    return manifest, signature, digest


def folders(root: Path, group: str) -> list[str]:
    """What lies in views/ or truth/, by name."""
    return sorted(path.name for path in (root / group).iterdir()) if (root / group).is_dir() else []


def places(root: Path) -> list[str]:
    """Where the views and the truth that are here lie: `views/<name>` and `truth/<name>`."""
    return [f"{group}/{name}" for group in (VIEWS, TRUTH) for name in folders(root, group)]


def anchor(run_dir: Path) -> Path:
    """Where the authority of a run from elsewhere lies: beside the run, as not all runs of a folder share one."""
    return run_dir.with_name(f".{run_dir.name}.ca.pem")


def view_folder(root: Path, where: str) -> Path:
    """A view by its place, which an untrusted file may have named: `views/<name>` or `truth/<name>`, and no link."""
    group, _, name = where.partition("/")
    if group not in (VIEWS, TRUTH) or not NAME.fullmatch(name):
        raise TranscriptError(f"{root}: {where!r:.80} is no view of this run; views lie in {VIEWS}/<name>")
    folder = root / group / name
    if folder.is_symlink() or folder.parent.is_symlink():
        raise TranscriptError(f"{folder}: is a link, which may leave the run; copy the view here")
    if not folder.is_dir():
        raise TranscriptError(f"{folder}: no such view here, though it should be; copy its folder in")
    return folder


def run_files(root: Path) -> list[str]:
    """The run's own files, by their place in it: all but the manifest, its signature, views, truth and logs."""
    found = []
    for folder, folders, names in os.walk(root):
        here = Path(folder).relative_to(root)
        if here == Path("."):
            folders[:] = [name for name in folders if name not in (VIEWS, TRUTH, LOGS)]
            names = [name for name in names if name not in (MANIFEST, SIGNATURE)]
        kept = [Path(folder) / name for name in names if not name.endswith(PART)]
        found += [path.relative_to(root).as_posix() for path in kept if not path.is_symlink()]
    return sorted(found)
