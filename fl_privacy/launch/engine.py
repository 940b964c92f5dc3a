"""Running a federation: start it on an engine, watch it to its end, clean up whatever happens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_privacy.config import Federation, NoPrivatise
from fl_privacy.dp.policy import open_ledger
from fl_privacy.errors import LaunchError
from fl_privacy.launch import local, simulation
from fl_privacy.launch.ground import Ground, new_run_name
from fl_privacy.launch.preflight import disk
from fl_privacy.launch.processes import Tail

ENGINES = {"local": local.start, "simulation": simulation.start}
POLL = 0.1
STATUS_EVERY = 2.0
RESTARTS = 1


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: str
    status: str
    rounds: int
    accuracy: float | None
    loss: float | None
    rmse: float | None
    path: str
    seconds: float
    reason: str = ""
    ledgers: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def up(
    federation: Federation,
    engine: str,
    runs_dir: Path,
    data_dir: Path | None = None,
    resume: str | None = None,
    watch: Callable[[Ground], None] = lambda ground: None,
) -> Result:
    """Run a federation to its end. `watch` is called several times a second."""
    if engine not in ENGINES:
        raise LaunchError(f"engine: {engine!r} is unknown; use {' or '.join(ENGINES)}")
    if resume is not None and not (runs_dir / resume / "checkpoints").is_dir():
        raise LaunchError(f"resume: {runs_dir / resume} has no checkpoint; start it anew")
    room = disk(runs_dir)
    if not room.ok:
        raise LaunchError(f"disk: {room.detail}; {room.fix}")
    began = time.monotonic()
    ground = Ground(federation, resume or new_run_name(federation), runs_dir.resolve(), data_dir)
    control = None
    try:
        control, flower_run = ENGINES[engine](ground)
        status, reason = _follow(ground, control, flower_run, watch)
    finally:
        if control is not None:
            control.close()
        ground.clear()
    watch(ground)
    last = _last_metric(ground.run_dir)
    return Result(
        run=ground.run,
        status=status,
        rounds=int(last.get("round", 0)),
        accuracy=last.get("accuracy"),
        loss=last.get("loss"),
        rmse=last.get("rmse"),
        path=str(ground.run_dir),
        seconds=round(time.monotonic() - began, 2),
        reason=reason,
        ledgers=_ledgers(ground),
    )


def _follow(ground: Ground, control: Any, flower_run: int, watch: Callable[[Ground], None]) -> tuple[str, str]:
    """Until the server says that the run is over, or Flower or a process gives up.

    Where Flower gives up and the server has said nothing (its runtime did not come up, as Ray's does not within 30 s
    on a loaded machine), the run is submitted again.
    """
    checked, again = time.monotonic(), RESTARTS
    tail = Tail(ground.run_dir / "logs" / "server.log")
    while True:
        watch(ground)
        if end := _end(tail):
            return end
        if time.monotonic() - checked > STATUS_EVERY:
            checked = time.monotonic()
            ground.fleet.check()
            found = control.status(flower_run)
            if found.status == "finished" and (end := _end(tail)):
                return end
            if found.status == "finished" and not again:
                return "failed", found.details or "the ServerApp failed; see superlink.log"
            if found.status == "finished":
                again -= 1
                flower_run = control.start_again()
        time.sleep(POLL)


def _end(tail: Tail) -> tuple[str, str] | None:
    """What the server has said of the run's end, and why."""
    ends = [event for event in tail.poll() if event["event"] in ("completed", "failed")]
    return (str(ends[0]["event"]), str(ends[0].get("reason", ""))) if ends else None


def _ledgers(ground: Ground) -> list[dict[str, Any]]:
    """What every site on this machine has spent, over all runs."""
    if isinstance(ground.federation.privatise, NoPrivatise):
        return []
    names = ground.federation.site_names
    return [open_ledger(ground.federation, name, ground.sites / name).report() for name in names]


def _last_metric(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {}
