"""A site's own policy, which binds its worker regardless of the federation's config or the server's tickets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fl_privacy.config.federation import Federation, Site
from fl_privacy.dp import gaussian
from fl_privacy.dp.ledger import Charge, Ledger, Limit, compose
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.files import write_public
from fl_privacy.journal import beside
from fl_privacy.reading import NAME, PATTERNS, problems

LEDGER = "ledger.jsonl"
SHARED = "shared.head"  # in the folder of a site: how far the shared ledger had come when the site last used it
LOST = '"A lost ledger" in docs/privacy.md'


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
    allow_plain: bool = Field(False, description="whether updates and counts may leave without noise")
    allow_plain_counts: bool = Field(False, description="whether counts of held-out records may leave without noise")
    allow_record_counts: bool = Field(False, description="whether a site may tell how many records it trains on")
    min_cohort: int = Field(3, ge=1, description="fewest organisations that an update may be released with")
    min_mixes: int = Field(1, ge=1, description="fewest mixes that could put an update together if they colluded")
    approve_runs: bool = Field(False, description="whether each run needs `fl-privacy site approve`")
    audit: bool = Field(False, description="whether clean updates may be recorded, to score attacks")
    units: tuple[str, ...] = Field(("site",), description="allowed units: the whole site, or single records")
    confinement: Literal["required", "preferred"] = Field(
        "preferred", description="whether the site refuses to start where code of a run cannot be confined in full"
    )
    ledger: Path | None = Field(None, description="folder of a ledger that several kits share, named after their data")

    @field_validator("ledger")
    @classmethod
    def _named(cls, ledger: Path | None) -> Path | None:
        if ledger is not None and not ledger.is_absolute():
            raise ValueError("use an absolute path, which is the same for all kits")
        if ledger is not None and not re.fullmatch(NAME, ledger.name):
            raise ValueError(f"the last part of the path is the name of the data; {PATTERNS[NAME]}")
        return ledger

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
        if federation.reproducible and not self.allow_plain:
            yield "a reproducible run is not private, and this site requires noise (allow_plain is false)"
        if federation.audit and not self.audit:
            yield "audit is not allowed here, because it records updates without noise; use false"
        if unit is None and not self.allow_plain:
            yield "updates must be privatised here, but privatise.kind is none (allow_plain is false)"
        beside = set(federation.route.released_with(federation, site.name))
        if len({one.organisation or one.name for one in federation.sites if one.name in beside}) < self.min_cohort:
            where = "this federation" if len(beside) == len(federation.sites) else "this site's region"
            yield f"{where} has fewer than the {self.min_cohort} organisations that min_cohort demands"
        if (least := _mixes(federation)) < self.min_mixes and any(
            role == "mix" for role, _ in federation.route.parties()
        ):
            yield f"{least} of the mixes could put an update together, and min_mixes demands {self.min_mixes}"
        if federation.plain_counts and not (self.allow_plain or self.allow_plain_counts):
            yield "counts of held-out records must have noise here (allow_plain_counts is false); set evaluate.epsilon"
        if federation.combine.weights == "records" and not self.allow_record_counts:
            yield "the number of records stays here (allow_record_counts is false); set combine.weights to equal"
        if unit is not None and unit not in self.units:
            yield f"{federation.privatise.kind} protects a {unit}; allowed: {', '.join(self.units)}"
        if unit is not None and site.epsilon is not None and site.epsilon > self.epsilon_per_round:
            yield f"epsilon {site.epsilon:g} per round is more than the {self.epsilon_per_round:g} allowed here"
        if unit is not None and site.epsilon_total is not None and site.epsilon_total > self.epsilon:
            yield f"epsilon_total {site.epsilon_total:g} is more than the {self.epsilon:g} allowed here over all runs"


USED = "policy.used"  # in a site's state folder: a site that once had a policy never starts without one


def policy_file(federation: Federation, site: str, state: Path | None, trial: bool) -> Path | None:
    """The site's policy file. Only a trial, in which one person runs all sites, needs none."""
    path = federation.site(site).policy
    marker = state / USED if state else None
    if path is None and (not trial or (marker is not None and marker.exists())):
        fix = "write policy.yaml in the kit; `fl-privacy site policy KIT` prints one to start from"
        raise ConfigError(f"policy: site {site} has none, and nothing leaves a site without it; {fix}")
    if path is not None and marker is not None and not marker.exists():
        Policy.load(path)
        write_public(marker, b"")
    return path


