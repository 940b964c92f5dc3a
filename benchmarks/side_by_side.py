"""Uploads of one update's shards to several aggregators at once, against one upload of the same bytes: wall time."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.parties import HOST, MEGABYTE, PARAMETERS, QUICK_PARAMETERS, Parties, parties
from benchmarks.result import Result
from benchmarks.upload_sender import Send, streaming
from fl_privacy.wire import rpc
from fl_privacy.wire.buffers import keep_buffers

AGGREGATORS = 4
LIMIT = 1.15
TIMEOUT = 60.0


def senders(made: Parties) -> list[Send]:
    """A way to upload to each of several processes, as a site does it."""
    script = Path(__file__).with_name("upload_server.py")
    there = [("aggregator", f"aggregator-{k}") for k in range(AGGREGATORS)]
    *servers, site = made.keys(*there, ("site", "site-0"))
    found = []
    for (role, name), keys in zip(there, servers, strict=True):
        made.fleet.start(name, [sys.executable, str(script), "--keys", str(keys.folder), "--way", "stream"])
        address = f"{HOST}:{made.fleet.wait_for(name, 'listening', TIMEOUT)['port']}"
        found.append(streaming(rpc.channel(address, site, made.identity(role, name))))
    return found


def run(quick: bool = False) -> list[Result]:
    """The median ratio of neighbouring uploads; the whole update goes to each process in turn."""
    keep_buffers()
    size, repeats = (QUICK_PARAMETERS, 4) if quick else (PARAMETERS, 16)
    update = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    shards = np.array_split(update, AGGREGATORS)
    with parties("bench") as made, ThreadPoolExecutor(AGGREGATORS) as pool:
        sending = senders(made)

        def at_once() -> None:
            for done in [pool.submit(send, shard) for send, shard in zip(sending, shards, strict=True)]:
                done.result()

        for send in sending:
            send(update)
        at_once()
        pairs = [(_seconds(partial(sending[i % AGGREGATORS], update)), _seconds(at_once)) for i in range(repeats)]
    rates = [round(4 * size / MEGABYTE / statistics.median(of), 1) for of in zip(*pairs, strict=True)]
    detail = {"aggregators": AGGREGATORS, "one_mb_per_second": rates[0], "at_once_mb_per_second": rates[1]}
    ratio = statistics.median(together / one for one, together in pairs)
    return [Result(f"{AGGREGATORS} uploads side by side to one", ratio, LIMIT, "x seconds", detail=detail)]


def _seconds(function: Callable[[], object]) -> float:
    started = time.monotonic()
    function()
    return time.monotonic() - started
