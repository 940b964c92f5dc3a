"""A shuffler: a real process, real certificates, and callers that break the rules."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fl_privacy.identity.keyring import Identity
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import chunks, data_bytes, decode, digest, encode
from helpers import (
    CALL,
    Array,
    Deployment,
    Hanging,
    Keys,
    Party,
    Stranger,
    collect,
    columns,
    deploy,
    kill,
    open_round,
    round_header,
    send,
    status,
    submit,
    vector_header,
)
from inprocess import LENGTH, everything, federation, stream_of, updates


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
    nobody = Party("127.0.0.1:1", keys.of("server", "server"), shuffler.identity)
    calls: dict[str, Callable[[], Any]] = {
        "UNAVAILABLE: peer: shuffler at 127.0.0.1:1: Connection refused; see its log": lambda: nobody.stub.finish(
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
        assert status(list, call(b"\xff" * 9, timeout=CALL)) == "INVALID_ARGUMENT"
    assert shuffler.process.is_running()
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    assert collect(shuffler.server, round).phase == "released"


ALLOWED: dict[str, set[str]] = {
    "site": {"submit", "fetch", "abstain"},
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
        # A shuffler has no shards, and a site that sent its update cannot abstain any more.
        allowed = "OK" if name in ALLOWED[role] else "PERMISSION_DENIED"
        odd = {"seed": "UNIMPLEMENTED", "shard": "UNIMPLEMENTED"}
        odd |= {"abstain": "FAILED_PRECONDITION"} if role == "site" else {}
        assert status(call) == odd.get(name, allowed), name
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
    unlisted = keys.authority.issue(Identity("test", "site", "site-0"), tmp_path / "unlisted")
    found = {
        "no certificate": (None, "UNAVAILABLE"),
        "another authority": (foreign, "UNAVAILABLE"),
        "expired": (keys.expired("site", "site-0"), "UNAVAILABLE"),
        "another federation": (other, "PERMISSION_DENIED"),
        "not in the config": (keys.of("site", "site-9"), "PERMISSION_DENIED"),
        "another key than the roster's": (unlisted, "PERMISSION_DENIED"),
        "no role": (nobody, "UNAUTHENTICATED"),
    }
    parties = {name: (Stranger(shuffler.address, authority, own), wanted) for name, (own, wanted) in found.items()}
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
        submit(shuffler.site(2), round, updates(3)[2])
        assert waiting.result(CALL).count == 3


def settled(shuffler: Deployment, round: pb.RoundHeader, commit: bool = True) -> str:
    request = pb.SettleRequest(run=round.run, round=round.round, attempt=round.attempt, commit=commit)
    return status(shuffler.server.settle, request, timeout=CALL)


def test_a_release_is_the_same_bytes_for_whoever_asks_until_it_has_arrived(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(collect, shuffler.server, round) for _ in range(4)]
        for index, update in enumerate(updates(3)):
            submit(shuffler.site(index), round, update)
        rows = {future.result(CALL).rows.tobytes() for future in waiting}
    assert len(rows | {collect(shuffler.server, round).rows.tobytes()}) == 1
    assert settled(shuffler, round) == "OK"
    assert status(collect, shuffler.server, round) == "FAILED_PRECONDITION"


def everybody_sends(deployment: Deployment, round: pb.RoundHeader, seed: int = 0) -> client.Release:
    for index, name in enumerate(round.sites):
        number = deployment.federation.site_names.index(name)
        submit(deployment.site(number), round, updates(4, round.length, seed)[index])
    return collect(deployment.server, round)


@pytest.mark.e2e
def test_a_restarted_shuffler_repeats_a_release_and_makes_no_other(keys: Keys, tmp_path: Path) -> None:
    """A shuffler that forgets what it released could be asked for another mixture of it."""
    first = deploy(tmp_path, keys, federation(), "shuffler")
    round = open_round(first.server, round_header("run", 1, LENGTH))
    mixed = everybody_sends(first, round)
    kill(first)
    second = deploy(tmp_path, keys, federation(), "shuffler")
    try:
        model = np.full(LENGTH, round.number, np.float32)
        others = round_header("run", 1, LENGTH, sites=["site-0", "site-1", "site-3"])
        again = open_round(second.server, others, model)
        assert status(everybody_sends, second, again) == "FAILED_PRECONDITION"  # S and S - v + w
        changed = round_header("run", 1, LENGTH, sites=["site-0", "site-1", "site-3"])
        assert status(open_round, second.server, changed) == "FAILED_PRECONDITION"  # another model for the same round
        open_round(second.server, round, model)
        assert everybody_sends(second, round).rows.tobytes() == mixed.rows.tobytes()
        open_round(second.server, round_header("run", 2, LENGTH))
        open_round(second.server, round, model)
        assert status(everybody_sends, second, round, 1) == "FAILED_PRECONDITION"  # other updates, same attempt
    finally:
        second.stop()


def test_terms_that_the_middleware_does_not_hold_itself_are_refused(shuffler: Deployment, run: str) -> None:
    """The server cannot choose another cohort, quorum, config or recipient than the attempt's name stands for."""
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    lies: dict[str, dict[str, Any]] = {
        "federation": {"federation": "0" * 64},
        "roster": {"roster": "0" * 64},
        "recipient": {"recipient": "sha256:" + "0" * 64},
        "root": {"root": b"r" * 32},
        "organisations": {"organisations": 4},
        "attempt": {"attempt": "0" * 64},
        "quorum": {"quorum": 2},
        "cohort": {"cohort": 2, "quorum": 2},
        "a site twice": {"sites": ["site-0", "site-0", "site-1"]},
        "a stranger": {"sites": ["site-0", "site-1", "site-9"]},
        "salt": {"salt": b"short"},
        "deadline": {"deadline": 1e4},
        "round": {"round": 2000},
        "model": {"model": b"m" * 32},
    }
    for name, lie in lies.items():
        header = round_header(run, lie.pop("round", 2), LENGTH, **lie)
        assert status(open_round, shuffler.server, header) in ("INVALID_ARGUMENT", "PERMISSION_DENIED", "DATA_LOSS"), (
            name
        )
    assert everybody_sends(shuffler, round).count == 3


