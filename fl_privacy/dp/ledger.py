"""The budget a site has spent: an append-only journal on its own disk, composed with dp-accounting."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fl_privacy.dp import gaussian
from fl_privacy.errors import FederationError
from fl_privacy.files import lock

FORMAT = 1
LONGEST_LINE = 4096
# Integer orders: fractional ones are slow for sampled steps, some do not converge, and PLD is tighter anyway.
ORDERS = (*range(2, 65), 128, 256, 512, 1024)
FINEST, COARSEST = 1e-4, 1e-2


class Limit(NamedTuple):
    """A budget that all charges together must keep to."""

    epsilon: float
    delta: float


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


class Ledger:
    """A site's budget (epsilon, delta) over all rounds of all runs. Survives restarts and fails closed.

    `further` limits, at deltas of their own, hold too.
    """

    def __init__(
        self, path: str | Path, epsilon: float, delta: float, site: str = "", further: Sequence[Limit] = ()
    ) -> None:
        self._limits = (Limit(epsilon, delta), *further)
        for limit in self._limits:
            gaussian.check(*limit)
        self.path, self.epsilon, self.delta, self.site = Path(path), epsilon, delta, site
        self._entries: dict[str, Charge] = {}
        self._head = ""
        with self._locked():
            if self.path.stat().st_size == 0:
                self._append({"format": FORMAT, "site": site})
            self._read()

    def charge(self, name: str, charge: Charge) -> bool:
        """Record a charge durably before anything is sent; False if `name` was already charged on the same terms.

        `name` is the attempt: resending the same bytes costs nothing. Raises if the charge would exceed the budget.
        """
        with self._locked():
            self._read()
            if name in self._entries:
                if self._entries[name] != charge:
                    raise LedgerError(f"charge: {name!r} was already charged on different terms")
                return False
            self.check(charge)
            self._append({"name": name, **asdict(charge)})
            self._entries[name] = charge
        return True

    def holds(self, name: str) -> bool:
        """Whether `name` was charged, by this or another process of the site."""
        with self._locked():
            self._read()
        return name in self._entries

    def check(self, *charges: Charge) -> None:
        """Raise if charges would exceed the budget or protect a different unit than earlier ones."""
        for charge in charges:
            self._check_unit(charge)
        for epsilon, delta in self._limits:
            would = compose([*self._entries.values(), *charges], delta)
            if would > epsilon:
                raise LedgerError(
                    f"budget: this round would raise epsilon to {would:.4g} of {epsilon:g} at delta {delta:g}; "
                    "nothing was spent or sent"
                )

    def spent(self, delta: float | None = None) -> float:
        """Epsilon spent so far at `delta`."""
        return compose(list(self._entries.values()), self.delta if delta is None else delta)

    def remaining(self) -> float:
        """Epsilon left under the tightest limit; the cost of another round depends on its noise."""
        return max(0.0, min(epsilon - self.spent(delta) for epsilon, delta in self._limits))

    def report(self) -> dict[str, Any]:
        """A summary for the user."""
        charges = list(self._entries.values())
        return {
            "site": self.site,
            "charges": len(charges),
            "spent": self.spent(),
            "remaining": self.remaining(),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "unit": charges[0].unit if charges else None,
            "adjacency": charges[0].adjacency if charges else None,
        }

    def _check_unit(self, charge: Charge) -> None:
        for known in list(self._entries.values())[:1]:
            if (known.unit, known.adjacency) != (charge.unit, charge.adjacency):
                raise LedgerError(
                    f"charge: protects a {charge.unit} ({charge.adjacency}), but this ledger protects a {known.unit} "
                    f"({known.adjacency}); use a separate ledger for each"
                )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold an exclusive lock, for reading too."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = lock(self.path, os.O_APPEND)
        except OSError as error:
            raise LedgerError(f"ledger {self.path}: {error.strerror}; nothing may be spent without it") from None
        try:
            yield
        finally:
            os.close(self._file)

    def _read(self) -> None:
        """Read the whole journal again. Ignores only a last line cut off by a crash: its charge was never sent."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.ftruncate(self._file, whole)
        self._entries, self._head = {}, ""
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            fields = self._parse(line, number)
            if number == 1:
                self._check_header(fields)
            else:
                name = str(fields.pop("name"))
                try:
                    self._entries[name] = Charge(**fields)
                except TypeError:
                    raise self._corrupt(number) from None

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line[:LONGEST_LINE])
            fields, head = dict(entry["entry"]), entry["head"]
        except (ValueError, TypeError, KeyError):
            raise self._corrupt(number) from None
        if head != _link(self._head, fields):
            raise self._corrupt(number)
        self._head = head
        return fields

    def _check_header(self, fields: dict[str, Any]) -> None:
        if fields.get("format") != FORMAT:
            raise LedgerError(f"ledger {self.path}: format {fields.get('format')!r} is unknown; update fl-privacy")
        if fields.get("site") != self.site:
            raise LedgerError(
                f"ledger {self.path}: belongs to site {fields.get('site')!r}, not {self.site!r}; restore the right one"
            )

    def _corrupt(self, number: int) -> LedgerError:
        return LedgerError(f"ledger {self.path}: line {number} was changed or damaged; restore it from a backup")

    def _append(self, fields: dict[str, Any]) -> None:
        head = _link(self._head, fields)
        line = json.dumps({"entry": fields, "head": head}, sort_keys=True) + "\n"
        try:
            os.write(self._file, line.encode())
            os.fsync(self._file)
        except OSError as error:
            raise LedgerError(f"ledger {self.path}: {error.strerror}; nothing was spent or sent") from None
        self._head = head


def _link(previous: str, fields: dict[str, Any]) -> str:
    return hashlib.sha256((previous + json.dumps(fields, sort_keys=True)).encode()).hexdigest()


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
