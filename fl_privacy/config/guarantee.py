"""What a run guarantees, as its manifest states it: the real terms, or "none"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from fl_privacy.choices import Model
from fl_privacy.config.evaluate import NOT_COVERED, TELLING, charge_of
from fl_privacy.dp.ledger import compose
from fl_privacy.reading import validated
from fl_privacy.routes.base import Trust

if TYPE_CHECKING:
    from fl_privacy.config import Federation, Site

Line = Annotated[str, Field(pattern=r"^[ -~]{1,300}$")]

SEEDED = "keys and noise are seeded (reproducible: true), so anyone who has the config can undo them"
AUDITED = "truth/ holds the sites' updates without noise, and views/ what each party saw (audit: true)"


class Terms(Model):
    """A site's budget. `epsilon` is for all attempts and evaluations; null: only the site's ledger can say."""

    epsilon_per_round: float | None
    delta: float
    attempts: int
    evaluations: int
    epsilon: float | None


class Guarantee(Model):
    """`guarantee` in the manifest. A run without noise, or with seeded noise, guarantees nothing: "none"."""

    unit: Line | Literal["none"] = "none"
    adjacency: Line | Literal["none"] = "none"
    sites: dict[Line, Terms] | Literal["none"] = "none"
    trust: tuple[Trust, ...]
    seeded: bool
    not_covered: tuple[Line, ...]

    @property
    def budgets(self) -> dict[str, Terms]:
        """By site; empty without a guarantee."""
        return self.sites if isinstance(self.sites, dict) else {}

    def lines(self) -> Iterator[str]:
        """For people to read."""
        terms = f"differential privacy; unit: {self.unit}, adjacency: {self.adjacency}"
        yield f"guarantee: {terms if self.budgets else 'none (no differential privacy)'}"
        for name, one in self.budgets.items():
            total = "in all as its ledger says" if one.epsilon is None else f"at most {one.epsilon:.4g} in all"
            each = "" if one.epsilon_per_round is None else f"{one.epsilon_per_round:.4g} per round, "
            asked = f"{one.attempts} attempts" + (f", {one.evaluations} evaluations" if one.evaluations else "")
            yield f"  {name}: epsilon {each}{total}, at delta {one.delta:g} ({asked})"
        for party in self.trust:
            yield f"trust: {party}"
        for text in self.not_covered:
            yield f"not covered: {text}"


class Asked(NamedTuple):
    """How often, at most, each site was asked for an update and for an evaluation: each may have been charged."""

    updates: Counter[str]
    evaluations: Counter[str]


def guarantee(federation: Federation, asked: Asked) -> Guarantee:
    """What a run guarantees after all that it asked of its sites."""
    given: dict[str, Any] = {"trust": federation.route.trust(federation), "seeded": federation.reproducible}
    if federation.unit is not None and not federation.reproducible:
        given |= {"unit": federation.unit, "adjacency": federation.privatise.adjacency}
        given["sites"] = {site.name: _terms(federation, site, asked) for site in federation.sites}
    return Guarantee(**given, not_covered=tuple(_uncovered(federation)))


def stated(manifest: Mapping[str, Any], where: str) -> Guarantee | None:
    """What a manifest states; older ones state nothing."""
    found = manifest.get("guarantee")
    return validated(Guarantee, found, f"{where}: guarantee") if isinstance(found, dict) else None


def _terms(federation: Federation, site: Site, asked: Asked) -> Terms:
    """The noise in training depends on a site's records, which only the site knows; a total is kept by its ledger."""
    delta, budget, each, total = federation.privatise.at_delta, site.budget, site.epsilon, site.epsilon_total
    assert budget is not None
    assert delta is not None
    updates, evaluations = (counts[site.name] for counts in asked)
    charge, evaluation = federation.privatise.charge(federation, budget), charge_of(federation)
    if charge is not None:
        each = compose([charge], delta)
        spent = compose([charge] * updates + ([evaluation] * evaluations if evaluation else []), delta)
        total = spent if total is None else min(total, spent)
    counted = evaluations if evaluation else 0
    return Terms(epsilon_per_round=each, delta=delta, attempts=updates, evaluations=counted, epsilon=total)


def _uncovered(federation: Federation) -> Iterator[str]:
    if federation.reproducible:
        yield SEEDED
    if federation.audit:
        yield AUDITED
    if federation.unit is not None and federation.plain_counts:
        yield NOT_COVERED
    if federation.plain_counts and federation.floor < len(federation.sites):
        yield TELLING
