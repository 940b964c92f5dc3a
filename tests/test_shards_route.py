"""Route `shards`: the server receives no update, neither over a socket nor in a file."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from fl_privacy.combine import mean
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.routes.ends import Ask, ServerSeat
from fl_privacy.shard import masks
from fl_privacy.tasks.workload import Workload, layout_of
from fl_privacy.transcript import open_run
from fl_privacy.wire import client
from helpers import Keys, ask_of, deploy
from server_app.loop import PASSING

SITES, AGGREGATORS, ROUNDS = 3, 3, 2
CONFIG = f"""
name: shards
seed: 11
sites: {SITES}
rounds: {ROUNDS}
rounds_per_message: {ROUNDS}
reproducible: true
audit: true
task: {{hidden: [12000], train: {{epochs: 1, batch_size: 64, momentum: 0}}}}
route: {{kind: shards, aggregators: {AGGREGATORS}}}
"""
CANARY = 64  # bytes of a vector to search for: too many to appear by chance


class SocketMeter:
    """Bytes that crossed the TCP sockets of some processes, as counted by the kernel."""

    def __init__(self) -> None:
        self._bytes: dict[str, dict[str, int]] = defaultdict(dict)
        self._names: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def total(self, name: str) -> int:
        return sum(self._bytes[name].values())

    def follow(self, run_dir: Path) -> None:
        """Called by the engine several times a second; learns which process is which."""
        pid_file = run_dir.parent / ".state" / run_dir.name / "pids.json"
        if not pid_file.exists():
            return
        pids = json.loads(pid_file.read_text())
        self._names[pids["superlink"]] = "superlink"
        for process in psutil.Process(pids["superlink"]).children(recursive=True):
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            self._names[process.pid] = "serverapp" if "flwr-serverapp" in line else "superlink"
        for name in ("aggregator-0", "aggregator-1"):
            self._names[pids[name]] = name

    def __enter__(self) -> SocketMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            text = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True).stdout
            for entry in re.split(r"\n(?=\S)", text):
                self._count(entry)
            time.sleep(0.05)

    def _count(self, entry: str) -> None:
        ends = " ".join(entry.split()[3:5])
        sizes = [int(n) for n in re.findall(r"bytes_(?:sent|received):(\d+)", entry)]
        for pid in re.findall(r"pid=(\d+)", entry):
            name = self._names.get(int(pid))
            if name is not None:
                self._bytes[name][ends] = max(self._bytes[name].get(ends, 0), sum(sizes))


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, SocketMeter, Path]:
    if subprocess.run(["sh", "-c", "command -v ss"], capture_output=True).returncode:
        pytest.skip("needs ss (iproute2) to read the kernel's byte counters")
    runs = tmp_path_factory.mktemp("runs")
    with SocketMeter() as meter:
        result = up(Federation.parse(CONFIG), "local", runs, watch=meter.follow)
    return result, meter, runs


def test_a_sharded_run_completes(metered: tuple[Result, SocketMeter, Path]) -> None:
    assert (metered[0].status, metered[0].rounds) == ("completed", ROUNDS)


def test_less_than_one_vector_crosses_the_sockets_of_server_and_superlink(
    metered: tuple[Result, SocketMeter, Path],
) -> None:
    result, meter, _ = metered
    vector = 4 * open_run(result.path).truth("site-0").round(1).arrays["update"].size
    assert 0 < meter.total("serverapp") < vector / 4
    assert 0 < meter.total("superlink") < vector
    # The meter does see vectors: an aggregator receives and sends a third of one per site and round.
    assert meter.total("aggregator-0") > 2 * SITES * ROUNDS * vector / AGGREGATORS * 0.9


def vectors(run_path: str) -> list[np.ndarray]:
    """Every update, every shard of an update, and every model after a round."""
    run = open_run(run_path)
    found = [run.truth(f"site-{i}").round(t).arrays["update"] for i in range(SITES) for t in (1, ROUNDS)]
    owners = masks.owners(found[0].size, AGGREGATORS, 11)
    return found + [shard for update in found for shard in masks.split(update, owners, AGGREGATORS)]


def canaries(run_path: str) -> list[bytes]:
    """Pieces of the vectors that no other file contains by chance, as it might the zeros of a dead unit."""
    pieces = []
    for vector in vectors(run_path):
        data = vector.tobytes()
        for start in range(0, len(data) - CANARY, len(data) // 5):
            piece = data[start : start + CANARY]
            if len(set(piece)) > CANARY // 3:
                pieces.append(piece)
    return pieces


def holds_any(folder: Path, pieces: list[bytes]) -> list[str]:
    found = []
    for path in (p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        found += [path.name for piece in pieces if piece in data][:1]
    return found


def test_no_file_of_server_or_superlink_contains_a_piece_of_an_update(
    metered: tuple[Result, SocketMeter, Path],
) -> None:
    result, _, runs = metered
    pieces = canaries(result.path)
    assert len(pieces) > 20
    run_dir, private = Path(result.path), runs / ".state" / result.run / "private"
    assert holds_any(private / "superlink", pieces) == []
    assert holds_any(private / "server", pieces) == []
    for part in ("views/server", "checkpoints", "logs"):
        assert holds_any(run_dir / part, pieces) == []
    assert [p for p in run_dir.iterdir() if p.is_file() and any(piece in p.read_bytes() for piece in pieces)] == []
    # The search does find pieces: an aggregator's own view contains its shards.
    assert holds_any(run_dir / "views" / "aggregator-0", pieces)


def test_shards_give_the_same_result_as_fedavg(metered: tuple[Result, SocketMeter, Path]) -> None:
    """The reassembled model is FedAvg's: the same held-out loss to the last bit."""
    federation = Federation.parse(CONFIG)
    work = Workload(federation)
    model, data = work.initial.copy(), {name: work.site_data(name) for name in federation.site_names}
    for round in range(1, ROUNDS + 1):
        updates = np.stack([work.update(model, data[name], name, round) for name in federation.site_names])
        model = federation.combine.optimiser().step(model, mean.weighted(updates, exact=True))
    assert work.evaluate(model).loss == metered[0].loss


