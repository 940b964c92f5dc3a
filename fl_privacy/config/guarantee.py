"""What a run guarantees, as its manifest states it: the real terms, or "none"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fl_privacy.choices import Model
from fl_privacy.reading import validated
from fl_privacy.routes.base import Trust

if TYPE_CHECKING:
    from fl_privacy.config import Federation, Site

Line = Annotated[str, Field(pattern=r"^[ -~]{1,300}$")]

SEEDED = "keys and noise are seeded (reproducible: true), so anyone who has the config can undo them"
AUDITED = "truth/ holds the sites' updates without noise, and views/ what each party saw (audit: true)"


class Terms(Model):
    """A site's budget. `epsilon` is for all attempts together; null: only the site's ledger can say."""

    epsilon_per_round: float | None
    delta: float
    attempts: int
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
            yield f"  {name}: epsilon {each}{total}, at delta {one.delta:g} ({one.attempts} attempts)"
        for party in self.trust:
            yield f"trust: {party}"
        for text in self.not_covered:
            yield f"not covered: {text}"


def guarantee(federation: Federation, attempts: Mapping[str, int]) -> Guarantee:
    """What a run guarantees. `attempts` is how often, at most, each site was asked: every attempt may be charged."""
    given: dict[str, Any] = {"trust": federation.route.trust(), "seeded": federation.reproducible}
    if federation.unit is not None and not federation.reproducible:
        given |= {"unit": federation.unit, "adjacency": federation.privatise.adjacency}
        given["sites"] = {s.name: _terms(federation, s, attempts.get(s.name, 0)) for s in federation.sites}
    return Guarantee(**given, not_covered=tuple(_uncovered(federation)))


def stated(manifest: Mapping[str, Any], where: str) -> Guarantee | None:
    """What a manifest states; older ones state nothing."""
    found = manifest.get("guarantee")
    return validated(Guarantee, found, f"{where}: guarantee") if isinstance(found, dict) else None


def _terms(federation: Federation, site: Site, attempts: int) -> Terms:
    """The noise in training depends on a site's records, which only the site knows; a total is kept by its ledger."""
    noise, budget = federation.privatise, site.budget
    assert budget is not None
    assert noise.at_delta is not None
    each, total = site.epsilon, site.epsilon_total
    if noise.after_training:
        each, spent = (noise.epsilon_after(federation, budget, rounds) for rounds in (1, attempts))
        total = spent if total is None else min(total, spent)
    return Terms(epsilon_per_round=each, delta=noise.at_delta, attempts=attempts, epsilon=total)


def _uncovered(federation: Federation) -> Iterator[str]:
    if federation.reproducible:
        yield SEEDED
    if federation.audit:
        yield AUDITED
