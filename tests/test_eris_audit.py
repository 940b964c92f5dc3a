"""The audit of ERIS: colluding views, sizes, claims and figures; and its reduced size on real runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import attacks
from attacks.audit import report, run
from attacks.audit.claims import FAILS, HOLDS, MISSING, UNCLEAR, checked, verdict
from attacks.audit.facts import planned, weights
from attacks.audit.matrix import Claim, Job, load
from commands import cli, json_of
from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError

ERIS = Path(__file__).parent.parent / "configs" / "papers" / "eris.yaml"
NUMBER = {"cell": "a", "measure": "m"}


def test_views_are_so_many_aggregators_and_each_is_attacked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {job.cell: job for job in load(ERIS, size="medium").jobs}
    views = dict(jobs["m-eris-16"].views)
    assert views["four"] == tuple(f"aggregator-{k}" for k in range(4))
    assert [len(names) for names in views.values()] == [1, 4, 8, 16]

    def replay(path: Path, names: tuple[str, ...], data_dir: Path | None, seeds: int, observers: Any) -> dict[str, Any]:
        return {name: {"measures": {"seen": {"value": len(observers)}}} for name in names}

    monkeypatch.setattr(attacks, "replay", replay)
    found = run._attacked(jobs["m-eris-16"], Path(), None)
    assert {name: one["measures"]["seen"]["value"] for name, one in found.items()} == {
        f"membership@{label}": count for label, count in (("one", 1), ("four", 4), ("half", 8), ("all", 16))
    }


def test_the_views_are_part_of_what_a_run_is_found_by() -> None:
    federation = Federation.parse("sites: 3\nroute: {kind: shards}")
    keys = {run.key(Job("a", 1, federation, (), views)) for views in ((), (("one", ("aggregator-0",)),))}
    assert len(keys) == 2


def test_a_size_changes_all_cells_and_further_those_that_match() -> None:
    jobs = {job.cell: job.federation for job in load(ERIS, size="medium").jobs}
    assert (len(jobs["m-fedavg"].sites), jobs["m-fedavg"].rounds) == (10, 15)
    assert (len(jobs["g-eris-2"].sites), jobs["g-eris-2"].rounds) == (3, 1)
    with pytest.raises(ConfigError, match=r"sizes: 'huge' is not there; use one of reduced, medium"):
        load(ERIS, size="huge")


def test_the_audit_has_every_method_and_axis() -> None:
    """In full: no cell that no table or claim shows, and every kind of compression and data set."""
    matrix = load(ERIS).matrix
    shown = {place.cell for table in matrix.tables for row in table.rows for place in table.places(row)}
    shown |= {side.cell for claim in matrix.claims for side in (claim.left, claim.right)}
    assert set(matrix.cells) == shown - {None}  # of closed forms
    kinds = {job.federation.compress.kind for job in load(ERIS).jobs}
    assert kinds >= {"none", "dsc", "prune", "top-k", "qsgd", "priprune", "soteriafl", "uniform"}
    assert {job.federation.task.dataset for job in load(ERIS).jobs} == {"mnist", "cifar10", "imdb"}


@pytest.mark.parametrize(
    ("mean", "half", "within", "said"),
    [
        (0.2, 0.1, None, HOLDS),
        (0.2, 0.3, None, UNCLEAR),
        (-0.2, 0.1, None, FAILS),
        (0.0, None, None, FAILS),
        (0.01, 0.005, 0.02, HOLDS),
        (0.01, 0.05, 0.02, UNCLEAR),
        (-0.1, 0.05, 0.02, FAILS),
    ],
)
def test_a_claim_holds_if_the_whole_interval_says_so(
    mean: float, half: float | None, within: float | None, said: str
) -> None:
    assert verdict(mean, half, within) == said


def test_a_claim_compares_runs_of_the_same_seed() -> None:
    claim = Claim.model_validate({"text": "less", "left": NUMBER, "right": {**NUMBER, "cell": "b"}})
    found = checked(claim, {"1": 0.1, "2": 0.2, "3": 0.9}, {"1": 0.2, "2": 0.31})
    assert (found["seeds"], found["verdict"]) == (2, HOLDS)
    assert found["difference"] == pytest.approx(0.105)
    assert checked(claim, {"1": 0.1}, {"2": 0.2})["verdict"] == MISSING


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 10))
def test_weights_drawn_from_a_gaussian_have_no_excess(seed: int, spread: float) -> None:
    """Six standard errors of the kurtosis, sqrt(24 / n)."""
    drawn = np.random.default_rng(seed).normal(0, spread, 20_000).astype(np.float32)
    found = weights(drawn)
    assert found["weight_std"] == pytest.approx(spread, rel=0.04)
    assert abs(found["weight_kurtosis"]) < 6 * np.sqrt(24 / drawn.size)


def test_costs_are_those_of_the_method() -> None:
    """FedAvg waits for K updates and sends K models; one of A aggregators, a part of each."""
    base = "sites: 10\ntask: {dataset: digits, model: mlp}\n"
    server, shards, dsc = (
        planned(Federation.parse(base + more))
        for more in (
            "route: {kind: server}",
            "route: {kind: shards, aggregators: 5}",
            "route: {kind: shards, aggregators: 5}\ncompress: {kind: dsc, p: 0.1}",
        )
    )
    size = 4 * server["parameters"]["value"]
    assert server["upload_bytes"]["value"] == shards["upload_bytes"]["value"] == size
    assert server["seconds"]["value"] == pytest.approx(2 * 10 * size / 20e6)
    assert shards["seconds"]["value"] == pytest.approx((10 + 11) / 5 * size / 20e6)  # the evaluator fetches it too
    heads = 5 * 4 * 9  # a round and a key per shard
    assert size / 10 < dsc["upload_bytes"]["value"] <= size / 10 + heads + 5 * 4


@pytest.mark.parametrize("plot", ["bars", "lines", "points"])
def test_every_kind_of_figure_is_drawn(plot: str, tmp_path: Path) -> None:
    entry = {"mean": 0.5, "half": None, "chance": 0.4, "paper": None}
    rows = [{"title": name, "entries": [entry, entry]} for name in ("1", "2")]
    table = {"id": "t", "title": "T", "corner": "A", "columns": ["x", "y"], "plot": plot, "rows": rows}
    assert report.draw(tmp_path, {"tables": [table], "cells": {}}) == {"t": "t.svg"}
    assert "<svg" in (tmp_path / "t.svg").read_text()


@pytest.mark.e2e
def test_the_reduced_audit_attacks_real_runs_and_says_what_holds(tmp_path: Path) -> None:
    """Two at a time first: the second call runs the rest."""
    words = ("audit", ERIS, "--reduced", "--out", tmp_path, "--json")
    first = json_of(cli(*words, "--most", "2", whole=True))
    assert first["runs"] == {"planned": 4, "finished": 2}
    found = json_of(cli(*words, whole=True))
    assert found["runs"] == {"planned": 4, "finished": 4}
    assert found["failures"] == []
    results = json.loads((tmp_path / "results.json").read_text())
    claims = {claim["text"]: claim for claim in results["claims"]}
    equal = claims["FSA's accuracy equals FedAvg's (Table 1)"]
    assert (equal["verdict"], equal["difference"]) == (HOLDS, 0)  # the same sums in another place
    for cell in ("m-fedavg", "m-eris-4", "m-dsc-20"):
        measures = results["cells"][cell]["measures"]
        attack = "membership" if cell == "m-fedavg" else "membership@one"
        best = measures[f"{attack}/likelihood_accuracy_max"]
        assert best["mean"] > best["chance"] > 0.5  # a maximum over rounds is above one half for anybody
        assert f"{attack}/last_model_accuracy" in measures
    with (tmp_path / "tables.csv").open() as table:
        lines = list(csv.DictReader(table))
    (accuracy,) = [
        line
        for line in lines
        if (line["table"], line["cell"], line["column"]) == ("figures-11-12", "m-links-30", "accuracy")
    ]
    assert 0 < float(accuracy["mean"]) < 1
    assert "What holds and what does not" in (tmp_path / "report.md").read_text()
