"""A model's card: what it was trained on, what that cost in privacy, and which attacks were run. Totals are rounded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fl_privacy import __version__
from fl_privacy.config import guarantee
from fl_privacy.config.guarantee import Guarantee
from fl_privacy.config.task import OURS_ONLY
from fl_privacy.deploy import ledgers
from fl_privacy.errors import FederationError
from fl_privacy.export.source import Found
from fl_privacy.report.markdown import number, table
from fl_privacy.round.best import measured
from fl_privacy.transcript.files import canonical, file_sha256, parse_object, read_bounded, sha256
from fl_privacy.transcript.run import MANIFEST

FORMAT = 1
NOTHING_HERE = "not known here"
OWN_INPUTS = "`data` of the task's own code prepared the records; prepare yours in the same way."
RAW = "The model expects records that are prepared like this. Raw ones give wrong predictions, and no error."
NO_NOISE = "No noise was added, so nothing was spent: there is no differential privacy."
NO_LEDGER = "What each site has spent is in its own ledger, and no ledger is here."
LEDGERS = "What each site has spent over all its runs, from its own ledger and rounded up:"


def facts(found: Found) -> dict[str, Any]:
    """The card as JSON; it is also inside the model file. None stands for what is not known here."""
    federation, task = found.federation, found.federation.task
    ours_only = OURS_ONLY if task.is_own else ()
    terms = task.model_dump(mode="json", exclude={"source", "code", *ours_only})
    return {
        "format": FORMAT,
        "made_with": f"fl-privacy {__version__}",
        "run": found.name,
        "run_digest": file_sha256(found.run.path / MANIFEST) if found.run else None,
        "federation": federation.name,
        "federation_digest": federation.digest,
        "round": found.round,
        "rounds": found.rounds,
        "parameters": found.layout.size,
        "layout_digest": found.layout.digest,
        "layout": found.layout.to_json(),
        "task": {"code": Path(task.code).name, **terms} if task.code else terms,
        "inputs": OWN_INPUTS if task.is_own else task.data_set.inputs,
        "task_digest": task.sha256 or sha256(canonical(terms)),
        "init": federation.init and federation.init.sha256,
        "sites": len(federation.sites),
        "records": rounded(found.metrics.get("records")),
        "metrics": {name: float(f"{value:.3g}") for name, value in measured(found.metrics).items()},
        "privatise": federation.privatise.kind,
        "route": federation.route.kind,
        "guarantee": None if (stated := _stated(found)) is None else stated.model_dump(mode="json"),
        "spent": _spent(found),
        "attacks": list(_attacks(found.run.path)) if found.run else None,
    }


def rounded(total: Any) -> int | None:
    """A total to two digits, and to tens: an exact one would tell how much a single record or site adds.

    The card's other numbers are rounded too: an exact share has the total as its denominator.
    """
    if not isinstance(total, int | float) or isinstance(total, bool) or not math.isfinite(total) or total < 1:
        return None
    return int(round(total, -max(1, math.floor(math.log10(total)) - 1))) or None


def at_most(epsilon: float) -> float:
    """Rounded up to two digits: the exact sum of DP-SGD's charges would tell how many records a site has."""
    if not epsilon:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(epsilon)) - 1)
    return float(f"{math.ceil(epsilon / step - 1e-9) * step:.2g}")


def _stated(found: Found) -> Guarantee | None:
    """What the run's signed manifest guarantees."""
    return guarantee.stated(found.run.manifest, str(found.run.path / MANIFEST)) if found.run else None


def _spent(found: Found) -> list[dict[str, Any]] | None:
    """Per site, from the ledgers on this machine; an empty list if nothing is ever charged."""
    if found.federation.unit is None:
        return []
    keys = ("site", "spent", "delta", "unit", "adjacency", "charges")
    try:
        reports = ledgers.reports(found.federation, found.states)
    except FederationError:
        return None
    return [{**{key: row[key] for key in keys}, "spent": at_most(row["spent"])} for row in reports] or None


