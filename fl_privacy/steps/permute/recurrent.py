"""Recurrent layers as torch calls them: all layers and directions in one function.

The hidden units of a layer move alike in each gate, in the recurrent matrix and in what the next layer reads; every
direction of every layer has an order of its own (Tazza, Section 4).
"""

from __future__ import annotations

from torch import Tensor

from fl_privacy.steps.permute.groups import Axis, fix, fixed, free, side_by_side, unite
from fl_privacy.steps.permute.trace import Axes, Call, Handler

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(call: Call) -> tuple[Axes, ...]:
    """(output, last states) of the layers; called as (input, states, weights, has_biases, layers, ..., batch_first)."""
    x, states, weights, biases, layers, _, _, both, batch_first = call.args
    if not isinstance(weights, tuple | list):
        raise call.refuse("reads packed sequences; pad them")
    _start_at_zero(call, states)
    directions, gates = 2 if both else 1, GATES[call.name]
    per = len(weights) // (layers * directions)
    if per not in (2, 4) or (per == 4) is not bool(biases):
        raise call.refuse("projects its states; remove proj_size")
    axes = call.axes(x)
    batch, steps = (axes[0], axes[1]) if batch_first else (axes[1], axes[0])
    fix(steps)
    into, last = axes[-1], list[Axis]()
    for layer in range(layers):
        hidden = list[Axis]()
        for direction in range(directions):
            first = (layer * directions + direction) * per
            hidden.append(_layer(call, list(weights[first : first + per]), into, gates))
        last += hidden
        into = side_by_side(hidden)
    outer = [batch, steps] if batch_first else [steps, batch]
    state = _numbered(last, batch)
    return ([*outer, into], *([state] * (len(call.result) - 1)))


def _layer(call: Call, weights: list[Tensor], into: Axis, gates: int) -> Axis:
    """One direction of one layer: the axis of its hidden units."""
    hidden = free(weights[1].shape[1], "hidden")
    gated = [*fixed(gates, "gates"), *hidden]
    for place, weight in enumerate(weights):
        axes = call.axes(weight)
        unite(axes[0], gated)
        if len(axes) > 1:
            unite(axes[1], into if place == 0 else hidden)
    return hidden


def _numbered(last: list[Axis], batch: Axis) -> Axes:
    """The last states: layers and directions, the batch, and hidden units that depend on the first."""
    axis = side_by_side(last)
    return [axis[:1], batch, axis[1:]] if len(last) > 1 else [[], batch, axis]


def _start_at_zero(call: Call, states: Tensor | tuple[Tensor, ...]) -> None:
    for state in states if isinstance(states, tuple | list) else (states,):
        if state.any():
            raise call.refuse("starts from states that are not zero; start from none")


RECURRENT: dict[str, Handler] = dict.fromkeys(GATES, recurrent)
