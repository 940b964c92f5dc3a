"""`fl-privacy up configs/fulcrum.yaml`: it learns, and every site's ledger has the noise of its own share."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.transcript import verify

CONFIG = Path(__file__).parent.parent / "configs" / "fulcrum.yaml"

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(600)
def test_the_example_learns_and_the_hub_spends_least(tmp_path: Path) -> None:
    federation = Federation.load(CONFIG)
    result = up(federation, "local", tmp_path)
    assert result.status == "completed", result.reason
    assert result.accuracy is not None
    assert result.accuracy > 0.5
    assert verify(Path(result.path), (tmp_path / "pki" / "ca.pem").read_bytes()).ok
    spent = {row["site"]: row["spent"] for row in result.ledgers}
    assert set(spent) == set(federation.site_names)
    assert max(spent.values()) < 8
    assert spent["east-1"] == pytest.approx(spent["west-2"], rel=0.02)  # they differ in a record
    assert spent["university"] < spent["east-1"] < spent["north"]
