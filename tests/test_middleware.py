"""Shuffler and aggregators: real processes, real certificates, and callers that break the rules."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from scipy import stats

from aggregator_app.service import Aggregator
from aggregator_app.state import ShardStore
from fl_privacy.combine import mean, optimiser
from fl_privacy.combine.rules import Combiner
from fl_privacy.config import Federation
from fl_privacy.dp import ldp
from fl_privacy.identity.keyring import Identity
from fl_privacy.ops.log import Log
from fl_privacy.round import service as middleware
from fl_privacy.round.machine import Phase
from fl_privacy.shard import masks
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import chunks, data_bytes, decode, digest, encode
from helpers import (
    CALL,
    Array,
    Deployment,
    Hanging,
    Keys,
    Party,
    collect,
    columns,
    deploy,
    eventually,
    kill,
    open_round,
    refused,
    round_header,
    send,
    status,
    submit,
    vector_header,
)
from shuffler_app.service import Shuffler

LENGTH = 1000
LEAST_P = 1e-6
EPSILONS = (1.0, 2.0, 4.0, 8.0)


def federation(labelled: bool = False, **changes: Any) -> Federation:
    """Four sites, with `labelled` each with a budget of its own."""
    sites: list[dict[str, Any]] = [{"name": f"site-{i}"} for i in range(len(EPSILONS))]
    if labelled:
        sites = [{**site, "epsilon": epsilon} for site, epsilon in zip(sites, EPSILONS, strict=True)]
        changes = {"privatise": {"kind": "ldp", "clip": 1.0}, **changes}
    route = {"kind": "shuffler", "level": "parameter", "n_min": 3}
    return Federation.model_validate({"name": "test", "sites": sites, "route": route, **changes})


def updates(count: int, length: int = LENGTH, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(count, length)).astype(np.float32)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def shuffler(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = deploy(tmp_path_factory.mktemp("shuffler"), keys, federation(), "shuffler")
    yield deployment
    deployment.stop()


_runs = itertools.count(1)


@pytest.fixture
def run(shuffler: Deployment) -> Iterator[str]:
    """A separate run for every test, finished at the end because a middleware keeps a limited number."""
    name = f"run-{next(_runs)}"
    yield name
    status(shuffler.server.finish, pb.FinishRequest(run=name), timeout=CALL)


def test_a_failed_call_is_explained_in_one_line_of_our_own(shuffler: Deployment, keys: Keys, run: str) -> None:
    nobody = Party("127.0.0.1:1", keys.of("server", "server"))
    calls: dict[str, Callable[[], Any]] = {
        "UNAVAILABLE: not reachable, or it refused our certificate": lambda: nobody.stub.finish(
            pb.FinishRequest(run=run), timeout=CALL
        ),
        "PERMISSION_DENIED: site: may not call this; only server may": lambda: shuffler.site(0).finish(
            pb.FinishRequest(run=run), timeout=CALL
        ),
    }
    for expected, call in calls.items():
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert client.explain(error.value).startswith(f"middleware: {expected}")
        assert not re.search(r"\n|Inactive|ipv4", client.explain(error.value))
    nobody.close()


# Bad submissions: name -> (status, what is sent instead of this good update).
def _header(round: pb.RoundHeader, good: Array, /, **changes: Any) -> Iterator[Any]:
    return chunks(pb.Chunk(vector=vector_header(round, good, **changes)), [good])


def _with_value(round: pb.RoundHeader, good: Array, value: float) -> Iterator[Any]:
    bad = good.copy()
    bad[-1] = value
    return chunks(pb.Chunk(vector=vector_header(round, bad)), [bad])


def _parts(round: pb.RoundHeader, good: Array, *parts: Any) -> Iterator[Any]:
    return iter([pb.Chunk(vector=vector_header(round, good)), *parts])


BAD: dict[str, tuple[str, Callable[[pb.RoundHeader, Array], Iterator[Any]]]] = {
    "truncated": ("DATA_LOSS", lambda r, u: _parts(r, u, data_bytes(u)[:-4])),
    "header alone": ("DATA_LOSS", lambda r, u: _parts(r, u)),
    "oversized": ("INVALID_ARGUMENT", lambda r, u: _parts(r, u, data_bytes(u), memoryview(b"more"))),
    "oversized message": ("RESOURCE_EXHAUSTED", lambda r, u: _parts(r, u, memoryview(bytes(1200 * 1024)))),
    "empty part": ("INVALID_ARGUMENT", lambda r, u: _parts(r, u, memoryview(b""))),
    "second header": ("INVALID_ARGUMENT", lambda r, u: _parts(r, u, pb.Chunk(vector=vector_header(r, u)))),
    "no header": ("INVALID_ARGUMENT", lambda r, u: iter([data_bytes(u)])),
    "a round's header": ("INVALID_ARGUMENT", lambda r, u: iter([pb.Chunk(round=r)])),
    "no part": ("INVALID_ARGUMENT", lambda r, u: iter([])),
    "not a number": ("INVALID_ARGUMENT", lambda r, u: _with_value(r, u, math.nan)),
    "infinite": ("INVALID_ARGUMENT", lambda r, u: _with_value(r, u, math.inf)),
    "changed on the way": ("DATA_LOSS", lambda r, u: _header(r, u, digest=digest(u + 1))),
    "no digest": ("INVALID_ARGUMENT", lambda r, u: _header(r, u, digest=b"")),
    "wrong layout": ("INVALID_ARGUMENT", lambda r, u: _header(r, u, layout="another")),
    "wrong length": ("INVALID_ARGUMENT", lambda r, u: _header(r, u, length=LENGTH + 1)),
    "length overflow": ("INVALID_ARGUMENT", lambda r, u: _header(r, u, length=2**64 - LENGTH)),
    "wrong type": ("INVALID_ARGUMENT", lambda r, u: _header(r, u, dtype="float64")),
    "unknown run": ("NOT_FOUND", lambda r, u: _header(r, u, run="nowhere")),
    "run of a megabyte": ("NOT_FOUND", lambda r, u: _header(r, u, run="x" * 2**20)),
    "path as run": ("NOT_FOUND", lambda r, u: _header(r, u, run="../../etc/passwd")),
    "unknown round": ("NOT_FOUND", lambda r, u: _header(r, u, round=r.round + 1)),
    "round overflow": ("NOT_FOUND", lambda r, u: _header(r, u, round=2**32 - 1)),
    "wrong attempt": ("FAILED_PRECONDITION", lambda r, u: _header(r, u, attempt="another")),
    "unknown tier": ("INVALID_ARGUMENT", lambda r, u: _header(r, u, tier="site-0 was here")),
    "floor nobody can meet": ("INVALID_ARGUMENT", lambda r, u: _header(r, u, floor=10_000)),
}


def test_bad_submissions_get_their_status_and_only_good_ones_are_collected(shuffler: Deployment, run: str) -> None:
    good = updates(4)
    round = open_round(shuffler.server, round_header(run, 1, LENGTH, cohort=4, quorum=4))
    site = shuffler.site(0)
    got = {name: status(site.submit, make(round, good[0]), timeout=CALL) for name, (_, make) in BAD.items()}
    assert got == {name: code for name, (code, _) in BAD.items()}
    for index in (2, 0, 3, 1):
        assert not submit(shuffler.site(index), round, good[index])
        if index == 0:
            assert submit(shuffler.site(0), round, good[0])  # the same bytes: already accepted
            other = vector_header(round, good[1])
            assert status(send, shuffler.site(0), other, good[1]) == "ALREADY_EXISTS"
    release = collect(shuffler.server, round)
    assert (release.phase, release.count) == ("released", 4)
    assert release.tiers == [""] * 4
    assert release.rows is not None
    assert np.array_equal(columns(release.rows), columns(good))


def test_an_uninvited_site_neither_gets_the_round_nor_takes_a_place(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH, sites=["site-1", "site-2", "site-3"]))
    assert status(submit, shuffler.site(0), round, updates(1)[0]) == "PERMISSION_DENIED"
    header, model = client.fetch(shuffler.site(0), pb.FetchRequest(run=run, wait=0.1), CALL)
    assert (header.round, model) == (0, None)
    assert client.fetch(shuffler.site(1), pb.FetchRequest(run=run), CALL)[0].round == 1
    for index in (1, 2, 3):
        submit(shuffler.site(index), round, updates(4)[index])
    assert collect(shuffler.server, round).count == 3


def raw_submit(party: Party, *messages: bytes) -> str:
    """Submit bytes that our own encoder would not produce."""
    call = party.channel.stream_unary("/fl_privacy.wire.Middleware/Submit", bytes, pb.SubmitReply.FromString)
    return status(call, iter(messages), timeout=CALL)


def test_bytes_that_are_not_a_message_are_refused_everywhere(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    site = shuffler.party("site", "site-0")
    header = encode(pb.Chunk(vector=vector_header(round, updates(1)[0])))
    for junk in (b"\xff" * 50, b"\x22\xff\xff\xff\xff\x7f", b"\x0a\x7f", b""):
        assert raw_submit(site, junk) == "INVALID_ARGUMENT"
        assert raw_submit(site, header, junk) == "INVALID_ARGUMENT"
    for method in ("Fetch", "Collect"):
        call = site.channel.unary_stream(f"/fl_privacy.wire.Middleware/{method}", bytes, decode)
        assert status(list, call(b"\xff" * 9, timeout=CALL)) in ("INTERNAL", "UNKNOWN")
    assert shuffler.process.is_running()
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    assert collect(shuffler.server, round).phase == "released"


def everything(stub: Any, round: pb.RoundHeader) -> dict[str, Callable[[], Any]]:
    """Every call of the API, well formed."""
    request = pb.CollectRequest(run=round.run, round=round.round, attempt=round.attempt)
    settle = pb.SettleRequest(run=round.run, round=round.round, attempt=round.attempt, commit=True)
    new = round_header(round.run, round.round + 1, LENGTH)
    return {
        "open": lambda: open_round(stub, new),
        "submit": lambda: submit(stub, round, updates(1)[0]),
        "collect": lambda: list(stub.collect(request, timeout=CALL)),
        "fetch": lambda: list(stub.fetch(pb.FetchRequest(run=round.run), timeout=CALL)),
        "newest": lambda: list(stub.fetch(pb.FetchRequest(run=round.run, newest=True), timeout=CALL)),
        "settle": lambda: stub.settle(settle, timeout=CALL),
        "seed": lambda: client.seed(stub, round.run, updates(1)[0], CALL),
        "finish": lambda: stub.finish(pb.FinishRequest(run=round.run), timeout=CALL),
    }


ALLOWED: dict[str, set[str]] = {
    "site": {"submit", "fetch"},
    "evaluator": {"newest"},
    "aggregator": set(),
    "shuffler": set(),
    "superlink": set(),
}


@pytest.mark.parametrize("role", ALLOWED)
def test_a_role_may_make_only_its_own_calls(shuffler: Deployment, run: str, role: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    party = shuffler.party(role, "site-0" if role == "site" else role)
    for name, call in everything(party.stub, round).items():
        # A shuffler answers `settle` and `seed` to nobody.
        allowed = "OK" if name in ALLOWED[role] else "PERMISSION_DENIED"
        wanted = "UNIMPLEMENTED" if name in ("settle", "seed") else allowed
        assert status(call) == wanted, name
    shuffler.server.finish(pb.FinishRequest(run=run), timeout=CALL)


def test_the_server_may_not_act_as_a_site(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    for name in ("submit", "fetch", "newest"):
        assert status(everything(shuffler.server, round)[name]) == "PERMISSION_DENIED"


def test_certificates_from_outside_the_federation_are_refused(
    shuffler: Deployment, run: str, keys: Keys, tmp_path: Path
) -> None:
    """An invalid certificate fails the handshake; a valid one with the wrong identity is refused afterwards."""
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    authority = keys.of("server", "server").authority_file
    foreign = Keys(tmp_path / "foreign").of("site", "site-0")
    foreign.authority_file.write_bytes(authority.read_bytes())
    other = keys.authority.issue(Identity("another", "site", "site-0"), tmp_path / "other")
    nobody = keys.authority.issue(Identity("test", "janitor", "site-0"), tmp_path / "nobody")
    parties = {
        "no certificate": (Party(shuffler.address, None, authority), "UNAVAILABLE"),
        "another authority": (Party(shuffler.address, foreign), "UNAVAILABLE"),
        "expired": (Party(shuffler.address, keys.expired("site", "site-0")), "UNAVAILABLE"),
        "another federation": (Party(shuffler.address, other), "PERMISSION_DENIED"),
        "not in the config": (Party(shuffler.address, keys.of("site", "site-9")), "PERMISSION_DENIED"),
        "no role": (Party(shuffler.address, nobody), "UNAUTHENTICATED"),
    }
    for name, (party, wanted) in parties.items():
        assert status(submit, party.stub, round, updates(1)[0]) == wanted, name
        assert status(list, party.stub.fetch(pb.FetchRequest(run=run), timeout=CALL)) == wanted, name
        party.close()
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    assert collect(shuffler.server, round).count == 3


def test_collect_returns_only_when_the_round_is_over(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collect, shuffler.server, round)
        for index, update in enumerate(updates(2)):
            submit(shuffler.site(index), round, update)
        time.sleep(0.3)
        assert not waiting.done()
        submit(shuffler.site(3), round, updates(3)[2])
        assert waiting.result(CALL).count == 3


def test_a_round_is_released_once(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(status, collect, shuffler.server, round) for _ in range(4)]
        for index, update in enumerate(updates(3)):
            submit(shuffler.site(index), round, update)
        assert sorted(future.result(CALL) for future in waiting) == [*["FAILED_PRECONDITION"] * 3, "OK"]
    assert status(collect, shuffler.server, round) == "FAILED_PRECONDITION"
    again = round_header(run, 1, LENGTH, attempt=round.attempt)
    assert status(open_round, shuffler.server, again) == "ALREADY_EXISTS"


def test_a_released_attempt_stays_released_under_any_run_name(shuffler: Deployment, run: str) -> None:
    """A site resends the same bytes for an attempt: two releases with different cohorts would reveal the difference."""
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    elsewhere = round_header(f"{run}-b", 1, LENGTH, attempt=round.attempt)
    assert status(open_round, shuffler.server, elsewhere) == "ALREADY_EXISTS"
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    collect(shuffler.server, round)
    shuffler.server.finish(pb.FinishRequest(run=run), timeout=CALL)
    assert status(open_round, shuffler.server, elsewhere) == "ALREADY_EXISTS"
    for number in range(middleware.MAX_RUNS + 1):  # enough runs for the finished one to be forgotten
        other = open_round(shuffler.server, round_header(f"{run}-{number}", 1, 1))
        shuffler.server.finish(pb.FinishRequest(run=other.run), timeout=CALL)
    assert status(open_round, shuffler.server, round) == "ALREADY_EXISTS"


def test_at_the_deadline_a_quorum_is_released_and_fewer_are_not(shuffler: Deployment, run: str) -> None:
    for count, phase in ((3, "released"), (2, "failed")):
        round = open_round(shuffler.server, round_header(run, 1, LENGTH, cohort=4, quorum=1, deadline=0.4))
        for index, update in enumerate(updates(count)):
            submit(shuffler.site(index), round, update)
        release = collect(shuffler.server, round)
        assert (release.phase, release.count) == (phase, count if phase == "released" else 0)
        assert (release.rows is not None) == (phase == "released")
        late = vector_header(round, updates(4)[3])
        assert status(send, shuffler.site(3), late, updates(4)[3]) == "FAILED_PRECONDITION"
    assert "2 of 4 updates came, 3 are needed" in release.reason


def test_a_submissions_own_floor_holds_a_round_back(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH, cohort=4, quorum=3, deadline=0.4))
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update, floor=4 if index == 1 else 1)
    assert collect(shuffler.server, round).phase == "failed"


def test_a_newer_attempt_supersedes_an_older_one(shuffler: Deployment, run: str) -> None:
    old = open_round(shuffler.server, round_header(run, 1, LENGTH))
    submit(shuffler.site(0), old, updates(1)[0])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collect, shuffler.server, old)
        time.sleep(0.1)
        new = open_round(shuffler.server, round_header(run, 1, LENGTH))
        assert waiting.result(CALL).phase == "failed"
    late = vector_header(old, updates(1)[0])
    assert status(send, shuffler.site(1), late, updates(1)[0]) == "FAILED_PRECONDITION"
    good = updates(3, seed=1)
    for index, update in enumerate(good):
        assert not submit(shuffler.site(index), new, update)
    release = collect(shuffler.server, new)
    assert release.rows is not None
    assert np.array_equal(columns(release.rows), columns(good))


def test_a_bad_open_leaves_the_open_round_intact(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    model = np.zeros(LENGTH, np.float32)
    bad = {
        "layers": round_header(run, 2, LENGTH, layers=[LENGTH + 1], model=digest(model)),
        "digest": round_header(run, 2, LENGTH, model=digest(model + 1)),
        "length": round_header(run, 2, LENGTH + 1, model=digest(model)),
        "cohort": round_header(run, 2, LENGTH, cohort=5, model=digest(model)),
        "quorum": round_header(run, 2, LENGTH, quorum=0, model=digest(model)),
        "deadline": round_header(run, 2, LENGTH, deadline=math.nan, model=digest(model)),
    }
    for name, header in bad.items():
        assert status(client.open_round, shuffler.server, header, model, CALL) != "OK", name
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    assert collect(shuffler.server, round).phase == "released"


def stream_of(round: pb.RoundHeader, update: Array) -> tuple[pb.Chunk, memoryview, memoryview]:
    data = data_bytes(update)
    return pb.Chunk(vector=vector_header(round, update)), data[:2000], data[2000:]


def test_a_hanging_stream_does_not_hold_the_round_past_its_deadline(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH, cohort=4, deadline=0.8))
    began = time.monotonic()
    hanging = Hanging(shuffler.site(3), *stream_of(round, updates(4)[3])[:2])
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    assert collect(shuffler.server, round).count == 3
    assert 0.7 < time.monotonic() - began < CALL / 2
    assert hanging.call.exception(CALL).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    hanging.end()


def test_a_slow_stream_cannot_write_into_a_finished_round(shuffler: Deployment, run: str) -> None:
    """Its row may belong to another site by then: a release moves rows together."""
    length = 200_000
    good = updates(3, length)
    poison = np.full(length, 1e30, np.float32)
    round = open_round(shuffler.server, round_header(run, 1, length, cohort=4, deadline=0.5))
    slow = Hanging(shuffler.site(0), pb.Chunk(vector=vector_header(round, poison)))
    time.sleep(0.1)  # it has the first row
    for index, update in enumerate(good):
        submit(shuffler.site(index + 1), round, update)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collect, shuffler.server, round)
        data = data_bytes(poison)
        for start in range(0, data.nbytes, 4000):
            slow.send(data[start : start + 4000])
            if waiting.done():
                break
            time.sleep(0.004)
        release = waiting.result(CALL)
    slow.end()
    assert slow.call.exception(CALL) is not None
    assert release.rows is not None
    assert np.array_equal(columns(release.rows), columns(good))


def test_a_client_that_disconnects_frees_its_place(shuffler: Deployment, run: str) -> None:
    good = updates(4)
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    gone = Hanging(shuffler.site(3), *stream_of(round, good[3])[:2])
    submit(shuffler.site(0), round, good[0])
    submit(shuffler.site(1), round, good[1])
    last = vector_header(round, good[2])
    eventually(lambda: status(send, shuffler.site(2), last, good[2]) == "RESOURCE_EXHAUSTED")
    gone.cancel()
    eventually(lambda: status(send, shuffler.site(2), last, good[2]) == "OK")
    release = collect(shuffler.server, round)
    assert release.rows is not None
    assert np.array_equal(columns(release.rows), columns(good[:3]))


def test_a_newer_stream_of_the_same_site_supersedes_the_older(shuffler: Deployment, run: str) -> None:
    good = updates(3)
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    old = Hanging(shuffler.site(0), *stream_of(round, updates(1, seed=9)[0])[:2])
    time.sleep(0.2)
    for index, update in enumerate(good):
        submit(shuffler.site(index), round, update)
    assert old.call.exception(CALL).code() is grpc.StatusCode.ABORTED
    release = collect(shuffler.server, round)
    old.end()
    assert release.rows is not None
    assert np.array_equal(columns(release.rows), columns(good))


def test_the_memory_of_a_round_is_freed_even_if_a_superseded_stream_hangs(shuffler: Deployment, run: str) -> None:
    length = 2**20
    good = np.ones((3, length), np.float32)
    hanging, used = [], []
    for number in range(1, 13):
        round = open_round(shuffler.server, round_header(run, number, length))
        hanging.append(Hanging(shuffler.site(0), *stream_of(round, good[0])[:2]))
        time.sleep(0.05)
        for index, update in enumerate(good):
            submit(shuffler.site(index), round, update)
        assert collect(shuffler.server, round).count == 3
        used.append(shuffler.process.memory_info().rss)
    assert used[-1] - used[1] < 5 * good.nbytes  # after ten rounds; the allocator keeps some
    for stream in hanging:
        stream.end()


def test_sites_fetch_the_model_of_the_next_round(shuffler: Deployment, run: str) -> None:
    model = updates(1)[0]
    site = shuffler.site(0)
    assert status(list, site.fetch(pb.FetchRequest(run=run), timeout=CALL)) == "NOT_FOUND"
    round = open_round(shuffler.server, round_header(run, 4, LENGTH, layers=[10, LENGTH]), model)
    header, got = client.fetch(site, pb.FetchRequest(run=run, after_round=3), CALL)
    assert np.array_equal(got, model)
    assert (header.round, header.attempt, list(header.layers)) == (4, round.attempt, [10, LENGTH])
    assert 0 < header.deadline <= round.deadline
    none = pb.FetchRequest(run=run, after_round=4, wait=0.05)
    assert client.fetch(site, none, CALL) == (pb.RoundHeader(run=run), None)
    same = pb.FetchRequest(run=run, after_round=4, after_attempt=round.attempt, wait=0.05)
    assert client.fetch(site, same, CALL)[0].round == 0
    with ThreadPoolExecutor(1) as pool:
        same.wait = 9
        waiting = pool.submit(client.fetch, site, same, CALL)
        time.sleep(0.1)
        again = open_round(shuffler.server, round_header(run, 4, LENGTH), model + 1)
        header, got = waiting.result(CALL)
        assert header.attempt == again.attempt
        assert np.array_equal(got, model + 1)
        waiting = pool.submit(client.fetch, site, pb.FetchRequest(run=run, after_round=4, wait=9), CALL)
        shuffler.server.finish(pb.FinishRequest(run=run), timeout=CALL)
        assert waiting.result(CALL)[0].finished


@pytest.mark.parametrize("wait", [math.nan, -1.0, -math.inf, 0.0])
def test_a_fetch_without_waiting_time_is_answered(shuffler: Deployment, run: str, wait: float) -> None:
    open_round(shuffler.server, round_header(run, 1, LENGTH))
    request = pb.FetchRequest(run=run, after_round=1, wait=wait)
    assert client.fetch(shuffler.site(0), request, 5.0)[0].round == 0


def test_a_flood_of_fetches_does_not_stop_a_round(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    waiting = [
        shuffler.site(3).fetch(pb.FetchRequest(run=run, after_round=1, wait=60.0), timeout=CALL) for _ in range(300)
    ]
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    assert collect(shuffler.server, round).count == 3
    for call in waiting:
        call.cancel()


def test_a_finished_run_can_be_resumed(shuffler: Deployment, run: str) -> None:
    open_round(shuffler.server, round_header(run, 1, LENGTH))
    shuffler.server.finish(pb.FinishRequest(run=run), timeout=CALL)
    assert client.fetch(shuffler.site(0), pb.FetchRequest(run=run), CALL)[0].finished
    open_round(shuffler.server, round_header(run, 1, LENGTH))
    header, model = client.fetch(shuffler.site(0), pb.FetchRequest(run=run), CALL)
    assert (header.round, header.finished) == (1, False)
    assert model is not None


def test_logs_name_no_site(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    collect(shuffler.server, round)
    for event in ("opened", "accepted", "released"):
        lines = [line for line in shuffler.events(event) if line["run"] == run]
        assert lines
        assert not any("site" in str(value) for line in lines for value in line.values())


# In one process, without a network: statistics over many rounds, and races that need exact timing.


class Context:
    """A caller with this certificate."""

    def __init__(self, role: str, name: str) -> None:
        self._uri = Identity("test", role, name).uri.encode()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"peer_uri": [self._uri]}


SERVER = Context("server", "server")
EVALUATOR = Context("evaluator", "evaluator")
SITES = [Context("site", f"site-{i}") for i in range(4)]


class Quiet(Log):
    def __call__(self, event: str, **fields: Any) -> None:
        """Log nothing."""


async def parts_of(*parts: Any) -> AsyncIterator[Any]:
    for part in parts:
        yield part


def opening(header: pb.RoundHeader, model: Array) -> AsyncIterator[Any]:
    header.model, header.parameters = digest(model), model.size
    return parts_of(*chunks(pb.Chunk(round=header), [model]))


def submission(header: pb.RoundHeader, update: Array, **changes: Any) -> AsyncIterator[Any]:
    return parts_of(*chunks(pb.Chunk(vector=vector_header(header, update, **changes)), [update]))


async def collected(service: Any, header: pb.RoundHeader) -> tuple[pb.ReleaseHeader, Array]:
    request = pb.CollectRequest(run=header.run, round=header.round, attempt=header.attempt)
    first, *rest = [part async for part in service.collect(request, SERVER)]
    data = np.frombuffer(b"".join(rest), np.float32)
    return first.release, data.reshape(first.release.count, -1) if rest else data


def shuffler_of(level: str, labelled: bool = False) -> Shuffler:
    return Shuffler(federation(labelled, route={"kind": "shuffler", "level": level, "n_min": 3}), Quiet("shuffler"))


async def play(service: Any, header: pb.RoundHeader, order: list[int], values: Array) -> tuple[pb.ReleaseHeader, Array]:
    await service.open(opening(header, np.zeros(header.length, np.float32)), SERVER)
    for index in order:
        tier = service.federation.sites[index].tier
        await service.submit(submission(header, values[index], tier=tier), SITES[index])
    return await collected(service, header)


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


def test_a_whole_model_keeps_its_tier() -> None:
    """The server weights models by tier: only models of one tier can be mixed (Shuffle-DP)."""
    values = np.repeat(np.arange(3, dtype=np.float32)[:, None], 2, axis=1)
    header, matrix = asyncio.run(
        play(shuffler_of("model", labelled=True), round_header("run", 1, 2), [2, 0, 1], values)
    )
    assert list(zip(header.tiers, matrix[:, 0], strict=True)) == [("1", 0), ("2", 1), ("4", 2)]


def test_a_site_s_label_is_its_own_budget() -> None:
    async def main() -> None:
        service, header, update = shuffler_of("parameter", True), round_header("run", 1, 2), np.zeros(2, np.float32)
        await service.open(opening(header, update), SERVER)
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
    levelled = federation(True, route={"kind": "shuffler", "level": "parameter", "n_min": 3, "buckets": "levelled"})
    sent = [ldp.privatise(np.zeros(length, np.float32), 1.0, e, 1e-5, bytes([i]) * 32) for i, e in enumerate(EPSILONS)]
    header = round_header("run", 1, length, layers=[length])
    release, rows = asyncio.run(play(Shuffler(levelled, Quiet("shuffler")), header, [0, 1, 2], np.stack(sent)))
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
        return [(await play(service, round_header("run", 1, 200), [0, 1, 2], values))[1].tobytes() for _ in range(3)]

    assert len(set(asyncio.run(main()))) == 3


def test_a_slow_open_cannot_reopen_a_released_attempt() -> None:
    """Two opens of one attempt run concurrently; the slow one ends after the round of the fast one was released."""

    async def main() -> None:
        service, header, model = shuffler_of("parameter"), round_header("run", 1, 4), np.zeros(4, np.float32)
        gate = asyncio.Event()

        async def slow() -> AsyncIterator[Any]:
            header.model = digest(model)
            yield pb.Chunk(round=header)
            await gate.wait()
            yield data_bytes(model)

        dawdling = asyncio.create_task(service.open(slow(), SERVER))
        await asyncio.sleep(0)
        release, _ = await play(service, header, [0, 1, 2], updates(3, 4))
        assert release.phase == "released"
        gate.set()
        with refused("ALREADY_EXISTS"):
            await dawdling

    asyncio.run(main())


def test_a_failed_or_unwanted_round_keeps_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "KEPT", 0.1)

    async def main() -> None:
        for count, wanted in ((2, "2 of 3 updates came"), (3, "nobody collected")):
            service, header = shuffler_of("parameter"), round_header("run", 1, 4, deadline=0.1)
            await service.open(opening(header, np.zeros(4, np.float32)), SERVER)
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
    monkeypatch.setattr(middleware, "KEPT", 0.0)

    async def main() -> None:
        service, header = shuffler_of("parameter"), round_header("run", 1, 4, deadline=0.5)
        await service.open(opening(header, np.zeros(4, np.float32)), SERVER)
        for index in range(3):
            await service.submit(submission(header, updates(3, 4)[index]), SITES[index])
        await asyncio.sleep(0.2)
        assert (await collected(service, header))[0].phase == "released"

    asyncio.run(main())


def test_a_cancelled_submission_leaves_no_trace() -> None:
    async def main() -> None:
        service, header = shuffler_of("parameter"), round_header("run", 1, LENGTH)
        await service.open(opening(header, np.zeros(LENGTH, np.float32)), SERVER)
        head, some, _ = stream_of(header, updates(1)[0])

        async def hanging() -> AsyncIterator[Any]:
            yield head
            yield some
            await asyncio.Event().wait()

        stuck = asyncio.create_task(service.submit(hanging(), SITES[3]))
        await asyncio.sleep(0.01)
        for index in (0, 1):
            await service.submit(submission(header, updates(3)[index]), SITES[index])
        with refused("RESOURCE_EXHAUSTED"):
            await service.submit(submission(header, updates(3)[2]), SITES[2])
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
            await service.open(opening(header, np.zeros(2, np.float32)), SERVER)

        for number in range(middleware.MAX_RUNS):
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


# Aggregators.

SHARD_LENGTH = 700


def sharded(**changes: Any) -> Federation:
    return federation(route={"kind": "shards", "aggregators": 2, "n_min": 2}, **changes)


@pytest.fixture(scope="module")
def aggregator(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = deploy(tmp_path_factory.mktemp("aggregator"), keys, sharded(), "aggregator")
    yield deployment
    deployment.stop()


def seed(deployment: Deployment, run: str, shard: Array) -> None:
    client.seed(deployment.party("evaluator", "evaluator").stub, run, shard, CALL)


def open_shard(deployment: Deployment, header: pb.RoundHeader) -> pb.RoundHeader:
    client.open_round(deployment.server, header, None, CALL)
    return header


def settle(deployment: Deployment, round: pb.RoundHeader, commit: bool = True) -> None:
    request = pb.SettleRequest(run=round.run, round=round.round, attempt=round.attempt, commit=commit)
    deployment.server.settle(request, timeout=CALL)


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
        assert status(client.seed, stub, "seeding", shard, CALL) == "PERMISSION_DENIED"
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
    assert status(open_shard, aggregator, kept) == "ALREADY_EXISTS"


def test_a_round_that_did_not_close_cannot_be_settled(aggregator: Deployment) -> None:
    start = updates(1, SHARD_LENGTH)[0]
    seed(aggregator, "open", start)
    round = open_shard(aggregator, round_header("open", 1, SHARD_LENGTH, quorum=1, deadline=0.5))
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
        services = [Aggregator(config, tmp_path / str(k), Quiet("aggregator")) for k in range(2)]
        for one, shard in zip(services, masks.split(model, owners, 2), strict=True):
            first = pb.VectorHeader(run="run", length=shard.size, digest=digest(shard))
            await one.seed(parts_of(*chunks(pb.Chunk(vector=first), [shard])), EVALUATOR)
        expected = model
        for number in range(1, 4):
            rows = updates(count, length, seed=number)
            cut = [masks.split(row, owners, 2) for row in rows]
            for k, one in enumerate(services):
                header = round_header("run", number, cut[0][k].size)
                await one.open(parts_of(pb.Chunk(round=header)), SERVER)
                for index in ([0, 1, 2], [2, 0, 1])[k]:
                    await one.submit(submission(header, cut[index][k]), SITES[index])
                request = pb.SettleRequest(run="run", round=number, attempt=header.attempt, commit=True)
                await one.settle(request, SERVER)
            expected = whole.step(expected, rows)
        shards = [one.runs["run"].model for one in services]
        assert masks.join(shards, owners).tobytes() == expected.tobytes()

    asyncio.run(main())


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
    header = round_header("run", 1, 4)
    await service.open(parts_of(pb.Chunk(round=header)), SERVER)
    for index in range(3):
        await service.submit(submission(header, np.ones(4, np.float32)), SITES[index])
    return header


def test_a_caller_that_disconnects_does_not_leave_a_round_half_settled(tmp_path: Path) -> None:
    async def main() -> None:
        service = Slow(sharded(), tmp_path, Quiet("aggregator"))
        service.gate = asyncio.Event()
        header = await closed_round(service)
        request = pb.SettleRequest(run="run", round=1, attempt=header.attempt, commit=True)
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
        assert ShardStore(tmp_path).load("run", 1)[0].tolist() == [1.0] * 4

    asyncio.run(main())


def test_failed_settling_is_never_reported_as_done(tmp_path: Path) -> None:
    async def main() -> None:
        service = Slow(sharded(), tmp_path, Quiet("aggregator"))
        service.gate, service.broken = asyncio.Event(), True
        service.gate.set()
        header = await closed_round(service)
        request = pb.SettleRequest(run="run", round=1, attempt=header.attempt, commit=True)
        for _ in range(2):
            with pytest.raises(OSError, match="disk"):
                await service.settle(request, SERVER)
        assert service.runs["run"].version == 0
        assert service.runs["run"].model.tolist() == [0.0] * 4

    asyncio.run(main())


def test_a_slow_seed_cannot_reset_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        service, gate = Aggregator(sharded(), tmp_path, Quiet("aggregator")), asyncio.Event()
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
        lambda name: store.newest(name),
        lambda name: store.load(name, 0),
    ):
        with refused("INVALID_ARGUMENT"):
            call(run)
    assert list(tmp_path.iterdir()) == []


def test_the_store_keeps_two_rounds_and_ignores_leftovers_of_a_crash(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    for number in range(4):
        store.save("run", number, np.full(2, number, np.float32), {"m": np.ones(2)})
    (tmp_path / "run" / "round-000009.tmp").write_bytes(b"half a shard")
    assert store.newest("run") == 3
    assert store.load("run", 2)[0].tolist() == [2, 2]
    assert store.load("run", 3)[1]["m"].tolist() == [1, 1]
    with refused("FAILED_PRECONDITION"):
        store.load("run", 1)
