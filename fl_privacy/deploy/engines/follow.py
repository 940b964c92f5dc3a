"""Following a submitted run to its end: what the server logs, and how the run ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fl_privacy.errors import LaunchError
from fl_privacy.ops.tail import Tail

POLL = 0.1
STATUS_EVERY = 2.0


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

    @classmethod
    def of(cls, run_dir: Path, end: tuple[str, str], seconds: float, ledgers: list[dict[str, Any]]) -> Result:
        """From the run's folder."""
        status, reason = end
        last = _last_metric(run_dir)
        accuracy, loss, rmse = (last.get(name) for name in ("accuracy", "loss", "rmse"))
        rounds, took = int(last.get("round", 0)), round(seconds, 2)
        return cls(run_dir.name, status, rounds, accuracy, loss, rmse, str(run_dir), took, reason, ledgers)


def follow(
    run_dir: Path, control: Any, flower_run: int, check: Callable[[], None], watch: Callable[[Path], None]
) -> tuple[str, str]:
    """Wait until the server reports that the run is over, or Flower or a process (`check` raises) gives up.

    A SuperLink on another machine may be unreachable for a while, or be restarted: it is asked again.
    """
    checked = time.monotonic()
    tail = Tail(run_dir / "logs" / "server.log")
    while True:
        watch(run_dir)
        if end := _end(tail.poll()):
            return end
        if time.monotonic() - checked > STATUS_EVERY:
            checked = time.monotonic()
            try:
                check()
            except LaunchError:
                if end := _end(tail.poll()):  # the process exited after its last event
                    return end
                raise
            try:
                found = control.status(flower_run)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:
                    raise LaunchError(f"superlink: refuses the server ({error.response.text[:200]})") from None
                continue
            except httpx.TransportError:
                continue
            if found.status == "finished":
                return _end(tail.poll()) or ("failed", found.details or "the ServerApp failed; see superlink.log")
        time.sleep(POLL)


def _end(events: list[dict[str, Any]]) -> tuple[str, str] | None:
    """How the run ended according to the server, and why."""
    ends = [event for event in events if event["event"] in ("completed", "failed")]
    return (str(ends[0]["event"]), str(ends[0].get("reason", ""))) if ends else None


def _last_metric(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {}
