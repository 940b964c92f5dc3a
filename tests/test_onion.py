"""Onions: every hop opens one layer and learns nothing of the rest; nothing else opens; padding does not count."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings, strategies as st

from fl_privacy.crypto import keys
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.mix import onion
from fl_privacy.mix.onion import Hop, Place

PLACE = Place("test", "run", 3, "ab" * 32)
NAMES = ("mix-0", "mix-1", "mix-2", "server")
KEYS = {name: X25519PrivateKey.generate() for name in NAMES}
HOPS = [Hop(name, KEYS[name].public_key()) for name in NAMES]


@settings(max_examples=25, deadline=None)
@given(content=st.binary(min_size=1, max_size=64), hops=st.integers(1, 4))
def test_each_hop_opens_its_layer_and_the_last_gets_the_content(content: bytes, hops: int) -> None:
    names = NAMES[-hops:]
    made = onion.wrapped(content, HOPS[-hops:], PLACE)
    for left, name in zip(range(hops, 0, -1), names, strict=True):
        assert len(made) == onion.size(len(content), left)
        made = onion.opened(made, KEYS[name], name, PLACE)
    assert made == content


def test_two_onions_of_one_content_have_nothing_in_common_at_any_layer() -> None:
    one, other = (onion.wrapped(b"bit", HOPS, PLACE) for _ in range(2))
    for name in NAMES[:-1]:
        assert one[:32] != other[:32]
        one, other = (onion.opened(each, KEYS[name], name, PLACE) for each in (one, other))
        assert one != other


@pytest.mark.parametrize(
    "place",
    [
        PLACE._replace(run="other"),
        PLACE._replace(round=4),
        PLACE._replace(attempt="cd" * 32),
        PLACE._replace(federation="other"),
    ],
)
def test_an_onion_for_another_run_round_or_attempt_does_not_open(place: Place) -> None:
    with pytest.raises(ProtocolError, match="another recipient"):
        onion.opened(onion.wrapped(b"bit", HOPS, place), KEYS["mix-0"], "mix-0", PLACE)


def test_an_onion_for_another_mix_or_changed_on_its_way_does_not_open() -> None:
    made = onion.wrapped(b"bit", HOPS, PLACE)
    for wrong in (
        onion.wrapped(b"bit", HOPS[1:], PLACE),
        made[:-1] + bytes([made[-1] ^ 1]),
        bytes(32) + made[32:],
        made[:40],
    ):
        with pytest.raises(ProtocolError):
            onion.opened(wrong, KEYS["mix-0"], "mix-0", PLACE)


def test_a_key_with_which_everybody_exchanges_the_same_is_none() -> None:
    onion.public(HOPS[0].key.public_bytes_raw(), "mix-0")
    for point in (bytes(32), b"\1" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f", bytes(31)):
        with pytest.raises(ProtocolError, match="mix-0: gave no key"):
            onion.public(point, "mix-0")


def batch(count: int) -> list[bytes]:
    return [onion.wrapped(bytes([index]) * 8, HOPS, PLACE) for index in range(count)]


def mixed(
    given: list[bytes], name: str = "mix-0", left: int = 4, least: int = 3, order: bytes = b"o" * 32
) -> list[bytes]:
    return onion.passed_on(given, KEYS[name], name, PLACE, each=onion.size(8, left), least=least, order=order)


def test_a_chain_keeps_the_contents_and_loses_their_order() -> None:
    given = batch(20)
    for left, name in zip((4, 3, 2), NAMES, strict=False):
        given = mixed(given, name, left, order=keys.fresh())
    found = [onion.opened(each, KEYS["server"], "server", PLACE)[0] for each in given]
    assert sorted(found) == list(range(20))
    assert found != list(range(20))


def test_a_batch_below_the_threshold_padded_replayed_or_of_other_sizes_is_refused() -> None:
    good, padding = batch(2), bytes(onion.size(8, 4))
    for bad in (
        good,
        [*good, padding],
        [*good, good[0]],
        [*good, batch(1)[0][:-1]],
        [*good, *batch(1)[:0], keys.fresh() * 7],
    ):
        with pytest.raises(ProtocolError):
            mixed(list(bad))


def test_every_order_is_equally_likely() -> None:
    found = Counter(tuple(onion.permutation(3, trial.to_bytes(32, "big"))) for trial in range(6000))
    assert len(found) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in found.values()) < 30  # 5 degrees of freedom, p = 1.5e-5


def test_the_quickstart_is_about_a_million_onions_per_round() -> None:
    found = onion.cost(each=47 * 4810, sites=5, mixes=3, rates=onion.Rates(made=10_000, opened=20_000))
    assert found.onions == 47 * 4810 * 5 == 1_130_350
    assert found.bytes_per_site == 47 * 4810 * (8 + 48 * 4)
    assert found.seconds_per_site == pytest.approx(47 * 4810 * 4 / 10_000)
    assert found.seconds_per_mix == pytest.approx(1_130_350 / 20_000)


def test_the_default_number_of_decoys_catches_a_thousandth_of_the_columns() -> None:
    """Measured: a thousandth of all columns at random misses every decoy in 1 % of trials or fewer."""
    columns, count = 100_000, onion.decoys(100_000)
    assert count == math.ceil(math.log(0.01) / math.log(0.999)) == 4603
    rng, missed = np.random.default_rng(0), 0
    for _ in range(2000):
        altered = rng.choice(columns + count, (columns + count) // 1000, replace=False)
        missed += not (altered < count).any()
    assert missed / 2000 < 0.01 + 4 * (0.01 * 0.99 / 2000) ** 0.5


def test_an_onion_without_a_layer_for_the_server_is_refused() -> None:
    with pytest.raises(FederationError, match="innermost"):
        onion.wrapped(b"bit", HOPS[:-1], PLACE)
