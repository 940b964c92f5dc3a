"""The noise of every site in `dpsgd` from public inputs: Fulcrum's allocation or an even one, with or without floors.

Every party can compute it from the config. A site computes its own noise again, and never uses less than its epsilon
demands for its own number of records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_privacy.dp import fulcrum, sampled
from fl_privacy.dp.ledger import compose
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.steps.base import Foretold
from fl_privacy.topology.leverage import Floats, on_size_grid

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.steps.privatise.dpsgd import Dpsgd

SHOWN = 10  # sites that a plan on a terminal lists


@dataclass(frozen=True)
class Shares:
    """Both allocations of a federation, and what each site's own epsilon demands; all by public inputs."""

    chosen: Floats  # sigma on the mean gradient, on the public grid
    balanced: fulcrum.Allocation
    even: fulcrum.Allocation  # uniform noise, under the same floors
    demands: tuple[sampled.Plan, ...]


def shares(terms: Dpsgd, federation: Federation) -> Shares:
    """Solve for all sites."""
    assert terms.budget is not None
    count, topology = len(federation.sites), federation.topology
    levers = np.zeros(count) if topology is None else topology.leverages(federation)
    demands = tuple(
        terms.plan(federation, size, site.budget or 0.0)
        for size, site in zip(sizes(federation), federation.sites, strict=True)
    )
    floor = np.array([plan.noise / plan.batch for plan in demands]) if terms.floor else None
    window = terms.window or federation.rounds * max(plan.steps for plan in demands)
    inputs: Any = (terms.budget, window, float(federation.task.train.batch_size), floor, federation.site_names)
    balanced, even = fulcrum.allocate(levers, *inputs), fulcrum.allocate(np.zeros(count), *inputs)
    chosen = balanced if terms.allocation == "fulcrum" else even
    return Shares(fulcrum.round_up(chosen.sigma), balanced, even, demands)


def sizes(federation: Federation) -> tuple[int, ...]:
    """What is public of the sites' numbers of records."""
    if federation.topology is not None:
        return federation.topology.sizes(federation)
    count = len(federation.sites)
    return (on_size_grid(federation.task.typical_records(count)),) * count


def own(terms: Dpsgd, federation: Federation, site: str, demand: sampled.Plan) -> sampled.Plan:
    """A site's plan: the allocated noise, raised to what its epsilon demands for its records, or refused below that."""
    sigma = float(shares(terms, federation).chosen[federation.site_names.index(site)])
    noise = fulcrum.noise_multiplier(sigma, demand.batch)
    if noise >= demand.noise:
        return replace(demand, noise=noise)
    if not terms.floor:
        fix = "set privatise.floor to true, or raise its epsilon"
        raise ConfigError(f"privatise.allocation: {_below(site, noise, demand)}; {fix}")
    # On the grid as well: a noise of its own would tell others the site's number of records.
    raised = float(fulcrum.round_up([demand.noise / demand.batch])[0])
    return replace(demand, noise=fulcrum.noise_multiplier(raised, demand.batch))


def weakest(terms: Dpsgd, federation: Federation, budget: float) -> sampled.Plan:
    """By public inputs, the plan of the site with the least noise on its mean gradient among those with this budget."""
    found = shares(terms, federation)
    everybody = zip(found.chosen, found.demands, federation.sites, strict=True)
    sigma, plan = min(((s, plan) for s, plan, site in everybody if site.budget == budget), key=lambda one: one[0])
    return replace(plan, noise=_noise(sigma, plan))


