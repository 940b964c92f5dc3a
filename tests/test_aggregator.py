"""Shard aggregators: a real process, and in this process for exact timing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator_app.service import Aggregator
from fl_privacy.combine import mean, optimiser
from fl_privacy.combine.rules import Combiner
from fl_privacy.config import Federation
from fl_privacy.round.shard_store import ShardStore
from fl_privacy.shard import masks
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import chunks, data_bytes, digest
from helpers import (
    CALL,
    Array,
    Deployment,
    Keys,
    collect,
    deploy,
    kill,
    open_round,
    refused,
    round_header,
    status,
    submit,
)
from inprocess import (
    EVALUATOR,
    KEYS,
    SERVER,
    SITES,
    Quiet,
    everything,
    federation,
    opened,
    parts_of,
    submission,
    updates,
)

SHARD_LENGTH = 700


def sharded(**changes: Any) -> Federation:
    return federation(route={"kind": "shards", "aggregators": 2, "n_min": 3}, **changes)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def aggregator(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = deploy(tmp_path_factory.mktemp("aggregator"), keys, sharded(), "aggregator")
    yield deployment
    deployment.stop()


def seed(deployment: Deployment, run: str, shard: Array, round: int = 0) -> None:
    client.seed(deployment.party("evaluator", "evaluator").stub, run, round, shard, CALL)


def open_shard(deployment: Deployment, header: pb.RoundHeader, model: Array | None = None) -> pb.RoundHeader:
    """With the digest of the aggregator's own shard of the round before, unless another one is given."""
    if not header.shards:
        request = pb.ShardRequest(run=header.run, round=header.round - 1)
        header.shards.append(deployment.server.shard(request, timeout=CALL).digest if model is None else digest(model))
    return open_round(deployment.server, header)


def settle(deployment: Deployment, round: pb.RoundHeader, commit: bool = True, members: bytes = b"\x07") -> None:
    where = {"run": round.run, "round": round.round, "attempt": round.attempt}
    deployment.server.settle(pb.SettleRequest(**where, commit=commit, members=members, senders=b"\0"), timeout=CALL)


def newest(deployment: Deployment, run: str) -> tuple[int, Array]:
    stub = deployment.party("evaluator", "evaluator").stub
    header, shard = client.fetch(stub, pb.FetchRequest(run=run, newest=True), CALL)
    assert shard is not None
    return header.round, shard


def play_shard(deployment: Deployment, round: pb.RoundHeader, rows: Array) -> client.Release:
    open_shard(deployment, round)
    for index, row in enumerate(rows):
        submit(deployment.site(index), round, row)
    return collect(deployment.server, round)


def step(shard: Array, rows: Array) -> Array:
    return optimiser.FedAvg().step(shard, mean.weighted(rows))


def test_only_the_evaluator_seeds_and_only_once(aggregator: Deployment) -> None:
    shard = updates(1, SHARD_LENGTH)[0]
    early = round_header("seeding", 1, SHARD_LENGTH)
    assert status(open_shard, aggregator, early) == "FAILED_PRECONDITION"
    for stub in (aggregator.server, aggregator.site(0), aggregator.party("aggregator", "aggregator-1").stub):
        assert status(client.seed, stub, "seeding", 0, shard, CALL) == "PERMISSION_DENIED"
    assert status(seed, aggregator, "seeding", np.array([np.nan], np.float32)) == "INVALID_ARGUMENT"
    assert status(seed, aggregator, "../outside", shard) == "INVALID_ARGUMENT"
    seed(aggregator, "seeding", shard)
    assert status(seed, aggregator, "seeding", shard + 1) == "ALREADY_EXISTS"
    assert np.array_equal(newest(aggregator, "seeding")[1], shard)
    wrong = round_header("seeding", 1, SHARD_LENGTH - 1)
    assert status(open_shard, aggregator, wrong) == "INVALID_ARGUMENT"
    ahead = round_header("seeding", 3, SHARD_LENGTH)
    assert status(open_shard, aggregator, ahead) == "FAILED_PRECONDITION"


