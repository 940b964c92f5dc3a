"""What an aggregating site signs about its shard after a round. Two different ones prove that it cheated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from fl_privacy.crypto import sealing
from fl_privacy.errors import ProtocolError, require
from fl_privacy.wire import federation_pb2 as pb

DIGEST = 32


class Equivocation(ProtocolError):
    """A site gave different parties different shards."""

    def __init__(self, site: str, attempt: str) -> None:
        said = f"shard: {site} signed two different shards in attempt {attempt[:12]}; the run is stopped"
        super().__init__("PERMISSION_DENIED", said)


def sign(key: ec.EllipticCurvePrivateKey, run: str, said: pb.ShardStatement) -> pb.ShardStatement:
    said.signature = sealing.signed(key, _text(run, said))
    return said


def check(key: ec.EllipticCurvePublicKey, run: str, said: pb.ShardStatement, index: int) -> None:
    """Refuse a statement that this key did not sign, or about another shard."""
    require(said.index == index, f"shard: number {said.index}, and {index} was expected")
    require(len(said.digest) in (0, DIGEST), "digest: not a SHA-256")
    sealing.verify(key, said.signature, _text(run, said))


def _text(run: str, said: pb.ShardStatement) -> bytes:
    facts = (said.attempt, str(said.index), said.members, said.senders, said.digest)
    return sealing.fields("fl-privacy shard 1", run, *facts)


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
            site, key = signers[ours.index]
            if theirs.attempt != ours.attempt or theirs == ours:
                continue
            if _text(run, theirs) != _text(run, ours) and _genuine(key, run, theirs, ours.index):
                raise Equivocation(site, ours.attempt)


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