class Silent:
    """Sites that never answer."""

    def invite(self, ask: Ask, model: object = None) -> None: ...

    def answers(self, ask: Ask) -> list[tuple[str, str, None]]:
        return []


@pytest.mark.e2e
def test_one_killed_aggregator_ends_the_attempt_at_once(tmp_path: Path) -> None:
    federation = Federation.parse(CONFIG).model_copy(update={"deadline": 60.0})
    keys = Keys(tmp_path / "pki", federation.name)
    there = [deploy(tmp_path / "a", keys, federation, "aggregator", k) for k in range(AGGREGATORS)]
    layout = layout_of(federation)
    owners = masks.owners(layout.size, AGGREGATORS, federation.seed)
    for one, shard in zip(there, masks.split(np.zeros(layout.size, np.float32), owners, AGGREGATORS), strict=True):
        client.seed(one.party("evaluator", "evaluator").stub, "a-run", 0, shard, 30.0)
    seat = ServerSeat(federation, layout, keys.of("server", "server"), [one.address for one in there], Silent())
    end = federation.route.server(seat)
    ask = ask_of(federation, keys, "a-run", 1, end.digest("a-run", 0, None), layout)
    began = time.monotonic()
    threading.Timer(1.0, there[1].fleet.children[there[1].name].signal, [signal.SIGKILL]).start()
    try:
        with pytest.raises(grpc.RpcError) as failed:
            end.play(ask, None)
        assert failed.value.code().name in PASSING  # so that the round is attempted again
        assert 0.9 < time.monotonic() - began < federation.deadline / 2
    finally:
        for one in there:
            one.stop()
