"""What the sites say to each other: signed statements, with the values and certificates that travel with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.agreement.terms import Terms, holds
from fl_privacy.crypto import sealing
from fl_privacy.errors import ProtocolError, require

MOST_BYTES = 4 * 2**20  # a proof of a new view among 100 sites has 1.2 MiB
MOST_VIEWS = 2**31
DIGEST = 32
DEEPEST = 2  # a proposal holds view changes, and these hold votes


class Topic(StrEnum):
    COMMITMENT = "commitment"  # to a contribution
    OPENING = "opening"  # of it
    PROPOSE = "propose"  # PBFT's pre-prepare; with a proof, its new-view
    PREPARE = "prepare"
    COMMIT = "commit"
    CHANGE = "view-change"
    DECIDED = "decided"  # state transfer: a value with its quorum of commits
    ASK = "ask"  # for that


VOTES = (Topic.PROPOSE, Topic.PREPARE, Topic.COMMIT)


@dataclass(frozen=True, slots=True)
class Statement:
    """What one site signed. It holds digests only, except in an opening."""

    topic: Topic
    author: str
    height: int
    view: int
    content: bytes
    signature: bytes = b""

    def payload(self, terms: Terms) -> bytes:
        """What is signed: bound to run, round and roster by the scope, to sequence and view by their numbers."""
        where = (self.topic.value, self.author, str(self.height), str(self.view))
        return sealing.fields("fl-privacy agreement 1", terms.scope, *where, self.content)

    def is_genuine(self, terms: Terms) -> bool:
        key = terms.key_of.get(self.author)
        return key is not None and holds(key, self.signature, self.payload(terms))

    @property
    def claim(self) -> tuple[int, bytes] | None:
        """In a view change: the last view in which its author prepared a value, and the value's digest."""
        return (int.from_bytes(self.content[:8], "big"), self.content[8:]) if self.content else None


@dataclass(frozen=True, slots=True)
class Message:
    said: Statement
    value: bytes = b""
    support: tuple[Message, ...] = ()

    @property
    def bare(self) -> Message:
        """The statement alone."""
        return Message(self.said)

    def statements(self) -> Iterator[Statement]:
        """Everything that was signed in it."""
        yield self.said
        for other in self.support:
            yield from other.statements()


def claiming(view: int, digest: bytes) -> bytes:
    """The content of a view change of a site that prepared something."""
    return view.to_bytes(8, "big") + digest


def sign(terms: Terms, key: ec.EllipticCurvePrivateKey, statement: Statement) -> Statement:
    signature = sealing.signed(key, statement.payload(terms))
    return Statement(statement.topic, statement.author, statement.height, statement.view, statement.content, signature)


def encode(message: Message) -> bytes:
    return json.dumps(as_list(message), separators=(",", ":")).encode()


def as_list(message: Message) -> list[Any]:
    said = message.said
    head = [said.topic.value, said.author, said.height, said.view, said.content.hex(), said.signature.hex()]
    return [*head, message.value.hex(), [as_list(other) for other in message.support]]


def decode(data: bytes, terms: Terms) -> Message:
    """A message in which everything is signed by whom it says, under these terms. Refuses anything else."""
    require(len(data) <= MOST_BYTES, f"agreement: a message of {len(data)} bytes, at most {MOST_BYTES} are allowed")
    message = parse(loads(data))
    for statement in message.statements():
        why = "agreement: not signed by this site for this run, roster, round, sequence and view"
        require(statement.is_genuine(terms), why, sealing.DENIED)
    return message


def loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ProtocolError("INVALID_ARGUMENT", "agreement: not a message; update both sites") from None


def parse(found: Any, depth: int = 0) -> Message:
    """A message of the right form; its signatures are not checked."""
    whole = isinstance(found, list) and len(found) == 8 and isinstance(found[7], list) and len(found[7]) <= 1000
    require(whole and depth <= DEEPEST, "agreement: not a message of this form")
    said = parse_statement(found[:6])
    support = tuple(parse(other, depth + 1) for other in found[7])
    return Message(said, _bytes(found[6]), support)


def parse_statement(found: Any) -> Statement:
    require(isinstance(found, list) and len(found) == 6, "agreement: not a statement of this form")
    topic, author, height, view, content, signature = found
    known = isinstance(topic, str) and topic in set(Topic) and isinstance(author, str)
    require(known and type(height) is int and type(view) is int, "agreement: not a statement of this form")
    require(1 <= height <= 2 and 0 <= view < MOST_VIEWS, f"agreement: sequence {height} or view {view} is out of range")
    statement = Statement(Topic(topic), author, height, view, _bytes(content), _bytes(signature))
    require(len(statement.content) in _lengths(statement.topic), "agreement: content of another length")
    return statement


def _lengths(topic: Topic) -> tuple[int, ...]:
    return {Topic.ASK: (0,), Topic.CHANGE: (0, 8 + DIGEST)}.get(topic, (DIGEST,))


def _bytes(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        raise ProtocolError("INVALID_ARGUMENT", "agreement: not hexadecimal") from None
