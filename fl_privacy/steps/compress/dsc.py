"""`compress: {kind: dsc}`: distributed shifted compression (ERIS, Algorithm 1 with DSC).

A site sends v = C(g - s) instead of its update g, and both ends move the reference s by gamma v. The published scheme
keeps the mean of all references at an aggregator, which drifts as soon as a site misses a round (`dsc-mean`); here
every aggregator keeps the reference of each site.

Ends that lost track of each other go back to the last reference that both have, or to zero. No reference ever
travels, because it holds what the compression withheld: an aggregator sends the round and the digest of the one it
has, and a site says which round's reference its message builds on.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_privacy.coding import Coding, Decoder, Known, Payload
from fl_privacy.crypto.keys import KEY_BYTES
from fl_privacy.errors import FederationError, require
from fl_privacy.shard.compressors import Compressor, Quantised, Sparse, bounded
from fl_privacy.shard.shift import Message, Shift
from fl_privacy.steps.base import At, Running, Seat, Step
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

__all__ = ["Dsc", "DscMean", "Message", "Shift"]

HEAD = 1 + KEY_BYTES // 4  # words: the round of the reference that the message builds on, and the key
HELD = struct.Struct("!I32s")  # what an aggregator says that it has: the round, and the digest
UNCOMPARED = bytes(32)  # in place of a digest
ROUND, REFERENCE = "round.", "reference."


class Dsc(Step):
    """Sends a random part of what changed since the site's last update, or all of it in 8 bits."""

    kind: Literal["dsc"] = "dsc"
    p: float = Field(0.05, gt=0, le=1, description="fraction of the coordinates sent per round; for `sparse`")
    compressor: Literal["sparse", "quantised"] = "sparse"
    levels: int = Field(127, ge=1, le=127, description="of the values; for `quantised`")

    def compress(self, d: int) -> Compressor:
        """The compressor for vectors of d numbers."""
        return Sparse(d, self.p) if self.compressor == "sparse" else Quantised(d, self.levels)

    def coding(self, before: Coding) -> Coding:
        return Messages(self.kind, "<u4", 0, by_part=True, step=self)

    def decoder(self, d: int) -> Decoder:
        return Referenced(self, d)

    def start(self, seat: Seat) -> Running:
        return Compressing(self, seat)

    @property
    def kept(self) -> float:
        return self.p if self.compressor == "sparse" else 1.0

    def problems(self, federation: Federation) -> Iterator[str]:
        if not federation.route.remembers:
            yield f"compress.kind: {self.kind} needs aggregators, and route is {federation.route.kind}; use shards"
        if federation.encode.kind != "none":
            yield f"encode.kind: {federation.encode.kind} is not supported with {self.kind}; use none"


class DscMean(Dsc):
    """As published: an aggregator keeps one reference, the mean of the sites'. All sites must take part every round."""

    kind: Literal["dsc-mean"] = "dsc-mean"  # type: ignore[assignment]

    def decoder(self, d: int) -> Decoder:
        return MeanReferenced(self, d)

    def problems(self, federation: Federation) -> Iterator[str]:
        yield from super().problems(federation)
        if federation.quorum < len(federation.sites):
            few = f"{federation.quorum} of {len(federation.sites)} may complete a round"
            yield f"compress.kind: dsc-mean drifts unless every site takes part, and {few}; use dsc or raise quorum"


@dataclass(frozen=True)
class Messages(Coding):
    """An update as its parts' messages, one after the other."""

    step: Dsc | None = None

    def length(self, parameters: int) -> int:
        assert self.step is not None
        return HEAD + self.step.compress(parameters).words

    def decoder(self, parameters: int) -> Decoder:
        assert self.step is not None
        return self.step.decoder(parameters)

    def decode(self, rows: Payload, parameters: int) -> NDArray[np.float32]:
        raise FederationError("coding: messages of dsc are decoded with their references; use decoder()")


class Compressing(Running):
    """A site's end: the references of all parts, and those before them in case a receiver did not count the last."""

    def __init__(self, step: Dsc, seat: Seat) -> None:
        self._step, self._seat, self._versions = step, seat, dict[tuple[int, int], Vector]()
        self._parts = seat.federation.route.parts(seat.federation, seat.work.layout.size)
        self._held: Sequence[bytes] = ()

    def compare(self, held: Sequence[bytes]) -> None:
        self._held = held

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._versions = {_version(name): array for name, array in state.items()}

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {f"{part}.{round}": array for (part, round), array in self._versions.items()}

    def outward(self, update: Payload, at: At) -> Payload:
        messages, kept = [], dict[tuple[int, int], Vector]()
        for part, vector in enumerate(self._parts.split(update)):
            base, reference = self._common(part)
            start = None if reference is None else reference.copy()
            shift = Shift(vector.size, reference=start, compressor=self._step.compress(vector.size))
            message = shift.encode(vector, self._seat.repeatable_key(at, f"{self._step.kind}/{part}"))
            messages += [np.array([base], "<u4"), np.frombuffer(message.key, "<u4"), message.packed]
            kept |= {(part, base): reference} if reference is not None else {}
            kept[part, at.round] = shift.reference
        self._versions = kept
        return np.concatenate(messages)

    def _common(self, part: int) -> tuple[int, Vector | None]:
        """The reference that this site and the receiver of a part both have, and its round; otherwise none, round 0."""
        if part >= len(self._held) or len(self._held[part]) != HELD.size:
            return 0, None
        round, wanted = HELD.unpack(self._held[part])
        found = self._versions.get((part, round))
        if found is not None and wanted in (UNCOMPARED, _digest(found)):
            return round, found
        lost = f"compress: this site lost its reference after round {round}, and dsc-mean cannot start again; use dsc"
        require(wanted != UNCOMPARED or round == 0, lost, "DATA_LOSS")
        return 0, None


