"""The signed heads of views: a party reports its own, the server pins them, and `verify` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.x509.verification import Store

from fl_privacy.errors import TranscriptError
from fl_privacy.roles import PEER, ROLES
from fl_privacy.transcript.chain import HEAD, HEAD_LIMIT
from fl_privacy.transcript.files import read_bounded
from fl_privacy.transcript.signing import HEAD_DOMAIN, Identity, identify, message_of

Head = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """Whose views these are. Without a manifest that holds (`run` is None), each view is judged alone."""

    anchors: Store
    run: str | None = None
    nonce: str = ""
    federation: str | None = None


def signed_head(folder: Path) -> bytes | None:
    """What a party reports to the server about its view: head.json as it is; None if it recorded nothing."""
    return read_bounded(folder / HEAD, HEAD_LIMIT) if (folder / HEAD).exists() else None


def check(head: Head, expected: Expected, path: str) -> Identity:
    """Who signed a head, which must be the observer that it names, in this very run."""
    signer = identify(message_of(HEAD_DOMAIN, head), head, expected.anchors, path)
    if expected.run not in (None, head["run"]):
        raise TranscriptError(f"{path}: is of run {head['run']:.80}, not of {expected.run}")
    nonce = head.get("nonce", "")
    if expected.run is not None and nonce not in ("", expected.nonce):
        raise TranscriptError(f"{path}: is of another run with this name (nonce {nonce:.8}, not {expected.nonce:.8})")
    if head["observer"] != signer.name and not _simulated(signer, head):
        raise TranscriptError(f"{path}: view of {head['observer']:.80}, signed by {signer.name}")
    if expected.federation not in (None, signer.federation):
        raise TranscriptError(f"{path}: signed for federation {signer.federation}, not {expected.federation}")
    return signer


def place(signer: Identity, head: Head, path: str) -> str:
    """Where the record with this head lies in a run: sites record truth, all others views."""
    known = ROLES.get(signer.role)
    if known is None or not known.records:
        raise TranscriptError(f"{path}: signed by {signer.role} {signer.name}, which records nothing")
    return f"{known.records}/{head['observer'] if _simulated(signer, head) else signer.name}"


def _simulated(signer: Identity, head: Head) -> bool:
    """Only the server records what others see, and only what it delivers to sites of a simulation."""
    known = ROLES.get(signer.role)
    return known is not None and known.starts_runs and str(head["observer"]).startswith(PEER)


def newest(pinned: Mapping[str, Head], where: str, head: Head) -> dict[str, Head]:
    """The pins with one more head. A party that signs two different records of one number is refused."""
    known = pinned.get(where)
    if known is not None and known["seq"] == head["seq"] and known["head"] != head["head"]:
        raise TranscriptError(f"{where}: signed two different records {head['seq']}; the first one stays pinned")
    return {**pinned, where: head} if known is None or known["seq"] < head["seq"] else dict(pinned)
