"""Trying a model on records: which layer cannot take its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.tasks.data import Dataset

TRIED = 2  # records


def misfit(model: nn.Module, data: Dataset) -> str:
    """Which layer of the model cannot take its input, and why; empty if all can. Other errors are raised."""
    entered: list[tuple[str, nn.Module, Any]] = []
    hooks = []
    for name, layer in model.named_modules():
        if next(layer.children(), None) is None:
            hooks.append(layer.register_forward_pre_hook(_noting(name, entered)))
            hooks.append(layer.register_forward_hook(lambda *_: _forget(entered)))
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.from_numpy(data.x[:TRIED]).to(next(model.parameters()).device))
    except Exception as error:
        if not entered:  # it is between the layers, in code that has a line
            raise
        name, layer, shape = entered[-1]
        why = " ".join(str(error).split())[:200]
        records = f"a record has shape {tuple(data.x.shape[1:])}"
        return f"layer {name or 'model'} ({layer}) cannot take an input of shape {shape}: {why}; {records}"
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return ""


def _noting(name: str, entered: list[tuple[str, nn.Module, Any]]) -> Any:
    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        given = inputs[0] if inputs else None
        entered.append((name, layer, tuple(given.shape[1:]) if isinstance(given, Tensor) else "unknown"))

    return note


def _forget(entered: list[tuple[str, nn.Module, Any]]) -> None:
    """A layer is done; layers without children do not nest."""
    entered.pop()
