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
from fl_privacy.coding import FLOAT32
from fl_privacy.config import Federation, ShufflerRoute, Site
from fl_privacy.wire import client, federation_pb2 as pb, rpc
from fl_privacy.wire.stream import digest

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
    keys = made.keys("shuffler", "shuffler").folder
    command = [sys.executable, "-m", "shuffler_app", "--config", str(config), "--keys", str(keys)]
    pid = made.fleet.start("shuffler", command).process.pid
    address = str(made.fleet.wait_for("shuffler", "listening", START)["address"])
    idle = _peak(pid)
    channels = [rpc.channel(address, made.keys("site", name)) for name in federation.site_names]
    channels.append(rpc.channel(address, made.keys("server", "server")))
    over = threading.Event()
    try:
        with ThreadPoolExecutor(1) as pool:
            together = pool.submit(_watch, pid, over)
            try:
                for number in range(1, ROUNDS + 1):
                    _round([rpc.middleware(channel) for channel in channels], model, number)
            finally:
                over.set()
        return idle, _peak(pid), max(_peak(pid), together.result())
    finally:
        for channel in channels:
            channel.close()


def _round(stubs: Sequence[rpc.Stub], model: NDArray[np.float32], number: int) -> None:
    """Open, submit from all sites at once, collect; the server is the last of the stubs."""
    *sites, server = stubs
    header = pb.RoundHeader(
        run="bench", round=number, attempt=f"attempt-{number}", cohort=len(sites), quorum=len(sites), deadline=TIMEOUT
    )
    header.layout, header.length, header.parameters, header.model = "bench", model.size, model.size, digest(model)
    client.open_round(server, header, model, TIMEOUT)
    with ThreadPoolExecutor(len(sites)) as pool:
        list(pool.map(lambda site: client.submit(site, header, model, TIMEOUT, FLOAT32), sites))
    request = pb.CollectRequest(run=header.run, round=header.round, attempt=header.attempt)
    release = client.collect(server.collect(request, timeout=TIMEOUT))
    if release.count != len(sites):
        raise RuntimeError(f"the shuffler released {release.count} of {len(sites)} updates: {release.reason}")


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