class Referenced(Decoder):
    """An aggregator's end: one reference per site, of the round that the site was last counted in."""

    def __init__(self, step: Dsc, d: int) -> None:
        self._compressor, self._d = step.compress(d), d
        self._references: dict[str, tuple[int, Vector]] = {}

    def held(self, site: str) -> bytes:
        round, reference = self._references.get(site, (0, None))
        return b"" if reference is None else HELD.pack(round, _digest(reference))

    def check(self, site: str, row: Payload) -> None:
        known = (0, self._references.get(site, (0, None))[0])
        require(int(row[0]) in known, f"reference: of round {row[0]}, and this aggregator has that of {known[1]}")
        _check_values(self._compressor, row)

    def decode(self, rows: Payload, sites: Sequence[str], round: int) -> NDArray[np.float32]:
        updates = np.empty((len(sites), self._d), np.float32)
        for row, site in enumerate(sites):
            shift = self._shift(rows[row], site)
            shift.decode(_message(rows[row]), updates[row])
            self._references[site] = round, shift.reference
        return updates

    def known(self, rows: Payload, sites: Sequence[str], round: int) -> list[Known]:
        """The chosen coordinates, exactly: whoever has all messages of a site also has its reference."""
        told = [self._shift(row, site).told(_message(row)) for row, site in zip(rows, sites, strict=True)]
        self.decode(rows, sites, round)
        return told

    def _shift(self, row: Payload, site: str) -> Shift:
        reference = self._references[site][1] if row[0] else None
        return Shift(self._d, reference=reference, compressor=self._compressor)

    def state(self) -> Mapping[str, NDArray[Any]]:
        rounds = {ROUND + site: np.array([round]) for site, (round, _) in self._references.items()}
        return {**rounds, **{REFERENCE + site: reference for site, (_, reference) in self._references.items()}}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        sites = [name.removeprefix(ROUND) for name in state if name.startswith(ROUND)]
        self._references = {site: (int(state[ROUND + site][0]), state[REFERENCE + site]) for site in sites}
        for site, (_, reference) in self._references.items():
            fits = reference.shape == (self._d,) and reference.dtype == np.float32
            require(fits, f"reference of {site}: not of this shard; the run must start again", "DATA_LOSS")


class MeanReferenced(Decoder):
    """An aggregator's end as published: v = s + mean_k v_k; s <- s + gamma mean_k v_k."""

    def __init__(self, step: Dsc, d: int) -> None:
        self._compressor, self._round, self._shift = step.compress(d), 0, Shift(d, compressor=step.compress(d))
        self._tracked = Referenced(step, d)

    def held(self, site: str) -> bytes:
        return HELD.pack(self._round, UNCOMPARED)

    def check(self, site: str, row: Payload) -> None:
        require(int(row[0]) == self._round, f"reference: of round {row[0]}, and this aggregator is at {self._round}")
        _check_values(self._compressor, row)

    def decode(self, rows: Payload, sites: Sequence[str], round: int) -> NDArray[np.float32]:
        updates = np.tile(self._shift.reference, (len(sites), 1))
        for update, row in zip(updates, rows, strict=True):
            message = _message(row)
            update[self._compressor.touched(message.key)] += self._compressor.expand(message.packed)
        moved = updates.mean(axis=0, dtype=np.float64) - self._shift.reference
        self._shift.reference += (self._shift.gamma * moved).astype(np.float32)
        self._round = round
        return updates

    def known(self, rows: Payload, sites: Sequence[str], round: int) -> list[Known]:
        """The scheme needs the mean of the references only, and yet an aggregator can keep each."""
        return self._tracked.known(rows, sites, round)

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {ROUND: np.array([self._round]), REFERENCE: self._shift.reference}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        if state:
            self._round, self._shift.reference = int(state[ROUND][0]), state[REFERENCE].copy()


def _message(row: Payload) -> Message:
    return Message(row[1:HEAD].tobytes(), row[HEAD:])


def _check_values(compressor: Compressor, row: Payload) -> None:
    require(bounded(compressor.values(row[HEAD:])), "data: not finite, or too large for an update")


def _version(name: str) -> tuple[int, int]:
    part, _, round = name.partition(".")
    return int(part), int(round)


def _digest(reference: Vector) -> bytes:
    return hashlib.sha256(reference.tobytes()).digest()
