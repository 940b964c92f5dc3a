"""How strongly the evidence of every round says that a canary took part. Nothing here knows which did.

Statistics per canary and round, larger if it took part:

- `loss`: minus its loss under the model that the site trained;
- `cosine`: of the site's update with the step that the canary's own gradient asks for;
- `likelihood`: its weight when the site's canaries together explain the update, in standard deviations above that of
  sites without it (shadows.py).

Coordinates that nobody saw are left out of these; where a whole model is needed, they are as in the new global model.
Under shifted compression, those that a message is about are known exactly, because references can be tracked. The code
of ERIS's authors takes unseen coordinates as zeros and tracks no reference, which is the `_zeros` variant.

`last_model` is what the last global model alone says, whoever observes: minus a canary's loss under it (ERIS's minimal
leakage).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attacks.common.knowledge import Knowledge
from attacks.membership.peers import observe
from attacks.membership.probe import Probe
from attacks.membership.seen import Part, Seen, Vector
from attacks.membership.shadows import Shadows
from fl_privacy.tasks.data import Dataset
from fl_privacy.transcript.read import View

MOST_NUMBERS = 2**26  # gradient entries held at once
RIDGE = 0.1  # of the squared norm of a gradient
LEAST = 2  # shadows that make a likelihood
FEW = 8  # shadows, below which a canary has no deviation of its own

Array = NDArray[np.float64]
ZEROS, LAST_MODEL = "_zeros", "last_model"
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Findings:
    """`evidence[name][r, c]` is about canary c in the r-th round, NaN where nothing was seen of its site.

    `overall[name][c]` is about canary c after all rounds; `sites[c]` names its site.
    """

    rounds: tuple[int, ...]
    sites: NDArray[np.str_]
    evidence: Mapping[str, Array]
    overall: Mapping[str, Array]
    notes: tuple[str, ...]
    seed: int


def examine(views: Mapping[str, View], knowledge: Knowledge, seed: int) -> Findings:
    """The attack as these parties, all colluding, make it."""
    canaries, probe = knowledge.canaries, Probe(knowledge.federation)
    sites = np.array([name for name, records in canaries.items() for _ in range(len(records))])
    shadows = Shadows(knowledge, probe.parameters, sorted({n for view in views.values() for n in view.rounds if n}))
    rounds, rows = list[int](), list[dict[str, Array]]()
    for seen in observe(views, knowledge.federation, knowledge.models, probe.parameters):
        knowledge.progress(f"membership, round {seen.round}")
        row: dict[str, Array] = {}
        for site in (name for name in canaries if name in seen.parts):
            for name, values in _of_site(site, seen, canaries[site], probe, shadows).items():
                row.setdefault(name, np.full(len(sites), np.nan))[sites == site] = values
        rounds.append(seen.round)
        rows.append(row)
    last = knowledge.models.after(rounds[-1])
    if last is not None:
        rows[-1][LAST_MODEL] = np.concatenate([-probe.losses(last, records) for records in canaries.values()])
    names, nothing = dict.fromkeys(name for row in rows for name in row), np.full(len(sites), np.nan)
    evidence = {name: np.stack([row.get(name, nothing) for row in rows]) for name in names}
    overall = {name: summary(values, sites) for name, values in evidence.items()}
    return Findings(tuple(rounds), sites, evidence, overall, tuple(shadows.notes), seed)


def _of_site(site: str, seen: Seen, records: Dataset, probe: Probe, shadows: Shadows) -> dict[str, Array]:
    """All statistics of one site's canaries in one round."""
    part = seen.parts[site]
    thin = part.thinned(max(1, MOST_NUMBERS // max(1, len(records))))
    known, sizes = list[Vector](), list[Array]()
    for gradients in probe.gradients(seen.model, records):
        known.append(thin.of(gradients))
        sizes.append(norms(part.of(gradients)) / np.maximum(norms(gradients), TINY))
    pull, others = np.concatenate(known), shadows.of(site, seen, thin)
    found = {"loss": -probe.losses(completed(part, seen.model, seen.after), records)}
    found["cosine"] = cosines(pull, thin.values[None])[:, 0]
    if len(others) >= LEAST:
        explained = weights(pull, np.concatenate([thin.values[None], others]))
        found["likelihood"] = unusual(explained[:, 0], explained[:, 1:])
    if part.where is not None:
        bare = cosines(pull, thin.untracked().values[None])[:, 0]
        found["loss" + ZEROS] = -probe.losses(completed(part.untracked(), seen.model, None), records)
        found["cosine" + ZEROS] = bare * np.concatenate(sizes)
    return found


def completed(part: Part, model: Vector, after: Vector | None) -> Vector:
    """The model that a site trained: what was seen of it, and elsewhere the new global model, or else the old one."""
    if part.where is None:
        return np.asarray(model + part.values)
    whole = (model if after is None else after).copy()
    whole[part.where] = model[part.where] + part.values
    return whole


def cosines(gradients: Vector, updates: Vector) -> Array:
    """The cosine of every update (column) with the step against every gradient (row); 0 for a gradient of 0."""
    products = -(gradients @ updates.T).astype(np.float64)
    return np.asarray(products / np.maximum(norms(gradients)[:, None] * norms(updates)[None], TINY))


def weights(gradients: Vector, updates: Vector) -> Array:
    """The weight of every gradient (row) in the ridge regression of every update (column) on all unit gradients."""
    unit = gradients / np.maximum(norms(gradients), TINY)[:, None].astype(np.float32)
    gram = (unit @ unit.T).astype(np.float64) + RIDGE * np.eye(len(unit))
    return np.asarray(np.linalg.solve(gram, -(unit @ updates.T).astype(np.float64)))


def unusual(own: Array, others: Array) -> Array:
    """By how many standard deviations each statistic is above that of sites without the canary, one per column.

    This is offline LiRA (Carlini et al. 2022, 4.2). With few such sites, all canaries share one deviation.
    """
    spread = others.std(axis=1, ddof=1)
    if others.shape[1] < FEW:
        spread = np.full(len(own), np.sqrt(np.square(spread).mean()))
    return np.asarray((own - others.mean(axis=1)) / np.maximum(spread, TINY))


def summary(evidence: Array, sites: NDArray[np.str_]) -> Array:
    """The mean over the rounds; in each, canaries are compared with the others of their site."""
    relative = evidence.copy()
    for site in np.unique(sites):
        mine = evidence[:, sites == site]
        centre, spread = mine.mean(axis=1, keepdims=True), mine.std(axis=1, keepdims=True)
        relative[:, sites == site] = (mine - centre) / np.where(spread > 0, spread, 1.0)
    there = np.isfinite(relative)
    total, rounds = np.where(there, relative, 0.0).sum(axis=0), there.sum(axis=0)
    return np.where(rounds > 0, total / np.maximum(rounds, 1), np.nan)


def norms(rows: Vector) -> Array:
    return np.asarray(np.linalg.norm(rows, axis=1), np.float64)