def test_the_server_receives_no_coordinates(aggregator: Deployment) -> None:
    seed(aggregator, "blind", updates(1, SHARD_LENGTH)[0])
    round = round_header("blind", 1, SHARD_LENGTH)
    release = play_shard(aggregator, round, updates(3, SHARD_LENGTH))
    assert (release.phase, release.count, release.tiers, release.rows) == ("closed", 3, [], None)
    request = pb.CollectRequest(run="blind", round=1, attempt=round.attempt)
    assert len(list(aggregator.server.collect(request, timeout=CALL))) == 1
    for name in ("fetch", "newest"):
        assert status(everything(aggregator.server, round)[name]) == "PERMISSION_DENIED"
        other = aggregator.party("aggregator", "aggregator-1").stub
        assert status(everything(other, round)[name]) == "PERMISSION_DENIED"


def test_a_round_is_applied_only_by_settling(aggregator: Deployment) -> None:
    start, rows = updates(1, SHARD_LENGTH)[0], updates(3, SHARD_LENGTH, seed=1)
    seed(aggregator, "settling", start)
    dropped = round_header("settling", 1, SHARD_LENGTH)
    play_shard(aggregator, dropped, rows)
    assert np.array_equal(newest(aggregator, "settling")[1], start)
    settle(aggregator, dropped, commit=False)
    assert status(settle, aggregator, dropped) == "FAILED_PRECONDITION"
    assert newest(aggregator, "settling")[0] == 0
    assert np.array_equal(newest(aggregator, "settling")[1], start)
    kept = round_header("settling", 1, SHARD_LENGTH)
    play_shard(aggregator, kept, rows)
    for _ in range(3):  # an answer may be lost: repeating the call applies nothing twice
        settle(aggregator, kept)
    settle(aggregator, kept, commit=False)
    assert newest(aggregator, "settling")[0] == 1
    assert np.array_equal(newest(aggregator, "settling")[1], step(start, rows))
    open_shard(aggregator, kept)  # a server that was killed asks again, and gets the same answer
    assert collect(aggregator.server, kept).members == b"\x07"
    settle(aggregator, kept)
    assert status(settle, aggregator, kept, members=b"\x03") == "FAILED_PRECONDITION"
    assert np.array_equal(newest(aggregator, "settling")[1], step(start, rows))


def test_a_round_that_did_not_close_cannot_be_settled(aggregator: Deployment) -> None:
    start = updates(1, SHARD_LENGTH)[0]
    seed(aggregator, "open", start)
    round = open_shard(aggregator, round_header("open", 1, SHARD_LENGTH, deadline=2.0))
    submit(aggregator.site(0), round, updates(1, SHARD_LENGTH)[0])
    assert status(settle, aggregator, round) == "FAILED_PRECONDITION"
    assert collect(aggregator.server, round).phase == "failed"
    assert status(settle, aggregator, round) == "FAILED_PRECONDITION"
    another = pb.SettleRequest(run="open", round=1, attempt="another", commit=True)
    assert status(aggregator.server.settle, another, timeout=CALL) == "FAILED_PRECONDITION"
    assert np.array_equal(newest(aggregator, "open")[1], start)


