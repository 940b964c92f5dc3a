"""The model that a federation starts from: made from its seed, or a file that its config pins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fl_privacy import vector
from fl_privacy.crypto import keys
from fl_privacy.errors import ConfigError
from fl_privacy.vector import Layout, Vector

if TYPE_CHECKING:
    from fl_privacy.config import Federation

SHOWN = 5  # differences in an error message
MANY = 50  # fewer parties than any model has parameters; to know how many it has takes torch


def initial(federation: Federation) -> Vector:
    """The first model. A file must be the pinned one, finite, and of the layout of the federation's model."""
    from fl_privacy.models import formats  # torch, which `check` may not need
    from fl_privacy.tasks.workload import model_of

    seeded, layout = vector.flatten(model_of(federation))
    if federation.init is None:
        return seeded
    path = federation.init.check("init")
    state = formats.read(path)
    if differing := differences(layout, vector.layout_of(state)):
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        what = "; ".join(differing[:SHOWN])
        raise ConfigError(f"init {path}: is not of this federation's layout: {what}{more}; use a model of its task")
    parts = vector.unflatten(*vector.flatten(state))
    ordered = np.concatenate([parts[name].reshape(-1) for name in layout.slices] or [seeded])
    if not np.isfinite(ordered).all():
        raise ConfigError(f"init {path}: has values that are not finite; use another model")
    return ordered


def started(federation: Federation) -> Vector:
    """What the server starts from, which may be less than the first model."""
    model = initial(federation)
    for step in federation.steps:
        model = step.first(model)
    return model


def drawn(federation: Federation, key: bytes) -> Vector:
    """A first model that nobody can make again without the key: all of torch's generator is set from it."""
    from fl_privacy.tasks import models
    from fl_privacy.tasks.workload import model_of

    with models.keyed(key):
        return vector.flatten(model_of(federation))[0]


def not_drawn(federation: Federation) -> list[str]:
    """Tensors of a first model that two keys give alike, such as those of a task that was trained before.

    Everybody has the task, and so knows them. Vectors, and tensors of one value, may be alike: norms and biases are.
    """
    from fl_privacy.tasks.workload import layout_of

    layout = layout_of(federation)
    one, other = (vector.unflatten(drawn(federation, keys.fresh()), layout) for _ in range(2))
    return [name for name, part in one.items() if part.ndim > 1 and np.ptp(part) and np.array_equal(part, other[name])]


def check(federation: Federation) -> None:
    """Refuse an unsuitable file or model, or more parties than it has parameters, before anything is started."""
    for step in federation.steps:
        step.check(federation)
    if federation.init is not None:
        initial(federation)
    if len(federation.route.parties()) > MANY:
        from fl_privacy.tasks.workload import layout_of

        federation.route.cost(federation, layout_of(federation).size)


def differences(wanted: Layout, found: Layout) -> list[str]:
    """In which tensors a layout is not the wanted one; their order does not matter."""
    ours = {entry.name: entry.shape for entry in wanted.entries}
    theirs = {entry.name: entry.shape for entry in found.entries}
    missing = [f"{name} {shape} is missing" for name, shape in ours.items() if name not in theirs]
    extra = [f"{name} {shape} is not in the model" for name, shape in theirs.items() if name not in ours]
    both = [(name, shape, theirs[name]) for name, shape in ours.items() if name in theirs]
    return [*(f"{name} is {its}, not {shape}" for name, shape, its in both if its != shape), *missing, *extra]
