"""`permute: {kind: tazza}`: the server averages models whose hidden units it cannot put a name to.

Every round has its own rule, drawn from the secret that the sites agreed on. A site opens the model of a round with the
rule of the round that made it, trains it, and closes what it sends with this round's. What travels is the difference to
the model received: the server adds the mean of these to its model, and so has the mean of the closed models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from fl_privacy.agreement.secret import CHECK_BYTES, Agreed
from fl_privacy.agreement.terms import FEWEST, MOST
from fl_privacy.coding import Payload
from fl_privacy.crypto import keys
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.steps.base import At, Foretold, Off, Running, Seat, Step
from fl_privacy.steps.permute.rule import Rule, Rules
from fl_privacy.vector import Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.tasks.workload import Workload

TRIED = 2  # records
ROSTER = "roster"  # in the step's state
LITTLE = (
    "permute: this hides little: the order of classes stays, hidden orders cancel in products of weights, and one "
    "colluding site opens everything; see docs/permutation.md"
)


class Tazza(Step):
    """Hidden units of the model in a secret order, another one every round; sites start from a secret model too."""

    kind: Literal["tazza"] = "tazza"

    agrees: ClassVar[bool] = True
    closes: ClassVar[bool] = True
    stamp_bytes: ClassVar[int] = CHECK_BYTES
    own_start: ClassVar[bool] = True  # the sites make the first model, and the server never holds it

    def first(self, model: Vector) -> Vector:
        """The server starts from nothing, and holds the closed mean of the sites' models after the first round."""
        return np.zeros_like(model)

    def problems(self, federation: Federation) -> Iterator[str]:
        what, route = f"permute.kind: {self.kind}", federation.route
        sites = len(federation.sites)
        if sites < FEWEST:
            yield f"{what} needs an agreement that bears one faulty site, so {FEWEST} sites; there are {sites}"
        if sites > MOST:
            yield f"{what} supports {MOST} sites; there are {sites}"
        if not route.shows_owners:
            has = "shows no single updates" if route.shows != "rows" else "hides who sent what"
            yield f"{what} needs rows with owners, and route {route.kind} {has}; use {{kind: server, mailbox: true}}"
        elif not route.carries_letters:
            yield f"{what} needs a mailbox for the sites' agreement; set route.mailbox: true"
        if not federation.sites_evaluate:
            yield f"{what} leaves the server a model that it cannot evaluate; use evaluate: sites"
        if federation.init is not None and self.own_start:
            yield "init: the server would hold the plain model; remove it, or use permute.kind: tazza-published"
        yield from self._fixed_orders(federation)

    def _fixed_orders(self, federation: Federation) -> Iterator[str]:
        """What keeps something per coordinate, or looks at the size of an update, cannot follow changing rules."""
        changing = f"permute.kind {self.kind} gives every round another order"
        for slot, step in (("compress", federation.compress), ("encode", federation.encode)):
            if not isinstance(step, Off):
                yield f"{slot}.kind: {step.kind} needs updates, and {changing} and sends whole models; remove {slot}"
        for rule, where in zip(federation.combine.rules(), ("combine", "combine.rule"), strict=False):
            if rule.optimiser().names:
                yield f"{where}.kind: {rule.kind} keeps moments per coordinate, and {changing}; use fedavg"
            elif not rule.translates:
                yield f"{where}.kind: {rule.kind} judges the length of updates, and {changing}; use fedavg or median"
            elif rule.lr != 1:
                yield f"{where}.lr: {rule.lr:g} would mix two orders, as {changing}; use 1"

    def foretell(self, federation: Federation) -> Foretold:
        sites = len(federation.sites)
        facts: dict[str, Any] = {"sites": sites, "faulty": (sites - 1) // 3, "rows_with_owners": True}
        lines = [
            f"permute: the sites agree on a secret before the first round, over the mailbox; {facts['faulty']} of "
            f"{sites} may be faulty",
            "permute: needs rows with owners, so the server sees who sent which closed model",
        ]
        if federation.task.is_own:
            lines.append("permute: whether every layer of this task's model can be permuted is checked at the sites")
        else:
            rules = example_rules(federation)
            facts |= {"moving": rules.moving, "hides_input": rules.hides_input}
            lines.append(f"permute: {rules.moving:,} parameters move")
            if not rules.hides_input:
                lines.append("permute: no position of a record moves in this model, so that it hides no data")
        return Foretold(facts, [*lines, LITTLE])

    def check(self, federation: Federation) -> None:
        if not federation.task.is_own:
            example_rules(federation)

    def start(self, seat: Seat) -> Running:
        return Closing(seat, self.own_start)


class TazzaPublished(Tazza):
    """As published: the server sends its own first model, so that it can compare later ones with it. To be attacked."""

    kind: Literal["tazza-published"] = "tazza-published"  # type: ignore[assignment]

    own_start: ClassVar[bool] = False

    def first(self, model: Vector) -> Vector:
        return model


class Closing(Running):
    """A site's two rules per round. The sites' operators never see them, and neither does a disk."""

    def __init__(self, seat: Seat, own_start: bool) -> None:
        self._seat, self._own_start = seat, own_start
        if own_start and seat.federation.task.is_own:
            check_start(seat.federation)
        self._rules, self._layout = rules_of(seat.work, seat.site), seat.work.layout
        self._drawn: dict[tuple[bytes, int], Rule] = {}
        self._received = self._plain = np.empty(0, np.float32)
        self._roster, self._before = b"", b""  # of this round's agreement, and of the last round's

    def inward(self, model: Vector, at: At) -> Vector:
        agreed, version = self._agreed(), at.version
        self._roster = bytes.fromhex(agreed.terms.roster)
        if self._before not in (b"", self._roster):
            why = "permute: the roster changed, and with it the secret; this run's models stay closed"
            raise ProtocolError("FAILED_PRECONDITION", f"{why}; start a new run")
        secret = agreed.of_run(at.run, at.nonce)
        self._received = model
        if version:
            self._plain = self._rule(secret, version).inverse.apply(model, self._layout)
        else:
            self._plain = self._first(secret) if self._own_start else model
        return self._plain

    def outward(self, update: Payload, at: At) -> Payload:
        closed = self._closing(at).apply(self._plain + update, self._layout)
        made: Vector = np.subtract(closed, self._received, out=closed)
        assert self._seat.secrets is not None
        self._seat.secrets.show(at.run, at.nonce, at.round)
        return made

    def stamp(self, at: At) -> bytes:
        return self._agreed().check_value(at.run, at.nonce, at.round)

    def truth(self, at: At) -> Mapping[str, NDArray[Any]]:
        """Where every coordinate of what is sent comes from."""
        order = np.arange(self._layout.size, dtype=np.float64).astype(np.float32)
        if self._layout.size >= 2**24:  # float32 has no larger whole numbers
            return {}
        return {"order": self._closing(at).apply(order, self._layout).astype(np.int32)}

    def state(self) -> Mapping[str, NDArray[Any]]:
        return {ROSTER: np.frombuffer(self._roster, np.uint8)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._before = state[ROSTER].astype(np.uint8).tobytes() if ROSTER in state else b""

    def _closing(self, at: At) -> Rule:
        return self._rule(self._agreed().of_run(at.run, at.nonce), at.round)

    def _rule(self, secret: bytes, round: int) -> Rule:
        """The rule of a round; those of two rounds are kept."""
        place = (secret, round)
        if place not in self._drawn:
            self._drawn = dict(list(self._drawn.items())[-1:])
            self._drawn[place] = self._rules.draw(secret, self._seat.federation.name, round)
        return self._drawn[place]

    def _first(self, secret: bytes) -> Vector:
        from fl_privacy.models.initial import drawn

        return drawn(self._seat.federation, keys.derive(secret, "", 0, "", "first model"))

    def _agreed(self) -> Agreed:
        if self._seat.secrets is None:
            raise FederationError("permute: this site has no way to agree on a secret; start its worker with --state")
        return self._seat.secrets.agreed()


def check_start(federation: Federation) -> None:
    """Refuse a task whose first model the server could make, and compare later ones with."""
    from fl_privacy.models.initial import not_drawn

    if known := not_drawn(federation):
        what = f"permute: {known[0]} of the task's model is the same for every secret, so the server knows it"
        fix = "draw it from torch's global generator, make a constant buffer persistent=False, or use tazza-published"
        raise FederationError(f"{what}; {fix}")


_known: WeakKeyDictionary[Workload, Rules] = WeakKeyDictionary()


def rules_of(work: Workload, site: str) -> Rules:
    """What may move in the model; derived once for all sites of a process."""
    import torch

    from fl_privacy.steps.permute import tazza

    if work not in _known:
        records = work.site_data(site).x[:TRIED]
        with work.theirs("permute"):
            _known[work] = tazza.rules(work.model, torch.from_numpy(records))
    return _known[work]


def example_rules(federation: Federation) -> Rules:
    """The same without anybody's data, for a data set whose records are numbers."""
    import torch

    from fl_privacy.steps.permute import tazza
    from fl_privacy.tasks.workload import model_of

    shape: Sequence[int] = federation.task.data_set.shape
    example = torch.randn(TRIED, *shape, generator=torch.Generator().manual_seed(0))
    return tazza.rules(model_of(federation), example)