def _attacks(run: Path) -> Iterator[dict[str, Any]]:
    """The scores in a run's folder `attacks`."""
    for path in sorted((run / "attacks").glob("*.json")):
        scored = parse_object(read_bounded(path), str(path))
        measures, observers = scored.get("measures"), scored.get("observers")
        if isinstance(measures, dict) and isinstance(observers, list):
            kept = {str(name): _measure(value) for name, value in measures.items() if isinstance(value, dict)}
            yield {"attack": path.stem.partition(".")[0], "observers": [str(o) for o in observers], "measures": kept}


def _measure(value: dict[str, Any]) -> dict[str, float | None]:
    found = {key: value.get(key) for key in ("value", "half_interval", "chance")}
    return {key: one if isinstance(one, int | float) and math.isfinite(one) else None for key, one in found.items()}


def to_json(card: dict[str, Any]) -> str:
    return json.dumps(card, allow_nan=False)


def to_markdown(card: dict[str, Any], title: str) -> str:
    """The card for people."""
    parts = [f"# {title}", _summary(card), "## Trained on", _trained(card)]
    parts += ["## Input", f"{card['inputs']} {RAW}", "## Privacy", _privacy(card)]
    parts += ["## Attacks", _attacked(card), "## Model", _model(card)]
    return "\n\n".join(parts) + "\n"


def _summary(card: dict[str, Any]) -> str:
    scores = ", ".join(f"{name} {value:g}" for name, value in card["metrics"].items())
    text = f"The model after round {card['round']} of {card['rounds']} of the run `{card['run']}`"
    return f"{text}{f': {scores} on held-out records' if scores else ''}. Made with {card['made_with']}."


def _trained(card: dict[str, Any]) -> str:
    about = f", with about {card['records']:,} held-out records together" if card["records"] else ""
    start = f"a model file with SHA-256 `{card['init']}`" if card["init"] else "a seed"
    task = "\n".join(f"- {key}: `{json.dumps(value)}`" for key, value in card["task"].items() if value is not None)
    return f"{card['sites']} sites{about}, starting from {start}. The task:\n\n{task}"


def _privacy(card: dict[str, Any]) -> str:
    lines = [f"route: {card['route']}", f"noise: {card['privatise']}"]
    if card["guarantee"] is not None:
        lines += Guarantee.model_validate(card["guarantee"]).lines()
    listed = "\n".join(f"- {line.strip()}" for line in lines)
    if not card["spent"]:
        return f"{listed}\n\n{NO_LEDGER if card['spent'] is None else NO_NOISE}"
    header = ("site", "epsilon", "delta", "unit", "adjacency", "charges")
    return f"{listed}\n\n{LEDGERS}\n\n{table(header, [_row(row) for row in card['spent']])}"


def _row(row: dict[str, Any]) -> list[str]:
    terms = (row["unit"], row["adjacency"], row["charges"])
    return [row["site"], number(row["spent"]), f"{row['delta']:g}", *map(str, terms)]


def _attacked(card: dict[str, Any]) -> str:
    if card["attacks"] is None:
        return f"Attacks on the run are {NOTHING_HERE}; the server's run folder has them."
    if not card["attacks"]:
        return "None was run on this run's records, which says nothing about what an attack would find."
    rows = [
        [one["attack"], ", ".join(one["observers"]), name, *map(number, measure.values())]
        for one in card["attacks"]
        for name, measure in one["measures"].items()
    ]
    return table(("attack", "seen by", "measure", "value", "±", "chance"), rows)


def _model(card: dict[str, Any]) -> str:
    digests = {"run": card["run_digest"], "federation": card["federation_digest"]}
    digests |= {"task": card["task_digest"], "layout": card["layout_digest"]}
    listed = table(("digest", "SHA-256"), [[name, value or NOTHING_HERE] for name, value in digests.items()])
    shapes = [[name, "x".join(map(str, shape)) or "scalar"] for name, shape in card["layout"]]
    return f"{card['parameters']:,} parameters.\n\n{listed}\n\n{table(('tensor', 'shape'), shapes)}"
