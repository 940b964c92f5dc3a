"""A site's own policy, which binds its worker regardless of the federation's config or the server's tickets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_privacy.config.federation import Federation, Site
from fl_privacy.dp import gaussian
from fl_privacy.dp.ledger import Charge, Ledger, Limit, compose
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.reading import problems


class PolicyError(FederationError):
    """The site's policy forbids it. Nothing is spent or sent."""


class Policy(BaseModel):
    """Read from a file on the site's own disk. A missing key allows nothing beyond its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    epsilon_per_round: float = Field(gt=0, description="largest budget for one round")
    epsilon: float = Field(gt=0, description="largest budget over all rounds of all runs")
    delta: float = Field(1e-5, gt=0, lt=1)
    routes: tuple[str, ...] = ("shuffler", "shards")
    tasks: tuple[str, ...] = Field(description="data sets and tasks that may be trained on, by name")
    code: tuple[str, ...] = Field((), description="SHA-256 of task code that may run here without being accepted")
    noise: bool = Field(True, description="whether updates must be privatised")
    audit: bool = Field(False, description="whether clean updates may be recorded, to score attacks")
    units: tuple[str, ...] = Field(("site",), description="allowed units: the whole site, or single records")

    @classmethod
    def load(cls, path: Path) -> Policy:
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"policy {path}: cannot be read ({' '.join(str(error).split())})") from None
        except ValidationError as error:
            raise ConfigError(f"policy {path}: {problems(error, cls)}") from None

    def check(self, federation: Federation, site: str) -> None:
        """Raise if a federation asks for more than this policy allows."""
        for problem in self._problems(federation, federation.site(site)):
            raise PolicyError(f"policy: {problem}")

    def check_charge(self, *charges: Charge) -> None:
        """Raise if a round costs more than this policy allows, at its own delta and whatever the config says."""
        epsilon, most = compose([*charges], self.delta), self.epsilon_per_round
        if epsilon > most:
            at = f"epsilon {epsilon:.4g} per round at delta {self.delta:g}"
            raise PolicyError(f"policy: {at} is more than the {most:g} allowed here")

    def _problems(self, federation: Federation, site: Site) -> Iterator[str]:
        route, task, unit = federation.route.kind, federation.task.label, federation.unit
        if route not in self.routes:
            yield f"route {route!r} is not allowed here; allowed: {', '.join(self.routes)}"
        if task not in self.tasks:
            yield f"task {task!r} is not allowed here; allowed: {', '.join(self.tasks)}"
        if federation.reproducible and self.noise:
            yield "a reproducible run is not private, and this site requires noise"
        if federation.audit and not self.audit:
            yield "audit is not allowed here, because it records updates without noise; use false"
        if unit is None and self.noise:
            yield "updates must be privatised here, but privatise.kind is none"
        if federation.sites_evaluate and federation.evaluate.epsilon is None and self.noise:
            yield "counts of held-out records must have noise here; set evaluate.epsilon or evaluate: server"
        if unit is not None and unit not in self.units:
            yield f"{federation.privatise.kind} protects a {unit}; allowed: {', '.join(self.units)}"
        if unit is not None and site.epsilon is not None and site.epsilon > self.epsilon_per_round:
            yield f"epsilon {site.epsilon:g} per round is more than the {self.epsilon_per_round:g} allowed here"
        if unit is not None and site.epsilon_total is not None and site.epsilon_total > self.epsilon:
            yield f"epsilon_total {site.epsilon_total:g} is more than the {self.epsilon:g} allowed here over all runs"


def open_ledger(federation: Federation, site: str, state: Path) -> Ledger:
    """The ledger in a site's own folder: it keeps to the site's policy and to its `epsilon_total`, where there is one.

    Without either it only records.
    """
    config, usual = federation.site(site), federation.privatise.at_delta
    assert usual is not None  # a federation without budgets has no ledgers
    limits = [] if config.epsilon_total is None else [Limit(config.epsilon_total, usual)]
    if config.policy:
        policy = Policy.load(config.policy)
        limits.append(Limit(policy.epsilon, policy.delta))
    first, *further = sorted(limits) or [Limit(gaussian.LARGEST_EPSILON, usual)]
    return Ledger(state / "ledger.jsonl", *first, site, further)
