"""Our routes against Flower's own SecAgg+ (t = n - 1): seconds per round, bytes per site, and a site that stops.

The same task, sites and machine. A round lasts from the end of one evaluation to the end of the next; the first is left
out. Bytes are those on the site's own links, its SuperNode's too, as TCP carries them; handshakes are left out.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from attacks.audit.formulas import bits_per_parameter
from benchmarks.relays import Relays, relayed
from benchmarks.result import Result
from benchmarks.stock_engine import Stock, lines
from fl_privacy.config import Federation
from fl_privacy.deploy.engines import engine
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.ops.tail import Tail
from fl_privacy.tasks.workload import layout_of

APP = Path(__file__).parent / "secagg_plus"
SITES, QUICK_SITES = 5, 3
PER_MESSAGE, QUICK_ROUNDS = 20, 2
WHOLE = 3  # rounds of SecAgg+ with all sites; after them one site stops, then another one
DEADLINE = 10.0  # of our rounds in which a site stops; the quorum is all sites but one
TIMEOUT = 3600.0
R = 4
TASK = {  # the quickstart's
    "dataset": "digits",
    "model": "mlp",
    "partition": {"kind": "dirichlet", "alpha": 0.5},
    "train": {"epochs": 5, "batch_size": 16, "lr": 0.1, "momentum": 0.9},
}
MIXES = {"route": {"kind": "mixes", "mixes": 3, "trust": "semi-honest", "n_min": 2}, "encode": {"kind": "rns", "r": R}}
CHECKED = {**MIXES, "route": {**MIXES["route"], "trust": "malicious"}}
SHUFFLER = {"route": {"kind": "shuffler", "level": "parameter", "n_min": 2}}


class Mark(NamedTuple):
    """Bytes that a site has sent and received so far, on average, when so many rounds were done."""

    rounds: int
    sent: float
    received: float


@dataclass
class Measured:
    """A run: one line per evaluation, from round 0 on, and marks of its bytes."""

    evaluations: Sequence[dict[str, Any]] = ()
    marks: list[Mark] = field(default_factory=list)

    @property
    def times(self) -> list[float]:
        """Seconds of each round from the first on."""
        return [float(after["time"]) - float(before["time"]) for before, after in pairwise(self.evaluations)]

    def mark(self, relays: Relays, sites: Sequence[str], rounds: int) -> None:
        links = [link for name in sites for link in relays.of(name)]
        sent, received = (sum(getattr(link, way) for link in links) / len(sites) for way in ("sent", "received"))
        if not self.marks or rounds > self.marks[-1].rounds:
            self.marks.append(Mark(rounds, sent, received))

    def summary(self, last: int) -> dict[str, Any]:
        """Rounds 2 to `last`."""
        seconds = self.times[1:last]
        found = {
            "seconds": round(statistics.mean(seconds), 3),
            "slowest": round(max(seconds), 3),
            "rounds": len(seconds),
            "accuracy": round(float(self.evaluations[last]["accuracy"]), 4),
        }
        marks = [one for one in self.marks if 1 <= one.rounds <= last]
        if len(marks) > 1:
            first, end = marks[0], marks[-1]
            rounds = end.rounds - first.rounds
            found["sent"] = round((end.sent - first.sent) / rounds)
            found["received"] = round((end.received - first.received) / rounds)
        return found


def run(quick: bool = False) -> list[Result]:
    """At the quick size no site stops (Flower takes a minute to notice), and our engine is the simulation."""
    sites, rounds = (QUICK_SITES, QUICK_ROUNDS) if quick else (SITES, WHOLE)
    with tempfile.TemporaryDirectory(prefix="fl-privacy-bench-") as folder:
        theirs = _secagg(sites, rounds, Path(folder), quick)
        secagg = theirs.summary(rounds)
        ours = {name: _ours(name, kind, sites, Path(folder), quick) for name, kind in _routes(quick).items()}
        dropped = None if quick else _dropped(Path(folder))
    if dropped is not None:
        secagg["a site stops"], secagg["another site stops"] = (_stopped(theirs, at) for at in (WHOLE, WHOLE + 1))
    detail = {"SecAgg+": secagg, "parameters": layout_of(_federation("size", {}, sites, 1)).size, "sites": sites}
    mixes = [
        Result(f"{name} to SecAgg+", found["seconds"] / secagg["seconds"], limit, "x seconds", detail=detail | found)
        for (name, found), limit in zip(ours.items(), (0.01, 0.03, 0.01, 0.2), strict=False)
    ]
    return [*mixes, *_bytes(ours, secagg), _model(sites), *_stops(dropped, secagg)]


def _routes(quick: bool) -> dict[str, tuple[dict[str, Any], int]]:
    """Our routes and rounds per message."""
    many = QUICK_ROUNDS if quick else PER_MESSAGE
    found = {"three mixes": (MIXES, many)}
    rest = {
        "three checked mixes": (CHECKED, many),
        "one shuffler": (SHUFFLER, many),
        "three mixes, 1 per message": (MIXES, 1),
    }
    return found if quick else found | rest


def _federation(name: str, kind: dict[str, Any], sites: int, rounds: int, **other: Any) -> Federation:
    return Federation.model_validate(
        {"name": name, "seed": 7, "sites": sites, "rounds": rounds, "task": TASK} | kind | other
    )


def _secagg(sites: int, rounds: int, folder: Path, quick: bool) -> Measured:
    """SecAgg+; at the full size one site stops in the round after `rounds`, and another one in the next."""
    made = _federation("secagg", {}, sites, rounds if quick else rounds + 2)
    names = made.site_names
    stops = {} if quick else {str(rounds + 1): [names[0]], str(rounds + 2): [names[1]]}
    measured, frozen = Measured(), set[str]()

    def watch(workspace: Workspace, timings: Path) -> None:
        measured.mark(relays, names, len(lines(timings)) - 1)
        for name in names:
            if name not in frozen and timings.with_name(f"stopping-{name}").exists():
                frozen.add(name)
                workspace.fleet.remember_families()  # Flower's programs leave the group of their SuperNode
                workspace.fleet.children[f"supernode-{name}"].signal(signal.SIGSTOP)

    with relayed() as relays:
        stock = Stock(APP, {"stops": json.dumps(stops)}, relays.address, watch)
        measured.evaluations = stock.up(made, folder, TIMEOUT, forks=quick)
    return measured


def _ours(name: str, kind: tuple[dict[str, Any], int], sites: int, folder: Path, quick: bool) -> dict[str, Any]:
    what, many = kind
    rounds = 1 + (1 if quick else 2) * many if many > 1 else WHOLE + 3
    made = _federation(name.replace(",", "").replace(" ", "-"), what, sites, rounds, rounds_per_message=many)
    return _played(made, folder, quick).summary(rounds)


def _played(
    made: Federation, folder: Path, quick: bool = False, also: Callable[[Path, int], None] = lambda run_dir, done: None
) -> Measured:
    measured, events = Measured(), list[dict[str, Any]]()
    tails = dict[Path, Tail]()

    def watch(run_dir: Path) -> None:
        tail = tails.setdefault(run_dir, Tail(run_dir / "logs" / "server.log"))
        events.extend(event for event in tail.poll() if event["event"] == "evaluated")
        measured.mark(relays, made.site_names, len(events) - 1)
        also(run_dir, len(events) - 1)

    with relayed(nodes=True) as relays:
        result = engine.up(made, "simulation" if quick else "local", folder, watch=watch)
    if result.status != "completed":
        raise RuntimeError(f"{made.name}: the run failed: {result.reason}")
    measured.evaluations = events
    return measured


def _dropped(folder: Path) -> dict[str, Any]:
    """Three mixes: after round 2, all processes of a site freeze; the other sites are enough."""
    made = _federation("stops", MIXES, SITES, 6, rounds_per_message=6, quorum=SITES - 1, deadline=DEADLINE)
    site, frozen = made.site_names[0], list[int]()

    def freeze(run_dir: Path, done: int) -> None:
        if done < 2 or frozen:
            return
        pids = json.loads((folder / ".state" / run_dir.name / "pids.json").read_text())
        for name, pid in pids.items():
            if name == site or name.endswith(f"-{site}"):
                os.killpg(pid, signal.SIGSTOP)
                frozen.append(pid)

    found = _played(made, folder, also=freeze)
    seconds = found.times[2:]
    return {"seconds": round(max(seconds), 3), "later": [round(one, 3) for one in seconds], "deadline": DEADLINE}


def _stopped(theirs: Measured, round_before: int) -> dict[str, Any]:
    after = theirs.evaluations[round_before + 1]
    return {"seconds": round(theirs.times[round_before], 3), "released": bool(after["released"])}


def _bytes(ours: dict[str, dict[str, Any]], secagg: dict[str, Any]) -> list[Result]:
    """Sent and received per site and round; sites of the simulation are no processes with links of their own."""
    if not ours["three mixes"].get("sent"):
        return []
    mine, theirs = (found["sent"] + found["received"] for found in (ours["three mixes"], secagg))
    return [
        Result(
            "three mixes to SecAgg+, bytes per site",
            mine / theirs,
            1,
            "x bytes",
            detail={"SecAgg+": theirs, "three mixes": mine},
        )
    ]


def _model(sites: int) -> Result:
    """Closed forms (Athanasiou et al. 2026, Figure 2): secure aggregation by secret sharing with t = n - 1."""
    ways = {way: bits_per_parameter(way, sites, R) for way in ("secret-sharing", "rns-unary", "rns-numbers", "float32")}
    value = ways["rns-numbers"] / ways["secret-sharing"]
    return Result("residues to secret sharing, upload by formula", value, 1, "x bits", detail=ways)


def _stops(dropped: dict[str, Any] | None, secagg: dict[str, Any]) -> list[Result]:
    if dropped is None:
        return []
    value = dropped["seconds"] / secagg["a site stops"]["seconds"]
    detail = {
        "three mixes": dropped,
        "SecAgg+": secagg["a site stops"],
        "SecAgg+, another": secagg["another site stops"],
    }
    return [Result("a site stops, three mixes to SecAgg+", value, 0.5, "x seconds", detail=detail)]
