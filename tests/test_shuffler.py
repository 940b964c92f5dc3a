"""A shuffler in this process: statistics over many rounds, and races that need exact timing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fl_privacy.dp import ldp
from fl_privacy.identity.roster import Member
from fl_privacy.round import service as middleware, watching
from fl_privacy.round.access import MAX_RUNS
from fl_privacy.round.machine import Phase
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import chunks, data_bytes
from helpers import Array, Keys, bound_to, columns, refused, round_header
from inprocess import (
    EPSILONS,
    KEYS,
    LENGTH,
    SERVER,
    SITES,
    Context,
    Quiet,
    collected,
    federation,
    opened,
    parts_of,
    play,
    shuffler_in,
    shuffler_of,
    stream_of,
    submission,
    updates,
)
from shuffler_app.service import Shuffler

LEAST_P = 1e-6


def p_value(counts: Array) -> float:
    return float(stats.chisquare(counts.ravel()).pvalue)


def test_the_order_of_whole_models_reveals_neither_names_nor_arrival() -> None:
    """Whatever their name and order of arrival, clients are equally often in each row."""
    rounds = 400
    by_name, by_arrival = np.zeros((3, 3)), np.zeros((3, 3))
    values = np.repeat(np.arange(3, dtype=np.float32)[:, None], 2, axis=1)

    async def main() -> None:
        service = shuffler_of("model")
        for number in range(1, rounds + 1):
            order = [(number + shift) % 3 for shift in range(3)]
            header, matrix = await play(service, round_header("run", number, 2), order, values)
            assert header.tiers == ["", "", ""]
            for row, client_ in enumerate(matrix[:, 0].astype(int)):
                by_name[row, client_] += 1
                by_arrival[row, order.index(client_)] += 1

    asyncio.run(main())
    assert p_value(by_name) > LEAST_P
    assert p_value(by_arrival) > LEAST_P


def test_a_site_s_label_is_its_own_budget() -> None:
    async def main() -> None:
        service, header, update = shuffler_of("parameter", True), round_header("run", 1, 2), np.zeros(2, np.float32)
        await opened(service, header, update)
        for tier in ("", f"{EPSILONS[1]:g}", "site-0 was here"):
            with refused("INVALID_ARGUMENT"):
                await service.submit(submission(header, update, tier=tier), SITES[0])
        await service.submit(submission(header, update, tier=f"{EPSILONS[0]:g}"), SITES[0])

    asyncio.run(main())


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_order_of_parameters_reveals_neither_names_nor_arrival(order: list[int]) -> None:
    """Every coordinate has its own permutation, and all six are equally frequent."""
    length = 30_000
    values = np.repeat(np.arange(3, dtype=np.float32)[:, None], length, axis=1)
    _, matrix = asyncio.run(play(shuffler_of("parameter"), round_header("run", 1, length), order, values))
    codes = (matrix * np.array([[1], [3], [9]])).sum(axis=0).astype(int)
    found, counts = np.unique(codes, return_counts=True)
    assert len(found) == 6
    assert p_value(counts) > LEAST_P


def test_levelled_buckets_have_the_same_noise_in_every_row() -> None:
    """Nothing is left for unmixing by variance: every row of a bucket has the noise of its smallest budget."""
    length = 100_000
    sent = [ldp.privatise(np.zeros(length, np.float32), 1.0, e, 1e-5, bytes([i]) * 32) for i, e in enumerate(EPSILONS)]
    header = round_header("run", 1, length, layers=[length])
    release, rows = asyncio.run(
        play(shuffler_of("parameter", True, buckets="levelled"), header, [0, 1, 2], np.stack(sent))
    )
    assert len(set(release.tiers)) == 1
    assert np.std(sent[0]) != pytest.approx(np.std(sent[2]), rel=0.1)
    for row in rows:
        # An estimate of sigma from n Gaussians has standard deviation sigma / sqrt(2 n); six of them.
        assert row.std() == pytest.approx(ldp.scale(1.0, float(release.tiers[0]), 1e-5), rel=6 / np.sqrt(2 * length))


def test_layers_stay_whole_and_come_from_different_clients() -> None:
    values = np.repeat(np.arange(3, dtype=np.float32)[:, None], 40, axis=1)
    layers = list(range(2, 42, 2))
    header = round_header("run", 1, 40, layers=layers)
    _, matrix = asyncio.run(play(shuffler_of("layer"), header, [0, 1, 2], values))
    assert (matrix[:, ::2] == matrix[:, 1::2]).all()
    assert (columns(matrix) == values).all()
    assert len(np.unique(matrix, axis=1).T) > 1  # one permutation for all 20 layers has a chance of 6^-19


def test_a_shuffle_is_never_repeated() -> None:
    async def main() -> list[bytes]:
        service = shuffler_of("parameter")
        values = np.repeat(np.arange(3, dtype=np.float32)[:, None], 200, axis=1)
        return [(await play(service, round_header("run", n, 200), [0, 1, 2], values))[1].tobytes() for n in (1, 2, 3)]

    assert len(set(asyncio.run(main()))) == 3


def test_a_slow_open_of_an_attempt_that_is_open_changes_nothing() -> None:
    """Two opens of one attempt run at once; the slow one gives way, and the round of the fast one is released."""

    async def main() -> None:
        service, header, model = shuffler_of("parameter"), round_header("run", 1, 4), np.zeros(4, np.float32)
        bound_to(service.federation, KEYS, header, model)
        gate = asyncio.Event()

        async def slow() -> AsyncIterator[Any]:
            yield pb.Chunk(round=header)
            await gate.wait()
            yield data_bytes(model)

        dawdling = asyncio.create_task(service.open(slow(), SERVER))
        await asyncio.sleep(0)
        await opened(service, header, model)
        for index in range(3):
            await service.submit(submission(header, updates(3, 4)[index]), SITES[index])
        release, rows = await collected(service, header)
        assert release.phase == "released"
        gate.set()
        with refused("ABORTED"):
            await dawdling
        assert (await collected(service, header))[1].tobytes() == rows.tobytes()

    asyncio.run(main())


def test_a_run_that_gives_way_to_others_while_it_is_opened_is_open_afterwards() -> None:
    async def main() -> None:
        service, header, model = shuffler_of("parameter"), round_header("run", 1, 4), np.zeros(4, np.float32)
        bound_to(service.federation, KEYS, header, model)

        async def slow() -> AsyncIterator[Any]:
            yield pb.Chunk(round=header)
            for number in range(MAX_RUNS):
                service._state(f"other-{number}", create=True)
            yield data_bytes(model)

        await service.open(slow(), SERVER)
        await service.submit(submission(header, updates(3, 4)[0]), SITES[0])

    asyncio.run(main())


def test_a_shuffler_that_stops_in_the_middle_of_a_release_repeats_it(tmp_path: Path) -> None:
    """The key of the permutations is on its disk, encrypted, until the server has the result."""
    values, config = updates(3, 50), federation(True, route={"kind": "shuffler", "n_min": 3, "buckets": "levelled"})
    header = round_header("run", 1, 50)

    async def released() -> bytes:
        return (await play(shuffler_in(tmp_path, config), header, [0, 1, 2], values))[1].tobytes()

    first = asyncio.run(released())
    assert asyncio.run(released()) == first
    (key,) = (tmp_path / "mixing").iterdir()
    assert key.stat().st_mode & 0o077 == 0

    async def confirmed() -> None:
        service = shuffler_in(tmp_path, config)
        await play(service, header, [0, 1, 2], values)
        await service.settle(pb.SettleRequest(run="run", round=1, attempt=header.attempt, commit=True), SERVER)

    asyncio.run(confirmed())
    assert not list((tmp_path / "mixing").iterdir())


def test_floors_count_organisations(tmp_path: Path) -> None:
    """Two sites of one hospital hide nothing from it."""
    keys = Keys(tmp_path / "keys")
    for number in range(4):
        keys.of("site", f"site-{number}")
    one = [
        Member(m.role, m.name, m.key, "clinic" if m.name in ("site-0", "site-1") else "") for m in keys.members.values()
    ]
    keys.members = {member.party: member for member in one}
    keys.of("server", "server")

    async def main() -> None:
        config = federation(route={"kind": "shuffler", "n_min": 3})
        service = Shuffler(config, keys.of("shuffler", "shuffler"), tmp_path / "state", Quiet("shuffler"))
        server = Context("server", "server", keys)
        sites = [Context("site", f"site-{i}", keys) for i in range(4)]
        model = np.zeros(4, np.float32)
        few = bound_to(config, keys, round_header("run", 1, 4, organisations=2), model)
        with refused("INVALID_ARGUMENT"):
            await service.open(parts_of(*chunks(pb.Chunk(round=few), [model])), server)
        header = bound_to(config, keys, round_header("run", 1, 4, cohort=4, organisations=3, deadline=0.3), model)
        await service.open(parts_of(*chunks(pb.Chunk(round=header), [model])), server)
        for index in range(3):
            await service.submit(submission(header, updates(3, 4)[index]), sites[index])
        request = pb.CollectRequest(run="run", round=1, attempt=header.attempt)
        (release,) = [part async for part in service.collect(request, server)]
        assert release.release.reason == "3 of 4 updates came, from fewer than 3 organisations"

    asyncio.run(main())


def test_a_run_is_continued_and_finished_by_the_server_that_opened_it() -> None:
    async def main() -> None:
        service, header, other = (
            shuffler_of("parameter"),
            round_header("run", 1, 4),
            Context("server", "another-server"),
        )
        model = np.zeros(4, np.float32)
        await opened(service, header, model)
        foreign = bound_to(service.federation, KEYS, round_header("run", 1, 4), model)
        with refused("PERMISSION_DENIED"):
            await service.open(parts_of(*chunks(pb.Chunk(round=foreign), [model])), other)
        with refused("PERMISSION_DENIED"):
            await service.finish(pb.FinishRequest(run="run"), other)
        for index in range(3):
            await service.submit(submission(header, updates(3, 4)[index]), SITES[index])
        assert (await collected(service, header))[0].phase == "released"
        await service.finish(pb.FinishRequest(run="run"), SERVER)

    asyncio.run(main())


def test_a_failed_or_unwanted_round_keeps_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "KEPT", 0.1)

    async def main() -> None:
        for count, wanted in ((2, "2 of 3 updates came"), (3, "nobody collected")):
            service, header = shuffler_of("parameter"), round_header("run", 1, 4, deadline=0.1)
            await opened(service, header, np.zeros(4, np.float32))
            attempt = service.runs["run"].attempt
            for index in range(count):
                await service.submit(submission(header, updates(3, 4)[index]), SITES[index])
            assert attempt.rows is not None
            await asyncio.wait_for(attempt.gone.wait(), 5)
            assert attempt.rows is None
            assert attempt.round.phase is Phase.FAILED
            assert wanted in attempt.round.reason

    asyncio.run(main())


def test_a_closed_round_is_kept_for_the_server_at_least_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another aggregator may take that long to close the same round."""
    monkeypatch.setattr(watching, "KEPT", 0.0)

    async def main() -> None:
        service, header = shuffler_of("parameter"), round_header("run", 1, 4, deadline=0.5)
        await opened(service, header, np.zeros(4, np.float32))
        for index in range(3):
            await service.submit(submission(header, updates(3, 4)[index]), SITES[index])
        await asyncio.sleep(0.2)
        assert (await collected(service, header))[0].phase == "released"

    asyncio.run(main())


