"""The budget a site has spent: an append-only journal on its own disk, composed with dp-accounting."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fl_privacy.dp import gaussian
from fl_privacy.errors import FederationError
from fl_privacy.journal import Head, Journal

# Integer orders: fractional ones are slow for sampled steps, some do not converge, and PLD is tighter anyway.
ORDERS = (*range(2, 65), 128, 256, 512, 1024)
FINEST, COARSEST = 1e-4, 1e-2


class Limit(NamedTuple):
    """A budget that all charges together must keep to, or only those of one spender."""

    epsilon: float
    delta: float
    spender: str = ""


class LedgerError(FederationError):
    """The ledger refuses a charge or cannot be trusted. Nothing is spent, and nothing may be sent."""


@dataclass(frozen=True)
class Charge:
    """One use of the data: noise relative to the sensitivity, steps, and the record sampling rate of each step.

    `unit` is what is protected (a site or a record); `adjacency` is how neighbours differ (replace, or add-or-remove).
    """

    noise: float
    unit: str
    adjacency: str
    rate: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        if not (self.noise > 0 and 0 < self.rate <= 1 and self.steps >= 1):
            raise LedgerError(f"charge: noise {self.noise}, rate {self.rate}, steps {self.steps} is not a mechanism")


class Ledger(Journal):
    """A budget (epsilon, delta) over all rounds of all runs. Survives restarts and fails closed.

    `further` limits, at deltas of their own, hold too. `site` is whose budget it is: a site's own, or that of a data
    set which several kits share. In a shared ledger, `spender` names the federation and site that is charged, and
    `notes` are files of the site that note how far the ledger has come.
    """

    what = "ledger"
    error = LedgerError
    unsaved = "nothing was sent"
    fix = 'restore the newest copy of it; if there is none, see "A lost ledger" in docs/privacy.md'

    def __init__(
        self,
        path: str | Path,
        epsilon: float,
        delta: float,
        site: str = "",
        further: Sequence[Limit] = (),
        spender: str = "",
        notes: Sequence[Path] = (),
    ) -> None:
        self._limits = (Limit(epsilon, delta), *further)
        for limit in self._limits:
            gaussian.check(limit.epsilon, limit.delta)
        self.epsilon, self.delta, self.site, self._spender = epsilon, delta, site, spender
        self._charges: dict[str, Charge] = {}
        super().__init__(Path(path), site, notes)

    def charge(self, name: str, charge: Charge) -> bool:
        """Record a charge durably before anything is sent; False if `name` was already charged on the same terms.

        `name` is the attempt: resending the same bytes costs nothing. Raises if the charge would exceed the budget.
        """
        with self.held():
            known = self._charges.get(self._key(name))
            if known is None:
                self.check(charge)
                self._add(self._key(name), charge)
                return True
            if known != charge:
                raise LedgerError(f"charge: {name!r} was already charged on different terms")
            self.settle()
        return False

    def holds(self, name: str) -> bool:
        """Whether `name` was charged, by this or another process of the site."""
        with self.held():
            return self._key(name) in self._charges

    def take_over(self, earlier: Ledger) -> None:
        """Charge here what the same site has spent from another ledger; what was taken over before costs nothing."""
        with self.held():
            for name, charge in earlier._charges.items():
                if self._key(name) not in self._charges:
                    self.check_unit(charge.unit, charge.adjacency)
                    self._add(self._key(name), charge)

    def check_witness(self, entries: int, head: str) -> None:
        """Raise if this ledger is behind the one that a witness has seen, or another one.

        A ledger that has come further is fine: it was charged, and the process ended before it reported that.
        """
        with self.held():
            self.check_head(Head(entries, head), "the middleware")

    def check(self, *charges: Charge) -> None:
        """Raise if charges would exceed the budget or protect a different unit than earlier ones."""
        for charge in charges:
            self.check_unit(charge.unit, charge.adjacency)
        for limit in self._limits:
            would = compose([*self._under(limit), *charges], limit.delta)
            if would > limit.epsilon:
                raise LedgerError(
                    f"budget: this round would raise epsilon to {would:.4g} of {limit.epsilon:g} at delta "
                    f"{limit.delta:g}; nothing was spent or sent"
                )

    def spent(self, delta: float | None = None) -> float:
        """Epsilon spent so far at `delta`."""
        return compose(list(self._charges.values()), self.delta if delta is None else delta)

    def remaining(self) -> float:
        """Epsilon left under the tightest limit; the cost of another round depends on its noise."""
        left = (limit.epsilon - compose(self._under(limit), limit.delta) for limit in self._limits)
        return max(0.0, min(left))

    def report(self) -> dict[str, Any]:
        """A summary for the user; `epsilon` and `remaining` are None where nothing sets a limit."""
        charges, limited = list(self._charges.values()), self.epsilon < gaussian.LARGEST_EPSILON
        return {
            "site": self.site,
            "charges": len(charges),
            "spent": self.spent(),
            "remaining": self.remaining() if limited else None,
            "epsilon": self.epsilon if limited else None,
            "delta": self.delta,
            "unit": charges[0].unit if charges else None,
            "adjacency": charges[0].adjacency if charges else None,
        }

    def check_unit(self, unit: str, adjacency: str) -> None:
        """Raise if earlier charges, perhaps of another federation of this name, protect something else."""
        for known in list(self._charges.values())[:1]:
            if (known.unit, known.adjacency) != (unit, adjacency):
                fix = "use another `ledger` in the policy" if self._spender else "give the federation another name"
                raise LedgerError(
                    f"ledger {self.path}: protects a {known.unit} ({known.adjacency}), and this federation a {unit} "
                    f"({adjacency}), which cannot be added up; {fix}"
                )

    def _loaded(self) -> None:
        self._charges = {}
        for number, entry in enumerate(self.entries, start=2):
            terms = dict(entry)
            try:
                name = str(terms.pop("name"))
                charge = Charge(**terms)
            except (KeyError, TypeError):
                raise self._damaged(number) from None
            if name in self._charges:
                raise self._damaged(number)
            self._charges[name] = charge

    def _add(self, key: str, charge: Charge) -> None:
        self.append({"name": key, **asdict(charge)})
        self._charges[key] = charge

    def _key(self, name: str) -> str:
        """Sites that share a ledger may be in the same attempt, and each is charged for it."""
        return f"{self._spender}/{name}" if self._spender else name

    def _under(self, limit: Limit) -> list[Charge]:
        """The charges that count under a limit."""
        ours = f"{limit.spender}/" if limit.spender else ""
        return [charge for name, charge in self._charges.items() if name.startswith(ours)]


def compose(charges: list[Charge], delta: float) -> float:
    """Total epsilon of all charges: exact without sampling, else the smaller of two upper bounds, RDP and PLD."""
    counted = sorted(Counter(charges).items(), key=lambda item: astuple(item[0]))
    return _composed(tuple(counted), delta) if counted else 0.0


@lru_cache(maxsize=4096)
def _composed(charges: tuple[tuple[Charge, int], ...], delta: float) -> float:
    """Cached: sites of one process spend alike, and each round is checked before the work and again when charged."""
    plain = _plain(charges)
    if all(charge.rate == 1 for charge, _ in charges):
        return gaussian.epsilon(plain, delta)
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    events = _events(charges, plain)
    by_rdp = _epsilon(RdpAccountant(ORDERS), events, delta)
    grid = _grid(by_rdp, sum(count for _, count in events))
    return min(by_rdp, _epsilon(PLDAccountant(value_discretization_interval=grid), events, delta))


def _epsilon(accountant: Any, events: list[tuple[Any, int]], delta: float) -> float:
    for event, count in events:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _grid(epsilon: float, compositions: int) -> float:
    """PLD's discretisation: below a thousandth of the result, which saves seconds per round when noise is small.

    A coarser grid rounds up, never down.
    """
    return min(COARSEST, max(FINEST, min(epsilon / 2000, 1 / math.sqrt(compositions))))


def _plain(charges: tuple[tuple[Charge, int], ...]) -> float:
    """Unsampled Gaussians compose exactly to one: its noise, infinite if there are none. Their precisions add up."""
    precision = sum(count * charge.steps / charge.noise**2 for charge, count in charges if charge.rate == 1)
    return precision**-0.5 if precision else math.inf


def _events(charges: tuple[tuple[Charge, int], ...], plain: float) -> list[tuple[Any, int]]:
    """The charges as dp-accounting events."""
    import dp_accounting

    events: list[tuple[Any, int]] = []
    if math.isfinite(plain):
        events.append((dp_accounting.GaussianDpEvent(plain), 1))
    for charge, count in charges:
        if charge.rate == 1:
            continue
        sampled = dp_accounting.PoissonSampledDpEvent(charge.rate, dp_accounting.GaussianDpEvent(charge.noise))
        events.append((sampled, count * charge.steps))
    return events
