"""The SuperLink's members: the SuperNodes whose public keys are in its kit's `nodes/`, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from fl_privacy.deploy.flower import Control
from fl_privacy.files import Stamp, stamp
from fl_privacy.ops.log import Log

MAX_KEY = 4096
NEW_KEY = (
    "Flower accepts no key that was removed before; the site must delete node/node.key and run `fl-privacy pki renew`, "
    "then install its new signed file there and here"
)


class Refusal(NamedTuple):
    """A file in `nodes/` that admits nobody, identified by its contents: each one is reported once."""

    site: str
    key: bytes
    reason: str


def keys_in(folder: Path) -> tuple[dict[bytes, str], set[Refusal]]:
    """Public key to name of every readable NAME.pub, and the files that are refused."""
    found: dict[bytes, str] = {}
    refused: set[Refusal] = set()
    for path in sorted(folder.glob("*.pub")):
        try:
            with path.open("rb") as file:
                key = serialization.load_pem_public_key(file.read(MAX_KEY))
            made = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            why = f"{path.name}: not a public key ({error}); install the site's signed file again"
            refused.add(Refusal(path.stem, b"", why))
            continue
        found[made] = path.stem
    return found, refused


class Members:
    """Keeps Flower's list in step with the folder: a site joins by adding a file and leaves by deleting it.

    `keep` is called several times a second, so a lasting problem is logged only once.
    """

    def __init__(self, control: Control, folder: Path, log: Log) -> None:
        self._control, self._folder, self._log = control, folder, log
        self._seen: tuple[list[Path], Stamp] | None = None
        self._refused: set[Refusal] = set()
        self._trouble = ""

    def keep(self) -> None:
        """Register new nodes, unregister removed ones; while the SuperLink is unreachable, each call tries again."""
        found = sorted(self._folder.glob("*.pub"))
        now = found, stamp(found)
        if now == self._seen:
            return
        try:
            refused = self._match()
        except httpx.HTTPError as error:
            if self._trouble != (trouble := type(error).__name__):
                self._log("members", reason=trouble)
                self._trouble = trouble
            return
        for one in sorted(refused - self._refused):
            self._log("refused", site=one.site, reason=one.reason)
        self._seen, self._refused, self._trouble = now, refused, ""

    def _match(self) -> set[Refusal]:
        """Removals first; one refused key does not hold up the others."""
        there = self._control.nodes()
        wanted, refused = keys_in(self._folder)
        for key in there.keys() - wanted.keys():
            if _accepted(self._control.unregister, there[key]):
                self._log("removed", node=there[key])
            else:
                refused.add(Refusal("", key, f"node {there[key]}: not removed by Flower; restart the superlink"))
        for key in sorted(wanted.keys() - there.keys(), key=wanted.__getitem__):
            if _accepted(self._control.register, key, wanted[key]):
                self._log("joined", site=wanted[key])
            else:
                refused.add(Refusal(wanted[key], key, f"{wanted[key]}.pub: refused; {NEW_KEY}"))
        return refused


def _accepted(call: Callable[..., None], *arguments: object) -> bool:
    """Whether the SuperLink accepted the call; anything but a final refusal is an error."""
    try:
        call(*arguments)
    except httpx.HTTPStatusError as error:
        if not error.response.is_client_error:
            raise
        return False
    return True
