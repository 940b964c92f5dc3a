"""A site's own measures: those that a task of your own adds, and what the site's journal last said."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_privacy.errors import FederationError
from fl_privacy.scores.metrics import Scores

ALONE = "alone"  # the journal's name of the model that the site trained without the others
PROBLEM = "metrics_error"  # in a line of the journal: why the task's own measures are missing
OURS = frozenset((*vars(Scores()), "model", "epochs", PROBLEM))
RECENT = 2**17  # bytes at the end of a journal


def own_measures(returned: Any) -> dict[str, float | None]:
    """What a task's `metrics` returned, as numbers; None for one that is not finite."""
    if not isinstance(returned, Mapping):
        raise FederationError(f"gave {type(returned).__name__}; return names with numbers, such as {{'recall': 0.5}}")
    found = dict[str, float | None]()
    for name, value in returned.items():
        if name in OURS or not isinstance(name, str) or not name.isprintable():
            raise FederationError(f"{str(name)!r:.60} is not a name of its own; choose another")
        number = float(value)
        found[name] = number if math.isfinite(number) else None
    return found


def latest(folder: Path) -> dict[str, Any] | None:
    """Of the newest journal in a site's `metrics` folder: the last global model's line, and the own model's."""
    try:
        file = max(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)
        lines = [] if file is None else _end(file)
    except OSError:
        return None
    models = [line for line in lines if isinstance(line.get("model"), int)]
    if file is None or not models:
        return None
    alone = [line for line in lines if line.get("model") == ALONE]
    return {"run": file.stem, "global": models[-1], "alone": alone[-1] if alone else None}


def _end(file: Path) -> list[dict[str, Any]]:
    """The whole lines at the end of a journal; a crash may have left half a line."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - RECENT))
        rows = stream.read().split(b"\n")
    found = []
    for row in rows:
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found