def problems(terms: Dpsgd, federation: Federation) -> Iterator[str]:
    """What is missing, and what no allocation can satisfy."""
    own_noise, extra = terms.allocation == "epsilon", {"budget": terms.budget, "window": terms.window}
    for name, value in extra.items():
        if own_noise and value is not None:
            yield f"privatise.{name}: {value:g} has no effect with allocation: epsilon; use fulcrum, or remove it"
    if own_noise:
        return
    if terms.budget is None:
        yield "privatise.budget: allocation needs the sum of all sites' variances; add budget: 0.5, say"
        return
    if terms.allocation == "fulcrum" and federation.topology is None:
        yield "privatise.allocation: fulcrum needs a leverage per site; add topology: {kind: ...}, or use uniform"
        return
    if any(site.budget is None for site in federation.sites):
        return  # another check says so
    try:
        found = shares(terms, federation)
    except FederationError as error:
        yield f"privatise.{error}"
        return
    for site, sigma, plan in zip(federation.sites, found.chosen, found.demands, strict=True):
        if not terms.floor and (noise := _raw(sigma, plan)) < plan.noise:
            yield f"privatise.floor: {_below(site.name, noise, plan)}; use true, or raise its epsilon or the budget"
            return


def foretold(terms: Dpsgd, federation: Federation) -> Foretold:
    """Per site: noise, its epsilon under both allocations, K*, and the term that holds beside it."""
    found = shares(terms, federation)
    window, batch = found.balanced.window, found.balanced.batch
    rounded = [fulcrum.round_up(each.sigma) for each in (found.balanced, found.even)]
    rows = []
    for at, (site, plan) in enumerate(zip(federation.sites, found.demands, strict=True)):
        both = [_epsilon(terms, federation, float(sigma[at]), plan) for sigma in rounded]
        sigma = float(found.chosen[at])
        rows.append(
            {
                "site": site.name,
                "leverage": float(found.balanced.leverage[at]),
                "sigma": sigma,
                "epsilon": both[0 if terms.allocation == "fulcrum" else 1],
                "epsilon_fulcrum": both[0],
                "epsilon_uniform": both[1],
                "paper_bound": float(fulcrum.paper_bound(sigma, window, batch, found.balanced.leverage[at])),
                "dataset_term": float(fulcrum.dataset_term(sigma, window, plan.batch)),
            }
        )
    facts = {"allocation": terms.allocation, "budget": terms.budget, "window": window, "batch": batch}
    facts |= {"paper_bound": found.balanced.bound, "paper_bound_uniform": found.balanced.uniform_bound}
    return Foretold({**facts, "sites": rows}, list(_lines(facts, rows)))


def _lines(facts: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        f"allocation {facts['allocation']}: variances on the mean gradient add up to {facts['budget']:g}, "
        f"{facts['window']} steps; paper_bound K* {facts['paper_bound']:.4g} nats, with uniform noise "
        f"{facts['paper_bound_uniform']:.4g}; it bounds nothing (docs/topology.md)"
    )
    for row in rows[:SHOWN]:
        yield (
            f"{row['site']}: leverage {row['leverage']:.3g}, sigma {row['sigma']:.3g}, epsilon after all rounds "
            f"{row['epsilon_fulcrum']:.3g} under fulcrum and {row['epsilon_uniform']:.3g} under uniform; paper_bound "
            f"{row['paper_bound']:.3g}, valid for a whole data set: {row['dataset_term']:.3g} nats beside its leverage"
        )
    if len(rows) > SHOWN:
        yield f"and {len(rows) - SHOWN} more sites, which --json lists"


def _epsilon(terms: Dpsgd, federation: Federation, sigma: float, plan: sampled.Plan) -> float:
    """After all rounds, as the ledger composes it."""
    noise = _noise(sigma, plan) if terms.floor else _raw(sigma, plan)
    return compose([replace(plan, noise=noise).charge] * federation.rounds, terms.delta)


def _noise(sigma: float, plan: sampled.Plan) -> float:
    return max(_raw(sigma, plan), plan.noise)


def _raw(sigma: float, plan: sampled.Plan) -> float:
    return fulcrum.noise_multiplier(float(sigma), plan.batch)


def _below(site: str, noise: float, demand: sampled.Plan) -> str:
    return f"{site!r} would get a noise multiplier of {noise:.3g}, and its own epsilon demands {demand.noise:.3g}"
