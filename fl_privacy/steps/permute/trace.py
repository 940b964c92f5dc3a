"""Derive a model's groups: run it once on an example, and follow every axis of every tensor through what it does.

No model is described by hand. What a function does to axes is in `functions`; one that is not there is refused with the
name of the layer that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl_privacy.errors import FederationError
from fl_privacy.steps.permute.groups import Axis, Group, Joint, fix, fixed, free

Axes = list[Axis]
HARMLESS = frozenset({"dim", "size", "numel", "is_floating_point", "__len__", "element_size", "stride", "get_device"})


class Refused(FederationError):
    """A part of the model cannot be permuted."""


class Call:
    """One call of a torch function: its name, arguments, result, and the axes of tensors."""

    def __init__(self, tracer: Tracer, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        self._tracer, self.name, self.args, self.kwargs, self.result = tracer, name, args, kwargs, result

    def given(self, *names: str) -> list[Any]:
        """The arguments under these names, in the order in which the function takes them; None where not given."""
        return [*self.args, *(self.kwargs.get(name) for name in names[len(self.args) :])][: len(names)]

    def axes(self, tensor: Tensor) -> Axes:
        return self._tracer.axes(tensor)

    def refuse(self, why: str) -> Refused:
        return self._tracer.refused(why)


Handler = Callable[[Call], Any]  # the axes of the result: a list of them, or a tuple of lists, as the result is


class Tracer(TorchFunctionMode):
    """Runs the model's functions, and keeps the axes of every tensor that comes of them."""

    def __init__(self, module: nn.Module, functions: Mapping[str, Handler]) -> None:
        super().__init__()
        self._functions = functions
        self._kept: dict[int, tuple[Tensor, Axes]] = {}
        self._names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        self.of: dict[str, Axes] = {}
        self.where: list[str] = []

    def axes(self, tensor: Tensor) -> Axes:
        """The axes of a tensor: a parameter's are free until something says otherwise, a constant's are fixed."""
        if id(tensor) in self._kept:
            return self._kept[id(tensor)][1]
        name = self._names.get(id(tensor))
        if name is None:
            made = [fixed(size) for size in tensor.shape]
        else:
            made = self.of[name] = [free(size, f"{name}.{i}") for i, size in enumerate(tensor.shape)]
        return self.keep(tensor, made)

    def keep(self, tensor: Tensor, axes: Axes) -> Axes:
        self._kept[id(tensor)] = tensor, axes
        return axes

    def refused(self, why: str) -> Refused:
        layer = self.where[-1] if self.where and self.where[-1] else "the model itself"
        return Refused(f"permute: layer {layer}: {why}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", str(func))
        if name == "__get__" or name in HARMLESS or not _tensors(result):
            if name == "__get__" and isinstance(result, Tensor):  # .T, .mT, .data
                raise self.refused("reads an attribute of a tensor that is one; use a function such as transpose")
            return result
        inputs = _tensors((args, kwargs or {}))
        plain = name.strip("_")
        handler = self._functions.get(plain)
        if handler is None:
            if not inputs:  # makes a constant
                return result
            known = "what it does to the order of its inputs is not known"
            raise self.refused(f"calls {plain}, and {known}; use other functions, or remove permute")
        found = handler(Call(self, plain, args, kwargs or {}, result))
        for tensor, axes in zip(_tensors(result), found if isinstance(found, tuple) else (found,), strict=True):
            self.keep(tensor, axes)
        return result


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in _tensors(part)] if isinstance(value, tuple | list) else []


@contextmanager
def _following(module: nn.Module, tracer: Tracer) -> Iterator[None]:
    """The tracer knows in which layer the model is; the model is in evaluation mode meanwhile."""
    hooks, training = [], {layer: layer.training for layer in module.modules()}
    for name, layer in module.named_modules():
        hooks.append(layer.register_forward_pre_hook(lambda _, __, name=name: tracer.where.append(name)))
        hooks.append(layer.register_forward_hook(lambda _, __, ___: _left(tracer)))
    module.eval()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, mode in training.items():
            layer.training = mode


def _left(tracer: Tracer) -> None:
    tracer.where.pop()


def traced(module: nn.Module, example: Tensor, functions: Mapping[str, Handler]) -> tuple[dict[str, Axes], Axes, Joint]:
    """The axes of every parameter and buffer, those of the input behind the batch, and the input as one group."""
    tracer = Tracer(module, functions)
    shape = example.shape[1:]
    movable = example.is_floating_point()  # ids of tokens are positions in a table, which stays as it is
    inputs: Axes = [(free if movable else fixed)(size, f"input.{i}") for i, size in enumerate(shape)]
    parts = [group for axis in inputs for group in axis]
    whole = parts[0] if len(parts) == 1 else Group(max(1, int(torch.tensor(shape).prod())), "input", fixed=not movable)
    joint = Joint(whole, parts)
    tracer.keep(example, [fixed(len(example), "batch"), *inputs])
    with torch.no_grad(), _following(module, tracer):
        with tracer:
            result = module(example)
        if not isinstance(result, Tensor):
            raise tracer.refused("the model gives more than one tensor; return one")
        for axis in tracer.axes(result):
            fix(axis)
    return tracer.of, inputs, joint
