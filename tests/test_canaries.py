"""Canaries: records that take part by a coin. The coins are fair, tossed once per run, and kept by the site alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from client_app.canaries import Canaries
from fl_privacy.config import Federation
from fl_privacy.crypto import keys
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.tasks.canaries import chosen, expected, tossed
from fl_privacy.tasks.data import Dataset

CONFIG = "sites: 3\naudit: true\ncanaries: {}\n"
RECORDS = 64


def records(count: int = RECORDS) -> Dataset:
    return Dataset(np.arange(count, dtype=np.float32)[:, None], np.zeros(count, np.int64))


def kept(canaries: Canaries, run: str) -> list[int]:
    return [int(x) for x in canaries.records(run).x[:, 0]]


@given(count=st.integers(1, 500), fraction=st.floats(0.01, 1), seed=st.integers(0, 2**63 - 1))
def test_canaries_are_a_fraction_of_the_records_each_once_and_public(count: int, fraction: float, seed: int) -> None:
    rows = chosen(count, fraction, seed, "site-0")
    assert len(rows) == max(1, round(fraction * count))
    assert np.array_equal(rows, np.unique(rows))
    assert 0 <= rows[0] <= rows[-1] < count
    assert np.array_equal(rows, chosen(count, fraction, seed, "site-0"))
    assert expected(count, len(rows)) == count - len(rows) // 2


def test_coins_are_fair_independent_and_determined_by_their_key() -> None:
    count = 100_000
    coins = tossed(count, keys.fresh())
    deviation = 0.5 / np.sqrt(count)  # of a mean of fair coins; six of them
    assert abs(coins.mean() - 0.5) < 6 * deviation
    assert abs((coins[1:] == coins[:-1]).mean() - 0.5) < 6 * deviation
    assert np.array_equal(tossed(70, b"k" * 32), tossed(100, b"k" * 32)[:70])
    assert not np.array_equal(coins, tossed(count, keys.fresh()))


def test_a_site_trains_on_all_other_records_and_on_the_canaries_whose_coin_says_so(tmp_path: Path) -> None:
    canaries = Canaries(Federation.parse(CONFIG), "site-0", records(), tmp_path)
    truth = canaries.truth("r")
    left_out = set(range(RECORDS)) - set(kept(canaries, "r"))
    assert left_out == {int(row) for row in truth["canaries"][~truth["included"]]}
    assert len(truth["canaries"]) == RECORDS // 2
    assert canaries.expected == RECORDS - RECORDS // 4  # says nothing about the coins


def test_a_run_keeps_its_coins_across_restarts_and_another_run_tosses_again(tmp_path: Path) -> None:
    federation = Federation.parse(CONFIG)
    first, restarted = (Canaries(federation, "site-0", records(), tmp_path) for _ in range(2))
    assert kept(first, "r") == kept(restarted, "r") == kept(first, "r")
    assert kept(first, "r") != kept(first, "s")  # equal with probability 2^-32
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "canaries").iterdir())


def test_only_a_reproducible_run_has_seeded_coins(tmp_path: Path) -> None:
    for text, same in ((CONFIG, False), (CONFIG + "reproducible: true\n", True)):
        federation = Federation.parse(text)
        one, other = (Canaries(federation, "site-0", records(), None) for _ in range(2))
        assert (kept(one, "r") == kept(other, "r")) is same
        assert kept(one, "r") != kept(Canaries(federation, "site-1", records(), None), "r")


def test_coins_of_other_records_are_refused(tmp_path: Path) -> None:
    federation = Federation.parse(CONFIG)
    Canaries(federation, "site-0", records(), tmp_path).records("r")
    with pytest.raises(FederationError, match="coins for other records"):
        Canaries(federation, "site-0", records(2 * RECORDS), tmp_path).records("r")


def test_without_canaries_a_site_trains_on_everything() -> None:
    data = records()
    canaries = Canaries(Federation.parse("sites: 3"), "site-0", data, None)
    assert canaries.records("r") is data
    assert (canaries.truth("r"), canaries.expected) == ({}, RECORDS)


def test_canaries_need_an_audit_and_change_the_digest() -> None:
    with pytest.raises(ConfigError, match=r"canaries: .* 25% of their records, which needs audit: true"):
        Federation.parse("sites: 3\ncanaries: {}\n")
    for fraction in (0, 1.5):
        with pytest.raises(ConfigError, match=r"canaries\.fraction"):
            Federation.parse(f"sites: 3\naudit: true\ncanaries: {{fraction: {fraction}}}\n")
    assert Federation.parse(CONFIG).digest != Federation.parse("sites: 3\naudit: true\n").digest
