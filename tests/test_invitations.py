"""Tickets: one for all rounds, cohorts drawn per round, and sites that join late, leave and return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord

from fl_privacy.config import Federation
from fl_privacy.round.terms import FAREWELLS
from fl_privacy.routes.ends import Ask, Ticket
from fl_privacy.steps.base import At
from server_app import invitations
from server_app.invitations import Invitations

FEDERATION = Federation.parse("sites: 4\nrounds: 20\nquorum: 3")
LAST = 20 + FAREWELLS


class Nodes:
    """Flower as the server sees it: connected nodes, messages sent and replies."""

    def __init__(self) -> None:
        self.there = {"site-0", "site-1", "site-2"}
        self.ever = set(self.there)
        self.sent: list[tuple[list[str], int, int]] = []
        self.back: list[tuple[str, str, None]] = []

    def knows(self, site: str) -> bool:
        return site in self.ever

    def refresh(self) -> list[str]:
        self.ever |= self.there
        return sorted(self.there)

    def send(self, sites: list[str], ticket: dict[str, Any], model: Any = None) -> None:
        ConfigRecord(ticket)  # raises for what Flower cannot carry
        self.sent.append((list(sites), ticket["first"], ticket["last"]))

    def receipts(self, coding: Any) -> list[tuple[str, str, None]]:
        found, self.back = self.back, []
        return found


def ask(round: int, *cohort: int, attempt: str = "a") -> Ask:
    terms: Any = SimpleNamespace(at=At("run", round, f"{attempt}{round}"))
    return Ask.of(terms, [f"site-{i}" for i in cohort], b"")


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> tuple[Nodes, Invitations, list[str]]:
    monkeypatch.setattr(invitations, "LOOK", -1.0)
    nodes, told = Nodes(), list[str]()
    return nodes, Invitations(nodes, FEDERATION, 20, True, lambda event, site: told.append(f"{event} {site}")), told  # type: ignore[arg-type]


def test_one_ticket_covers_all_rounds_whoever_is_in_the_cohort(
    flower: tuple[Nodes, Invitations, list[str]],
) -> None:
    nodes, tickets, _ = flower
    for round, cohort in enumerate(((0, 1), (1, 2), (0, 2), (0, 1, 2)), start=1):
        tickets.invite(ask(round, *cohort))
    assert nodes.sent == [(["site-0", "site-1"], 1, LAST), (["site-2"], 2, LAST)]


def test_a_site_that_joins_late_is_invited_on_its_own(flower: tuple[Nodes, Invitations, list[str]]) -> None:
    nodes, tickets, _ = flower
    first = ask(1, 0, 1, 2, 3)
    tickets.invite(first)
    nodes.there.add("site-3")
    tickets.answers(first)
    assert nodes.sent == [(["site-0", "site-1", "site-2"], 1, LAST), (["site-3"], 1, LAST)]


def test_a_lost_site_is_noticed_and_invited_when_it_returns(flower: tuple[Nodes, Invitations, list[str]]) -> None:
    nodes, tickets, told = flower
    first = ask(1, 0, 1, 2)
    tickets.invite(first)
    nodes.there.remove("site-1")
    tickets.answers(first)
    assert told == ["lost site-1"]
    nodes.there.add("site-1")
    tickets.answers(ask(2, 0, 1, 2))
    assert nodes.sent[-1][0] == ["site-1"]


def test_a_site_that_declines_is_asked_again_only_in_the_next_attempt(
    flower: tuple[Nodes, Invitations, list[str]],
) -> None:
    nodes, tickets, _ = flower
    tickets.invite(ask(1, 0, 1))
    nodes.back = [("site-0", "abstain", None)]
    tickets.answers(ask(1, 0, 1))
    tickets.invite(ask(1, 0, 1))
    assert len(nodes.sent) == 1
    tickets.invite(ask(1, 0, 1, attempt="b"))
    assert nodes.sent[-1] == (["site-0"], 1, LAST)


def test_an_expired_ticket_is_renewed_but_a_completed_one_is_not(
    flower: tuple[Nodes, Invitations, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, tickets, _ = flower
    tickets.invite(ask(5, 0, 1))
    nodes.back = [("site-0", "done", None)]  # it ended its ticket before Flower would drop it
    tickets.answers(ask(5, 0, 1))
    assert nodes.sent[-1] == (["site-0"], 5, LAST)
    last = ask(LAST, 0, 1)
    tickets.invite(last)
    nodes.back = [("site-0", "done", None)]
    tickets.answers(last)
    assert len(nodes.sent) == 2
    monkeypatch.setattr(invitations.time, "monotonic", lambda: 1e9)  # twelve hours later, and more
    tickets.invite(ask(LAST, 1, attempt="b"))
    assert nodes.sent[-1] == (["site-1"], LAST, LAST)


def test_after_a_failed_attempt_every_site_is_invited(flower: tuple[Nodes, Invitations, list[str]]) -> None:
    nodes, tickets, _ = flower
    tickets.invite(ask(1, 0, 1, 2))
    tickets.withdraw()
    tickets.invite(ask(1, 0, 1, 2, attempt="b"))
    assert [sites for sites, _, _ in nodes.sent] == [["site-0", "site-1", "site-2"]] * 2


@pytest.mark.parametrize(("waits", "last"), [(True, LAST), (False, 20)])
def test_a_ticket_for_the_last_round_covers_the_farewell_where_sites_can_wait(waits: bool, last: int) -> None:
    nodes = Nodes()
    tickets = Invitations(nodes, FEDERATION, 1, waits, lambda *_: None)  # type: ignore[arg-type]
    tickets.invite(ask(19, 0))
    tickets.invite(ask(20, 1))
    tickets.invite(ask(21, 2))
    assert nodes.sent == [(["site-0"], 19, 19), (["site-1"], 20, last), (["site-2"], 21, max(21, last))]


def test_flower_can_carry_every_field_of_a_ticket() -> None:
    """Its records hold numbers, text and bytes, and nothing else."""
    facts = {"run": "run", "federation": "0" * 64, "first": 1, "last": 1}
    for more in ({}, {"made": 0}, {"made": 3, "place": "[]"}):
        ticket = Ticket.model_validate({**facts, **more})
        assert Ticket.model_validate(dict(ConfigRecord(ticket.model_dump()))) == ticket