def template(federation: Federation, site: str) -> str:
    """A policy that allows just this federation, for the site's operator to read, restrict and save."""
    unit, delta = federation.unit, federation.privatise.at_delta
    own, counts = federation.site(site), federation.evaluate.epsilon or 0
    each = (own.epsilon or own.epsilon_total or 1) + counts
    total = own.epsilon_total or each * federation.rounds
    counted = federation.combine.weights == "records"
    values = {
        "epsilon_per_round": (f"{each:g}", "largest budget for one round"),
        "epsilon": (f"{total:g}", "largest budget over all rounds of all runs"),
        "delta": (f"{delta or 1e-5:g}", "at which both hold, whatever the federation uses"),
        "tasks": (f"[{federation.task.label}]", "data sets and tasks that may be trained on"),
        "routes": (f"[{federation.route.kind}]", "how updates may travel"),
        "units": (f"[{unit or 'site'}]", "what the noise must protect: site, or record (weaker)"),
        "allow_plain": (str(unit is None).lower(), "whether updates and counts may leave without noise"),
        "allow_plain_counts": (str(federation.plain_counts).lower(), "whether counts of held-out records may do so"),
        "allow_record_counts": (str(counted).lower(), "whether aggregators may know how many records train"),
        "min_cohort": ("3", "fewest organisations that an update may be released with" + _smaller(federation)),
        "min_mixes": (str(_mixes(federation)), "fewest mixes that could put an update together if they colluded"),
        "audit": (str(federation.audit).lower(), "whether updates without noise may be recorded, to score attacks"),
        "approve_runs": ("false", "whether each run needs `fl-privacy site approve`"),
        "confinement": ("preferred", "or required: refuse to start where code of a run cannot be confined in full"),
    }
    return "".join(f"{key}: {value}  # {text}\n" for key, (value, text) in values.items())


def _smaller(federation: Federation) -> str:
    """What the default of `min_cohort` means in a federation whose rounds may have fewer."""
    fewest = min(federation.quorum, len({site.organisation or site.name for site in federation.sites}))
    return (
        f"; this federation also completes rounds of {fewest}, in which this site sends nothing" if fewest < 3 else ""
    )


def _mixes(federation: Federation) -> int:
    """Fewest mixes that could put an update together; 1 on routes without any."""
    mixes = {name for role, name in federation.route.parties() if role == "mix"}
    return min(
        (len(one.parties) for one in federation.route.trust(federation) if mixes.issuperset(one.parties)), default=1
    )


def requires_confinement(federation: Federation, site: str) -> bool:
    """Whether a site's policy requires that code which comes with a run is confined in full."""
    path = federation.site(site).policy
    return path is not None and Policy.load(path).confinement == "required"


def open_ledger(federation: Federation, site: str, state: Path) -> Ledger:
    """The ledger that a site spends from: it keeps to the site's policy and to its `epsilon_total`, if there are any.

    It is in the site's own folder, or where the policy says. Without policy and total it only records.
    """
    config, usual = federation.site(site), federation.privatise.at_delta
    assert usual is not None  # a federation without budgets has no ledgers
    policy = Policy.load(config.policy) if config.policy else None
    shared = policy.ledger if policy else None
    spender = f"{federation.name}/{site}" if shared else ""
    limits = [Limit(policy.epsilon, policy.delta)] if policy else []
    if config.epsilon_total is not None:
        limits.append(Limit(config.epsilon_total, usual, spender))
    limits.sort(key=lambda limit: (limit.spender, limit))
    (epsilon, delta, _), *further = limits or [Limit(gaussian.LARGEST_EPSILON, usual)]
    own, note = state / LEDGER, state / SHARED
    if shared is None:
        if note.exists():
            raise PolicyError(f"policy: names no ledger, but {note} says that one was used; name it, or see {LOST}")
        return Ledger(own, epsilon, delta, site, further)
    ledger = Ledger(shared / LEDGER, epsilon, delta, shared.name, further, spender, [note])
    if own.exists() or beside(own).exists():
        ledger.take_over(Ledger(own, epsilon, delta, site))
    return ledger


def ledger_files(federation: Federation, site: str, state: Path) -> tuple[Path, ...]:
    """The file that `open_ledger` opens, then those which show that it was there."""
    file = (shared_ledger(federation.site(site).policy) or state) / LEDGER
    return file, beside(file), state / SHARED


def shared_ledger(policy: Path | None) -> Path | None:
    """The folder of the ledger that a policy names; None also if the policy cannot be read: the site refuses that."""
    with suppress(ConfigError):
        return Policy.load(policy).ledger if policy else None
    return None
