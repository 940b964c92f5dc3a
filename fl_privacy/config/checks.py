"""What the parts of a federation demand of each other: each check yields what is wrong and how to fix it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_privacy.config import evaluate
from fl_privacy.tasks.catalog import MODELS

if TYPE_CHECKING:
    from fl_privacy.config import Federation


def _numbers(f: Federation) -> Iterator[str]:
    for twice in sorted(name for name, count in Counter(f.site_names).items() if count > 1):
        yield f"sites: {twice!r} is there twice; give every site its own name"
    if f.cohort > len(f.sites):
        yield f"cohort: {f.cohort} is more than the {len(f.sites)} sites; use at most {len(f.sites)}"
    if f.quorum > f.cohort:
        yield f"quorum: {f.quorum} is more than the cohort of {f.cohort}; lower it"
    if f.floor > f.cohort:
        yield f"route.n_min: {f.floor} is more than the cohort of {f.cohort}, so nothing could be released; lower it"
    if f.floor > f.quorum:
        yield f"quorum: {f.quorum} is below route.n_min {f.floor}, so such a round would be thrown away; raise it"


def _sites(f: Federation) -> Iterator[str]:
    yield from _budgets(f)
    if f.rounds_per_ticket > 1 and not f.route.long_tickets:
        yield f"rounds_per_message: {f.rounds_per_message} needs a middleware, and route.kind is server; use auto"
    for site in f.sites:
        if site.behaviour is not None and not f.audit:
            yield f"sites.behaviour: {site.name!r} misbehaves, which needs audit: true; add it or remove the key"
        elif site.behaviour is not None:
            yield from site.behaviour.problems(f)
    if f.canaries is not None and not f.audit:
        left_out = f"sites would leave out about {f.canaries.fraction / 2:.0%} of their records"
        yield f"canaries: {left_out}, which needs audit: true; add it or remove the key"


def _budgets(f: Federation) -> Iterator[str]:
    """One form for all sites: labels, buckets and weights compare their numbers."""
    kind = f.privatise.kind
    total = next((site.name for site in f.sites if site.epsilon_total is not None), None)
    for site in f.sites:
        if f.unit is not None and site.budget is None:
            fix = "give every site epsilon (per round), or every site epsilon_total (of all rounds)"
            yield f"sites.epsilon: {site.name!r} has no budget and privatise.kind is {kind!r}; {fix}"
        if total is not None and site.epsilon is not None:
            both = "it has both" if site.epsilon_total is not None else f"{total!r} has epsilon_total"
            yield f"sites.epsilon: {site.name!r} has one per round, and {both}; use one form for all sites"
        if f.unit is None and site.budget is not None:
            key = "epsilon" if site.epsilon_total is None else "epsilon_total"
            fix = f"no noise is added; use ldp or dpsgd, or remove {key}"
            yield f"sites.{key}: {site.name!r} has {site.budget:g}, and privatise.kind is none: {fix}"


def _task(f: Federation) -> Iterator[str]:
    if f.task.is_own:
        return
    task, data = f.task, f.task.data_set
    kind, centres = task.partition.kind, data.sites
    if not MODELS[task.model].take(data.shape, data.classes):
        yield f"task.model: {task.model!r} does not fit the {task.dataset} data; use mlp"
    if task.hidden is not None and task.model != "mlp":
        yield f"task.hidden: only the mlp has hidden widths, and task.model is {task.model!r}; remove it"
    if task.train.crop and (len(data.shape) != 3 or min(data.shape[1:]) < task.train.crop):
        yield f"task.train.crop: {task.train.crop} does not fit {task.dataset} records of shape {data.shape}; remove it"
    for field in ("label_smoothing", "instahide"):
        if getattr(task.train, field) and not data.classes:
            yield f"task.train.{field}: {task.dataset} has no classes; remove it"
    if kind == "by-site" and not data.own_sites:
        yield f"task.partition.kind: {task.dataset} has no sites of its own; use iid or dirichlet"
    if kind in ("iid", "dirichlet", "coupled") and not data.pooled:
        yield f"task.partition.kind: {kind} deals out a benchmark, and {task.dataset} is read at each site; use by-site"
    if task.by_site and centres and len(f.sites) > len(centres):
        yield f"sites: {task.dataset} by-site has {len(centres)}, not {len(f.sites)}; use at most {len(centres)}"
    if kind == "coupled" and task.partition.position == "degree" and f.topology is None:
        yield "task.partition.position: degree needs a graph; add topology: {kind: star}, say, or use organisation"
    if kind == "coupled" and task.partition.sizes is not None and len(task.partition.sizes) != len(f.sites):
        yield f"task.partition.sizes: {len(task.partition.sizes)} values for {len(f.sites)} sites; give one per site"
    if kind in ("dirichlet", "coupled") and not data.classes:
        yield f"task.partition.kind: {task.dataset} has no classes to skew; use by-site or iid"
    yield from data.problems(f)


def _hosts(f: Federation) -> Iterator[str]:
    for role, name in f.route.parties():
        if f.hosts is not None and f.hosts.of(role, name) is None:
            yield f"hosts: {name} has no address, and route.kind is {f.route.kind!r}; add its host:port"


def problems(f: Federation) -> Iterator[str]:
    """What is wrong with a federation: first its parts together, then what each choice demands."""
    for check in (_numbers, _sites, _task, _hosts):
        yield from check(f)
    if f.topology is not None:
        yield from f.topology.problems(f)
    for choice in (f.route, f.combine, *f.steps):
        yield from choice.problems(f)
    yield from evaluate.problems(f)
    yield from f.stop.problems(f)
