"""A route and a behaviour defined only in this file: registered, parsed, planned and run without a library file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from pydantic import Field

from client_app import worker
from client_app.site import Site
from fl_privacy.behaviours import BEHAVIOURS, Behaviour
from fl_privacy.cli.run import plan
from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.deploy.parties import observers, parties
from fl_privacy.errors import ConfigError, RoundFailed
from fl_privacy.round.terms import Terms
from fl_privacy.routes import ROUTES
from fl_privacy.routes.base import Route
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat, SiteSeat, Ticket
from fl_privacy.steps.base import At
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.vector import Vector
from fl_privacy.wire.stream import data_bytes
from helpers import Keys, ask_of
from server_app.strategy import MODEL, Strategy
from sites import PARAMETERS, Idle, Work

BOARD: dict[tuple[str, str], str] = {}  # (attempt, site) -> digest: a real route would keep this in a process
CONFIG = "name: toy\nsites: 5\nquorum: 4\nrounds: 2\ndeadline: 5\nroute: {kind: pledge}"


class PledgeRoute(Route):
    """Sites pledge a digest before they send; the server accepts an update only if it matches the pledge."""

    kind: Literal["pledge"] = "pledge"
    exchanges: ClassVar[tuple[str, ...]] = ("pledge", "submit", "collect")
    long_tickets: ClassVar[bool] = False

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, coding = federation.cohort, parameters, federation.coding
        return [
            cost(coding, "server", 1, len(self.exchanges) * n, models=(0, n * d), updates=(n * d, 0)),
            cost(coding, "site", n, len(self.exchanges), models=(d, 0), updates=(0, d)),
        ]

    def site(self, seat: SiteSeat) -> PledgingSite:
        return PledgingSite(seat)

    def server(self, seat: ServerSeat) -> PledgedServer:
        return PledgedServer(seat)


class PledgingSite:
    def __init__(self, seat: SiteSeat) -> None:
        self._name, self._update = seat.keys.folder.name, None

    def rounds(self, ticket: Ticket, model: Vector | None) -> Iterator[tuple[At, Vector]]:
        assert model is not None
        yield Terms.parse(ticket.terms).at, model

    def admit(self, at: At, model: Vector) -> None:
        """Takes part in everything."""

    def abstain(self, at: At) -> None:
        """Says nothing."""

    def held(self) -> list[bytes]:
        return []

    def deliver(self, at: At, payload: Payload) -> None:
        BOARD[at.attempt, self._name] = hashlib.sha256(data_bytes(payload)).hexdigest()
        self._update = payload

    def reply(self) -> Payload | None:
        return self._update


class PledgedServer:
    def __init__(self, seat: ServerSeat) -> None:
        self._sites, self._quorum = seat.sites, seat.federation.quorum

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        self._sites.invite(ask, model)
        kept = {
            name: update
            for name, _, update in self._sites.answers(ask)
            if update is not None and BOARD.get((ask.attempt, name)) == hashlib.sha256(data_bytes(update)).hexdigest()
        }
        if len(kept) < self._quorum:
            raise RoundFailed(f"{len(kept)} updates match their pledge")
        rows = np.stack([kept[name] for name in sorted(kept)])
        return Outcome(len(kept), rows, [""] * len(kept), received=rows.nbytes)

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        return b""

    def confirm(self, ask: Ask) -> None: ...

    def copies(self, ask: Ask) -> int:
        return len(ask.cohort)

    def finish(self, run: str) -> None:
        BOARD.clear()


class SignFlip(Behaviour):
    """Sends the opposite of what it trained."""

    kind: Literal["toy-flip"] = "toy-flip"
    scale: float = Field(1.0, gt=0)

    def act(self, update: Vector, at: At) -> Vector:
        return -np.float32(self.scale) * update


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    ROUTES.add("pledge", PledgeRoute)
    BEHAVIOURS.add("toy-flip", SignFlip)
    yield
    ROUTES.remove("pledge")
    BEHAVIOURS.remove("toy-flip")


class Office:
    """Invitations without Flower: tickets go straight to the workers' own function, and `post` handles the replies."""

    def __init__(self, federation: Federation, folder: Path, keys: Keys, post: Callable[[str, bytes], bytes]) -> None:
        self._federation, self._keys, self._post = federation, keys, post
        self._answers: list[tuple[str, str, Payload | None]] = []
        self.sites = {name: self._site(folder / name) for name in federation.site_names}

    def _site(self, state: Path) -> Site:
        work: Any = Work(100)
        rng = np.random.default_rng(int(state.name[-1]))
        trained = (1 + 0.1 * rng.normal(size=PARAMETERS)).astype(np.float32)
        work.train = lambda private: trained
        state.mkdir(parents=True)
        return Site(self._federation, state.name, self._keys.of("site", state.name), [], state=state, workload=work)

    def invite(self, ask: Ask, model: Vector | None = None) -> None:
        assert model is not None
        for name in ask.cohort:
            ticket = Ticket(run=ask.run, federation=self._federation.digest, first=1, last=1, terms=ask.terms.to_json())
            fields, update = worker.answer(self.sites[name], ticket.model_dump(), bytearray(data_bytes(model)))
            sent = np.frombuffer(self._post(name, bytes(update)), self._federation.coding.type)
            self._answers.append((name, fields["status"], sent if sent.size else None))

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        came, self._answers = self._answers, []
        return came


