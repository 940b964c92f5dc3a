"""What a run shows without an attack: what its updates cost, and how its model's weights are distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from attacks.common.fetched import Models
from fl_privacy.coding import FLOAT32
from fl_privacy.config import Federation
from fl_privacy.roles import ROLES
from fl_privacy.theory.cost import times
from fl_privacy.transcript import open_run
from fl_privacy.vector import Vector

RATE = 20e6  # bytes per second, as in ERIS's tables

Found = dict[str, dict[str, Any]]


def planned(federation: Federation) -> Found:
    """Bytes of a site's update, packed where its step says how, and the least seconds of a round (ERIS, Table 5)."""
    from fl_privacy.tasks.workload import layout_of  # takes torch

    parameters = layout_of(federation).size
    costs = federation.route.cost(federation, parameters)
    (sent,) = {cost.updates[1] for cost in costs if cost.party in ROLES and ROLES[cost.party].has_node}
    packed = next((size for step in federation.steps if (size := step.packed(parameters)) is not None), sent)
    at_least, whole = times(costs, RATE), FLOAT32.nbytes(parameters)
    seconds = at_least.updates * packed / sent + at_least.models
    return _plain(
        {"parameters": parameters, "upload_bytes": packed, "upload_share": packed / whole, "seconds": seconds}
    )


def ended(run: Path) -> Found:
    """The best round by the run's metric (ERIS, Figures 11 and 12), and the weights of the last model."""
    opened = open_run(run)
    model, best = Models(opened).after(opened.manifest["rounds"]), opened.manifest.get("best")
    found = {"best_round": best["round"]} if best else {}
    return _plain(found | (weights(model) if model is not None else {}))


def weights(model: Vector) -> dict[str, float]:
    """Spread and excess kurtosis (0 for a Gaussian) of a model's weights (ERIS, Figure 7), and the largest of them."""
    centred = model.astype(np.float64) - model.mean(dtype=np.float64)
    variance = float(np.square(centred).mean())
    kurtosis = float((centred**4).mean()) / max(variance, np.finfo(np.float64).tiny) ** 2 - 3
    largest = float(np.abs(model).max(initial=0))
    found = {"weight_mean": float(model.mean()), "weight_std": variance**0.5, "weight_kurtosis": kurtosis}
    return found | {"weight_largest": largest}


def _plain(values: dict[str, float]) -> Found:
    return {name: {"value": value, "chance": None} for name, value in values.items()}
