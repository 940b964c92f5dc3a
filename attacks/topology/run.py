"""TADI: four channels, and what each says of the share of a sensitive class at every site (Section IV, Algorithm 1).

A1 has the parameters, A2-topo the site's place in the graph too, A2-org its organisation, A2-full both. Beside the
paper's features and shadows stand stronger ones: `raw` features keep directions of updates, and `adaptive` shadows
train from the target's own models under each site's own noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from attacks.common.knowledge import Knowledge
from attacks.topology import positions, priors
from attacks.topology.features import Book, Features
from attacks.topology.looks import Look, sights
from attacks.topology.regressors import predict
from attacks.topology.shadows import Corpus, Plan, corpus
from attacks.topology.unmix import unmixed
from fl_privacy.config import Federation
from fl_privacy.tasks.workload import layout_of
from fl_privacy.transcript.read import View
from fl_privacy.vector import Vector

Array = NDArray[np.float64]
CHANNELS = {"a1": (False, False), "a2_topo": (True, False), "a2_org": (False, True), "a2_full": (True, True)}
POSITION = {"topo": (True, False), "org": (False, True)}  # no update at all
DEFAULT = "lightgbm"


@dataclass(frozen=True)
class Way:
    """A corpus, features and a regressor; what it is called in measures, where it is not the paper's."""

    plan: Plan
    raw: bool
    regressor: str

    @property
    def label(self) -> str:
        named = [
            "" if self.plan.prior == priors.MATCHED else self.plan.prior,
            "adaptive" if self.plan.adaptive else "",
            "raw" if self.raw else "",
            "" if self.regressor == DEFAULT else self.regressor,
        ]
        return "_".join(part for part in named if part)


@dataclass(frozen=True)
class Findings:
    """`guesses[label, channel]`: p_i of every site; `prior[label]`: what the shadows' mean alone would say.

    `unmixed[round]` are the updates that unequal noise lets an observer pick out of a shuffled bucket.
    """

    sites: tuple[str, ...]
    guesses: Mapping[tuple[str, str], Array]
    prior: Mapping[str, float]
    unmixed: Mapping[int, NDArray[np.float32]]
    notes: tuple[str, ...]
    seed: int


def ways(federation: Federation) -> Iterator[Way]:
    """What is tried: the paper's with all regressors, then other priors and stronger features."""
    matched = Plan(priors.MATCHED)
    for regressor in (DEFAULT, "mlp", "ridge"):
        yield Way(matched, False, regressor)
    for plan in (matched, Plan(priors.MATCHED, adaptive=True)):
        for regressor in (DEFAULT, "ridge"):
            yield Way(plan, True, regressor)
    if priors.MISMATCHED in priors.kinds(federation):
        for raw, regressor in ((False, DEFAULT), (True, "ridge")):
            yield Way(Plan(priors.MISMATCHED), raw, regressor)


def examine(views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
    """The attack as these parties, all colluding, make it."""
    federation = knowledge.federation
    if federation.task.is_own or not federation.task.data_set.classes:
        raise Unsuitable("task: topology asks for the share of a class; use a data set of ours that has classes")
    layout = layout_of(federation)
    book, looks, starts = Book(layout, positions.neighbours(federation)), list[Look](), list[Vector]()
    picked, noise = dict[int, NDArray[np.float32]](), deviations(federation)
    for sight in sights(views, federation, knowledge.models, layout.size):
        book.add(sight.model, sight.rows, sight.look.there)
        looks.append(sight.look)
        starts.append(sight.model)
        if noise is not None and (rows := _shuffled(views, federation, sight.look, layout.size)) is not None:
            picked[sight.look.round] = unmixed(rows, noise)
    target, guesses, prior = book.features(), dict[tuple[str, str], Array](), dict[str, float]()
    for way in ways(federation):
        found = corpus(way.plan, federation, lambda: knowledge.proxy, looks, starts, seed, knowledge.progress)
        knowledge.progress(f"topology, {way.label or 'as published'}")
        prior[way.label] = float(found.p.mean())
        for channel, exposed in CHANNELS.items():
            guesses[way.label, channel] = _guess(way, exposed, federation, found, target, seed)
        for channel, exposed in POSITION.items() if way.label in ("", "mismatched") else ():
            guesses[way.label, channel] = _guess(way, exposed, federation, found, None, seed)
    notes = [] if any(look.own for look in looks) else ["a1: no site's own update was seen, only a mean it is in"]
    return Findings(federation.site_names, guesses, prior, picked, tuple(notes), seed)


def _guess(
    way: Way, exposed: tuple[bool, bool], federation: Federation, found: Corpus, target: Features | None, seed: int
) -> Array:
    """The sites' p_i by one channel; without `target` by position alone."""
    places = [positions.structural(federation)] if exposed[0] else []
    places += [positions.organisational(federation)] if exposed[1] else []

    def columns(features: Features | None, place: NDArray[np.int64]) -> Array:
        parts = [part[place] for part in places]
        if features is not None:
            parts.append(features.published)
            parts += [features.raw] if way.raw else []
            parts += [features.lateral] if exposed[0] else []
        return np.concatenate(parts, axis=1)

    shadows = columns(found.features if target is not None else None, found.place)
    asked = columns(target, np.arange(len(federation.sites)))
    return predict(way.regressor, shadows, found.p, asked, seed)


def deviations(federation: Federation) -> Array | None:
    """The noise per parameter of every site's update, up to a factor that all share; None where nobody can know it."""
    found = federation.privatise.deviations(federation)
    return None if found is None else np.array(found)


def _shuffled(
    views: Mapping[str, View], federation: Federation, look: Look, parameters: int
) -> NDArray[np.float32] | None:
    """The rows of a bucket with all sites, mixed by parameter; None where rows are sums or have names."""
    view = views.get("server")
    whole = any(len(group) == look.sites for group in look.mixed)
    if view is None or not whole or federation.route.shows != "rows" or federation.route.mixed_by != "parameter":
        return None
    arrays = view.round(look.round).arrays
    if "updates" not in arrays or len(arrays["updates"]) != look.sites:
        return None
    return np.asarray(federation.coding.decoder(parameters).decode(arrays["updates"], [], look.round), np.float32)
