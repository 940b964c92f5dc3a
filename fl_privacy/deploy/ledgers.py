"""What a site has spent, over all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_privacy.config import Federation


def report(federation: Federation, site: str, state: Path) -> dict[str, Any] | None:
    """From the ledger in a site's own folder; None in a federation without budgets."""
    if federation.unit is None:
        return None
    from fl_privacy.config.policy import open_ledger  # its accountant takes a second to import

    return open_ledger(federation, site, state).report()
