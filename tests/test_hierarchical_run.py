"""`fl-privacy up configs/hierarchical.yaml`: it learns what federated averaging does, and the server sees no update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.round.checkpoints import Checkpoints
from fl_privacy.routes.server import ServerRoute
from fl_privacy.transcript import open_run, verify
from fl_privacy.transcript.events import Row

CONFIG = Path(__file__).parent.parent / "configs" / "hierarchical.yaml"
ROUNDS = 2

pytestmark = pytest.mark.e2e


def model(result: Result) -> np.ndarray:
    assert result.status == "completed", result.reason
    return Checkpoints(Path(result.path) / "checkpoints").load(ROUNDS)["model"]


@pytest.mark.timeout(900)
def test_the_example_is_federated_averaging_to_the_bit_and_the_server_sees_sums_only(tmp_path: Path) -> None:
    text = CONFIG.read_text().replace("rounds: 5", f"rounds: {ROUNDS}")
    made = Federation.parse(text + "reproducible: true\naudit: true\n")
    result = up(made, "simulation", tmp_path)
    flat = made.model_copy(update={"route": ServerRoute(), "topology": None})
    assert model(result).tobytes() == model(up(flat, "simulation", tmp_path)).tobytes()
    run = open_run(result.path)
    assert verify(Path(result.path), (tmp_path / "pki" / "ca.pem").read_bytes()).ok
    regions = [f"region-{k}" for k in range(3)]
    assert sorted(run.observers) == [*regions, "server"]
    route = made.route
    for round in range(1, ROUNDS + 1):
        seen = run.view("server").round(round).arrays
        assert set(seen) - {"counts"} == {"model", *(f"{what}-{name}" for what in ("sum", "count") for name in regions)}
        assert not [event for event in run.view("server").events(round) if isinstance(event, Row)]
        sums = route.sums(made, seen)  # type: ignore[attr-defined]
        updates = {}
        for name, sites in zip(regions, route.members(made), strict=True):  # type: ignore[attr-defined]
            view, rows = run.view(name), np.asarray(run.view(name).round(round).arrays["updates"])
            owners = [event.name for event in view.events(round) if isinstance(event, Row)]
            assert owners == sorted(sites)
            updates |= dict(zip(owners, rows, strict=True))
            count, total = sums[name]
            assert count == len(sites)
            np.testing.assert_array_equal(total, rows.astype(np.float64).sum(axis=0).astype(np.float32))
        for array in [np.asarray(array) for array in seen.values()] + [total for _, total in sums.values()]:
            assert not any(np.array_equal(array, update) for update in updates.values())
