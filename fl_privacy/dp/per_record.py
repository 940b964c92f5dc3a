"""Per-record gradients of a batch, and the check that a model has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import linear
from torch.nn.modules.dropout import _DropoutNd

from fl_privacy.errors import FederationError
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.models import Lstm
from fl_privacy.tasks.train import Loss, few_threads, loss_of

PROBES = 4  # records in the self-test
MOST = 256  # records among which it looks for different ones
# Far above the rounding of a deep model, far below the effect of a neighbouring record. A loss may contain float32.
AGREE = {torch.float64: 1e-8, torch.float32: 1e-4}
FIX = "normalise with GroupNorm and keep no running statistics"
MIXES = "a record's gradient depends on the other records of its batch"
VECTORISED = "do not use .item(), conditions on values or changes in place in forward and loss"
VECTORISABLE = (nn.LSTM, nn.MultiheadAttention)  # which Opacus would replace


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Loss = loss_of) -> list[Tensor]:
    """For each trainable weight, the gradient of every record's own loss, one row per record."""
    return PATHS.get(type(model), _vectorised)(model, x, y, loss)


def _vectorised(model: Any, x: Tensor, y: Tensor, of: Loss) -> list[Tensor]:
    """For any model: each record is a batch of one."""
    weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}

    def loss(weights: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        return of(functional_call(model, weights, (record[None],)), label[None], "sum")

    return list(vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(weights, x, y).values())


def _lstm(model: Any, x: Tensor, y: Tensor, of: Loss) -> list[Tensor]:
    """Four times as fast as vectorising nn.LSTM, which sums one matrix per record at every step of the series.

    With a_t = W x_t + U h_(t-1) + b, a record's gradients are the sums of da_t x_t^T, da_t h_(t-1)^T and da_t.
    """
    layer, head = model.lstm, model.out
    series = x if x.dim() == 3 else x.unsqueeze(2)
    inputs = linear(series, layer.weight_ih_l0, layer.bias_ih_l0 + layer.bias_hh_l0).detach().requires_grad_()
    before, last = _unrolled(inputs, layer.weight_hh_l0.detach())
    outputs = linear(last, head.weight.detach(), head.bias.detach())
    inner, outer = torch.autograd.grad(of(outputs, y, "sum"), [inputs, outputs])
    bias = inner.sum(dim=1)
    by_input, by_state = inner.transpose(1, 2) @ series, inner.transpose(1, 2) @ before
    return [by_input, by_state, bias, bias, outer.unsqueeze(2) * last.detach().unsqueeze(1), outer]


def _unrolled(inputs: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor]:
    """An LSTM step by step: the hidden state before each step, and the final one."""
    hidden = cell = inputs.new_zeros(len(inputs), recurrent.shape[1])
    before = []
    for entering in inputs.unbind(dim=1):
        before.append(hidden.detach())
        keep_in, forget, new, out = linear(hidden, recurrent).add(entering).chunk(4, dim=1)
        cell = forget.sigmoid() * cell + keep_in.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
    return torch.stack(before, dim=1), hidden


PATHS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor, Loss], list[Tensor]]] = {Lstm: _lstm}


class Unfit(FederationError):
    """Why records have no gradients of their own, and the fix."""


def check(model: nn.Module, data: Dataset, loss: Loss = loss_of) -> None:
    """Raise if records of a batch influence each other, or if the gradients here are not per-record gradients.

    The model runs on made-up records, which surely differ, and on the site's own where it cannot take these: it may
    look numbers up or take logarithms. An error in its own code is raised as it is.
    """
    _check_layers(model)
    failed = Exception()
    with few_threads(model):
        for probe in (_made_up, _own):
            for dtype in AGREE:
                try:
                    problem = _problem(_undropped(model).to(dtype).cpu().train(), *probe(data, dtype), loss)
                except Exception as error:
                    failed = error
                    continue
                if problem:
                    raise FederationError(f"task.model: {problem}; {FIX}")
                return
    raise FederationError(f"task.model: {failed}") if isinstance(failed, Unfit) else failed


def _made_up(data: Dataset, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Records of the same shape as these, but surely different from each other."""
    rows, generator = np.arange(PROBES) % len(data), torch.Generator().manual_seed(0)
    pair = torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows])
    x, y = (t if not t.is_floating_point() else torch.randn(t.shape, generator=generator, dtype=dtype) for t in pair)
    return x, y


def _own(data: Dataset, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Records that differ from each other."""
    some = data.x[:MOST].reshape(min(MOST, len(data)), -1)
    rows = np.sort(np.unique(some, axis=0, return_index=True)[1])[:PROBES]
    if len(rows) < 2:
        raise Unfit("cannot be tested on equal records; let data() return different ones")
    pair = torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows])
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in pair)
    return x, y


def _undropped(model: nn.Module) -> nn.Module:
    """A copy that drops nothing: dropout acts on each record by itself, and two runs of it differ."""
    made = copy.deepcopy(model)
    for layer in made.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return made


def _problem(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> str:
    """The problem found by running the model, or an empty string."""
    state = [buffer.clone() for buffer in model.buffers()]
    together = model(x.clone())  # a model may change its input in place
    if not torch.isfinite(together).all():
        raise Unfit("its outputs are not finite; let it give finite ones for every record")
    if any(not torch.equal(*pair) for pair in zip(state, model.buffers(), strict=True)):
        return "stores information about records in its buffers, which get no noise"
    if not torch.equal(together, model(x.clone())):
        raise Unfit("draws random numbers outside of nn.Dropout, so it cannot be tested; use layers of nn.Dropout")
    try:
        apart = [_alone(model, x[i : i + 1].clone(), y[i : i + 1], loss) for i in range(len(y))]
    except (RuntimeError, ValueError) as error:
        raise Unfit(f"does not accept single records ({_first_line(error)}); {FIX}") from error
    alone = list(map(torch.stack, zip(*(found for _, found in apart), strict=True)))
    if not all(torch.isfinite(part).all() for part in alone):
        raise Unfit("its gradients are not finite; let model and loss have finite ones for every record")
    if any(not torch.equal(*pair) for pair in zip(state, model.buffers(), strict=True)):
        return "stores information about records in its buffers, which get no noise"
    if not _agree(together, torch.cat([outputs for outputs, _ in apart])):
        return MIXES
    try:
        found = gradients(model, x.clone(), y, loss)
    except Exception as error:
        raise Unfit(f"has no gradients per record: {_first_line(error)}; {VECTORISED}") from None
    return "" if all(map(_agree, found, alone)) else MIXES


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _check_layers(model: nn.Module) -> None:
    """Opacus knows which layers cannot be private. It rejects some that have per-record gradients here."""
    from opacus.validators import ModuleValidator

    for name, layer in model.named_modules():
        validate = ModuleValidator.VALIDATORS.get(type(layer))
        if validate is not None and not isinstance(layer, VECTORISABLE) and validate(layer):
            fix = "use nn.LSTM" if isinstance(layer, nn.RNNBase) else FIX
            raise FederationError(f"task.model: {type(layer).__name__} {name!r} has no per-record privacy; {fix}")


def _alone(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs and gradients of one record, computed with plain autograd."""
    outputs = model(x)
    total = loss(outputs, y, "sum")
    return outputs, torch.autograd.grad(total, trainable(model), allow_unused=True, materialize_grads=True)


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= AGREE[one.dtype] * (1 + other.norm()))
