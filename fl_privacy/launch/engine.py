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

    Where Flower gives up before the server had its sites (Ray's runtime does not always come up within its 30 s on a
    loaded machine), nothing has been asked of a site, and the run is submitted again.
    """
    checked, again, begun = time.monotonic(), RESTARTS, False
    tail = Tail(ground.run_dir / "logs" / "server.log")
    while True:
        watch(ground)
        events = tail.poll()
        if end := _end(events):
            return end
        begun = begun or any(event["event"] == "started" for event in events)
        if time.monotonic() - checked > STATUS_EVERY:
            checked = time.monotonic()
            ground.fleet.check()
            found = control.status(flower_run)
            if found.status == "finished":
                if end := _end(tail.poll()):
                    return end
                if begun or not again or found.sub_status != "failed":
                    return "failed", found.details or "the ServerApp failed; see superlink.log"
                again -= 1
                flower_run = control.start_again()
        time.sleep(POLL)


def _end(events: list[dict[str, Any]]) -> tuple[str, str] | None:
    """What the server has said of the run's end, and why."""
    ends = [event for event in events if event["event"] in ("completed", "failed")]
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