def played(text: str, folder: Path, post: Callable[[str, bytes], bytes] = lambda _, update: update) -> Outcome:
    """One round of a federation: sites, route and server, without processes."""
    federation = Federation.parse(text)
    keys, model = Keys(folder / "keys", federation.name), np.zeros(PARAMETERS, np.float32)
    office = Office(federation, folder, keys, post)
    end = federation.route.server(ServerSeat(federation, Work.layout, keys.of("server", "server"), (), office))
    return end.play(ask_of(federation, keys, "run", 1, end.digest("run", 0, model), Work.layout), model)


def combined(text: str, folder: Path) -> Vector:
    outcome = played(text, folder)
    assert outcome.rows is not None
    strategy = Strategy(Federation.parse(text))
    return strategy.combine({MODEL: np.zeros(PARAMETERS, np.float32)}, outcome.rows, outcome.tiers)[MODEL]


class TestRoute:
    def test_a_config_accepts_it_and_reads_back_from_its_own_yaml(self) -> None:
        federation = Federation.parse(CONFIG)
        assert isinstance(federation.route, PledgeRoute)
        assert Federation.parse(federation.to_yaml()).digest == federation.digest
        assert federation.rounds_per_ticket == 1

    def test_an_unknown_key_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"route\.n_min: unknown key"):
            Federation.parse(CONFIG.replace("pledge", "pledge, n_min: 3"))

    def test_without_it_the_error_lists_the_available_routes(self) -> None:
        ROUTES.remove("pledge")
        with pytest.raises(ConfigError, match="unknown; use one of server, shuffler, shards"):
            Federation.parse(CONFIG)

    def test_it_adds_no_process(self) -> None:
        federation = Federation.parse(CONFIG)
        assert [role for role, _ in parties(federation)] == ["superlink", "server", *["site"] * 5]
        assert list(observers(federation)) == ["server"]

    def test_plan_shows_its_cost(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "toy.yaml").write_text(CONFIG)
        plan(tmp_path / "toy.yaml", as_json=True)
        found = json.loads(capsys.readouterr().out)
        costs = {party["party"]: party for party in found["per_round"]}
        assert found["exchanges"] == ["pledge", "submit", "collect"]
        assert costs["site"]["messages"] == 3
        assert costs["server"]["bytes_in"] == 5 * 4 * found["parameters"]

    def test_both_ends_complete_a_round(self, tmp_path: Path) -> None:
        outcome = played(CONFIG, tmp_path)
        assert outcome.count == 5
        assert outcome.received == 5 * 4 * PARAMETERS

    def test_its_own_check_drops_an_update_changed_in_transit(self, tmp_path: Path) -> None:
        def post(name: str, update: bytes) -> bytes:
            return bytes(len(update)) if name == "site-2" else update

        assert played(CONFIG, tmp_path, post).count == 4

    def test_a_round_that_its_check_empties_fails(self, tmp_path: Path) -> None:
        with pytest.raises(RoundFailed, match="0 updates match their pledge"):
            played(CONFIG, tmp_path, lambda _, update: bytes(len(update)))


class TestBehaviour:
    FLIPPED = """
name: toy
audit: true
route: {kind: server}
combine: {kind: RULE}
sites:
  - {name: site-0, behaviour: {kind: toy-flip, scale: 20}}
  - {name: site-1}
  - {name: site-2}
  - {name: site-3}
  - {name: site-4}
"""

    def text(self, rule: str) -> str:
        return self.FLIPPED.replace("RULE", rule)

    def test_it_needs_audit(self) -> None:
        with pytest.raises(ConfigError, match="'site-0' misbehaves, which needs audit: true"):
            Federation.parse(self.text("median").replace("audit: true", "audit: false"))

    def test_the_digest_does_not_reveal_who_misbehaves(self) -> None:
        honest = self.text("median").replace(", behaviour: {kind: toy-flip, scale: 20}", "")
        assert Federation.parse(honest).digest == Federation.parse(self.text("median")).digest

    def test_what_leaves_the_site_is_the_flipped_update(self, tmp_path: Path) -> None:
        update = np.linspace(0, 1, PARAMETERS, dtype=np.float32)
        for name, factor in (("site-0", -20), ("site-1", 1)):
            idle = Idle(Federation.parse(self.text("median")), name, tmp_path / name)
            sent = idle.prepare("run", 1, "a", lambda private: update)
            np.testing.assert_array_equal(sent, np.float32(factor) * update)

    @pytest.mark.parametrize("rule", ["median", "trimmed-mean, trim: 0.2"])
    def test_robust_rules_resist_it(self, rule: str, tmp_path: Path) -> None:
        # Honest sites train 1 +- 0.1 for every parameter: a robust rule stays within that range.
        assert combined(self.text(rule), tmp_path).min() > 0.5

    def test_the_mean_does_not_resist_it(self, tmp_path: Path) -> None:
        assert combined(self.text("fedavg"), tmp_path).max() < 0
