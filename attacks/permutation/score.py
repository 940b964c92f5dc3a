"""The share of indices that the attacker put where they belong; by chance one index per order is right."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from attacks.common.attack import Unsuitable
from attacks.common.measure import Measure, Scores
from attacks.common.truth import Truth
from attacks.permutation.factors import Factors, Order, between
from attacks.permutation.invariants import linear
from attacks.permutation.run import STRONGEST, Findings

Orders = Mapping[int, Order]


def score(found: Findings, truth: Truth) -> Scores:
    """Relative orders by method, absolute ones where the server held the plain model, and what one site gives away."""
    factors, federation = found.factors, truth.federation
    honest = [site.name for site in federation.sites if site.behaviour is None and site.name in truth.sites]
    orders = {site: true_orders(factors, truth, site) for site in honest}
    rounds = sorted({round for one in orders.values() for round in one})
    if not rounds:
        raise Unsuitable("truth: no honest site recorded where its coordinates went; record the run again")
    right = {round: next(one[round] for one in orders.values() if round in one) for round in rounds}
    relative = dict(relative_orders(factors, right, found.plain_start))
    measures = dict[str, Measure]()
    for name, guesses in found.relative.items():
        measures |= of_kind(name, factors, guesses, relative)
    for name, guesses in found.absolute.items():
        measures |= of_kind(name, factors, guesses, right)
    measures |= colluding(factors, orders)
    curves = dict[str, dict[str, float]]()
    for kind, groups in kinds(factors).items():
        by_round = {
            str(round): correct(factors, guess, relative[round], groups)
            for round, guess in found.relative[STRONGEST].items()
            if round in relative
        }
        curves |= {f"{kind}, {STRONGEST}, by round": by_round} if by_round else {}
    return Scores(measures, curves, notes=list(notes(found)))


def true_orders(factors: Factors, truth: Truth, site: str) -> dict[int, Order]:
    """By round the order of what a site sent, relative to the plain model."""
    return {round: factors.order_of(coordinates) for round, coordinates in truth.orders(site).items()}


def relative_orders(factors: Factors, right: Orders, plain_start: bool) -> Iterator[tuple[int, Order]]:
    """By round the order relative to the model that the sites received, which is in the order of the round before."""
    for round, order in right.items():
        if round == 1 and plain_start:
            yield round, order
        elif round - 1 in right:
            yield round, between(order, right[round - 1])


def kinds(factors: Factors) -> dict[str, frozenset[int]]:
    """Positions of a record and hidden units apart, where there are both."""
    return {name: groups for name, groups in (("inputs", factors.inputs), ("hidden", factors.hidden)) if groups}


def of_kind(name: str, factors: Factors, guesses: Orders, right: Orders) -> dict[str, Measure]:
    """The mean over rounds; in groups the first round and the last one that was scored."""
    rounds, made = sorted(guesses.keys() & right.keys()), dict[str, Measure]()
    for kind, groups in kinds(factors).items() if rounds else ():
        if not groups <= guesses[rounds[0]].keys():
            continue  # shadow models say nothing of hidden units
        values = [correct(factors, guesses[round], right[round], groups) for round in rounds]
        made[f"{name}_{kind}"] = Measure(
            float(np.mean(values)), chance(factors, groups), {"first": values[0], "last": values[-1]}
        )
    return made


def colluding(factors: Factors, orders: Mapping[str, Orders]) -> dict[str, Measure]:
    """The share of indices of another site's models that a colluding site knows as its own: the worst pair."""
    made = {}
    for kind, groups in kinds(factors).items():
        shares = [
            np.mean([correct(factors, own[round], other[round], groups) for round in both])
            for site, own in orders.items()
            for name, other in orders.items()
            if name != site and (both := own.keys() & other.keys())
        ]
        if shares:
            made[f"colluding_{kind}"] = Measure(float(min(shares)), chance(factors, groups))
    return made


def correct(factors: Factors, guess: Order, right: Order, groups: Collection[int]) -> float:
    hits = sum(int((guess[group] == right[group]).sum()) for group in groups)
    return hits / sum(map(factors.size, groups))


def chance(factors: Factors, groups: Collection[int]) -> float:
    """A random permutation has one fixed point on average."""
    return len(groups) / sum(map(factors.size, groups))


def notes(found: Findings) -> Iterator[str]:
    if not found.factors.inputs:
        yield "inputs: no position of a record moves in this model, so that there is nothing to find"
    if not found.plain_start:
        yield "absolute: the server never held the plain model; hidden orders are relative to the round before"
        if not linear(found.factors):
            yield "products, moments: these are for chains of linear layers with an input order"
