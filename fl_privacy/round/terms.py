"""What an attempt at a round is bound to. Its name is a digest of all of it.

The server makes the terms; every middleware and every site makes them again from what it holds itself, and takes part
only in an attempt of that name. So nothing that was sent for one attempt is good for another run, round, model, cohort
or recipient.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

from fl_privacy.errors import ProtocolError, require
from fl_privacy.steps.base import At

if TYPE_CHECKING:
    from fl_privacy.config import Federation

DOMAIN = "fl-privacy attempt 1"
MOST = 1_000_000  # attempts at one round
FAREWELLS = 2  # exchanges after the last round: for the final model, and for the best one


@dataclass(frozen=True)
class Terms:
    """`model`, `root` and `nonce` are digests as bytes, the others as their owners write them."""

    run: str
    nonce: bytes  # of the run: a second run of the same name is another one
    round: int
    number: int  # of the attempt at this round, from 1
    federation: str  # digest of the config
    roster: str  # digest of who is in the federation, with keys and organisations
    model: bytes  # of the model that the round starts from; with shards, of their digests in order; with mixes, `sized`
    root: bytes  # of the cohort
    cohort: int  # sites in it
    organisations: int  # that these belong to
    quorum: int
    layout: str
    counts: int
    farewell: int
    best: int
    recipient: str  # fingerprint of the server's key

    @classmethod
    def checked(cls, source: Any, **known: Any) -> Terms:
        """From a header or other terms, which must agree with what the caller knows itself and give the name."""
        for name, value in known.items():
            differs = f"{name}: another one than this party has; all need the same config and roster"
            require(getattr(source, name) == value, differs, "PERMISSION_DENIED")
        terms = cls(**{name: getattr(source, name) for name in FIELDS})
        require(terms.name == source.attempt, "attempt: not the digest of its terms")
        return terms

    @classmethod
    def parse(cls, text: str) -> Terms:
        """The inverse of `to_json`, for text that nobody vouches for."""
        try:
            listed = dict(zip(FIELDS, json.loads(text)[1:], strict=True))
            made = cls(**dict(_typed(listed)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ProtocolError("INVALID_ARGUMENT", "terms: not those of an attempt") from None
        require(made.to_json() == text, "terms: not in their one form")
        return made

    def to_json(self) -> str:
        return json.dumps([DOMAIN, *(v.hex() if isinstance(v, bytes) else v for v in astuple(self))])

    @property
    def attempt(self) -> str:
        return self.name

    @property
    def at(self) -> At:
        wanted = {name: getattr(self, name) for name in ("counts", "farewell", "best", "nonce")}
        return At(self.run, self.round, self.name, **wanted)

    @property
    def name(self) -> str:
        """The attempt's name."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def check(self, federation: Federation) -> None:
        """Refuse a cohort or quorum that the federation's config does not allow, whatever the server says."""
        sites, least, last = len(federation.sites), federation.floor, federation.rounds + FAREWELLS
        require(1 <= self.round <= last, f"round: {self.round}, but this federation has {last} with its farewells")
        require(1 <= self.number <= MOST, f"number: {self.number} attempts at a round are too many")
        low, high = (least, sites) if self.farewell else (federation.quorum, federation.cohort)
        require(low <= self.cohort <= high, f"cohort: {self.cohort} sites, but this federation has {low} to {high}")
        require(low <= self.quorum <= self.cohort, f"quorum: {self.quorum}, but this federation needs {low}")
        few = f"organisations: {self.organisations} in the cohort, but at least {least} are needed"
        require(least <= self.organisations <= self.cohort, few)


FIELDS = tuple(field.name for field in fields(Terms))
_KINDS = {"str": str, "int": int, "bytes": str}  # in JSON


def _typed(listed: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for field in fields(Terms):
        value = listed[field.name]
        if type(value) is not _KINDS[str(field.type)]:
            raise TypeError(field.name)
        yield field.name, bytes.fromhex(str(value)) if field.type == "bytes" else value


def joined(digests: list[bytes]) -> bytes:
    """The digest of a model that is known only by the digests of its shards."""
    return hashlib.sha256(b"".join(digests)).digest()


def sized(digest: bytes, parameters: int) -> bytes:
    """The digest of a model and of its size, which a middleware that never sees the model has to be sure of."""
    require(len(digest) == hashlib.sha256().digest_size, "digest: not a SHA-256")
    return joined([digest, parameters.to_bytes(8, "big")])
