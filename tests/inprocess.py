"""For tests: a federation of four sites, and its middleware in this process with callers that have certificates."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy.config import Federation
from fl_privacy.identity.keyring import Identity
from fl_privacy.ops.log import Log
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import chunks, data_bytes
from helpers import CALL, Array, Keys, bound_to, open_round, round_header, submit, vector_header
from shuffler_app.service import Shuffler

LENGTH = 1000
EPSILONS = (1.0, 2.0, 4.0, 8.0)
FOLDER = Path(tempfile.mkdtemp(prefix="flp-middleware-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
KEYS = Keys(FOLDER / "keys")


def federation(labelled: bool = False, **changes: Any) -> Federation:
    """Four sites with a quorum of three; with `labelled` each has a budget of its own."""
    sites: list[dict[str, Any]] = [{"name": f"site-{i}"} for i in range(len(EPSILONS))]
    if labelled:
        sites = [{**site, "epsilon": epsilon} for site, epsilon in zip(sites, EPSILONS, strict=True)]
        changes = {"privatise": {"kind": "ldp", "clip": 1.0}, **changes}
    route = {"kind": "shuffler", "level": "parameter", "n_min": 3}
    fields = {"name": "test", "sites": sites, "rounds": 1000, "quorum": 3, "route": route, **changes}
    return Federation.model_validate(fields)


def updates(count: int, length: int = LENGTH, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(count, length)).astype(np.float32)


class Context:
    """A caller with this certificate."""

    def __init__(self, role: str, name: str, keys: Keys = KEYS) -> None:
        self.keys = keys.of(role, name)
        self._uri = Identity("test", role, name).uri.encode()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"peer_uri": [self._uri], "x509_pem_cert": [self.keys.certificate_file.read_bytes()]}


SERVER = Context("server", "server")
EVALUATOR = Context("evaluator", "evaluator")
SITES = [Context("site", f"site-{i}") for i in range(4)]


class Quiet(Log):
    def __call__(self, event: str, **fields: Any) -> None:
        """Log nothing."""


async def parts_of(*parts: Any) -> AsyncIterator[Any]:
    for part in parts:
        yield part


async def opened(service: Any, header: pb.RoundHeader, model: Array | None = None) -> pb.RoundHeader:
    """Open a round as the server does; at a shuffler with the model."""
    bound_to(service.federation, KEYS, header, model)
    await service.open(parts_of(*chunks(pb.Chunk(round=header), [] if model is None else [model])), SERVER)
    return header


def submission(header: pb.RoundHeader, update: Array, **changes: Any) -> AsyncIterator[Any]:
    return parts_of(*chunks(pb.Chunk(vector=vector_header(header, update, **changes)), [update]))


async def collected(service: Any, header: pb.RoundHeader) -> tuple[pb.ReleaseHeader, Array]:
    request = pb.CollectRequest(run=header.run, round=header.round, attempt=header.attempt)
    first, *rest = [part async for part in service.collect(request, SERVER)]
    data = np.frombuffer(b"".join(rest), np.float32)
    return first.release, data.reshape(first.release.count, -1) if rest else data


def shuffler_in(folder: Path, config: Federation) -> Shuffler:
    return Shuffler(config, KEYS.of("shuffler", "shuffler"), folder, Quiet("shuffler"))


def shuffler_of(level: str, labelled: bool = False, **route: Any) -> Shuffler:
    """A shuffler with a journal of its own."""
    config = federation(labelled, route={"kind": "shuffler", "level": level, "n_min": 3, **route})
    return shuffler_in(Path(tempfile.mkdtemp(dir=FOLDER)), config)


async def play(service: Any, header: pb.RoundHeader, order: list[int], values: Array) -> tuple[pb.ReleaseHeader, Array]:
    await opened(service, header, np.full(header.length, header.number, np.float32))
    for index in order:
        tier = service.federation.sites[index].tier
        await service.submit(submission(header, values[index], tier=tier), SITES[index])
    return await collected(service, header)


def stream_of(round: pb.RoundHeader, update: Array) -> tuple[pb.Chunk, memoryview, memoryview]:
    data = data_bytes(update)
    return pb.Chunk(vector=vector_header(round, update)), data[:2000], data[2000:]


def everything(stub: Any, round: pb.RoundHeader) -> dict[str, Callable[[], Any]]:
    """Every call of the API, well formed."""
    request = pb.CollectRequest(run=round.run, round=round.round, attempt=round.attempt)
    settle = pb.SettleRequest(run=round.run, round=round.round, attempt=round.attempt, commit=True)
    abstain = pb.AbstainRequest(run=round.run, round=round.round, attempt=round.attempt)
    new = round_header(round.run, round.round + 1, LENGTH)
    return {
        "open": lambda: open_round(stub, new),
        "submit": lambda: submit(stub, round, updates(1)[0]),
        "collect": lambda: list(stub.collect(request, timeout=CALL)),
        "fetch": lambda: list(stub.fetch(pb.FetchRequest(run=round.run), timeout=CALL)),
        "newest": lambda: list(stub.fetch(pb.FetchRequest(run=round.run, newest=True), timeout=CALL)),
        "settle": lambda: stub.settle(settle, timeout=CALL),
        "abstain": lambda: stub.abstain(abstain, timeout=CALL),
        "shard": lambda: stub.shard(pb.ShardRequest(run=round.run), timeout=CALL),
        "seed": lambda: client.seed(stub, round.run, 0, updates(1)[0], CALL),
        "finish": lambda: stub.finish(pb.FinishRequest(run=round.run), timeout=CALL),
    }
