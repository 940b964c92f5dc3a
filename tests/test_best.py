"""Early stopping and the best round."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.config import Federation, Stop
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.round.best import Best
from fl_privacy.round.checkpoints import Checkpoints

LOSSES = st.lists(st.floats(0, 10) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=30)


def played(stop: Stop, values: list[float]) -> tuple[Best, int]:
    """What a run of these metrics comes to: the best round, and after how many rounds it ends."""
    best = Best(stop)
    best.see(0, {stop.metric: values[0]})
    for round, value in enumerate(values, start=1):
        best.see(round, {stop.metric: value})
        if best.over():
            return best, round
    return best, len(values)


@given(values=LOSSES)
def test_the_best_round_has_the_least_loss_and_is_the_first_of_equals(values: list[float]) -> None:
    best, _ = played(Stop(), values)
    finite = [value for value in values if math.isfinite(value)]
    assert best.round == (values.index(min(finite)) + 1 if finite else None)


@given(values=LOSSES, patience=st.integers(1, 5), min_delta=st.floats(0, 2))
def test_a_run_ends_exactly_when_patience_rounds_were_no_better(
    values: list[float], patience: int, min_delta: float
) -> None:
    best, ended = played(Stop(patience=patience, min_delta=min_delta), values)
    since = ended - (best.round or 0)
    assert since == patience if best.over() else (since < patience and ended == len(values))
    if best.round:
        later = [value for value in values[best.round : ended] if math.isfinite(value)]
        assert not any(values[best.round - 1] - value > min_delta for value in later)


def test_a_higher_accuracy_is_better() -> None:
    best, ended = played(Stop(metric="accuracy", patience=2), [0.1, 0.5, 0.4, 0.5, 0.9])
    assert (best.round, ended) == (2, 4)
    assert best.over() == "accuracy has not improved since round 2, and stop.patience is 2"
    assert best.to_json() == {"round": 2, "metric": "accuracy", "value": 0.5}


def test_without_patience_a_run_never_ends_early() -> None:
    best, ended = played(Stop(), [1.0] + [2.0] * 50)
    assert (best.round, ended) == (1, 51)


def test_rounds_without_scores_are_waited_for() -> None:
    """Sites evaluate every third round, and the scores of a round come with the next one."""
    best = Best(Stop(patience=3))
    best.see(3, {"loss": 1.0})
    assert not best.over()
    best.see(6, {"loss": None, "accuracy": 0.5})
    assert not best.over()
    best.see(9, {"loss": 1.5})
    assert best.over()


def test_a_resumed_run_recalls_what_an_unbroken_one_saw() -> None:
    rows: list[dict[str, Any]] = [{"round": 0, "loss": 3.0}, {"round": 1, "loss": 2.0}, {"round": 2, "loss": None}]
    best = Best(Stop(patience=2))
    best.recall([*rows, {"round": 3, "loss": 2.5}])
    assert best.round == 1
    assert best.over()


def test_a_metric_that_is_not_measured_is_refused_with_those_that_are() -> None:
    with pytest.raises(FederationError, match=r"stop.metric: 'accuracy' is not measured here; use one of loss, rmse$"):
        Best(Stop(metric="accuracy")).see(0, {"loss": 0.5, "rmse": 0.1, "accuracy": None})
    Best(Stop(metric="auroc")).see(0, {"loss": 0.5, "accuracy": 0.1, "auroc": None})  # one class only, for once


@pytest.mark.parametrize(
    ("task", "metric", "said"),
    [
        ({"dataset": "digits"}, "rmse", "not measured for classes"),
        ({"dataset": "digits"}, "auroc", "measured only by sites"),
        (
            {"dataset": "lcl", "model": "lstm", "partition": {"kind": "by-site"}},
            "accuracy",
            "not measured for a forecast",
        ),
    ],
)
def test_a_config_names_a_metric_that_it_measures(task: dict[str, Any], metric: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"stop\.metric: '{metric}' is {said}"):
        Federation.of({"sites": 3, "task": task, "stop": {"metric": metric}})


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12, unique=True).map(sorted), st.integers(0, 30))
def test_a_party_that_missed_the_best_round_keeps_what_it_had_then(rounds: list[int], best: int) -> None:
    """Otherwise it could not give out its part of the best model, and no site would get that."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Checkpoints(Path(folder))
        for round in rounds:
            kept.save(round, {"shard": np.array([round])}, best)
        before = [round for round in rounds if round <= best]
        assert kept.rounds() == sorted({*rounds[-2:], *before[-1:]})
