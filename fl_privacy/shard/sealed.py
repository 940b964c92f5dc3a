"""What a sealed shard of an update contains, and how large it is: a size that depends on the round alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fl_privacy.coding import Coding, Payload
from fl_privacy.crypto import sealing
from fl_privacy.errors import require
from fl_privacy.scores.form import Counts

SEALED = Coding("sealed", "|u1", 0)  # how sealed shards travel
HEAD = struct.Struct("<QIB")  # records, floor, whether there are counts
NUMBER = np.dtype("<u8")
MAX_FLOOR = 2**32 - 1


class Content(NamedTuple):
    """One site's shard for one aggregating site."""

    payload: Payload
    counts: Counts | None  # a share of them
    records: int
    floor: int

    def encode(self, counts: int) -> bytes:
        """In a round with so many numbers in its counts; zeros stand for counts that there are not."""
        numbers = np.zeros(counts, np.uint64) if self.counts is None else self.counts
        head = HEAD.pack(self.records, min(self.floor, MAX_FLOOR), self.counts is not None)
        return head + numbers.astype(NUMBER).tobytes() + np.ascontiguousarray(self.payload).tobytes()

    @classmethod
    def decode(cls, data: bytes, coding: Coding, length: int, counts: int) -> Content:
        """The inverse of `encode`, for a shard of `length` numbers; refuses what no honest site sends."""
        start = HEAD.size + NUMBER.itemsize * counts
        size = start + coding.type.itemsize * length
        require(len(data) == size, f"length: a shard of {len(data)} bytes, {size} are needed")
        records, floor, counted = HEAD.unpack_from(data)
        payload = np.frombuffer(data, coding.type, length, start)
        coding.check(payload)
        require(counted <= 1, "counts: neither there nor not there")
        numbers = np.frombuffer(data, NUMBER, counts, HEAD.size).astype(np.uint64) if counted and counts else None
        return cls(payload, numbers, records, max(1, floor))


def sizes(shards: Sequence[int], counts: int) -> list[int]:
    """Bytes of sealed shards, from the bytes of the plain ones and how many numbers the counts have."""
    return [sealing.OVERHEAD + HEAD.size + NUMBER.itemsize * counts + shard for shard in shards]
