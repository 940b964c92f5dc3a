"""Tazza's weight shuffling: hidden units of a model in a secret order, which its outputs do not depend on.

`rules` derives what may move from what the model does with an example, not from the names of its layers. `Rules.draw`
makes the rule of a round; `apply` and `invert` permute and restore a model, an update or a gradient as a flat vector.
docs/permutation.md says what this hides, and that it is little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fl_privacy.errors import FederationError
from fl_privacy.steps.permute.groups import Axis, per_slot, rows, settle, spread
from fl_privacy.steps.permute.rule import Kind, Part, Parts, Rule, Rules
from fl_privacy.vector import Layout, Vector, flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor, nn

CLOSE = 1e-4  # relative: sums in another order, in float32
TRIAL = bytes(32)  # the secret of a rule that is only tried

__all__ = ["Rule", "Rules", "apply", "difference", "invert", "rules"]


def rules(module: nn.Module, example: Tensor) -> Rules:
    """What may move in a model, from a batch of records as it takes them; the model gives one tensor.

    A part that cannot be permuted is refused with the name of its layer. The result is tried on the example.
    """
    from fl_privacy.steps.permute.functions import FUNCTIONS
    from fl_privacy.steps.permute.trace import traced

    found, inputs, joint = traced(module, example, FUNCTIONS)
    whole = joint.parts and all(group.joint is joint for group in joint.parts)
    spans = [len(inputs)] if whole else [1] * len(inputs)
    records: list[Axis] = [[joint.whole]] if whole else inputs
    axes = [axis for each in found.values() for axis in each]
    settled = iter(settle([*axes, *records]))
    tensors = {name: [next(settled) for _ in each] for name, each in found.items()}
    made = _numbered(_with_names(module, tensors), list(zip(spans, settled, strict=True)))
    rule = made.draw(TRIAL, "trial", 0)
    if not difference(module, example, rule) <= CLOSE:
        raise FederationError("permute: the model gives other outputs when it is permuted; remove permute")
    return made


def apply(vector: Vector, layout: Layout, rule: Rule, out: Vector | None = None) -> Vector:
    """The vector with every position where the rule puts it: a new one, unless there is one for it."""
    return rule.apply(vector, layout, out)


def invert(vector: Vector, layout: Layout, rule: Rule, out: Vector | None = None) -> Vector:
    """The vector that `apply` made this one of, bit for bit."""
    return rule.inverse.apply(vector, layout, out)


def difference(module: nn.Module, example: Tensor, rule: Rule) -> float:
    """max |f(permute(x); permute(W)) - f(x; W)|, relative to the largest output."""
    import torch
    from torch.func import functional_call

    vector, layout = flatten(module)
    permuted = unflatten(rule.apply(vector, layout), layout)
    state: dict[str, Any] = {name: torch.from_numpy(array).to(example.device) for name, array in permuted.items()}
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            plain = module(example)
            x = torch.from_numpy(rule.records(example.cpu().numpy())).to(example.device)
            moved = functional_call(module, state, (x,), tie_weights=False)
    finally:
        module.train(training)
    return float((moved - plain).abs().max() / plain.abs().max().clamp(min=1e-30))


def _with_names(module: nn.Module, tensors: dict[str, list[Axis]]) -> dict[str, list[Axis]]:
    """A tensor that has several names in the state dict under each of them."""
    first = {id(t): name for name, t in (*module.named_buffers(), *module.named_parameters())}
    state = module.state_dict(keep_vars=True)
    return {name: tensors[first[id(t)]] for name, t in state.items() if first.get(id(t)) in tensors}


def _numbered(tensors: dict[str, list[Axis]], inputs: list[tuple[int, Axis]]) -> Rules:
    """The groups by number, without torch or anything that can still change."""
    groups: list[Kind | None] = []
    numbers: dict[int, int] = {}

    def number(group: Any) -> int:
        if id(group) in numbers:
            return numbers[id(group)]
        numbers[id(group)] = place = len(groups)
        groups.append(None)
        slots = tuple(
            (index * per_slot(group), per_slot(group), number(spread([slot])[0]))
            for index, slot in sorted(group.slots.items())
        )
        groups[place] = Kind(group.name, group.size, rows(group), group.fixed, slots)
        return place

    def parts(axis: Axis) -> Parts:
        return tuple(
            Part(number(group), group.size, tuple(axis.index(outer) for outer in spread(group.over))) for group in axis
        )

    made = {name: tuple(map(parts, axes)) for name, axes in tensors.items()}
    records = tuple((count, parts(axis)) for count, axis in inputs)
    return Rules(tuple(kind for kind in groups if kind is not None), made, records)
