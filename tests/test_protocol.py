"""The round's state machine: whatever happens in any order, its promises hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from fl_privacy.errors import ProtocolError
from fl_privacy.round.machine import MAX_COHORT, MAX_LENGTH, Phase, Round, RoundSpec, Submission
from helpers import refused
from profiles import examples

SPEC = RoundSpec(run="run", round=1, attempt="a", cohort=3, quorum=2, deadline=10.0, layout="l", length=4)
CLIENTS = ("ann", "bob", "cid", "dan", "eve")
BYTES = (b"one", b"two")


def submission(data: bytes = b"one", floor: int = 1) -> Submission:
    return Submission(SPEC.attempt, SPEC.layout, SPEC.length, data, floor)


def accept(round: Round, *clients: str, now: float = 0.0, floor: int = 1) -> None:
    for client in clients:
        given = submission(client.encode(), floor)
        ticket = round.begin(client, given, now)
        assert ticket is not None
        round.commit(client, ticket, given, now)


def code_of(call: Callable[..., object], *arguments: object) -> str:
    """The code that a call is refused with, or ""."""
    try:
        call(*arguments)
    except ProtocolError as error:
        return error.code
    return ""


class RoundMachine(RuleBasedStateMachine):
    """Every order of every call, compared with a model made of plain sets."""

    streams = Bundle("streams")

    @initialize(
        cohort=st.integers(1, 4), quorum=st.integers(1, 4), floor=st.integers(1, 4), deadline=st.floats(0.5, 20)
    )
    def start(self, cohort: int, quorum: int, floor: int, deadline: float) -> None:
        self.spec = replace(SPEC, cohort=cohort, quorum=min(quorum, cohort), deadline=deadline)
        self.round = Round(self.spec, floor, opened_at=100.0)
        self.now, self.floor = 100.0, floor
        self.accepted: dict[str, Submission] = {}
        self.current: dict[str, int] = {}
        self.over = self.given_up = False
        self.releases = 0

    def model_tick(self) -> None:
        if self.now >= 100.0 + self.spec.deadline:
            self.over = True

    def needed(self) -> int:
        return max([self.spec.quorum, self.floor, *(s.floor for s in self.accepted.values())])

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        self.model_tick()
        self.round.tick(self.now)
        assert self.round.is_over == self.over

    @rule(target=streams, client=st.sampled_from(CLIENTS), data=st.sampled_from(BYTES), floor=st.integers(1, 4))
    def begin(self, client: str, data: bytes, floor: int) -> object:
        made = submission(data, floor)
        try:
            ticket = self.round.begin(client, made, self.now)
        except ProtocolError as error:
            self.check_refusal(error.code, client, made)
            return multiple()
        if ticket is None:
            assert self.accepted[client].digest == data
            return multiple()
        self.model_tick()
        assert client not in self.accepted
        assert not self.over
        self.current[client] = ticket
        return client, ticket, made

    def check_refusal(self, code: str, client: str, made: Submission) -> None:
        if made.floor > self.spec.cohort:
            assert code == "INVALID_ARGUMENT"
        elif client in self.accepted:
            assert code == "ALREADY_EXISTS"
            assert self.accepted[client].digest != made.digest
        else:
            self.model_tick()
            full = len(self.accepted) + len(self.current) >= self.spec.cohort
            assert code == ("FAILED_PRECONDITION" if self.over else "RESOURCE_EXHAUSTED")
            assert self.over or (full and client not in self.current)

    @rule(stream=consumes(streams))
    def commit(self, stream: tuple[str, int, Submission]) -> None:
        client, ticket, made = stream
        stale = self.current.get(client) != ticket
        code = code_of(self.round.commit, client, ticket, made, self.now)
        if stale:
            assert code == "ABORTED"
            return
        self.model_tick()
        assert code == ("FAILED_PRECONDITION" if self.over else "")
        del self.current[client]
        if code:
            self.round.abort(client, ticket)
            return
        self.accepted[client] = made
        self.over = len(self.accepted) == self.spec.cohort

    @rule(stream=streams)
    def check(self, stream: tuple[str, int, Submission]) -> None:
        client, ticket, _ = stream
        stale = self.current.get(client) != ticket
        code = code_of(self.round.check, client, ticket, self.now)
        if not stale:
            self.model_tick()
        assert code == ("ABORTED" if stale else "FAILED_PRECONDITION" if self.over else "")

    @rule(stream=consumes(streams))
    def abort(self, stream: tuple[str, int, Submission]) -> None:
        client, ticket, _ = stream
        self.round.abort(client, ticket)
        if self.current.get(client) == ticket:
            del self.current[client]

    @rule()
    def fail(self) -> None:
        self.round.fail("given up")
        if not self.releases:
            self.given_up = not self.over or self.given_up or len(self.accepted) >= self.needed()
            self.over = True

    @rule()
    def release(self) -> None:
        may = self.over and not self.releases and not self.given_up and len(self.accepted) >= self.needed()
        assert code_of(self.round.release) == ("" if may else "FAILED_PRECONDITION")
        self.releases += may

    @invariant()
    def promises(self) -> None:
        if not hasattr(self, "round"):
            return
        assert self.round.accepted == tuple(sorted(self.accepted))
        assert len(self.accepted) + len(self.current) <= self.spec.cohort
        assert self.releases <= 1
        assert self.round.is_over == self.over
        if self.round.phase in (Phase.CLOSED, Phase.RELEASED):
            assert len(self.accepted) >= self.needed()
        if self.over and not self.given_up and not self.releases:
            expected = Phase.CLOSED if len(self.accepted) >= self.needed() else Phase.FAILED
            assert self.round.phase is expected
        if self.round.phase is Phase.FAILED:
            assert self.round.reason


TestRound = RoundMachine.TestCase
TestRound.settings = examples(150, stateful_step_count=30)


@given(st.permutations(CLIENTS[:3]), st.permutations(CLIENTS[:3]))
def test_the_order_of_acceptance_is_not_revealed(one: list[str], other: list[str]) -> None:
    first, second = Round(SPEC, 2, 0.0), Round(SPEC, 2, 0.0)
    accept(first, *one)
    accept(second, *other)
    assert first.accepted == second.accepted
    assert first.release() == second.release() == tuple(sorted(one))


def test_a_full_cohort_closes_at_once_and_a_quorum_at_the_deadline() -> None:
    full, partly = Round(SPEC, 1, 0.0), Round(SPEC, 1, 0.0)
    accept(full, "ann", "bob", "cid")
    assert full.phase is Phase.CLOSED
    accept(partly, "ann", "bob")
    assert partly.tick(9.999) is Phase.COLLECTING
    assert partly.tick(10.0) is Phase.CLOSED


@pytest.mark.parametrize(("floor", "own"), [(3, 1), (1, 3)], ids=["the middleware's", "a submission's"])
def test_below_a_floor_nothing_is_released(floor: int, own: int) -> None:
    round = Round(SPEC, floor, 0.0)
    accept(round, "ann")
    accept(round, "bob", floor=own)
    assert round.tick(10.0) is Phase.FAILED
    assert "2 of 3 updates came, from fewer than 3 organisations" in round.reason
    with refused("FAILED_PRECONDITION"):
        round.release()


def test_a_cohort_below_the_floor_fails_when_it_is_full() -> None:
    round = Round(replace(SPEC, cohort=2), 3, 0.0)
    accept(round, "ann", "bob")
    assert round.phase is Phase.FAILED


def test_the_last_moment_is_the_one_before_the_deadline() -> None:
    round = Round(SPEC, 1, 0.0)
    late = round.begin("ann", submission(), 9.0)
    assert late is not None
    with refused("FAILED_PRECONDITION"):
        round.commit("ann", late, submission(), 10.0)
    assert round.accepted == ()
    with refused("FAILED_PRECONDITION"):
        round.begin("bob", submission(), 10.0)


def test_a_stream_must_stop_once_the_round_is_over() -> None:
    """The receiver asks before every write, because the row may belong to another site by then."""
    round = Round(SPEC, 1, 0.0)
    ticket = round.begin("cid", submission(), 0.0)
    assert ticket is not None
    accept(round, "ann", "bob")
    round.check("cid", ticket, 9.0)
    with refused("FAILED_PRECONDITION"):
        round.check("cid", ticket, 10.0)
    assert round.phase is Phase.CLOSED


def test_the_same_bytes_are_already_accepted_and_others_are_refused_even_after_the_end() -> None:
    round = Round(SPEC, 1, 0.0)
    accept(round, "ann", "bob", "cid")
    for _ in range(2):
        assert round.begin("ann", submission(b"ann"), 99.0) is None
        with refused("ALREADY_EXISTS"):
            round.begin("ann", submission(b"else"), 99.0)
        round.phase is Phase.RELEASED or round.release()
    assert round.accepted == ("ann", "bob", "cid")


def test_a_newer_stream_supersedes_and_an_aborted_one_frees_its_place() -> None:
    round = Round(replace(SPEC, cohort=1, quorum=1), 1, 0.0)
    old = round.begin("ann", submission(b"old"), 0.0)
    new = round.begin("ann", submission(b"new"), 0.0)
    assert old is not None
    assert new is not None
    with refused("ABORTED"):
        round.commit("ann", old, submission(b"old"), 0.0)
    round.abort("ann", old)
    assert round.holds("ann", new)
    with refused("RESOURCE_EXHAUSTED"):
        round.begin("bob", submission(), 0.0)
    round.abort("ann", new)
    accept(round, "bob")
    assert round.accepted == ("bob",)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"attempt": "b"}, "FAILED_PRECONDITION"),
        ({"layout": "m"}, "INVALID_ARGUMENT"),
        ({"length": 3}, "INVALID_ARGUMENT"),
        ({"floor": 0}, "INVALID_ARGUMENT"),
        ({"floor": 4}, "INVALID_ARGUMENT"),
    ],
)
def test_a_submission_that_does_not_fit_is_refused_and_leaves_no_trace(changes: dict[str, object], code: str) -> None:
    round = Round(SPEC, 1, 0.0)
    with refused(code):
        round.begin("ann", replace(submission(), **changes), 0.0)
    assert round == Round(SPEC, 1, 0.0)


def test_no_submission_can_set_a_floor_above_the_cohort() -> None:
    """Otherwise one site could make every round fail."""
    round = Round(SPEC, 1, 0.0)
    accept(round, "ann", "bob", "cid", floor=SPEC.cohort)
    assert round.phase is Phase.CLOSED


def test_no_submission_can_set_a_floor_that_the_organisations_of_a_cohort_never_meet() -> None:
    """Two sites of one hospital count once, and so does each tier that is mixed by itself."""
    hospitals = {"ann": "x", "bob": "x", "cid": "y"}
    round = Round(SPEC, 1, 0.0, hospitals)
    with refused("INVALID_ARGUMENT"):
        round.begin("ann", submission(floor=3), 0.0)
    accept(round, "ann", "bob", "cid", floor=2)
    assert round.phase is Phase.CLOSED
    halves = Round(SPEC, 1, 0.0, {"ann": "x", "bob": "y", "cid": "z"}, lambda names, runs, least: [(0, 1), (2,)])
    with refused("INVALID_ARGUMENT"):
        halves.begin("ann", submission(floor=2), 0.0)
    accept(halves, "ann", "bob", "cid")
    assert halves.phase is Phase.CLOSED


@pytest.mark.parametrize(
    "changes",
    [
        {"run": ""},
        {"run": "x" * 129},
        {"round": 0},
        {"attempt": ""},
        {"cohort": 0},
        {"cohort": MAX_COHORT + 1},
        {"quorum": 0},
        {"quorum": 4},
        {"deadline": 0.0},
        {"deadline": -1.0},
        {"deadline": float("nan")},
        {"deadline": float("inf")},
        {"layout": ""},
        {"length": 0},
        {"length": MAX_LENGTH + 1},
    ],
)
def test_a_round_out_of_range_cannot_be_opened(changes: dict[str, object]) -> None:
    with refused("INVALID_ARGUMENT"):
        replace(SPEC, **changes)


def test_a_released_round_cannot_fail_and_the_first_reason_is_kept() -> None:
    released, failed = Round(SPEC, 1, 0.0), Round(SPEC, 1, 0.0)
    accept(released, "ann", "bob", "cid")
    released.release()
    released.fail("too late")
    assert (released.phase, released.reason) == (Phase.RELEASED, "")
    for reason in ("first", "second"):
        failed.fail(reason)
    assert failed.reason == "first"


def test_tickets_are_never_issued_twice() -> None:
    round = Round(SPEC, 1, 0.0)
    tickets = [round.begin(name, submission(), 0.0) for name, _ in itertools.product(CLIENTS[:3], range(3))]
    assert len(set(tickets)) == 9
