"""Following a submitted run to its end: what the server logs, how the run ended, and what to do if it just stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fl_privacy.deploy.supervise import FIRST_PAUSE, OFTEN
from fl_privacy.errors import LaunchError
from fl_privacy.files import is_locked
from fl_privacy.ops.status import SIGNALS
from fl_privacy.ops.tail import Tail
from fl_privacy.round.checkpoints import Checkpoints
from fl_privacy.transcript.run import head_of

POLL = 0.1
CHECK_EVERY, STATUS_EVERY = 0.4, 2.0
LAST_WORDS = 3.0  # seconds for Flower to learn why a ServerApp exited
REACH = 300.0  # seconds until a SuperLink must accept a run that is submitted again
UNHEARD = (
    "No heartbeat",
    "unknown error",
)  # what Flower says about a ServerApp that was killed, or stopped by a signal
# How the server reports a failure that is none of the run's: it was stopped, or its SuperLink was away for too long.
STOPPED = (*SIGNALS, "RunNotRunningException")


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
    head: str = ""  # of the transcript, for `transcript verify --head`

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, run_dir: Path, end: tuple[str, str], seconds: float, ledgers: list[dict[str, Any]]) -> Result:
        """From the run's folder."""
        status, reason = end
        last = _last_metric(run_dir)
        accuracy, loss, rmse = (last.get(name) for name in ("accuracy", "loss", "rmse"))
        rounds, took = int(last.get("round", 0)), round(seconds, 2)
        head = head_of(run_dir) if status == "completed" else ""  # a failed run may still be signing
        return cls(run_dir.name, status, rounds, accuracy, loss, rmse, str(run_dir), took, reason, ledgers, head)


@dataclass
class Submitted:
    """A run that Flower has, Flower's number of it, and how to submit it again."""

    control: Any
    flower_run: int
    again: Callable[[], int]
    lock: Path  # the ServerApp holds it for as long as it runs


@dataclass
class Follower:
    """Follows a run until the server reports its end, or Flower or a process (`check` raises) gives up.

    If its ServerApp exits without a word, the run is submitted again and continues after its last checkpoint. A
    SuperLink on another machine may be unreachable for a while, or be restarted: it is asked again.
    """

    run_dir: Path
    submitted: Submitted
    check: Callable[[], None]
    watch: Callable[[Path], None] = lambda run_dir: None
    log: Callable[..., None] = lambda event, **fields: None
    _began: bool = False  # its ServerApp was seen
    _missed: float = 0.0  # since when it is gone
    _checked: float = field(default_factory=time.monotonic)
    _asked: float = field(default_factory=time.monotonic)
    _exits: list[int] = field(default_factory=list)  # after which round each ServerApp exited

    def __post_init__(self) -> None:
        self._tail = Tail(self.run_dir / "logs" / "server.log")

    def end(self) -> tuple[str, str]:
        """How the run ended, and why."""
        while True:
            self.watch(self.run_dir)
            gone = self._gone()
            end = self._end() or self._look()
            if end is not None and not end[1].startswith(STOPPED):
                return end
            if why := gone if end is None else end[1]:
                if self._too_often():
                    return "failed", f"the ServerApp exited {OFTEN} times after the same round; last reason: {why}"
                self._again(why)
            time.sleep(POLL)

    def _gone(self) -> str:
        """Why the ServerApp is gone, if it is and had time to say so itself."""
        if is_locked(self.submitted.lock):
            self._began, self._missed = True, 0.0
        elif self._began and not self._missed:
            self._missed = time.monotonic()
        return "killed, or out of memory" if self._missed and time.monotonic() - self._missed > LAST_WORDS else ""

    def _end(self) -> tuple[str, str] | None:
        """How the run ended according to the server, and why."""
        ends = [event for event in self._tail.poll() if event["event"] in ("completed", "failed")]
        return (str(ends[0]["event"]), str(ends[0].get("reason", ""))) if ends else None

    def _look(self) -> tuple[str, str] | None:
        """Now and then, check the processes, and ask Flower for an end that the server did not report."""
        now = time.monotonic()
        if now - self._checked > CHECK_EVERY:
            self._checked = now
            try:
                self.check()
            except LaunchError:
                if end := self._end():  # the process exited after its last event
                    return end
                raise
        if now - self._asked > STATUS_EVERY:
            self._asked = now
            return self._ask()
        return None

    def _ask(self) -> tuple[str, str] | None:
        try:
            found = self.submitted.control.status(self.submitted.flower_run)
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise LaunchError(f"superlink: refuses the server ({error.response.text[:200]})") from None
            return None
        except httpx.TransportError:
            return None
        if found.status != "finished":
            return None
        if any(words in found.details for words in UNHEARD):  # perhaps before it took its lock
            self._began = True
            return self._end()
        return self._end() or ("failed", found.details or "the ServerApp failed; see superlink.log")

    def _too_often(self) -> bool:
        """Whether the ServerApp keeps exiting after the same round."""
        self._exits.append(max(Checkpoints(self.run_dir / "checkpoints").rounds(), default=0))
        return self._exits.count(self._exits[-1]) >= OFTEN

    def _again(self, why: str) -> None:
        """Submit the run again, once the SuperLink accepts it."""
        self.log("fell", process="server", code=None, reason=why, again_in=FIRST_PAUSE)
        until = time.monotonic() + REACH
        while True:
            self._pause(FIRST_PAUSE)
            try:
                self.submitted.flower_run = self.submitted.again()
                break
            except LaunchError:
                if time.monotonic() > until:
                    raise
        self._began, self._missed, self._asked = False, 0.0, time.monotonic()
        self.log("submitted", after=self._exits[-1])

    def _pause(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        while time.monotonic() < due:
            self.check()
            self.watch(self.run_dir)
            time.sleep(POLL)


def _last_metric(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {}