@pytest.mark.parametrize("combine", ["fedavg", "fedprox", "fedadam", "fedyogi", "median", "trimmed-mean"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_joined_shards_equal_the_rule_on_the_whole_vector_bit_for_bit(
    combine: str, reproducible: bool, tmp_path: Path
) -> None:
    """Two aggregators over three rounds against the same rule on the whole vector; sites answer in different orders."""
    length, count = 1501, 3
    config = sharded(combine={"kind": combine}, reproducible=reproducible)
    owners = masks.owners(length, 2, config.seed)
    model = updates(1, length, seed=5)[0]
    whole = Combiner(config)

    async def main() -> None:
        services = [aggregator_in(tmp_path / str(k), config) for k in range(2)]
        for one, shard in zip(services, masks.split(model, owners, 2), strict=True):
            first = pb.VectorHeader(run="run", length=shard.size, digest=digest(shard))
            await one.seed(parts_of(*chunks(pb.Chunk(vector=first), [shard])), EVALUATOR)
        expected = model
        for number in range(1, 4):
            rows = updates(count, length, seed=number)
            cut = [masks.split(row, owners, 2) for row in rows]
            for k, one in enumerate(services):
                header = round_header("run", number, cut[0][k].size, shards=[digest(one.runs["run"].model)])
                await opened(one, header)
                for index in ([0, 1, 2], [2, 0, 1])[k]:
                    await one.submit(submission(header, cut[index][k]), SITES[index])
                await one.settle(committed(header), SERVER)
            expected = whole.step(expected, rows)
        shards = [one.runs["run"].model for one in services]
        assert masks.join(shards, owners).tobytes() == expected.tobytes()

    asyncio.run(main())


@pytest.mark.e2e
def test_a_killed_aggregator_resumes_from_its_disk(keys: Keys, tmp_path: Path) -> None:
    config, start = sharded(), updates(1, SHARD_LENGTH)[0]
    rows = [updates(3, SHARD_LENGTH, seed=number) for number in range(4)]
    deployment = deploy(tmp_path, keys, config, "aggregator")
    seed(deployment, "run", start)
    expected = [start]
    for number in (1, 2):
        round = round_header("run", number, SHARD_LENGTH)
        play_shard(deployment, round, rows[number])
        settle(deployment, round)
        expected.append(step(expected[-1], rows[number]))
    unfinished = open_shard(deployment, round_header("run", 3, SHARD_LENGTH))
    submit(deployment.site(0), unfinished, rows[3][0])
    kill(deployment)

    deployment = deploy(tmp_path, keys, config, "aggregator")
    try:
        assert status(seed, deployment, "run", start) == "ALREADY_EXISTS"
        assert status(collect, deployment.server, unfinished) == "NOT_FOUND"
        third = round_header("run", 3, SHARD_LENGTH)
        play_shard(deployment, third, rows[3])
        assert np.array_equal(newest(deployment, "run")[1], expected[2])
        settle(deployment, third)
        assert np.array_equal(newest(deployment, "run")[1], step(expected[2], rows[3]))
        # Another aggregator did not settle: repeat the round from the previous shard.
        again = round_header("run", 3, SHARD_LENGTH)
        play_shard(deployment, again, rows[0])
        assert newest(deployment, "run")[0] == 2
        settle(deployment, again)
        assert np.array_equal(newest(deployment, "run")[1], step(expected[2], rows[0]))
        far = round_header("run", 2, SHARD_LENGTH)
        assert status(open_shard, deployment, far) == "FAILED_PRECONDITION"
    finally:
        deployment.stop()


def aggregator_in(folder: Path, config: Federation, kind: type[Aggregator] = Aggregator) -> Aggregator:
    return kind(config, KEYS.of("aggregator", "aggregator-0"), folder, Quiet("aggregator"))


def committed(header: pb.RoundHeader, members: bytes = b"\x07", senders: bytes = b"\0") -> pb.SettleRequest:
    where = {"run": header.run, "round": header.round, "attempt": header.attempt}
    return pb.SettleRequest(**where, commit=True, members=members, senders=senders)


def test_updates_that_not_every_aggregator_has_are_left_out(tmp_path: Path) -> None:
    """A site that sends to one aggregator only costs nobody an attempt, but the floor holds for those that are left."""

    async def main() -> None:
        config, rows = sharded(), updates(4, 4)
        service = aggregator_in(tmp_path, config)
        service._store.save("run", 0, np.zeros(4, np.float32), {})
        header = round_header("run", 1, 4, cohort=4, shards=[digest(np.zeros(4, np.float32))])
        await opened(service, header)
        for index in range(4):
            await service.submit(submission(header, rows[index]), SITES[index])
        for few, code in ((b"\x03", "FAILED_PRECONDITION"), (b"\x13", "INVALID_ARGUMENT")):
            with refused(code):
                await service.settle(committed(header, few), SERVER)
        await service.settle(committed(header, b"\x0d"), SERVER)
        assert service.runs["run"].model.tobytes() == step(np.zeros(4, np.float32), rows[[0, 2, 3]]).tobytes()

    asyncio.run(main())


def test_a_restarted_aggregator_knows_what_it_applied_and_lets_others_catch_up(tmp_path: Path) -> None:
    async def main() -> None:
        first = aggregator_in(tmp_path, sharded())
        header = await closed_round(first)
        await first.settle(committed(header), SERVER)
        again = aggregator_in(tmp_path, sharded())
        assert again._state("run").version == 1  # from its disk
        await opened(again, header)
        offer = [part async for part in again.fetch(pb.FetchRequest(run="run"), SITES[0])]
        assert (offer[0].round.attempt, bytes(offer[1])) == (header.attempt, bytes(16))  # the model before the round
        reply = await again.submit(submission(header, np.ones(4, np.float32)), SITES[0])
        assert reply.duplicate
        none = [part async for part in again.fetch(pb.FetchRequest(run="run", wait=0.01), SITES[0])]
        assert none[0].round.round == 0
        with refused("FAILED_PRECONDITION"):
            await again.settle(committed(header, b"\x03"), SERVER)
        await again.settle(committed(header), SERVER)
        assert again.runs["run"].version == 1
        assert again.runs["run"].model.tolist() == [1.0] * 4

    asyncio.run(main())


class Slow(Aggregator):
    """An aggregator that a test can hold while it settles."""

    gate: asyncio.Event
    broken = False

    async def _settle(self, *arguments: Any) -> None:
        await self.gate.wait()
        if self.broken:
            raise OSError("disk")
        await super()._settle(*arguments)


async def closed_round(service: Aggregator) -> pb.RoundHeader:
    shard = np.zeros(4, np.float32)
    service._store.save("run", 0, shard, {})
    header = await opened(service, round_header("run", 1, 4, shards=[digest(shard)]))
    for index in range(3):
        await service.submit(submission(header, np.ones(4, np.float32)), SITES[index])
    return header


def test_a_caller_that_disconnects_does_not_leave_a_round_half_settled(tmp_path: Path) -> None:
    async def main() -> None:
        service = aggregator_in(tmp_path, sharded(), Slow)
        service.gate = asyncio.Event()
        header = await closed_round(service)
        request = committed(header)
        first = asyncio.create_task(service.settle(request, SERVER))
        await asyncio.sleep(0.01)
        first.cancel()
        drop = pb.SettleRequest(run="run", round=1, attempt=header.attempt, commit=False)
        await service.settle(drop, SERVER)
        second = asyncio.create_task(service.settle(request, SERVER))
        await asyncio.sleep(0.01)
        assert not second.done()  # no answer before the shard is on disk
        service.gate.set()
        await second
        assert service.runs["run"].version == 1
        assert ShardStore(tmp_path / "shards").load("run", 1)[0].tolist() == [1.0] * 4

    asyncio.run(main())


def test_failed_settling_is_never_reported_as_done(tmp_path: Path) -> None:
    async def main() -> None:
        service = aggregator_in(tmp_path, sharded(), Slow)
        service.gate, service.broken = asyncio.Event(), True
        service.gate.set()
        header = await closed_round(service)
        request = committed(header)
        with pytest.raises(OSError, match="disk"):
            await service.settle(request, SERVER)
        assert service.runs["run"].version == 0
        assert service.runs["run"].model.tolist() == [0.0] * 4

    asyncio.run(main())


def test_a_slow_seed_cannot_reset_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        service, gate = aggregator_in(tmp_path, sharded()), asyncio.Event()
        late = np.full(4, 9, np.float32)

        async def slow() -> AsyncIterator[Any]:
            yield pb.Chunk(vector=pb.VectorHeader(run="run", length=4, digest=digest(late)))
            await gate.wait()
            yield data_bytes(late)

        dawdling = asyncio.create_task(service.seed(slow(), EVALUATOR))
        await asyncio.sleep(0.01)
        await closed_round(service)
        gate.set()
        with refused("ALREADY_EXISTS"):
            await dawdling
        assert service.runs["run"].model.tolist() == [0.0] * 4

    asyncio.run(main())


@pytest.mark.parametrize("run", ["", ".", "..", "../x", "/etc", "a/b", "a\\b\0", "-x", "a\n", "x" * 129, "ü"])
def test_no_run_name_escapes_the_state_folder(run: str, tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "state")
    for call in (
        lambda name: store.save(name, 0, np.zeros(1, np.float32), {}),
        lambda name: store.load(name, 0),
    ):
        with refused("INVALID_ARGUMENT"):
            call(run)
    assert store.newest(run) is None
    assert list(tmp_path.iterdir()) == []


def test_the_store_keeps_two_rounds_and_ignores_leftovers_of_a_crash(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    for number in range(4):
        store.save("run", number, np.full(2, number, np.float32), {"moment": {"m": np.ones(2)}})
    (tmp_path / "run" / "round-000009.tmp").write_bytes(b"half a shard")
    assert store.newest("run") == 3
    assert store.load("run", 2)[0].tolist() == [2, 2]
    assert store.load("run", 3)[1]["moment"]["m"].tolist() == [1, 1]
    with refused("FAILED_PRECONDITION"):
        store.load("run", 1)
