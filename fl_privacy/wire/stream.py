"""Vectors as chunked streams: a header, then raw bytes. Everything received is treated as hostile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from fl_privacy.coding import FLOAT32, Coding, Payload
from fl_privacy.errors import ProtocolError, require
from fl_privacy.wire import federation_pb2 as pb

CHUNK = 1 << 20
MAX_MESSAGE = CHUNK + (1 << 16)
DATA_TAG = bytes([4 << 3 | 2])  # Chunk.data, a length-delimited field


@dataclass(frozen=True)
class Malformed:
    """Bytes that are not a Chunk: kept as a value, so that the reader can refuse them with a proper status."""


Part = pb.Chunk | memoryview | Malformed


def encode(part: pb.Chunk | memoryview) -> bytes:
    """A Chunk on the wire. Data is framed by hand: the same bytes as protobuf's, with one copy instead of three."""
    if isinstance(part, memoryview):
        return b"".join((DATA_TAG, _varint(part.nbytes), part))
    return bytes(part.SerializeToString())


def decode(message: bytes) -> Part:
    """The inverse of `encode`; data comes back as a view into the message."""
    if message[:1] == DATA_TAG:
        size, start = _read_varint(message, 1)
        return memoryview(message)[start:] if size == len(message) - start else Malformed()
    chunk = pb.Chunk()
    try:
        chunk.ParseFromString(message)
    except DecodeError:
        return Malformed()
    return chunk


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(message: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(start, min(start + 5, len(message))):
        value |= (message[position] & 0x7F) << shift
        if message[position] < 0x80:
            return value, position + 1
        shift += 7
    return -1, start


def data_bytes(array: Payload) -> memoryview:
    """The array's little-endian bytes, without a copy on little-endian machines."""
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def digest(array: Payload) -> bytes:
    """SHA-256 of the array's bytes as they travel."""
    return hashlib.sha256(data_bytes(array)).digest()


def chunks(header: pb.Chunk, arrays: Iterable[Payload] = ()) -> Iterator[pb.Chunk | memoryview]:
    """The stream: header first, then every array's bytes in pieces of at most 1 MiB."""
    yield header
    for array in arrays:
        view = data_bytes(array)
        for start in range(0, view.nbytes, CHUNK):
            yield view[start : start + CHUNK]


def header_of(part: Part, wanted: str) -> Any:
    """The wanted header that a stream must begin with."""
    if isinstance(part, pb.Chunk) and part.WhichOneof("part") == wanted:
        return getattr(part, wanted)
    raise ProtocolError("INVALID_ARGUMENT", f"stream: does not begin with a {wanted} header")


class Receiver:
    """Fills one array from the data parts of a stream: exactly its bytes, with that digest, valid for its coding."""

    def __init__(self, target: Payload, digest: bytes | None = None, coding: Coding = FLOAT32) -> None:
        self._target, self._coding, self._digest = target, coding, digest
        self._view = target.reshape(-1).view(np.uint8).data if target.size else memoryview(b"")
        self._hash, self._position = hashlib.sha256(), 0

    def feed(self, part: Part) -> None:
        """Accept the next part; refuses headers, malformed and empty parts, and bytes beyond the end."""
        if not isinstance(part, memoryview):
            raise ProtocolError("INVALID_ARGUMENT", "stream: expected data")
        end = self._position + part.nbytes
        require(part.nbytes > 0, "stream: empty data")
        require(end <= self._view.nbytes, f"stream: more than the announced {self._view.nbytes} bytes")
        self._view[self._position : end] = part
        self._position = end
        if self._digest is not None:
            self._hash.update(part)

    def finish(self) -> None:
        """The stream has ended: check that it was complete and valid."""
        position, size = self._position, self._view.nbytes
        require(position == size, f"stream: ended after {position} of {size} bytes", "DATA_LOSS")
        require(self._digest in (None, self._hash.digest()), "digest: does not match the data", "DATA_LOSS")
        self._coding.check(self._target)
