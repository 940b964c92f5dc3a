"""The audit of topology: every cell is shown, closed forms have the paper's digits, a small run finds the channels."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from attacks.audit.formulas import fulcrum_bound, fulcrum_gap
from attacks.audit.matrix import Audit, Number, Pairs, load
from attacks.audit.pairs import compared
from commands import cli, json_of
from fl_privacy.errors import FederationError

TOPOLOGY = Path(__file__).parent.parent / "configs" / "papers" / "topology-dp.yaml"


@cache
def whole() -> Audit:
    """Reading it solves an allocation for every cell and seed."""
    return load(TOPOLOGY)


def test_every_cell_is_in_a_table() -> None:
    matrix = whole().matrix
    shown = {place.cell for table in matrix.tables for row in table.rows for place in table.places(row)}
    assert set(matrix.cells) == shown - {None}


def test_the_audit_has_every_axis() -> None:
    jobs = whole().jobs
    federations = [job.federation for job in jobs]
    kinds = {f.topology.kind for f in federations if f.topology is not None}
    assert kinds == {"star", "ring", "line", "hierarchical", "erdos-renyi", "barabasi-albert"}
    assert {f.task.partition.eta for f in federations} >= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {f.route.kind for f in federations} == {"server", "shuffler", "shards", "mixes", "hierarchical"}
    assert {f.task.dataset for f in federations} == {"cifar10", "heart-disease", "mnist"}
    assert len(load(TOPOLOGY, size="quick").jobs) <= 25


def test_closed_forms_have_the_papers_digits() -> None:
    assert f"{fulcrum_gap('star', 1.0):.4f}" == "1.1957"
    assert fulcrum_gap("ring", 1.0) == pytest.approx(0, abs=1e-9)
    both = [fulcrum_bound("Fed-ISIC2019", how, 0.05, 100) for how in ("uniform", "fulcrum")]
    assert f"{both[0] - both[1]:.3f}" == "1.967"
    for call in (lambda: fulcrum_gap("cube", 1.0), lambda: fulcrum_bound("x", "fulcrum", 1.0, 1)):
        with pytest.raises(FederationError, match="is unknown"):
            call()


def test_pairs_are_compared_seed_by_seed() -> None:
    seen = {"a": {"1": 0.80, "2": 0.81, "3": 0.9}, "b": {"1": 0.80, "2": 0.80}}

    def values(number: Number) -> dict[str, float]:
        return seen[number.cell]

    found = compared(Pairs(title="x", left=("a",), right=("b",)), values)
    assert found["n"] == 2
    assert found["mean"] == pytest.approx(0.005)
    assert 0 < found["t_p"] < 1
    assert "mean" not in compared(Pairs(title="x", left=("b",), right=("c",)), lambda n: seen.get(n.cell, {}))
    with pytest.raises(ValueError, match="as many on both sides"):
        Pairs(title="x", left=("a", "b"), right=("b",))


@pytest.mark.e2e
def test_the_reduced_audit_finds_both_channels(tmp_path: Path) -> None:
    said = json_of(cli("audit", TOPOLOGY, "--reduced", "--out", tmp_path, "--json", timeout=900, whole=True))
    assert said["failures"] == []
    found = {
        one["cell"]: one["measures"]["topology"]
        for one in (json.loads(path.read_text()) for path in (tmp_path / "cells").iterdir())
    }
    assert found["clean"]["a1_lift"]["groups"]["low"] > 0
    assert found["clean"]["raw_ridge_a1_lift"]["groups"]["low"] > 0
    assert found["clean"]["a2_org_auroc"]["value"] >= 0.95
    assert "Paired comparisons" in (tmp_path / "report.md").read_text()
