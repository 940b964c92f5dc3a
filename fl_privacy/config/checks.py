"""What the parts of a federation demand of each other: each check returns what is wrong and how to fix it, or None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_privacy.tasks.catalog import TASKS, fits

if TYPE_CHECKING:
    from fl_privacy.config import Federation


def _names_differ(f: Federation) -> str | None:
    twice = sorted(name for name, count in Counter(f.site_names).items() if count > 1)
    return f"sites: {twice[0]!r} is there twice; give every site its own name" if twice else None


def _cohort_fits(f: Federation) -> str | None:
    if f.cohort > len(f.sites):
        return f"cohort: {f.cohort} is more than the {len(f.sites)} sites; use at most {len(f.sites)}"
    return None


def _quorum_fits(f: Federation) -> str | None:
    return f"quorum: {f.quorum} is more than the cohort of {f.cohort}; lower it" if f.quorum > f.cohort else None


def _floor_fits(f: Federation) -> str | None:
    if f.floor > f.cohort:
        return f"route.n_min: {f.floor} is more than the cohort of {f.cohort}, so nothing could be released; lower it"
    if f.floor > f.quorum:
        return f"quorum: {f.quorum} is below route.n_min {f.floor}, so such a round would be thrown away; raise it"
    return None


def _budgets_fit(f: Federation) -> str | None:
    missing = [site.name for site in f.sites if site.epsilon is None]
    if f.unit is not None and missing:
        return f"sites.epsilon: {missing[0]!r} has none and privatise.kind is {f.privatise.kind!r}; give every site one"
    return None


def _messages_fit(f: Federation) -> str | None:
    if f.rounds_per_ticket > 1 and not f.route.long_tickets:
        return f"rounds_per_message: {f.rounds_per_message} needs a middleware, and route.kind is server; use auto"
    return None


def _behaviours_fit(f: Federation) -> str | None:
    bad = [site.name for site in f.sites if site.behaviour is not None]
    if bad and not f.audit:
        return f"sites.behaviour: {bad[0]!r} misbehaves on purpose, which needs audit: true; add it or remove the key"
    return None


def _model_fits(f: Federation) -> str | None:
    if not fits(f.task.dataset, f.task.model):
        return f"task.model: {f.task.model!r} does not fit the {f.task.dataset} data; use mlp"
    if f.task.hidden is not None and f.task.model != "mlp":
        return f"task.hidden: only the mlp has hidden widths, and task.model is {f.task.model!r}; remove it"
    centres = TASKS.get(f.task.dataset).sites
    if f.task.partition.kind == "by-site":
        if not centres:
            return f"task.partition.kind: {f.task.dataset} has no sites of its own; use iid or dirichlet"
        if len(f.sites) > len(centres):
            return f"sites: {f.task.dataset} by-site has {len(centres)}, not {len(f.sites)}; use at most {len(centres)}"
    if f.task.partition.kind == "dirichlet" and TASKS.get(f.task.dataset).forecast:
        return f"task.partition.kind: {f.task.dataset} has no classes to skew; use by-site or iid"
    return None


def _hosts_fit(f: Federation) -> str | None:
    for role, name in f.route.parties():
        if f.hosts is not None and f.hosts.of(role, name) is None:
            return f"hosts: {name} has no address, and route.kind is {f.route.kind!r}; add its host:port"
    return None


CHECKS = (
    _names_differ,
    _cohort_fits,
    _quorum_fits,
    _floor_fits,
    _budgets_fit,
    _messages_fit,
    _behaviours_fit,
    _model_fits,
    _hosts_fit,
)


def problems(f: Federation) -> Iterator[str]:
    """What is wrong with a federation: first its parts together, then what each choice demands."""
    yield from (problem for check in CHECKS if (problem := check(f)) is not None)
    for choice in (f.route, f.combine, *f.steps):
        yield from choice.problems(f)