def test_a_cancelled_submission_leaves_no_trace() -> None:
    async def main() -> None:
        service, header = shuffler_of("parameter"), round_header("run", 1, LENGTH)
        await opened(service, header, np.zeros(LENGTH, np.float32))
        head, some, _ = stream_of(header, updates(1)[0])

        async def hanging() -> AsyncIterator[Any]:
            yield head
            yield some
            await asyncio.Event().wait()

        stuck = asyncio.create_task(service.submit(hanging(), SITES[2]))
        await asyncio.sleep(0.01)
        for index in (0, 1):
            await service.submit(submission(header, updates(3)[index]), SITES[index])
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        attempt = service.runs["run"].attempt
        assert not attempt.streams
        await service.submit(submission(header, updates(3)[2]), SITES[2])
        _, matrix = await collected(service, header)
        assert np.array_equal(columns(matrix), columns(updates(3)))

    asyncio.run(main())


def test_a_stream_without_a_header_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "HEADER_WAIT", 0.05)

    async def silent() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None

    async def main() -> None:
        with refused("DEADLINE_EXCEEDED"):
            await shuffler_of("parameter").submit(silent(), SITES[0])

    asyncio.run(main())


def test_finished_runs_are_dropped_only_when_there_is_no_room() -> None:
    async def main() -> None:
        service = shuffler_of("parameter")

        async def open_(number: int) -> None:
            header = round_header(f"run-{number}", 1, 2)
            await opened(service, header, np.zeros(2, np.float32))

        for number in range(MAX_RUNS):
            await open_(number)
            assert len(service.runs) == number + 1
            if number < 5:
                await service.finish(pb.FinishRequest(run=f"run-{number}"), SERVER)
        for number in range(5):
            await open_(100 + number)
        assert set(service.runs) == {"run-5", "run-6", "run-7", *(f"run-{100 + n}" for n in range(5))}
        with refused("RESOURCE_EXHAUSTED"):
            await open_(200)

    asyncio.run(main())
