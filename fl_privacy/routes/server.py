"""`route: {kind: server}`: the baseline, in which updates go through Flower."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_privacy.coding import Payload
from fl_privacy.crypto import keys
from fl_privacy.errors import FederationError, ProtocolError, RoundFailed, require
from fl_privacy.round.counted import Counted, received
from fl_privacy.round.own_models import OwnModels, root_of
from fl_privacy.round.terms import Terms
from fl_privacy.routes.base import Route, Trust
from fl_privacy.routes.ends import Ask, Outcome, ServerSeat, SiteSeat, Ticket
from fl_privacy.scores.form import Counts
from fl_privacy.steps.base import At, WithOwn
from fl_privacy.theory.cost import Cost, cost
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

POLL = 0.1


class ThroughFlower(Route):
    """Updates travel through Flower to the server's process."""

    long_tickets: ClassVar[bool] = False  # the model comes with the ticket
    carries_counts: ClassVar[bool] = True

    def trust(self, federation: Federation) -> list[Trust]:
        return [Trust(parties=(name,)) for name in ("server", "superlink")]

    def cost(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, c, coding = federation.cohort, parameters, federation.bytes_of_counts, federation.coding
        each = len(self.exchanges)
        return [
            cost(coding, "server", 1, each * n, models=(0, n * d), updates=(n * d, 0), counts=(n * c, 0)),
            cost(coding, "site", n, each, models=(d, 0), updates=(0, d), counts=(0, c)),
        ]

    def once(self, federation: Federation, parameters: int) -> list[Cost]:
        n, d, coding, each = len(federation.sites), parameters, federation.coding, len(self.exchanges)
        return [
            cost(coding, "server", 1, each * n, models=(0, n * d), updates=(0, 0)),
            cost(coding, "site", n, each, models=(d, 0), updates=(0, 0)),
        ]

    def site(self, seat: SiteSeat) -> AtSite:
        return AtSite(seat)

    def server(self, seat: ServerSeat) -> AtServer:
        return AtServer(seat)


class ServerRoute(ThroughFlower):
    """The baseline: updates travel through Flower, and the server sees who sent what."""

    kind: Literal["server"] = "server"
    mailbox: bool = Field(False, description="a process that carries sealed messages between sites, and can read none")

    shows_owners: ClassVar[bool] = True

    @property
    def carries_letters(self) -> bool:
        return self.mailbox

    def parties(self) -> list[tuple[str, str]]:
        return [("mailbox", "mailbox")] if self.mailbox else []

    def middleware(self) -> list[str]:
        return ["mailbox"] if self.mailbox else []


def odd(stamps: Mapping[str, bytes], sites: int) -> frozenset[str]:
    """Who sent another stamp than most: fewer than a third of all sites are liars. More are a split, and end the run.

    More than that third with one stamp have a correct site among them. With fewer, a third of the round decides.
    """
    if len(set(stamps.values())) < 2:
        return frozenset()
    (most, agree), *_ = Counter(stamps.values()).most_common(1)
    others, few = frozenset(site for site, stamp in stamps.items() if stamp != most), (sites - 1) // 3
    if not (len(others) <= few < agree or 3 * len(others) < len(stamps)):
        say = f"{len(others)} of {len(stamps)} sites show another check value: {', '.join(sorted(others))}"
        fix = "their logs name who signed for both; remove these, and start a new run"
        raise FederationError(f"upload: sites hold different secrets: {say}; {fix}")
    return others


class AtSite:
    """The model comes with the ticket, and the update goes back with the receipt; the bytes of the counts follow it."""

    def __init__(self, seat: SiteSeat) -> None:
        self._seat = seat
        self._terms: Terms
        self._update: Payload | None = None
        self._place = ""

    def rounds(self, ticket: Ticket, model: Vector | None) -> Iterator[tuple[At, Vector]]:
        self._update, self._terms, self._place = None, Terms.parse(ticket.terms), ticket.place
        same = (self._terms.run, self._terms.round) == (ticket.run, ticket.first)
        require(same and model is not None, "ticket: came without a model, or with the terms of another round")
        assert model is not None
        at = self._terms.at
        if ticket.made >= 0:
            require(ticket.made <= at.version, "ticket: with a model of a later round")
            at = WithOwn(**vars(at), made=ticket.made)
        yield at, model

    def admit(self, at: At, model: Vector) -> None:
        sound = model.shape == (self._seat.layout.size,) and bool(np.isfinite(model).all())
        require(sound, "model: not of this federation's layout, or not finite")
        Terms.checked(self._terms, **self._seat.facts(self._digest(model))).check(self._seat.federation)

    def _digest(self, model: Vector) -> bytes:
        """What stands for the model in the terms."""
        from fl_privacy.wire.stream import digest

        own, federation = digest(model), self._seat.federation
        if not federation.combine.several:
            return own
        return root_of(self._place, self._seat.site, own, len(federation.sites))

    def held(self) -> Sequence[bytes]:
        return ()

    def deliver(self, at: At, payload: Payload, counts: Counts | None = None) -> None:
        stamp = np.frombuffer(self._seat.stamp(at), np.uint8)
        behind = [] if counts is None else [counts.view(payload.dtype)]
        behind += [stamp.view(payload.dtype)] if stamp.size else []
        self._update = np.concatenate([payload, *behind]) if behind else payload

    def abstain(self, at: At) -> None:
        """The reply without an update says so."""

    def reply(self) -> Payload | None:
        return self._update


class AtServer:
    """Updates come back in Flower's replies, and the server sees whose each is."""

    def __init__(self, seat: ServerSeat) -> None:
        self._seat = seat
        self._federation, self._sites, self._size = seat.federation, seat.sites, seat.layout.size

    def digest(self, run: str, round: int, model: Vector | None) -> bytes:
        from fl_privacy.wire.stream import digest

        if self._federation.combine.several:
            return self._own_models(run, round).root
        assert model is not None
        return digest(model)

    def _own_models(self, run: str, round: int) -> OwnModels:
        """What stands for the models of all sites before a round."""
        from fl_privacy.wire.stream import digest

        models, holders = self._seat.held().models, self._seat.holders()
        digests = {name: digest(models[name]) for name in set(holders.values())}
        salt = keys.derive(self._seat.keys.key_file.read_bytes(), run, round, "", "models of sites")
        return OwnModels({site: digests[name] for site, name in holders.items()}, salt)

    def confirm(self, ask: Ask) -> None:
        """Nobody else keeps it."""

    def play(self, ask: Ask, model: Vector | None) -> Outcome:
        from fl_privacy.transcript.events import (  # reading a config does not need the transcript
            Event,
            Receipt,
            rows_of,
        )

        self._invite(ask, model)
        until, failed = time.monotonic() + self._federation.deadline, 0
        updates, counted, receipts = dict[str, Payload](), Counted(ask.counts), list[Event]()
        stamps = dict[str, bytes]()
        while len(updates) + failed < len(ask.cohort) and time.monotonic() < until:
            for site, status, reply in self._sites.answers(ask):
                receipts.append(Receipt(name=site, status=status, time=time.time()))
                update, counts, stamp = self._parts(ask, reply) if status == "done" else (None, None, b"")
                if update is None:
                    failed += 1
                    continue
                updates[site], stamps[site] = update, stamp
                if counts is not None:
                    counted.add(site, counts)
            time.sleep(POLL)
        left_out = odd(stamps, len(self._federation.sites))
        updates = {site: update for site, update in updates.items() if site not in left_out}
        if len(updates) < (needed := ask.terms.quorum):
            raise RoundFailed(f"{len(updates)} of {len(ask.cohort)} updates came, {needed} are needed")
        names = sorted(updates)
        outcome = Outcome(len(names), receipts=[*receipts, *rows_of(names)], seen=counted.stored(names))
        senders = [site for site in counted.sites if site not in left_out]
        outcome.counts, outcome.counted = counted.total(senders), len(senders)
        if self._federation.stamp_bytes:
            outcome.seen["stamps"] = np.stack([np.frombuffer(stamps[site], np.uint8) for site in names])
        if not ask.farewell:
            outcome.rows, outcome.tiers = np.stack([updates[n] for n in names]), list(map(self._tier, names))
            outcome.owners, outcome.received = names, outcome.rows.nbytes
        return outcome

    def _invite(self, ask: Ask, model: Vector | None) -> None:
        """Every site gets the model that it starts from, and no other."""
        if not self._federation.combine.several:
            self._sites.invite(ask, model)
            return
        own = self._own_models(ask.run, ask.farewell or ask.round - 1)
        models, holders, made = self._seat.held().models, self._seat.holders(), self._seat.made()
        for site in ask.cohort:
            own_ask = replace(ask, cohort=[site], made=made.get(holders[site], -1))
            self._sites.invite(own_ask, models[holders[site]], own.place(site))

    def _tier(self, site: str) -> str:
        return self._federation.site(site).tier

    def _parts(self, ask: Ask, reply: Payload | None) -> tuple[Payload | None, Counts | None, bytes]:
        """The update in a reply, None unless it is sound, and the counts and the stamp behind it."""
        coding = self._federation.coding
        size = 0 if ask.farewell else coding.length(self._size)
        data = np.empty(0, coding.type) if reply is None else reply
        try:
            require(data.dtype == coding.type and data[:size].shape == (size,), "update: not of this layout")
            coding.check(data[:size])
            behind, length = data[size:].tobytes(), self._federation.stamp_bytes
            require(len(behind) >= length, "stamp: missing")
            rest = len(behind) - length
            return data[:size], received(behind[:rest], ask.counts), behind[rest:]
        except ProtocolError:
            return None, None, b""

    def copies(self, ask: Ask) -> int:
        return len(ask.cohort)

    def finish(self, run: str) -> list[bytes]:
        """No other party takes part in a run."""
        return []
