"""The rollback witness: the middleware remembers how far each site's ledger has come.

A site's disk cannot say that it was set back to an older copy; somebody else has to remember. After every charge a site
signs a statement of its ledger's head and sends it along. The middleware keeps the newest statement of each ledger. It
cannot invent one, because it has no site's key, and learns from it only the ledger's name, its number of entries and a
hash.

With every round that it offers, a middleware shows a site the newest statements that it has of the site's ledgers. A
site whose ledger is behind one of them sends nothing, and shows the reason to its operator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_privacy.dp.ledger import Ledger, LedgerError
from fl_privacy.errors import FederationError, ProtocolError, require
from fl_privacy.files import append, create, make_folder, replace, whole_lines
from fl_privacy.identity.signing import sign_text, verify_text
from fl_privacy.reading import DIGEST, NAME

DOMAIN = b"fl-privacy/ledger/v1/head\0"
LONGEST = 1024  # bytes of an encoded statement
MOST = 16  # ledgers of one site
SLACK = 2**20  # bytes of outdated statements in a store before it is rewritten

Name = Annotated[str, Field(pattern=NAME)]


class Statement(BaseModel):
    """How far a site's ledger has come, signed with the key of the site's certificate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    federation: Name
    site: Name
    ledger: Name
    entries: int = Field(ge=0, lt=2**53)
    head: str = Field(pattern=DIGEST)
    signature: str = Field("", max_length=200)

    def encode(self) -> bytes:
        return json.dumps(self.model_dump(), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Statement:
        try:
            return cls.model_validate_json(data[: LONGEST + 1])
        except ValidationError as error:
            fields = f"{error.error_count()} fields are wrong"
            raise ProtocolError("INVALID_ARGUMENT", f"statement of a ledger: {fields}") from None

    @property
    def signed(self) -> bytes:
        """What the signature covers."""
        return DOMAIN + json.dumps(self.model_dump(exclude={"signature"}), sort_keys=True).encode()

    def is_signed_by(self, key: object) -> bool:
        try:
            verify_text(key, self.signature, self.signed)
        except (InvalidSignature, ValueError):
            return False
        return True


def statement(ledger: Ledger, federation: str, site: str, key: ec.EllipticCurvePrivateKey) -> Statement:
    """The head of a ledger, as last read or charged, signed by the site."""
    entries, head = ledger.head
    made = Statement(federation=federation, site=site, ledger=ledger.owner, entries=entries, head=head)
    return made.model_copy(update={"signature": sign_text(key, made.signed)})


def check(ledger: Ledger, found: Statement | None, key: object) -> None:
    """Refuse a ledger that is behind what the middleware has seen of it; None: it has seen nothing.

    `key` is the site's own public key. A head in the ledger's own chain needs no signature: only the site has made it.
    """
    if found is None:
        return
    if found.ledger != ledger.owner:
        raise LedgerError(f"witness: answered for the ledger {found.ledger!r}, not {ledger.owner!r}; nothing was sent")
    try:
        ledger.check_witness(found.entries, found.head)
    except LedgerError as error:
        if found.is_signed_by(key):
            raise
        doubt = "the site's present key did not sign that: if the key is the same as then, the middleware is wrong"
        raise LedgerError(f"{error} ({doubt})") from None


class Witnesses:
    """The newest statement of each ledger of each site, in one file of the middleware's own folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "witness.jsonl"
        self._newest: dict[tuple[str, str], Statement] = {}
        make_folder(folder)
        create(self._file, b"")
        lines = whole_lines(self._file.read_bytes())
        self._end = sum(len(line) + 1 for line in lines)
        try:
            for found in map(Statement.decode, lines):
                self._newest[found.site, found.ledger] = found
        except ProtocolError:
            fix = "restore it, or remove it if no site has restored a ledger since"
            raise FederationError(f"witness {self._file}: cannot be read; {fix}") from None

    def of(self, site: str) -> list[Statement]:
        """The newest statement of each ledger of a site."""
        return [found for (name, _), found in self._newest.items() if name == site]

    def newest(self, site: str, ledger: str) -> Statement | None:
        return self._newest.get((site, ledger))

    def take(self, found: Statement, key: object) -> None:
        """Keep a statement, durably; `key` is the public key in the site's certificate. Raises if it is not newer."""
        require(found.is_signed_by(key), "statement of a ledger: the signature is wrong", "PERMISSION_DENIED")
        known = self.newest(found.site, found.ledger)
        if known is not None and (known.entries, known.head) == (found.entries, found.head):
            return
        if known is None:
            ledgers = sum(site == found.site for site, _ in self._newest)
            require(ledgers < MOST, f"statement of a ledger: {found.site!r} has {ledgers} others", "RESOURCE_EXHAUSTED")
        elif found.entries <= known.entries:
            problem = f"{found.entries} entries, and {known.entries} were seen"
            raise ProtocolError("FAILED_PRECONDITION", f"ledger {found.ledger!r} of {found.site!r}: {problem}")
        self._end = append(self._file, self._end, found.encode() + b"\n")
        self._newest[found.site, found.ledger] = found
        self._shorten()

    def _shorten(self) -> None:
        """Forget outdated statements once they take too much room."""
        if self._end > SLACK + LONGEST * len(self._newest):
            kept = b"".join(found.encode() + b"\n" for found in self._newest.values())
            replace(self._file, kept)
            self._end = len(kept)
