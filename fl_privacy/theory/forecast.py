"""What `fl-privacy plan` says of a federation before it runs: the time of a round, and what its parties may learn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fl_privacy.coding import FLOAT32
from fl_privacy.errors import FederationError
from fl_privacy.theory.cost import Cost, Times, times
from fl_privacy.theory.distribution import distribution_time
from fl_privacy.theory.leakage import View, views

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.steps.base import Foretold


@dataclass(frozen=True)
class Forecast:
    """Of one federation, if all links have the same rate, in bytes per second."""

    rate: float
    rounds: int
    times: Times
    fedavg: float  # seconds, with one server and uncompressed updates
    views: list[View]
    packed: dict[str, int]  # by step, the bytes of an update in a form that is simulated but not sent
    published: float | None  # seconds, by the formula of the paper that the route is from
    steps: dict[str, Foretold]  # by kind, what the steps say of themselves
    route: Foretold | None = None  # what the route says of itself

    def to_json(self) -> dict[str, Any]:
        seconds = {"updates": self.times.updates, "models": self.times.models, "fedavg": self.fedavg}
        seconds |= {} if self.published is None else {"published": self.published}
        found = {"rate": self.rate, "distribution_time": {"total": self.times.total, **seconds}}
        return {**found, "leakage": [asdict(view) for view in self.views], "packed_bytes": self.packed, **self._facts()}

    def _facts(self) -> dict[str, Any]:
        found = {"steps": {kind: dict(step.facts) for kind, step in self.steps.items()}} if self.steps else {}
        return found if self.route is None else {**found, "route": dict(self.route.facts)}

    def lines(self) -> Iterator[str]:
        each = f"updates {_seconds(self.times.updates)}, models {_seconds(self.times.models)}"
        yield (
            f"a round takes at least {_seconds(self.times.total)} on links of {self.rate / 1e6:g} MB/s ({each}), "
            f"FedAvg with one server {_seconds(self.fedavg)}"
        )
        if self.published is not None:
            yield f"by the formula in ERIS's tables, {_seconds(self.published)}"
        for kind, size in self.packed.items():
            yield f"compress: {kind} is simulated, and updates travel as float32; packed, one would take {size:,} bytes"
        for step in self.steps.values():
            yield from step.lines
        yield from () if self.route is None else self.route.lines
        for view in self.views:
            several = f"; c of the {view.count} together, c times as much" if view.count > 1 else ""
            learnt = f"learns at most {view.coordinates:,.0f} C_max of a site in {self.rounds} rounds"
            yield f"one {view.party} {learnt}{several}"
        yield (
            "C_max is the most that one number of an update tells about a site's records, 1/2 ln(1 + SNR) nats with "
            "Gaussian noise; without noise there is no such limit, and the counts above only compare routes"
        )


def _seconds(seconds: float) -> str:
    return f"{float(f'{seconds:.2g}'):g} s"


def forecast(federation: Federation, parameters: int, costs: Sequence[Cost], rate: float) -> Forecast:
    """The forecast for a route's costs of one round."""
    if not 0 < rate < math.inf:
        raise FederationError(f"rate: {rate / 1e6:g} MB/s is not a rate; use a positive number")
    fedavg = distribution_time("fedavg", FLOAT32.nbytes(parameters), federation.cohort, rate)
    packed = {step.kind: size for step in federation.steps if (size := step.packed(parameters)) is not None}
    published = federation.route.published(federation, FLOAT32.nbytes(parameters), rate)
    steps = {step.kind: said for step in federation.steps if (said := step.foretell(federation)) is not None}
    took, seen = times(costs, rate), views(costs, federation)
    route = federation.route.foretell(federation, parameters)
    return Forecast(rate, federation.rounds, took, fedavg, seen, packed, published, steps, route)
