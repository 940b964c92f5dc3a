"""A model's card: what its numbers say, and what they must not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.config import Federation
from fl_privacy.dp.ledger import Ledger
from fl_privacy.dp.sampled import plan
from fl_privacy.export import card
from fl_privacy.export.source import Found
from fl_privacy.vector import Layout

CONFIG = "sites: {count: 3, epsilon: 2}\nprivatise: {kind: dpsgd}\nroute: {kind: shuffler}\n"


def found(states: dict[str, Path] | None = None, **metrics: float) -> Found:
    federation, nothing = Federation.parse(CONFIG), np.empty(0, np.float32)
    return Found(federation, "run", 1, 1, nothing, Layout(()), states or {}, {"round": 1, **metrics})


@pytest.mark.parametrize(
    ("total", "shown"), [(4, None), (7, 10), (87, 90), (254, 250), (1_049, 1_000), (96_450.4, 96_000), (math.nan, None)]
)
def test_totals_have_two_digits_and_are_rounded_to_tens(total: float, shown: int | None) -> None:
    assert card.rounded(total) == shown


@given(st.floats(1e-6, 1e3))
def test_what_was_spent_is_rounded_up_and_not_by_much(epsilon: float) -> None:
    assert epsilon <= card.at_most(epsilon) * (1 + 1e-9)
    assert card.at_most(epsilon) <= 1.1 * epsilon


def test_scores_do_not_tell_how_many_records_there_are() -> None:
    """An exact share has the total as its denominator."""
    facts = card.facts(found(accuracy=200 / 254, records=254))
    assert facts["records"] == 250
    shown = facts["metrics"]["accuracy"]
    fits = {n for n in range(245, 255) for k in range(n + 1) if float(f"{k / n:.3g}") == shown}
    assert len(fits) > 1


def test_what_was_spent_does_not_tell_how_many_records_a_site_has(tmp_path: Path) -> None:
    states = {}
    for number, records in enumerate((100, 200, 400)):
        states[f"site-{number}"] = folder = tmp_path / str(number)
        folder.mkdir()
        ledger = Ledger(folder / "ledger.jsonl", 1e3, 1e-5, f"site-{number}")
        ledger.charge("a", plan(records, 5, 16, 1.0, 2.0, 1e-5).charge)
    spent = card.facts(found(states))["spent"]
    assert [row["spent"] for row in spent] == [2.0] * 3


@pytest.mark.parametrize(
    ("scaling", "feature", "said"),
    [
        ("local", "{name: x}", "by the mean and the standard deviation of its own training records"),
        ("given", "{name: x, mean: 0, std: 1}", "by the statistics given with each feature"),
        ("none", "{name: x}", "not scaled"),
    ],
)
def test_a_card_says_how_records_were_prepared_and_warns_of_raw_ones(scaling: str, feature: str, said: str) -> None:
    options = f"{{scaling: {scaling}, label: {{name: y, levels: [0, 1]}}, features: [{feature}]}}"
    federation = Federation.parse(f"sites: 3\ntask: {{dataset: csv, options: {options}}}")
    text = card.to_markdown(card.facts(replace(found(), federation=federation)), "m")
    assert said in text
    assert "Raw ones give wrong predictions" in text


def test_whatever_an_attack_measured_a_card_is_json() -> None:
    measure = card._measure({"value": math.nan, "half_interval": math.inf, "chance": "x"})
    assert json.loads(card.to_json(measure)) == {"value": None, "half_interval": None, "chance": None}
