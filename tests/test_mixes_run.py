"""`fl-privacy up configs/mixes.yaml`: it learns, its record verifies, and each party saw what the docs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.mix import shares
from fl_privacy.rns.residues import unpack
from fl_privacy.routes.convicted import convicted
from fl_privacy.routes.sharing import share_of
from fl_privacy.transcript import open_run, verify

CONFIG = Path(__file__).parent.parent / "configs" / "mixes.yaml"
MIXES = ("mix-0", "mix-1", "mix-2")

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(600)
def test_the_example_learns_and_no_two_mixes_hold_an_update(tmp_path: Path) -> None:
    text = CONFIG.read_text().replace("semi-honest", "malicious") + "audit: true\n"
    federation = Federation.parse(text)
    result = up(federation, "local", tmp_path)
    assert result.status == "completed", result.reason
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    path, authority = Path(result.path), (tmp_path / "pki" / "ca.pem").read_bytes()
    assert verify(path, authority).ok
    run = open_run(path)
    assert convicted(run, federation, authority) == []
    coding: Any = federation.coding
    route: Any = federation.route
    parameters = run.view("server").round(1).arrays["model"].size
    columns = route.columns(federation, parameters)
    seen = run.view("server").round(1).arrays
    assert "updates" not in seen
    held = {mix: run.view(mix).round(1).arrays["shares"] for mix in MIXES}
    sums = {}
    for mix, rows in held.items():
        parts = [share_of(row.tobytes(), coding, columns, row.dtype == np.uint8) for row in rows]
        sums[mix] = shares.added(parts, coding.moduli)
        assert np.array_equal(sums[mix], unpack(np.asarray(seen[f"sum-{mix}"]), coding.moduli, columns))
        for part in parts:  # each is uniform: chi-square at p = 1e-6, about
            for row, m in zip(part, coding.moduli, strict=True):
                expected = columns / m
                statistic = ((np.bincount(row, minlength=m) - expected) ** 2 / expected).sum()
                assert statistic < (m - 1) + 4.9 * (2 * (m - 1)) ** 0.5 + 10
    assert {rows.dtype for rows in held.values()} == {np.dtype("u1"), np.dtype("<u4")}


@pytest.mark.timeout(600)
def test_one_trusted_mix_is_as_accurate(tmp_path: Path) -> None:
    """`fl-privacy up configs/rns.yaml`: the server gets a sum and no update."""
    federation = Federation.load(CONFIG.with_name("rns.yaml"))
    result = up(federation, "simulation", tmp_path)
    assert result.status == "completed", result.reason
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    seen = open_run(Path(result.path)).view("server").round(1).arrays
    assert "sum-mix-0" in seen
    assert "updates" not in seen
