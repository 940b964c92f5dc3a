"""What the parts of a federation demand of each other; a rule tells what is wrong, and how to mend it, or None."""

from __future__ import annotations

from collections import Counter

from fl_privacy.config import Dpsgd, Federation, ServerRoute, ShardsRoute, ShufflerRoute


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
    private = f.privatise.kind != "none"
    missing = [site.name for site in f.sites if site.epsilon is None]
    if private and missing:
        return f"sites.epsilon: {missing[0]!r} has none and privatise.kind is {f.privatise.kind!r}; give every site one"
    if isinstance(f.route, ShufflerRoute) and f.route.buckets != "none" and not private:
        return f"route.buckets: {f.route.buckets!r} needs budgets, and privatise.kind is none; use ldp or dpsgd"
    if f.combine.weights != "equal" and not private:
        return f"combine.weights: {f.combine.weights!r} needs budgets, and privatise.kind is none; use equal"
    if f.combine.weights != "equal" and isinstance(f.route, ShardsRoute):
        return f"combine.weights: {f.combine.weights!r} is not to be had with shards; use equal"
    return None


def _records_fit(f: Federation) -> str | None:
    """With noise inside the training, what it comes to on an update depends on the site's size, which is its own."""
    if not isinstance(f.privatise, Dpsgd):
        return None
    if isinstance(f.route, ShufflerRoute) and f.route.buckets == "levelled":
        return "route.buckets: 'levelled' needs the noise of an update, which dpsgd adds in training; use published"
    if f.combine.weights == "precision":
        return "combine.weights: 'precision' needs the noise of an update, which dpsgd adds in training; use epsilon"
    return None


def _messages_fit(f: Federation) -> str | None:
    if f.rounds_per_message > 1 and isinstance(f.route, ServerRoute):
        return f"rounds_per_message: {f.rounds_per_message} needs a middleware, and route.kind is server; use 1"
    return None


def _model_fits(f: Federation) -> str | None:
    from fl_privacy.tasks.catalog import CATALOG, fits

    if not fits(f.task.dataset, f.task.model):
        return f"task.model: {f.task.model!r} does not fit the {f.task.dataset} data; use mlp"
    if f.task.hidden is not None and f.task.model != "mlp":
        return f"task.hidden: only the mlp has hidden widths, and task.model is {f.task.model!r}; remove it"
    centres = CATALOG[f.task.dataset].sites
    if f.task.partition.kind == "by-site":
        if not centres:
            return f"task.partition.kind: {f.task.dataset} has no sites of its own; use iid or dirichlet"
        if len(f.sites) > len(centres):
            return f"sites: {f.task.dataset} by-site has {len(centres)}, not {len(f.sites)}; use at most {len(centres)}"
    if f.task.partition.kind == "dirichlet" and CATALOG[f.task.dataset].forecast:
        return f"task.partition.kind: {f.task.dataset} has no classes to skew; use by-site or iid"
    return None


def _hosts_fit(f: Federation) -> str | None:
    if f.hosts is None:
        return None
    if isinstance(f.route, ShufflerRoute) and f.hosts.shuffler is None:
        return "hosts.shuffler: missing, and route.kind is 'shuffler'; add its host:port"
    if isinstance(f.route, ShardsRoute):
        if len(f.hosts.aggregators) != f.route.aggregators:
            return f"hosts.aggregators: {len(f.hosts.aggregators)} given, and the route has {f.route.aggregators}"
        if f.hosts.evaluator is None:
            return "hosts.evaluator: missing, and route.kind is 'shards'; add its host:port"
    return None


RULES = (
    _names_differ,
    _cohort_fits,
    _quorum_fits,
    _floor_fits,
    _budgets_fit,
    _records_fit,
    _messages_fit,
    _model_fits,
    _hosts_fit,
)
