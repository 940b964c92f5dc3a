"""The audit of source inference: all of its cells are shown, and its reduced size finds what unprotected runs leak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attacks.audit.formulas import bits_per_parameter
from attacks.audit.matrix import load
from commands import cli, json_of
from fl_privacy.errors import FederationError

SIA = Path(__file__).parent.parent / "configs" / "papers" / "sia-rns.yaml"


def test_every_cell_is_in_a_table_or_a_claim() -> None:
    matrix = load(SIA).matrix
    shown = {place.cell for table in matrix.tables for row in table.rows for place in table.places(row)}
    shown |= {side.cell for claim in matrix.claims for side in (claim.left, claim.right)}
    assert set(matrix.cells) == shown - {None}


def test_the_audit_has_every_axis() -> None:
    federations = [job.federation for job in load(SIA).jobs]
    assert {f.task.dataset for f in federations} == {"mnist", "cifar10", "synthetic", "har", "imdb"}
    assert {f.task.partition.alpha for f in federations} >= {0.1, 10.0}
    assert {len(f.sites) for f in federations} >= {5, 10, 20, 50}
    assert {getattr(f.route, "level", f.route.kind) for f in federations} >= {"server", "model", "layer", "parameter"}
    assert {f.combine.kind for f in federations} >= {"fedavg", "fedprox", "median"}
    assert len(load(SIA, size="medium").jobs) < 35


def test_bits_per_parameter_are_those_of_the_paper_where_these_are_possible() -> None:
    """Its secret sharing has clients - 2 shares; residues in unary: the optimum of every possible row."""
    assert bits_per_parameter("secret-sharing", 1000, 8) / 999 == 36926 / 998
    assert bits_per_parameter("secret-sharing", 10_000, 16) / 9999 == 669866 / 9998
    assert bits_per_parameter("rns-unary", 10, 3) == 35
    assert bits_per_parameter("rns-unary", 10_000, 16) == 371
    assert bits_per_parameter("rns-published", 1000, 8) >= bits_per_parameter("rns-unary", 1000, 8) + 10
    with pytest.raises(FederationError, match="method: 'x' is unknown"):
        bits_per_parameter("x", 10, 3)


@pytest.mark.e2e
def test_the_reduced_audit_shows_what_shuffles_leave(tmp_path: Path) -> None:
    said = json_of(cli("audit", SIA, "--reduced", "--out", tmp_path, "--json", timeout=280, whole=True))
    assert said["failures"] == []
    found = {
        one["cell"]: one["measures"] for one in (json.loads(p.read_text()) for p in (tmp_path / "cells").iterdir())
    }
    named, mixed, groups = (found[cell]["source"] for cell in ("m-01", "m-parameter", "m-groups-2"))
    for measure in ("source_best", "rm_best", "rl_best", "rp_best", "rp_strongest"):
        assert named[measure]["value"] > named[measure]["chance"] + 0.1, measure
    assert mixed["any_strongest"]["value"] > mixed["any_strongest"]["chance"] + 0.1
    assert mixed["any_strongest_p"]["value"] < 0.01
    # One cohort in every round: sums say nothing.
    assert abs(named["sums_overall"]["value"] - 1 / 6) < named["sums_overall_interval"]["value"]
    assert "rm_best" in groups
    claims = json.loads((tmp_path / "results.json").read_text())["claims"]
    verdicts = {claim["text"]: claim["verdict"] for claim in claims}
    assert verdicts["source inference beats chance by name (MNIST, alpha 0.1)"] == "holds"
