"""What an aggregating site signs about its shard after a round. Two different ones prove that it cheated."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from fl_privacy.crypto import sealing
from fl_privacy.errors import ProtocolError, require
from fl_privacy.wire import federation_pb2 as pb

DIGEST = 32


class Equivocation(ProtocolError):
    """A site gave different parties different shards."""

    def __init__(self, site: str, attempt: str, proof: Sequence[pb.ShardStatement] = ()) -> None:
        said = f"shard: {site} signed two different shards in attempt {attempt[:12]}; the run is stopped"
        super().__init__("PERMISSION_DENIED", said)
        self.proof = proof


def sign(key: ec.EllipticCurvePrivateKey, run: str, said: pb.ShardStatement) -> pb.ShardStatement:
    said.signature = sealing.signed(key, _text(run, said))
    return said


def check(key: ec.EllipticCurvePublicKey, run: str, said: pb.ShardStatement, index: int) -> None:
    """Refuse a statement that this key did not sign, or about another shard."""
    require(said.index == index, f"shard: number {said.index}, and {index} was expected")
    require(len(said.digest) in (0, DIGEST), "digest: not a SHA-256")
    sealing.verify(key, said.signature, _text(run, said))


def _text(run: str, said: pb.ShardStatement) -> bytes:
    facts = (said.attempt, str(said.round), str(said.index), said.members, said.senders, said.digest)
    return sealing.fields("fl-privacy shard 2", run, *facts)


def fingerprint(run: str, said: pb.ShardStatement) -> str:
    """All that a statement says. A site may sign one in an attempt."""
    return hashlib.sha256(_text(run, said)).hexdigest()


def packed(statements: Iterable[pb.ShardStatement]) -> bytes:
    """The statements about all shards of a model, as sites announce them to each other."""
    return bytes(pb.ShardStatements(said=statements).SerializeToString())


def compare(
    run: str,
    own: Sequence[pb.ShardStatement],
    announced: Mapping[str, bytes],
    signers: Sequence[tuple[str, ec.EllipticCurvePublicKey]],
) -> None:
    """Raise if an aggregating site signed something else for another site than for us, in the same attempt.

    What others announce without the aggregating site's signature proves nothing, and is ignored.
    """
    for content in announced.values():
        for ours, theirs in zip(own, _unpacked(content), strict=False):
            _refuse_both(run, ours, theirs, signers)


def check_proofs(
    run: str, announced: Mapping[str, bytes], signers: Sequence[tuple[str, ec.EllipticCurvePublicKey]]
) -> None:
    """Raise if another site has shown two statements that one aggregating site signed in one attempt."""
    for content in announced.values():
        match _unpacked(content):
            case [one, other]:
                _refuse_both(run, one, other, signers)


def _refuse_both(
    run: str,
    one: pb.ShardStatement,
    other: pb.ShardStatement,
    signers: Sequence[tuple[str, ec.EllipticCurvePublicKey]],
) -> None:
    if one.attempt != other.attempt or one.index >= len(signers) or _text(run, one) == _text(run, other):
        return
    site, key = signers[one.index]
    if _genuine(key, run, one, one.index) and _genuine(key, run, other, one.index):
        raise Equivocation(site, one.attempt, (one, other))


def _genuine(key: ec.EllipticCurvePublicKey, run: str, said: pb.ShardStatement, index: int) -> bool:
    try:
        check(key, run, said, index)
    except ProtocolError:
        return False
    return True


def _unpacked(content: bytes) -> list[pb.ShardStatement]:
    try:
        return list(pb.ShardStatements.FromString(content).said)
    except DecodeError:
        return []
