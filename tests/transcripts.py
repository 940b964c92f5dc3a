"""A small run with throwaway certificates, and the changes that tests make to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.transcript import RunWriter, ViewWriter, chain, verify
from fl_privacy.transcript.events import Other
from fl_privacy.transcript.files import canonical, sha256
from fl_privacy.transcript.signing import HEAD_DOMAIN, Signer

RUN = "run-1"


class Credentials(NamedTuple):
    key: ec.EllipticCurvePrivateKey
    pem: bytes


class Authority:
    """A throwaway CA."""

    def __init__(self, name: str = "test CA") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = _certificate(self.name, self.name, self.key).add_extension(x509.BasicConstraints(True, None), True)
        self.pem = builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        role: str,
        name: str,
        days: float = 1,
        start: float = -1,
        federation: str = "demo",
        *extensions: x509.ExtensionType,
    ) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        uri = x509.UniformResourceIdentifier(f"fl-privacy://{federation}/{role}/{name}")
        builder = _certificate(subject, self.name, key, days, start).add_extension(
            x509.SubjectAlternativeName([uri]), False
        )
        for extension in extensions:
            builder = builder.add_extension(extension, True)
        return Credentials(key, builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float = 1, start: float = -1
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=start))
        .not_valid_after(now + timedelta(days=days))
    )


CA = Authority()
SERVER = CA.issue("server", "server")
SHUFFLER = CA.issue("shuffler", "shuffler")
SITE = CA.issue("site", "site-0")


def make_run(root: Path, close: str | None = "completed", nonces: bool = True) -> Path:
    """A small run: server and shuffler saw three rounds, one site wrote its truth."""
    path = root / RUN
    observers = {"server": "views/server", "shuffler": "views/shuffler"}
    run = RunWriter(path, {"run": RUN, "config": {"name": "demo"}, "observers": observers}, *SERVER)
    nonce = run.nonce if nonces else ""
    writers = [
        ViewWriter(path / "views/server", "server", RUN, *SERVER, nonce),
        ViewWriter(path / "views/shuffler", "shuffler", RUN, *SHUFFLER, nonce),
        ViewWriter(path / "truth/site-0", "site-0", RUN, *SITE, nonce),
    ]
    for t in range(1, 4):
        for writer in writers:
            writer.record(t, "a1", {"updates": matrix(t)}, tiers=[1.0, "gold"], events=[Other(fields={"t": t})])
        run.metric({"round": t, "loss": 1 / t})
    run.update(rounds=3)
    if close:
        run.close(close)
    return path


def matrix(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 5)).astype(np.float32)


def problems(path: Path, ca: bytes = CA.pem, head: str | None = None) -> str:
    return "\n".join(str(problem) for problem in verify(path, ca, head).problems)


def notes(path: Path, ca: bytes = CA.pem) -> str:
    return "\n".join(str(finding) for finding in verify(path, ca).findings if finding.note)


class Crash(BaseException):
    """The process is killed here."""


class Saboteur:
    """Makes the n-th call of `os.fsync` or `os.replace` fail; with `die`, nothing is cleaned up afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int, error: BaseException, die: bool) -> None:
        self.calls, self.fail_at, self.error, self.dead = 0, fail_at, error, False
        for name in ("fsync", "replace"):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))
        if die:
            for owner, name in ((Path, "unlink"), (ViewWriter, "_continue")):
                monkeypatch.setattr(owner, name, self.unless_dead(getattr(owner, name)))

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at or (self.dead and isinstance(self.error, Crash)):
                self.dead = True
                raise self.error
            return real(*args)

        return call

    def unless_dead(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: None if self.dead else real(*args, **options)


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(folder: Path, keep: int, who: Credentials | None = None) -> None:
    """Remove all records after `keep`, and sign the result if a key is given."""
    view = chain.read_chain(folder)
    for entry in view.entries[keep:]:
        for name in entry.files:
            (folder / name).unlink()
    (folder / "chain.jsonl").write_bytes(b"".join(entry.line for entry in view.entries[:keep]))
    if who:
        sign_head(folder, view.entries[:keep], view.head, who)


def sign_head(folder: Path, entries: list[chain.Entry], head: dict[str, Any], who: Credentials) -> None:
    names = head["run"], head["observer"], head.get("nonce", "")
    top = entries[-1].head if entries else chain.genesis(*names)
    document = {**chain.named(*names), "seq": len(entries), "head": top}
    (folder / "head.json").write_bytes(canonical(Signer(*who).sign(HEAD_DOMAIN, document)) + b"\n")


def rewrite(folder: Path, who: Credentials | None, new_head: bool = True) -> None:
    """Change one array and recompute every later digest and link, as someone without the key could."""
    view = chain.read_chain(folder)
    entries: list[chain.Entry] = []
    prev = chain.genesis(view.head["run"], view.head["observer"], view.head.get("nonce", ""))
    for old in view.entries:
        if old.seq == 2:
            flip(folder / chain.file_names(old.round, old.seq)[0])
        files = {name: sha256((folder / name).read_bytes()) for name in old.files}
        entries.append(chain.Entry(old.seq, old.round, old.attempt, files, prev))
        prev = entries[-1].head
    (folder / "chain.jsonl").write_bytes(b"".join(entry.line for entry in entries))
    if new_head:
        (folder / "head.json").write_bytes(canonical({**view.head, "head": prev}) + b"\n")
    if who:
        sign_head(folder, entries, view.head, who)
