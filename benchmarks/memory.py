"""Peak memory of a shuffler in rounds of ten sites: the rows themselves, and little else.

A separate process mixes the rows in shared memory. We read the shuffler's own high-water mark and sample the two
processes together, counting shared pages once.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.parties import MEGABYTE, PARAMETERS, QUICK_PARAMETERS, Parties, parties
from benchmarks.result import Result
from fl_privacy.coding import FLOAT32, Payload
from fl_privacy.config import Federation, ShufflerRoute, Site
from fl_privacy.round.collector import Collector
from fl_privacy.routes.ends import Ask, ServerSeat
from fl_privacy.vector import Entry, Layout, Vector
from fl_privacy.wire import client, federation_pb2 as pb, rpc
from fl_privacy.wire.stream import digest
from server_app.asking import Asking

SITES = 10
ROUNDS = 2
START = 60.0
TIMEOUT = 120.0
SAMPLE = 0.02


def limit(rows: int) -> float:
    """In MB: the updates plus 15 %, and what an interpreter with its libraries takes."""
    return 1.15 * rows / MEGABYTE + 200


def run(quick: bool = False) -> list[Result]:
    model = np.random.default_rng(0).standard_normal(QUICK_PARAMETERS if quick else PARAMETERS, dtype=np.float32)
    federation = Federation(
        name="bench", sites=tuple(Site(name=f"site-{i}") for i in range(SITES)), route=ShufflerRoute(level="parameter")
    )
    with parties(federation.name) as made:
        idle, peak, both = _shuffle(made, federation, model)
    rows = SITES * model.nbytes
    detail = {
        "sites": SITES,
        "parameters": model.size,
        "rows_mb": round(rows / MEGABYTE, 1),
        "idle_mb": round(idle, 1),
        "with_mixer_mb": round(both, 1),
    }
    return [Result("shuffler, peak memory", round(peak, 1), round(limit(rows), 1), "MB", detail=detail)]


def _shuffle(made: Parties, federation: Federation, model: NDArray[np.float32]) -> tuple[float, float, float]:
    """Whole rounds on a real shuffler: its peak before and after, and that of shuffler and mixer together, in MB."""
    config = made.folder / "federation.yaml"
    config.write_text(federation.to_yaml())
    there, callers = (
        ("shuffler", "shuffler"),
        [*(("site", name) for name in federation.site_names), ("server", "server")],
    )
    keys, *others = made.keys(there, *callers)
    command = [sys.executable, "-m", "shuffler_app", "--config", str(config), "--keys", str(keys.folder)]
    command += ["--state", str(made.folder / "state")]
    pid = made.fleet.start("shuffler", command).process.pid
    address = str(made.fleet.wait_for("shuffler", "listening", START)["address"])
    idle = _peak(pid)
    *sites, own = others
    channels = [rpc.channel(address, each, made.identity(*there)) for each in sites]
    layout = Layout((Entry("bench", model.shape),))
    server = Collector(ServerSeat(federation, layout, own, [address], Nobody()))
    asking = Asking(federation, layout, own, "bench", bytes(32), made.folder)
    over = threading.Event()
    try:
        with ThreadPoolExecutor(1) as pool:
            together = pool.submit(_watch, pid, over)
            try:
                for number in range(1, ROUNDS + 1):
                    # Every round has its own model, as in a run.
                    ask = asking.make(number, federation.site_names, 1, {}, digest(model + number))
                    _round(server, ask, [rpc.middleware(channel) for channel in channels], model + number)
            finally:
                over.set()
        return idle, _peak(pid), max(_peak(pid), together.result())
    finally:
        for channel in channels:
            channel.close()


class Nobody:
    """Sites are not invited: they send by themselves."""

    def invite(self, ask: Ask, model: Vector | None = None, place: str = "") -> None: ...

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        return []


def _round(server: Collector, ask: Ask, sites: Sequence[rpc.Stub], model: Vector) -> None:
    """Open, submit from all sites at once, collect, confirm."""
    server.open(0, ask, model.size, model)
    header = pb.RoundHeader(**ask.where, layout=ask.terms.layout)
    with ThreadPoolExecutor(len(sites)) as pool:
        list(pool.map(lambda site: client.submit(site, header, model, TIMEOUT, FLOAT32), sites))
    (release,), _ = server.collect(ask)
    if release.count != len(sites):
        raise RuntimeError(f"the shuffler released {release.count} of {len(sites)} updates: {release.reason}")
    server.confirm(ask)


def _peak(pid: int) -> float:
    """The high-water mark of a process's resident set, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    kibibytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024 / MEGABYTE


def _watch(pid: int, over: threading.Event) -> float:
    """The largest sampled memory share of a process and its children together, in MB."""
    most, parent = 0.0, psutil.Process(pid)
    while not over.wait(SAMPLE):
        total = 0
        for process in (parent, *parent.children()):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        most = max(most, total / MEGABYTE)
    return most
