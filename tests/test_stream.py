"""Streams and rows: whatever bytes arrive, in whatever pieces, the result is the array or a refusal."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fl_privacy.errors import ProtocolError
from fl_privacy.round.rows import Rows
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import (
    CHUNK,
    MAX_MESSAGE,
    Malformed,
    Receiver,
    chunks,
    data_bytes,
    decode,
    digest,
    encode,
    header_of,
)
from helpers import refused
from profiles import examples

Array = NDArray[np.float32]
FINITE = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=1, max_side=300),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)
VECTOR = st.builds(
    pb.VectorHeader,
    run=st.text(max_size=20),
    round=st.integers(0, 2**32 - 1),
    attempt=st.text(max_size=20),
    length=st.integers(0, 2**64 - 1),
    tier=st.text(max_size=5),
    digest=st.binary(max_size=40),
    floor=st.integers(0, 2**32 - 1),
)


def pieces(data: bytes, cuts: list[int]) -> list[memoryview]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [memoryview(data)[a:b] for a, b in pairwise(ends)]


def receive(target: Array, parts: list[memoryview], wanted: bytes | None = None) -> None:
    receiver = Receiver(target, wanted)
    for part in parts:
        receiver.feed(decode(encode(part)))
    receiver.finish()


@given(st.binary(max_size=400))
def test_data_arrive_as_sent(data: bytes) -> None:
    back = decode(encode(memoryview(data)))
    assert isinstance(back, memoryview)
    assert back == data


@given(VECTOR)
def test_a_header_arrives_as_sent(header: pb.VectorHeader) -> None:
    back = decode(encode(pb.Chunk(vector=header)))
    assert back == pb.Chunk(vector=header)
    assert header_of(back, "vector") == header


@given(st.binary(max_size=400) | st.sampled_from([bytes(n) for n in (127, 128, 16383, 16384, CHUNK)]))
def test_hand_framed_data_equal_protobuf_s_encoding(data: bytes) -> None:
    framed = encode(memoryview(data))
    assert framed == pb.Chunk(data=data).SerializeToString()
    assert pb.Chunk.FromString(framed).data == data
    assert decode(pb.Chunk(data=data).SerializeToString()) == data


def test_a_full_chunk_with_its_frame_fits_the_message_limit() -> None:
    assert CHUNK < len(encode(memoryview(bytes(CHUNK)))) <= MAX_MESSAGE


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: b"\x22" + tail))
def test_any_bytes_decode_to_a_part_and_never_raise(message: bytes) -> None:
    part = decode(message)
    assert isinstance(part, pb.Chunk | memoryview | Malformed)
    if isinstance(part, memoryview):
        assert pb.Chunk.FromString(message).data == part
    for kind in ("vector", "round", "release"):
        if not isinstance(part, pb.Chunk) or part.WhichOneof("part") != kind:
            with refused("INVALID_ARGUMENT"):
                header_of(part, kind)


@pytest.mark.parametrize(
    "message",
    [
        b"\x22",
        b"\x22\x05abc",
        b"\x22\x02abc",
        b"\x22\xff\xff\xff\xff\x7f",
        b"\x22\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
        b"\x22\x83\x80\x80\x80\x80\x80\x00abc",
        b"\x22\x01a\x22\x01b",
        b"\x0a\x7f",
        b"\x0a\x03\x0a\x01\xff",
        b"\x07",
    ],
    ids=["bare", "short", "long", "huge", "endless", "long varint", "twice", "cut header", "not UTF-8", "no tag"],
)
def test_bytes_that_are_not_a_chunk_are_malformed(message: bytes) -> None:
    assert decode(message) == Malformed()


@given(st.binary(min_size=1, max_size=60))
def test_data_after_a_header_are_not_data(data: bytes) -> None:
    """Protobuf lets the last of several parts win; a receiver accepts only plain data."""
    both = pb.Chunk(vector=pb.VectorHeader(run="r")).SerializeToString() + pb.Chunk(data=data).SerializeToString()
    with refused("INVALID_ARGUMENT"):
        Receiver(np.empty(len(data), np.float32)).feed(decode(both))


@given(FINITE, st.lists(st.integers(0, 1200), max_size=12))
def test_every_division_of_the_bytes_gives_the_same_array(array: Array, cuts: list[int]) -> None:
    target = np.full_like(array, np.nan)
    receive(target, pieces(bytes(data_bytes(array)), cuts), digest(array))
    assert target.tobytes() == array.tobytes()


@given(st.lists(st.binary(max_size=40) | VECTOR.map(lambda h: pb.Chunk(vector=h)), max_size=8), st.integers(0, 16))
def test_a_receiver_fills_its_array_or_refuses_and_writes_nowhere_else(parts: list[object], size: int) -> None:
    around = np.full(size + 8, 7, np.float32)
    receiver = Receiver(around[4 : 4 + size])
    code = ""
    try:
        for part in parts:
            receiver.feed(part if isinstance(part, pb.Chunk) else decode(encode(memoryview(part))))
        receiver.finish()
    except ProtocolError as error:
        code = error.code
    assert code in ("", "INVALID_ARGUMENT", "DATA_LOSS")
    if not code:
        assert around[4 : 4 + size].tobytes() == b"".join(parts)
    assert (around[:4] == 7).all()
    assert (around[4 + size :] == 7).all()


@given(FINITE, st.data())
def test_a_truncated_or_changed_stream_is_data_loss(array: Array, data: st.DataObject) -> None:
    raw = bytearray(data_bytes(array))
    wanted = digest(array)
    with refused("DATA_LOSS"):
        receive(np.empty_like(array), [memoryview(raw)[: data.draw(st.integers(1, len(raw) - 1))]], wanted)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with refused("DATA_LOSS"):
        receive(np.empty_like(array), [memoryview(raw)], wanted)


@given(FINITE, st.binary(min_size=1, max_size=9))
def test_more_than_was_announced_is_refused(array: Array, more: bytes) -> None:
    with refused("INVALID_ARGUMENT"):
        receive(np.empty_like(array), [data_bytes(array), memoryview(more)])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, struct.unpack("<f", b"\x01\x00\x80\x7f")[0]])
@pytest.mark.parametrize("position", [0, 2**18 - 1, 2**18, -1])
def test_values_that_are_not_finite_are_refused_at_any_position(bad: float, position: int) -> None:
    array = np.zeros(2**18 + 5, np.float32)
    array[position] = bad
    with refused("INVALID_ARGUMENT"):
        receive(np.empty_like(array), [data_bytes(array)], digest(array))


def test_the_largest_and_smallest_floats_pass() -> None:
    info = np.finfo(np.float32)
    array = np.array([info.max, info.min, info.smallest_subnormal, -0.0], np.float32)
    target = np.empty_like(array)
    receive(target, [data_bytes(array)], digest(array))
    assert target.tobytes() == array.tobytes()


def test_empty_data_are_refused_so_that_a_stream_cannot_last_forever() -> None:
    with refused("INVALID_ARGUMENT"):
        Receiver(np.empty(1, np.float32)).feed(memoryview(b""))


@given(st.lists(st.integers(0, 3 * CHUNK // 4), max_size=3))
@examples(20)
def test_a_stream_is_a_header_and_pieces_of_at_most_one_chunk(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.float32) for size in sizes]
    header = pb.Chunk(vector=pb.VectorHeader(run="r"))
    first, *rest = chunks(header, arrays)
    assert first == header
    assert all(0 < part.nbytes <= CHUNK for part in rest)
    assert b"".join(rest) == b"".join(array.tobytes() for array in arrays)


def test_the_digest_is_of_the_little_endian_bytes_in_any_memory_order() -> None:
    array = np.arange(12, dtype=np.float32)
    wanted = hashlib.sha256(struct.pack("<12f", *range(12))).digest()
    assert digest(array) == digest(array.astype(">f4")) == digest(np.repeat(array, 2)[::2]) == wanted
    assert digest(np.empty(0, np.float32)) == hashlib.sha256().digest()


def test_receiving_takes_no_memory_beyond_the_target() -> None:
    array = np.ones(2**20, np.float32)
    target, data = np.empty_like(array), data_bytes(array)
    tracemalloc.start()
    try:
        receive(target, [data], digest(array))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * array.nbytes  # the encoded message, but no second or third copy


def test_a_false_length_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        assert decode(b"\x22\xff\xff\xff\xff\x07" + bytes(10)) == Malformed()
        header = decode(pb.Chunk(vector=pb.VectorHeader(length=2**63)).SerializeToString())
        assert header_of(header, "vector").length == 2**63
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


@given(st.permutations(range(5)), st.sets(st.integers(0, 4)), st.data())
def test_rows_are_gathered_in_the_requested_order_whatever_was_dropped(
    order: list[int], dropped: set[int], data: st.DataObject
) -> None:
    rows = Rows(5, 3)
    for number in order:
        rows.take(f"c{number}")[:] = number
        rows.label(f"c{number}", f"t{number}")
    for number in dropped:
        rows.drop(f"c{number}")
    for number in data.draw(st.permutations(sorted(dropped))):
        rows.take(f"c{number}")[:] = 10 + number
    names = data.draw(st.lists(st.sampled_from(range(5)), unique=True))
    matrix, tiers = rows.gather([f"c{number}" for number in names])
    expected = [10 + number if number in dropped else number for number in names]
    assert matrix.tolist() == [[value] * 3 for value in expected]
    assert tiers == [f"t{number}" for number in names]


def test_gathering_twice_gives_the_same_rows() -> None:
    rows = Rows(3, 2)
    for number, name in enumerate("abc"):
        rows.take(name)[:] = number
        rows.label(name, "")
    for _ in range(2):
        assert rows.gather(["a", "b", "c"])[0].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_a_superseding_stream_gets_the_same_row_and_a_dropped_row_becomes_free() -> None:
    rows = Rows(1, 2)
    assert np.shares_memory(rows.take("ann"), rows.take("ann"))
    rows.drop("ann")
    rows.drop("ann")
    rows.take("bob")


def test_a_matrix_larger_than_any_memory_is_refused() -> None:
    with refused("RESOURCE_EXHAUSTED"):
        Rows(10_000, 2**40)
