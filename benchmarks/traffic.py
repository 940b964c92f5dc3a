"""Bytes of a run on the wire against `fl-privacy plan`, party by party, for several numbers of aggregators."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.relays import Relays, relayed
from benchmarks.result import Result
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.tasks.workload import layout_of

SITES, HIDDEN, COUNTS = 3, 32_000, (2, 4, 8)  # 2.4 M parameters: shards of 1.2 MB and more
QUICK_HIDDEN = 12_000  # 0.9 M parameters: the same within 1 percent
CONFIG = """
name: traffic
seed: 4
sites: {sites}
rounds: 1
task: {{hidden: [{hidden}], train: {{epochs: 1, batch_size: 128}}}}
route: {{kind: shards, aggregators: {aggregators}, placement: {placement}}}
evaluate: {{by: {by}, alone: false}}
"""
BY = {"processes": "server", "sites": "sites"}  # who evaluates
PLACED = 3  # aggregators that are sites: every site


class Traffic(NamedTuple):
    """A whole run of one party: bytes received and sent; handshakes are listed apart."""

    party: str
    planned: tuple[int, int]
    measured: tuple[int, int]
    handshakes: int

    @property
    def error(self) -> float:
        """The largest relative error of the plan, of what it says is not zero."""
        pairs = zip(self.planned, self.measured, strict=True)
        return max(abs(found / said - 1) for said, found in pairs if said)


def measure(aggregators: int, hidden: int, placement: str = "processes") -> list[Traffic]:
    """One round on the local engine: every middleware, the evaluator, every site. The best model is the last one."""
    text = CONFIG.format(sites=SITES, hidden=hidden, aggregators=aggregators, placement=placement, by=BY[placement])
    federation = Federation.parse(text)
    with tempfile.TemporaryDirectory(prefix="fl-privacy-bench-") as folder, relayed() as relays:
        result = up(federation, "local", Path(folder))
    if result.status != "completed":
        raise RuntimeError(f"the run failed: {result.reason}")
    return list(_compared(federation, relays))


def _compared(federation: Federation, relays: Relays) -> Iterator[Traffic]:
    route, size = federation.route, layout_of(federation).size
    pairs = zip(route.cost(federation, size), route.once(federation, size), strict=True)
    planned = {each.party: (each.bytes_in + once.bytes_in, each.bytes_out + once.bytes_out) for each, once in pairs}
    kinds = {name: kind for kind, name in route.parties()} | dict.fromkeys(federation.site_names, "site")
    targets = dict(zip(route.middleware(), dict.fromkeys(target for _, target in relays.links), strict=True))
    for name, kind in kinds.items():
        links = relays.to(targets[name]) if name in targets else relays.of(name)
        dialled, dialling = sum(link.sent for link in links), sum(link.received for link in links)
        measured = (dialled, dialling) if name in targets else (dialling, dialled)
        yield Traffic(name, planned[kind], measured, sum(link.handshakes for link in links))


def table(found: list[Traffic]) -> Iterator[str]:
    names = ("planned in", "on the wire", "planned out", "on the wire")
    yield f"{'party':<14} {' '.join(f'{name:>12}' for name in names)} {'handshakes':>11}"
    for party, planned, measured, handshakes in found:
        yield (
            f"{party:<14} {planned[0]:>12,} {measured[0]:>12,} {planned[1]:>12,} {measured[1]:>12,} {handshakes:>11,}"
        )


def run(quick: bool = False) -> list[Result]:
    hidden, counts = (QUICK_HIDDEN, (2,)) if quick else (HIDDEN, COUNTS)
    found = {a: measure(a, hidden) for a in counts}
    worst = max(one.error for parties in found.values() for one in parties)
    busiest = [a * sum(parties[0].measured) for a, parties in found.items()]
    tables = {"tables": {str(a): list(table(parties)) for a, parties in found.items()}}
    placed = measure(PLACED, hidden, "sites")
    sealed = {"tables": {f"{PLACED} sites": list(table(placed))}}
    return [
        Result("bytes on the wire, off the plan", 100 * worst, 1, "%", detail=tables),
        Result(
            "bytes on the wire through a mailbox, off the plan",
            100 * max(one.error for one in placed),
            1,
            "%",
            detail=sealed,
        ),
        Result("aggregator's bytes times A, max to min", max(busiest) / min(busiest), 1.01, "x"),
    ]


if __name__ == "__main__":
    for count in COUNTS:
        print(f"{count} aggregators", *table(measure(count, HIDDEN)), sep="\n")
    print(f"{PLACED} sites that aggregate", *table(measure(PLACED, HIDDEN, "sites")), sep="\n")
