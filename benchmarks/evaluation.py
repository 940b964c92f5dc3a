"""What evaluation at the sites costs: the quickstart's rounds and farewell, against evaluation at the server.

Measured on the server's clock from the second round to the end of the run: the first round waits for Flower.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.result import Result
from fl_privacy.config import Federation
from fl_privacy.config.evaluate import Evaluate
from fl_privacy.deploy.engines import engine
from fl_privacy.ops.tail import Tail

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
ROUNDS, QUICK_ROUNDS = 100, 3
TIMES = 3
WHO = ("server", "sites")


def run(quick: bool = False) -> list[Result]:
    """The shortest of several runs of each kind, which alternate."""
    rounds, times = (QUICK_ROUNDS, 1) if quick else (ROUNDS, TIMES)
    federation = Federation.load(CONFIG).model_copy(update={"rounds": rounds})
    seconds: dict[str, list[float]] = {who: [] for who in WHO}
    with tempfile.TemporaryDirectory(prefix="fl-privacy-bench-") as folder:
        for who in WHO * times:
            evaluated = federation.model_copy(update={"evaluate": Evaluate(by=who)})
            seconds[who].append(_seconds(evaluated, "simulation" if quick else "local", Path(folder)))
    detail: dict[str, Any] = {who: [round(each, 2) for each in found] for who, found in seconds.items()}
    ratio = min(seconds["sites"]) / min(seconds["server"])
    return [Result(f"{rounds} rounds, evaluated by sites", ratio, 1.15, "x by the server", detail=detail)]


def _seconds(federation: Federation, kind: str, folder: Path) -> float:
    result = engine.up(federation, kind, folder)
    if result.status != "completed":
        raise RuntimeError(f"{federation.name}: the run failed: {result.reason}")
    events = Tail(Path(result.path, "logs", "server.log")).poll()
    times = {(event["event"], event.get("round")): float(event["time"]) for event in events}
    return times["completed", None] - times["round", 2]
