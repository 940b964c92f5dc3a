"""Route onions: what its config demands, what it costs, and real mix processes that open and shuffle bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from chains import chain
from fl_privacy.config import Federation

BASE: dict[str, Any] = {
    "name": "test",
    "sites": 4,
    "rounds": 4,
    "deadline": 60,
    "evaluate": "server",
    "encode": {"kind": "rns", "r": 1, "range": 2.0, "form": "published"},
    "route": {"kind": "onions", "mixes": 3},
}


def federation(route: dict[str, Any] | None = None, **changes: Any) -> Federation:
    return Federation.parse(yaml.safe_dump({**BASE, **changes, "route": {**BASE["route"], **(route or {})}}))


@pytest.mark.e2e
def test_the_sum_is_exactly_that_of_the_encoded_updates(tmp_path: Path) -> None:
    with chain(tmp_path, federation()) as made:
        for round in (1, 2):
            outcome = made.play(round, seed=round)
            assert not made.errors
            assert outcome.count == 4
            np.testing.assert_allclose(outcome.mean, made.expected(), rtol=0, atol=1e-7)
