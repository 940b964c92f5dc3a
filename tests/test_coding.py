"""Updates need not be float32: other numbers pass through streams, rows, shuffles, shards and transcripts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.coding import FLOAT32, Coding
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.round.rows import Rows
from fl_privacy.routes.cut import Cut
from fl_privacy.shuffle.job import Job, MixingSet, mix, origins
from fl_privacy.steps import STEPS
from fl_privacy.steps.base import Step
from fl_privacy.wire.stream import Receiver, data_bytes, digest
from profiles import examples

KEY = b"k" * 32
DTYPES = ("<f4", "<f2", "<i8", "<u4", "|u1")


class Small(Coding):
    """Integers from 0 to 99, two per parameter."""

    def check(self, payload: Any) -> None:
        if payload.max(initial=0) > 99:
            raise ProtocolError("INVALID_ARGUMENT", "data: above 99")


SMALL = Small("small", "|u1", 2)


@given(dtype=st.sampled_from(DTYPES), rows=st.integers(2, 6), columns=st.integers(1, 50), seed=st.integers(0, 2**32))
@examples(40)
def test_a_shuffle_moves_any_dtype_as_it_moves_float32(dtype: str, rows: int, columns: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).integers(0, 100, (rows, columns)).astype(dtype)
    job = Job("parameter", rows, columns, (columns,), (MixingSet(tuple(range(rows)), KEY),))
    whole = matrix.astype(np.float32)
    mix(whole, job)
    expected = np.take_along_axis(matrix, origins(job), axis=0)
    mix(matrix, job)
    assert np.array_equal(matrix, expected)
    assert np.array_equal(matrix.astype(np.float32), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stream_fills_rows_of_any_dtype(dtype: str) -> None:
    coding = Coding("other", dtype)
    sent = np.arange(12).astype(dtype)
    rows = Rows(2, 12, coding)
    receiver = Receiver(rows.take("a"), digest(sent), coding)
    receiver.feed(data_bytes(sent))
    receiver.finish()
    rows.label("a", "")
    assert np.array_equal(rows.gather(["a"])[0][0], sent)


def test_a_coding_checks_what_it_receives() -> None:
    bad = np.array([1, 200], np.uint8)
    receiver = Receiver(np.empty(2, np.uint8), digest(bad), SMALL)
    receiver.feed(data_bytes(bad))
    with pytest.raises(ProtocolError, match="above 99"):
        receiver.finish()
    with pytest.raises(ProtocolError, match="not finite"):
        Coding("half", "<f2").check(np.array([np.inf], np.float16))
    Coding("whole", "<i4").check(np.array([-(2**31)], np.int32))


@given(parameters=st.integers(3, 60), aggregators=st.integers(2, 3), seed=st.integers(0, 2**32))
@examples(30)
def test_shards_of_several_numbers_per_parameter_are_disjoint_and_complete(
    parameters: int, aggregators: int, seed: int
) -> None:
    cut = Cut(parameters, aggregators, seed, SMALL)
    payload = np.arange(SMALL.length(parameters)).astype(np.uint8)
    shards = cut.split(payload)
    assert [shard.size for shard in shards] == cut.sizes()
    assert sorted(np.concatenate(shards).tolist()) == sorted(payload.tolist())
    whose = np.repeat(cut.owners, SMALL.per_parameter)
    assert all(np.array_equal(shard, payload[whose == k]) for k, shard in enumerate(shards))


class Packed(Step):
    """A toy encoding in which no number belongs to a single parameter."""

    kind: Literal["packed"] = "packed"
    made: ClassVar[Coding] = Coding("packed", "|u1", 0)

    def coding(self, before: Coding) -> Coding:
        return self.made


def test_a_route_that_splits_by_parameter_refuses_what_it_cannot_split() -> None:
    STEPS.add("encode.packed", Packed)
    try:
        assert Federation.parse("sites: 3").coding is FLOAT32
        for route in ("{kind: shards}", "{kind: shuffler, level: parameter}", "{kind: shuffler, level: layer}"):
            with pytest.raises(FederationError, match="numbers per parameter"):
                Federation.parse(f"sites: 3\nencode: {{kind: packed}}\nroute: {route}")
        for route in ("{kind: server}", "{kind: shuffler, level: model}"):
            assert Federation.parse(f"sites: 3\nencode: {{kind: packed}}\nroute: {route}").coding.name == "packed"
    finally:
        STEPS.remove("encode.packed")


def test_plan_counts_the_bytes_of_the_coding() -> None:
    federation = Federation.parse("sites: 3\nroute: {kind: server}")
    plain = federation.route.cost(federation, 1000)
    object.__setattr__(federation, "coding", SMALL)
    coded = federation.route.cost(federation, 1000)
    assert [c.bytes_in for c in plain] == [3 * 4000, 4000]
    assert [c.bytes_in for c in coded] == [3 * 2000, 4000]
