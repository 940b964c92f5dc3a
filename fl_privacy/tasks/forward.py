"""Trying a model on records: its answers, which layer cannot take its input, and whether outputs fit the labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_privacy import vector
from fl_privacy.tasks.data import Dataset

if TYPE_CHECKING:
    from fl_privacy.config import Federation

TRIED = 2  # records
BATCH = 256


class Forward:
    """The outputs of a federation's model with given parameters, as in evaluation."""

    def __init__(self, federation: Federation) -> None:
        from fl_privacy.tasks.workload import model_of

        self._model = model_of(federation).eval()
        self._layout = vector.flatten(self._model)[1]

    def __call__(self, parameters: vector.Vector, x: NDArray[np.float32]) -> NDArray[np.float32]:
        vector.load(self._model, parameters, self._layout)
        records = torch.from_numpy(x.copy())  # a model may change its input
        with torch.no_grad():
            found = [self._model(batch).cpu() for batch in torch.split(records, BATCH)]
        outputs: NDArray[np.float32] = torch.cat(found).numpy()
        return outputs


def misfit(model: nn.Module, data: Dataset, classes: int) -> str:
    """Which layer of the model cannot take its input, and why, or what its outputs do not fit; empty if all is well.

    Other errors are raised.
    """
    entered: list[tuple[str, nn.Module, Any]] = []
    hooks = []
    for name, layer in model.named_modules():
        if next(layer.children(), None) is None:
            hooks.append(layer.register_forward_pre_hook(_noting(name, entered)))
            hooks.append(layer.register_forward_hook(lambda *_: _forget(entered)))
    training = model.training
    try:
        with torch.no_grad():
            records = torch.from_numpy(data.x[:TRIED].copy())  # a model may change its input
            outputs = model.eval()(records.to(next(model.parameters()).device))
    except Exception as error:
        if not entered:  # it is between the layers, in code that has a line
            raise
        name, layer, shape = entered[-1]
        why = " ".join(str(error).split())[:200]
        a_record = f"a record has shape {tuple(data.x.shape[1:])}"
        if np.issubdtype(data.x.dtype, np.integer):
            a_record += " of whole numbers; return floats from data(), unless the model looks numbers up"
        elif data.x.ndim == 1:
            a_record += "; return x of shape (records, 1) from data()"
        else:
            a_record += "; change the layer, or what data() returns"
        return f"layer {name or 'model'} ({layer}) cannot take an input of shape {shape}: {why}; {a_record}"
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return _unfit(outputs, data, classes)


def _unfit(outputs: Any, data: Dataset, classes: int) -> str:
    """What is wrong with the outputs of the first records."""
    if not isinstance(outputs, Tensor):
        return f"gives {type(outputs).__name__}; return one tensor, with a row per record"
    asked, count = f"{classes} classes, one score each" if classes else "a number to predict", len(data.x[:TRIED])
    shapes = ((count, classes),) if classes else ((count, 1),)
    if tuple(outputs.shape) not in shapes:
        each = tuple(outputs.shape[1:]) if outputs.ndim and len(outputs) == count else None
        what = f"shape {tuple(outputs.shape)} for {count} records" if each is None else f"shape {each} per record"
        return f"gives outputs of {what}, and the task has {asked}: {shapes[0][1:]}; change one, or set `classes`"
    if not outputs.is_floating_point():
        return f"gives outputs of type {outputs.dtype}; return float32"
    if classes and data.forecast:
        return f"has {classes} outputs, and labels are floats; give integers for classes, or a model with one output"
    if not classes and not data.forecast and len(data):
        return (
            "has one output, and labels are integers; give floats to predict a number, or two outputs for two classes"
        )
    return ""


def _noting(name: str, entered: list[tuple[str, nn.Module, Any]]) -> Any:
    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        given = inputs[0] if inputs else None
        entered.append((name, layer, tuple(given.shape[1:]) if isinstance(given, Tensor) else "unknown"))

    return note


def _forget(entered: list[tuple[str, nn.Module, Any]]) -> None:
    """A layer is done; layers without children do not nest."""
    entered.pop()
