"""Pinning views that were copied into a run after it was closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.errors import TranscriptError
from fl_privacy.transcript.chain import read_head
from fl_privacy.transcript.files import writing
from fl_privacy.transcript.run import CLOSED, FORMATS, MANIFEST, head_of, read_manifest, view_folder
from fl_privacy.transcript.signing import Signer
from fl_privacy.transcript.verify import verify
from fl_privacy.transcript.write import reopened, write_manifest


class Pinned(NamedTuple):
    """Which views were pinned, and the head of the run since."""

    places: list[str]
    head: str


def pin(path: str | Path, key: ec.EllipticCurvePrivateKey, certificate_pem: bytes | str, ca_pem: bytes) -> Pinned:
    """Pin every view that `verify` accepts but for its missing pin; the manifest says that these pins are late."""
    root, signer = Path(path), Signer(key, certificate_pem)
    found = read_manifest(root)
    signer.check_own(found.message, found.document, str(root / MANIFEST))
    if found.manifest["format"] < FORMATS[-1] or found.manifest["status"] not in CLOSED:
        raise TranscriptError(f"{root / MANIFEST}: not a closed run of format {FORMATS[-1]}; pin views when it ended")
    unpinned = verify(root, ca_pem).unpinned
    if unpinned:
        heads: dict[str, Any] = {where: read_head(view_folder(root, where)) for where in unpinned}
        manifest = reopened(found)
        late = {"heads": {**manifest["heads"], **heads}, "late": [*manifest["late"], *unpinned]}
        with writing(str(root / MANIFEST)):
            write_manifest(root, {**manifest, **late}, signer)
    return Pinned(unpinned, head_of(root))