def test_a_round_does_not_wait_for_a_site_that_abstains(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH, cohort=4))
    request = pb.AbstainRequest(run=run, round=1, attempt=round.attempt)
    shuffler.site(3).abstain(request, timeout=CALL)
    shuffler.site(3).abstain(request, timeout=CALL)
    assert status(submit, shuffler.site(3), round, updates(4)[3]) == "FAILED_PRECONDITION"
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    assert collect(shuffler.server, round).count == 3


def test_a_round_that_too_few_sites_can_complete_fails_at_once(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH, cohort=4))
    for index in (0, 1):
        shuffler.site(index).abstain(pb.AbstainRequest(run=run, round=1, attempt=round.attempt), timeout=CALL)
    release = collect(shuffler.server, round)
    assert (release.phase, release.reason) == ("failed", "0 of 4 updates came, 3 are needed")


def test_the_same_attempt_can_be_opened_again_after_it_failed(shuffler: Deployment, run: str) -> None:
    """Sites resend the same bytes for it, so that a retry costs them nothing."""
    round = open_round(shuffler.server, round_header(run, 1, LENGTH, deadline=0.2))
    assert collect(shuffler.server, round).phase == "failed"
    round.deadline = 20.0
    model = np.full(LENGTH, round.number, np.float32)
    open_round(shuffler.server, round, model)
    assert everybody_sends(shuffler, round).phase == "released"


def test_at_the_deadline_a_quorum_is_released_and_fewer_are_not(shuffler: Deployment, run: str) -> None:
    for count, phase in ((3, "released"), (2, "failed")):
        round = open_round(shuffler.server, round_header(run, 5 - count, LENGTH, cohort=4, deadline=0.4))
        for index, update in enumerate(updates(count)):
            submit(shuffler.site(index), round, update)
        release = collect(shuffler.server, round)
        assert (release.phase, release.count) == (phase, count if phase == "released" else 0)
        assert (release.rows is not None) == (phase == "released")
        late = vector_header(round, updates(4)[3])
        assert status(send, shuffler.site(3), late, updates(4)[3]) == "FAILED_PRECONDITION"
    assert "2 of 4 updates came, 3 are needed" in release.reason


def test_a_submissions_own_floor_holds_a_round_back(shuffler: Deployment, run: str) -> None:
    round = open_round(shuffler.server, round_header(run, 1, LENGTH, cohort=4, quorum=3, deadline=2.0))
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
    bad = {
        "layers": round_header(run, 2, LENGTH, layers=[LENGTH + 1]),
        "length": round_header(run, 2, LENGTH, parameters=LENGTH + 1),
        "cohort": round_header(run, 2, LENGTH, cohort=5),
        "quorum": round_header(run, 2, LENGTH, quorum=0),
        "deadline": round_header(run, 2, LENGTH, deadline=math.nan),
    }
    for name, header in bad.items():
        assert status(open_round, shuffler.server, header) != "OK", name
    for index, update in enumerate(updates(3)):
        submit(shuffler.site(index), round, update)
    assert collect(shuffler.server, round).phase == "released"


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
    round = open_round(shuffler.server, round_header(run, 1, length, cohort=4, deadline=2.0))
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
            time.sleep(0.012)
        release = waiting.result(CALL)
    slow.end()
    assert slow.call.exception(CALL) is not None
    assert release.rows is not None
    assert np.array_equal(columns(release.rows), columns(good))


def test_a_client_that_disconnects_frees_its_place(shuffler: Deployment, run: str) -> None:
    good = updates(3)
    round = open_round(shuffler.server, round_header(run, 1, LENGTH))
    gone = Hanging(shuffler.site(2), *stream_of(round, updates(4)[3])[:2])
    submit(shuffler.site(0), round, good[0])
    submit(shuffler.site(1), round, good[1])
    gone.cancel()
    submit(shuffler.site(2), round, good[2])
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
        assert settled(shuffler, round) == "OK"
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
    assert client.fetch(site, same, CALL)[0].round == 4  # its answer is missing
    submit(site, round, updates(1)[0])
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
