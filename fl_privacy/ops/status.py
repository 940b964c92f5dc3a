"""The status of a run from its folder alone: while it runs, after its end, or after a failure.

No file is trusted: it may be cut off, half written or not ours. Nothing heavy is imported.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from fl_privacy.errors import TranscriptError

LONGEST_DOCUMENT = 2**24
LONGEST_LOG = 2**24  # bytes at the end of a log
LONGEST_TAIL = 2**16
QUIET = 900.0  # seconds of silence beyond the deadline after which a server elsewhere counts as gone
RECENT = 10  # rounds to estimate the time left from
LONGEST_TEXT = 300
SIGNALS = ("KeyboardInterrupt", "SystemExit")  # how a server that was stopped reports its failure
STOPPED = "stopped before it finished"
ENDED = {"completed": "", "failed": "", "interrupted": STOPPED}  # of a manifest, and what is known of the reason
GONE = "its processes exited before the run finished"
NEVER, NOTHING = "never started", "it ended before it was prepared; start a new run"
CONFIG = Path("private", "federation.yaml")  # the config of a run on this machine, in its state folder
IN_CONTAINERS = "in containers"
AWAY = "it is copied here when it ends; until then: docker compose -p {project} ps, or logs server"

Event = dict[str, Any]


@dataclass
class Process:
    """A process that the launcher started on this machine."""

    name: str
    pid: int
    alive: bool
    rss: int = 0
    last: str = ""


@dataclass
class Budget:
    """What a site on this machine logged with its last update; `left` is None if nothing limits it."""

    site: str
    spent: float
    left: float | None
    delta: float | None


@dataclass
class Status:
    """Everything about a run."""

    run: str
    path: str
    state: str
    reason: str = ""
    federation: str = ""
    route: str = ""
    created: str = ""
    round: int = 0
    rounds: int | None = None
    attempt: int | None = None
    score: dict[str, float] = field(default_factory=dict)
    seconds_a_round: float | None = None
    seconds_left: float | None = None
    bytes: int = 0
    failed_attempts: list[dict[str, Any]] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)


def read(path: Path, now: float | None = None) -> Status:
    """The status of the run in a folder."""
    root = path.resolve()
    home = root.parent / ".state" / root.name
    manifest = _manifest(root)
    if manifest is None and not home.is_dir() and not (root / "logs" / "server.log").is_file():
        raise TranscriptError(f"{path}: not a run (no manifest.json, no logs/server.log); use a folder in runs/")
    manifest = manifest or {}
    config = manifest.get("config") if isinstance(manifest.get("config"), dict) else {}
    assert isinstance(config, dict)
    events, earlier = _server_events(root)
    rows = [row for row in _json_lines(root / "metrics.jsonl", LONGEST_LOG) if _number(row.get("round")) is not None]
    processes = _processes(home, root / "logs")
    state, reason = _state(manifest, config, events, home, processes, now or time.time())
    if state == "interrupted":
        started = bool(rows) or any(e["event"] == "started" for e in [*earlier, *events])
        state = state if started else NEVER
        reason = f"{reason}; resume it with fl-privacy {again}" if (again := resume_words(root)) else NOTHING
    last = rows[-1] if rows else {}
    found = Status(root.name, str(root), state, reason, rounds=_whole(config.get("rounds")), processes=processes)
    route = config.get("route")
    found.federation, found.created = _text(config.get("name", "")), _text(manifest.get("created", ""))
    found.route = _text(route.get("kind", "")) if isinstance(route, dict) else ""
    found.round = _whole(last.get("round")) or 0
    found.score = {k: last[k] for k in ("accuracy", "rmse", "loss") if _number(last.get(k)) is not None}
    found.bytes = sum(_whole(row.get("bytes")) or 0 for row in rows)
    found.failed_attempts = [_failed(e) for e in [*earlier, *events] if e["event"] == "attempt-failed"]
    found.budgets = _budgets(root / "logs")
    _times(found, events, rows)
    return found


def _state(
    manifest: Event, config: Event, events: list[Event], home: Path, processes: list[Process], now: float
) -> tuple[str, str]:
    """What the server logged; without that, whether processes are still running."""
    ends = [event for event in events if event["event"] in ("completed", "failed")]
    if ends:
        reason = _text(ends[-1].get("reason", ""))
        return ("interrupted", STOPPED) if reason.startswith(SIGNALS) else (str(ends[-1]["event"]), reason)
    status = str(manifest.get("status"))
    if status in ENDED and not any(p.alive for p in processes):
        return status, ENDED[status]
    if (home / "compose.yaml").is_file() and not processes:
        return IN_CONTAINERS, AWAY.format(project=_project(home))
    if home.is_dir():
        gone = not any(process.alive for process in processes)
    else:
        quiet = now - max((_number(event.get("time")) or 0.0 for event in events), default=0.0)
        gone = quiet > (_number(config.get("deadline")) or 0.0) + QUIET
    if gone:
        return "interrupted", GONE
    return ("running" if any(event["event"] == "started" for event in events) else "waiting"), ""


def resume_words(root: Path) -> str:
    """The words after `fl-privacy` that resume a run, depending on how it was started; empty if nothing is there."""
    home = root.parent / ".state" / root.name
    if (home / "compose.yaml").is_file() or (home / CONFIG).is_file():
        return f"up --resume {shlex.quote(str(root))}"
    if home.is_dir():
        return f"up --resume {shlex.quote(str(root))}" if (root / "manifest.json").is_file() else ""
    kit = root.parent.parent
    return f"train {shlex.quote(str(kit)) if (kit / 'kit.yaml').is_file() else 'KIT'}"


def _project(home: Path) -> str:
    """The compose project of a run, from the federation's name in the launcher's file."""
    try:
        found = re.search(
            rb"^name: ([A-Za-z0-9._-]{1,128})$", _end_of(home / "federation.yaml", LONGEST_DOCUMENT), re.M
        )
    except OSError:
        found = None
    return f"fl-privacy-{found[1].decode() if found else 'NAME'}"


def _times(found: Status, events: list[Event], rows: list[Event]) -> None:
    """From one evaluation to the next, which covers a whole round; without the server's log, as it measured them."""
    ends = [t for e in events if e["event"] == "evaluated" and (t := _number(e.get("time"))) is not None]
    took = [b - a for a, b in pairwise(ends)]
    took = took or [s for row in rows if row["round"] and (s := _number(row.get("seconds"))) is not None]
    if took:
        recent = took[-RECENT:]
        found.seconds_a_round = round(sum(recent) / len(recent), 3)
    if found.state != "running":
        return
    begun = [event for event in events if event["event"] == "round"]
    found.attempt = _whole(begun[-1].get("attempt")) if begun else None
    if found.seconds_a_round is not None and found.rounds is not None:
        found.seconds_left = round(max(0, found.rounds - found.round) * found.seconds_a_round, 1)


