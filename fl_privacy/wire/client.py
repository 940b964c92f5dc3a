"""The client side of the middleware: the calls of sites, server and evaluator."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from fl_privacy.coding import FLOAT32, MAX_PARAMETERS, Coding, Payload
from fl_privacy.errors import ProtocolError, require
from fl_privacy.scores.form import Counts
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.channel import Refused
from fl_privacy.wire.rpc import Stub
from fl_privacy.wire.stream import Receiver, chunks, digest, header_of

Array = NDArray[np.float32]
Result = TypeVar("Result")
SUMS = Coding("sum", "<u4", 0)  # of a mix, as it travels
FIELDS = ("phase", "reason", "count", "members", "senders", "counted")
PAUSE = 0.25
LONGEST_PAUSE = 2.0


@dataclass(frozen=True)
class Release:
    """What the server received from a round."""

    phase: str
    reason: str = ""
    count: int = 0
    tiers: list[str] = field(default_factory=list)
    members: bytes = b""  # one bit per site of the cohort
    senders: bytes = b""
    rows: Payload | None = None
    counts: Counts | None = None
    counted: int = 0
    statement: bytes = b""


REASONS = {
    "UNAVAILABLE": "not reachable, or it refused our certificate; see its log, or run fl-privacy preflight",
    "DEADLINE_EXCEEDED": "no answer in time",
    "CANCELLED": "the call was cancelled",
    "UNIMPLEMENTED": "does not know this call; use the same version of fl-privacy everywhere",
}


def explain(error: grpc.RpcError) -> str:
    """Why a call to a middleware failed, in one line: our own reason if it gave one, and not gRPC's report."""
    code, details = error.code().name, " ".join(str(error.details() or "").split())
    own = isinstance(error, Refused) or re.match(r"[a-z_-]+: ", details)  # "field: reason", as our services answer
    return f"middleware: {code}: {details if own else REASONS.get(code, 'failed; see its log')}"


def patiently(call: Callable[[], Result], until: float, *also: grpc.StatusCode) -> Result:
    """Repeat a call while its peer is unavailable, until `until` (time.monotonic)."""
    pause = PAUSE
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, *also) or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def fetch(
    stub: Stub, request: pb.FetchRequest, timeout: float, coding: Coding = FLOAT32, most: int = MAX_PARAMETERS
) -> tuple[pb.RoundHeader, Payload | None]:
    """The next round and its model, or a header without a round; refuses one of more than `most` numbers unread."""
    parts = stub.fetch(request, timeout=timeout)
    header: pb.RoundHeader = header_of(_first(parts), "round")
    if not header.digest:
        return header, None
    fits = header.length <= most and coding.type.itemsize * header.length <= FLOAT32.nbytes(MAX_PARAMETERS)
    require(fits, f"length: {header.length} is out of range")
    return header, _fill(np.empty(header.length, coding.type), parts, header.digest, coding)


def submit(stub: Stub, round: pb.RoundHeader, payload: Payload, timeout: float, coding: Coding, **terms: Any) -> bool:
    """Send an update, or a shard of one, under the `terms` of its header; returns whether it had arrived before."""
    where = {name: getattr(round, name) for name in ("run", "round", "attempt", "layout")}
    reply = stub.submit(_vector(payload, coding, **where, **terms), timeout=timeout)
    return bool(reply.duplicate)


def share(stub: Stub, header: pb.ShareHeader, sealed: Payload, timeout: float) -> None:
    """Hand a mailbox an aggregating site's shard, sealed for all sites."""
    header.length, header.digest = sealed.size, digest(sealed)
    stub.share(chunks(pb.Chunk(share=header), [sealed]), timeout=timeout)


def seed(stub: Stub, run: str, round: int, shard: Array, timeout: float) -> None:
    """Hand an aggregator its shard of the model that a round left; round 0 leaves the initial one."""
    stub.seed(_vector(shard, FLOAT32, run=run, round=round), timeout=timeout)


def relay(stub: Stub, payload: Payload, timeout: float, coding: Coding, **terms: Any) -> None:
    """Hand a mix the batch that the one before it gave."""
    stub.relay(_vector(payload, coding, **terms), timeout=timeout)


def _vector(payload: Payload, coding: Coding, **terms: Any) -> Iterator[pb.Chunk | memoryview]:
    header = pb.VectorHeader(dtype=coding.name, length=payload.size, digest=digest(payload), **terms)
    return chunks(pb.Chunk(vector=header), [payload])


def open_round(stub: Stub, header: pb.RoundHeader, model: Array | None, timeout: float) -> None:
    """Open an attempt; a shuffler gets the model too."""
    stub.open(chunks(pb.Chunk(round=header), [] if model is None else [model]), timeout=timeout)


def collect_sum(parts: Iterator[Any], coding: Coding = SUMS, most: int = MAX_PARAMETERS) -> Release:
    """Wait for the round's end, and receive a sum of at most so many numbers.

    A mix hands out whose updates it has, and once the round is settled their sum.
    """
    header: pb.ReleaseHeader = header_of(_first(parts), "release")
    total = None
    if header.phase == "released":
        require(header.length <= most, f"length: {header.length} is out of range")
        total = _fill(np.empty(header.length, coding.type), parts, None, coding)
    fields = {name: getattr(header, name) for name in (*FIELDS, "statement")}
    return Release(**fields, rows=total, counts=counts_in(header.counts))


def collect(parts: Iterator[Any], coding: Coding = FLOAT32) -> Release:
    """Wait for the round's end and receive what is released; `parts` is the running call, so it can be cancelled."""
    header: pb.ReleaseHeader = header_of(_first(parts), "release")
    rows = None
    if header.phase == "released":
        rows = _fill(np.empty((header.count, header.length), coding.type), parts, None, coding)
    fields = {name: getattr(header, name) for name in FIELDS}
    return Release(**fields, tiers=list(header.tiers), rows=rows, counts=counts_in(header.counts))


def counts_in(data: bytes) -> Counts | None:
    require(len(data) % 8 == 0, f"counts: {len(data)} bytes are no 64-bit numbers", "DATA_LOSS")
    return np.frombuffer(data, "<u8").astype(np.uint64) if data else None


def _first(parts: Iterator[Any]) -> Any:
    for part in parts:
        return part
    raise ProtocolError("DATA_LOSS", "stream: empty")


def _fill(target: Payload, parts: Iterator[Any], wanted: bytes | None, coding: Coding = FLOAT32) -> Payload:
    receiver = Receiver(target, wanted, coding)
    for part in parts:
        receiver.feed(part)
    receiver.finish()
    return target