def _failed(event: Event) -> dict[str, Any]:
    wanted = {"round": _whole(event.get("round")), "attempt": _whole(event.get("attempt"))}
    return {**wanted, "reason": _text(event.get("reason", ""))}


def _processes(home: Path, logs: Path) -> list[Process]:
    """Those in pids.json. A process that started after the file was written is not ours."""
    path = home / "pids.json"
    pids, found = _object(path), []
    written = path.stat().st_mtime if pids else 0.0
    for name, pid in sorted(pids.items()):
        if not isinstance(pid, int) or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name):
            continue
        process = Process(name, pid, False, last=_last(logs / f"{name}.log"))
        try:
            running = psutil.Process(pid)
            with running.oneshot():
                ours = running.create_time() <= written + 1 and running.status() != psutil.STATUS_ZOMBIE
                process.alive, process.rss = ours, running.memory_info().rss if ours else 0
        except (psutil.Error, ValueError, OverflowError):
            pass
        found.append(process)
    return found


def _last(log: Path) -> str:
    """A process's last event in a few words."""
    events = list(_events(log, LONGEST_TAIL))
    if not events:
        return ""
    last, terms = events[-1], []
    if (number := _whole(last.get("round", last.get("last")))) is not None:
        terms.append(f"round {number}")
    if _whole(last.get("count")) is not None and _whole(last.get("cohort")) is not None:
        terms.append(f"{last['count']} of {last['cohort']}")
    if last.get("reason"):
        terms.append(str(last["reason"]))
    return _text(" ".join((str(last["event"]), *terms)))


def _budgets(logs: Path) -> list[Budget]:
    """From the sites' own events: composing a ledger takes seconds."""
    found: dict[str, Budget] = {}
    for log in (*sorted(logs.glob("worker-*.log")), logs / "sites.log"):
        for event in _events(log, LONGEST_TAIL):
            spent = _number(event.get("spent"))
            if event["event"] in ("charged", "resend") and spent is not None:
                site = _text(event.get("role", ""))
                found[site] = Budget(site, spent, _number(event.get("left")), _number(event.get("delta")))
    return [found[site] for site in sorted(found)]


def _server_events(root: Path) -> tuple[list[Event], list[Event]]:
    """The server's events since its last start, and those before: a resumed run has one log per start."""
    logs = root / "logs"
    old = sorted(logs.glob("server.*.log"), key=lambda path: (len(path.name), path.name), reverse=True)
    earlier = [event for path in old for event in _events(path, LONGEST_LOG)]
    return list(_events(logs / "server.log", LONGEST_LOG)), earlier


def _manifest(root: Path) -> Event | None:
    path = root / "manifest.json"
    if not path.is_file():
        return None
    manifest = _object(path)
    if not manifest:
        raise TranscriptError(f"{path}: damaged; restore the run from a copy")
    return manifest


def _object(path: Path) -> Event:
    """A small JSON document; empty if it cannot be read."""
    try:
        value = json.loads(_end_of(path, LONGEST_DOCUMENT))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _events(path: Path, limit: int) -> Iterator[Event]:
    return (line for line in _json_lines(path, limit) if isinstance(line.get("event"), str))


def _json_lines(path: Path, limit: int) -> Iterator[Event]:
    """The complete JSON lines at the end of a file; other lines are skipped."""
    try:
        lines = _end_of(path, limit).split(b"\n")[:-1]
    except OSError:
        return
    for line in lines:
        start = line.find(b"{")
        try:
            value = json.loads(line[start:]) if start >= 0 else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _end_of(path: Path, limit: int) -> bytes:
    """The last bytes of a regular file."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError("not a regular file")
        file.seek(max(0, facts.st_size - limit))
        return file.read(limit)


def _number(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fits else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _text(value: Any) -> str:
    """Short, on one line, and without terminal control characters."""
    text = "".join(c if c.isprintable() else " " for c in str(value)[:LONGEST_TEXT])
    return " ".join(text.split())
