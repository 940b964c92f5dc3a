"""What torch's functions do to the axes of their inputs: one handler for each, by the function's name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fl_privacy.steps.permute.attention import attention, multi_head
from fl_privacy.steps.permute.groups import (
    Axis,
    Group,
    broadcast,
    dropped,
    fix,
    fixed,
    free,
    length,
    reshaped,
    selected,
    side_by_side,
    unite,
)
from fl_privacy.steps.permute.recurrent import RECURRENT
from fl_privacy.steps.permute.trace import Axes, Call, Handler


def elementwise(call: Call) -> Axes:
    """Any function of one number at a time; with several tensors, they are broadcast."""
    operands = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Tensor)]
    axes = call.axes(operands[0])
    for other in operands[1:]:
        axes = broadcast(axes, call.axes(other))
    return axes


def place(dim: int, axes: Axes) -> int:
    return dim % len(axes)


def places(dims: Any, axes: Axes) -> list[int]:
    if dims is None:
        return list(range(len(axes)))
    return [place(dim, axes) for dim in (dims if isinstance(dims, tuple | list) else (dims,))]


def linear(call: Call) -> Axes:
    x, weight, bias = call.given("input", "weight", "bias")
    axes, (out, into) = call.axes(x), call.axes(weight)
    unite(axes[-1], into)
    if bias is not None:
        unite(out, call.axes(bias)[0])
    return [*axes[:-1], out]


def matmul(call: Call) -> Axes:
    left, right = (call.axes(each) for each in call.given("input", "other"))
    if len(left) < 2 or len(right) < 2:
        raise call.refuse("multiplies a matrix by a vector; use linear")
    batch = broadcast(left[:-2], right[:-2])
    unite(left[-1], right[-2])
    kept = [*batch, left[-2], right[-1]]
    dropped(kept, left[-1])
    return kept


def convolution(call: Call) -> Axes:
    """Channels move, places do not; groups of more than one channel move as groups and alike within."""
    x, weight, bias, *_, groups = call.given("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    axes, kernel = call.axes(x), call.axes(weight)
    out, into, count = kernel[0], kernel[1], groups or 1
    channel = 1 if len(axes) == len(kernel) else 0
    for axis in (*axes[channel + 1 :], *kernel[2:]):
        fix(axis)
    if count == 1:
        unite(axes[channel], into)
    else:
        outer = Group(count, "groups")
        unite(axes[channel], [outer, *into])
        unite(out, [outer, *free(length(out) // count, "of a group")])
    if bias is not None:
        unite(out, call.axes(bias)[0])
    sizes = call.result.shape[channel + 1 :]
    return [*axes[:channel], out, *(fixed(size) for size in sizes)]


def prelu(call: Call) -> Axes:
    x, weight = call.given("input", "weight")
    axes, (slope,) = call.axes(x), call.axes(weight)
    if slope:
        unite(axes[1], slope)
    return axes


def embedding(call: Call) -> Axes:
    ids, weight = call.given("input", "weight")
    table = call.axes(weight)
    fix(table[0])
    return [*call.axes(ids), table[1]]


def layer_norm(call: Call) -> Axes:
    x, shape, weight, bias = call.given("input", "normalized_shape", "weight", "bias")
    axes = call.axes(x)
    for each in (weight, bias):  # rms_norm has no bias, and a number in its place
        if isinstance(each, Tensor):
            broadcast(axes[-len(shape) :], call.axes(each))
    return axes


def batch_norm(call: Call) -> Axes:
    x, *rest = call.given("input", "running_mean", "running_var", "weight", "bias")
    axes = call.axes(x)
    for each in rest:
        if each is not None:
            unite(axes[1], call.axes(each)[0])
    return axes


def group_norm(call: Call) -> Axes:
    x, groups, weight, bias = call.given("input", "num_groups", "weight", "bias")
    axes = call.axes(x)
    reshaped([axes[1]], (groups, length(axes[1]) // groups))
    for each in (weight, bias):
        if each is not None:
            unite(axes[1], call.axes(each)[0])
    return axes


def pooled(call: Call) -> Axes | tuple[Axes, ...]:
    """Places are fixed, unless all of them become one; channels stay as they are."""
    axes = call.axes(call.args[0])
    results = call.result if isinstance(call.result, tuple) else (call.result,)
    behind = int(call.name[-2]) if call.name[-2:] in ("1d", "2d", "3d") else len(axes) - 2
    for axis in axes[-behind:]:
        fix(axis)
    made = [[*axes[:-behind], *(fixed(size) for size in each.shape[-behind:])] for each in results]
    return tuple(made) if isinstance(call.result, tuple) else made[0]


def padded(call: Call) -> Axes:
    axes = call.axes(call.args[0])
    return [
        axis if length(axis) == size and not _pads(call, len(axes) - 1 - i) else _still(axis, size)
        for i, (axis, size) in enumerate(zip(axes, call.result.shape, strict=True))
    ]


def _pads(call: Call, from_end: int) -> bool:
    """Whether any padding is given for this axis, counted from the last one."""
    pad = tuple(call.given("input", "pad")[1])[2 * from_end : 2 * from_end + 2]
    return any(pad)


def _still(axis: Axis, size: int) -> Axis:
    fix(axis)
    return fixed(size)


def view(call: Call) -> Axes:
    return reshaped(call.axes(call.args[0]), call.result.shape)


def expand(call: Call) -> Axes:
    """A repeated axis is the same at every place, so any order of it is; it is kept in place, to be simple."""
    axes, shape = call.axes(call.args[0]), call.result.shape
    padded_axes: Axes = [*([[]] * (len(shape) - len(axes))), *axes]
    return [axis if length(axis) == size else fixed(size) for axis, size in zip(padded_axes, shape, strict=True)]


def transpose(call: Call) -> Axes:
    x, one, other = call.given("input", "dim0", "dim1")
    axes = list(call.axes(x))
    a, b = place(one, axes), place(other, axes)
    axes[a], axes[b] = axes[b], axes[a]
    return axes


def t(call: Call) -> Axes:
    return call.axes(call.args[0])[::-1]


def permute(call: Call) -> Axes:
    x, *rest = call.args
    dims = call.kwargs.get("dims", rest[0] if rest and isinstance(rest[0], tuple | list) else rest)
    axes = call.axes(x)
    return [axes[place(dim, axes)] for dim in dims]


def reduced(call: Call) -> Axes | tuple[Axes, ...]:
    """Sums, means and maxima do not depend on the order of what they are over."""
    x, dims = call.given("input", "dim")
    if isinstance(dims, Tensor) or "other" in call.kwargs:  # the larger of two
        return elementwise(call)
    keep = call.kwargs.get("keepdim", False) or (len(call.args) > 2 and call.args[2] is True)
    axes = call.axes(x)
    gone = places(dims, axes)
    kept = [axis for i, axis in enumerate(axes) if i not in gone]
    for i in gone:
        dropped(kept, axes[i])
    if call.name in ("argmax", "argmin") or isinstance(call.result, tuple):
        for i in gone:  # an index says where something was
            fix(axes[i])
    made: Axes = [[] if i in gone else axis for i, axis in enumerate(axes)] if keep else kept
    return (made, made) if isinstance(call.result, tuple) else made


def along(call: Call) -> Axes:
    """Softmax and the like: the same order comes out as went in."""
    return call.axes(call.args[0])


def unbind(call: Call) -> tuple[Axes, ...]:
    x, dim = call.given("input", "dim")
    axes = call.axes(x)
    at = place(dim or 0, axes)
    rest = [axis for i, axis in enumerate(axes) if i != at]
    return tuple(selected(rest, axes[at], index) for index in range(len(call.result)))


def chunk(call: Call) -> tuple[Axes, ...]:
    """Equal parts of an axis each move by themselves; unequal ones are fixed."""
    dim = call.given("input", "chunks", "dim")[2] or 0
    axes, sizes = call.axes(call.args[0]), [each.shape[dim] for each in call.result]
    at = place(dim, axes)
    if len(set(sizes)) > 1:
        fix(axes[at])
        return tuple([[*axes[:at], fixed(size), *axes[at + 1 :]] for size in sizes])
    outer, inner = reshaped([axes[at]], (len(sizes), sizes[0]))
    whole = [*axes[:at], inner, *axes[at + 1 :]]
    return tuple(selected(whole, outer, index) for index in range(len(sizes)))


def getitem(call: Call) -> Axes:
    """Whole slices and new axes anywhere; a place or a part of an axis, which then cannot move."""
    x, index = call.args
    index = index if isinstance(index, tuple) else (index,)
    axes, given = call.axes(x), sum(each is not None and each is not Ellipsis for each in index)
    made: list[Axis | None] = []
    left, picked = list(axes), list[tuple[Axis, int]]()
    for each in index:
        if each is None:
            made.append([])
        elif each is Ellipsis:
            made += [left.pop(0) for _ in range(len(axes) - given)]
        elif isinstance(each, int):
            axis = left.pop(0)
            picked.append((axis, each % max(length(axis), 1)))
        elif isinstance(each, slice):
            axis = left.pop(0)
            size = len(range(*each.indices(length(axis))))
            made.append(axis if each in (slice(None), slice(0, None)) else _still(axis, size))
        else:
            raise call.refuse("reads a tensor at places that another one names; use slices")
    found = [[] if axis is None else axis for axis in (*made, *left)]
    for axis, at in picked:
        found = selected(found, axis, at)
    return found


def select(call: Call) -> Axes:
    x, dim, index = call.given("input", "dim", "index")
    axes = call.axes(x)
    at = place(dim, axes)
    return selected([axis for i, axis in enumerate(axes) if i != at], axes[at], index % length(axes[at]))


def narrow(call: Call) -> Axes:
    x, dim, _, size = call.given("input", "dim", "start", "length")
    axes = list(call.axes(x))
    axes[place(dim, axes)] = _still(axes[place(dim, axes)], size)
    return axes


def cat(call: Call) -> Axes:
    """Parts of one size keep their own order along the axis in which they are put together; others are fixed."""
    tensors, dim = call.given("tensors", "dim")
    every = [call.axes(each) for each in tensors]
    at = place(dim or 0, every[0])
    if len({length(axes[at]) for axes in every}) == 1:
        joined = side_by_side([axes[at] for axes in every])
    else:
        joined = _still([group for axes in every for group in axes[at]], call.result.shape[at])
    made = [axis for i, axis in enumerate(every[0]) if i != at]
    for axes in every[1:]:
        made = broadcast(made, [axis for i, axis in enumerate(axes) if i != at])
    return [*made[:at], joined, *made[at:]]


def stack(call: Call) -> Axes:
    tensors, dim = call.given("tensors", "dim")
    made = call.axes(tensors[0])
    for each in tensors[1:]:
        made = broadcast(made, call.axes(each))
    at = (dim or 0) % (len(made) + 1)
    return [*made[:at], fixed(len(tensors)), *made[at:]]


def _table(*rows: tuple[Handler, str]) -> dict[str, Handler]:
    return {name: handler for handler, names in rows for name in names.split()}


FUNCTIONS: dict[str, Handler] = {
    **_table(
        (
            elementwise,
            "relu relu6 gelu silu elu celu selu leaky_relu rrelu sigmoid tanh hardtanh hardswish hardsigmoid mish "
            "softplus softsign logsigmoid log_sigmoid tanhshrink softshrink hardshrink threshold dropout "
            "alpha_dropout feature_dropout dropout1d dropout2d dropout3d identity clone contiguous detach to "
            "float double half type_as requires_grad abs neg exp log log1p expm1 sqrt rsqrt square reciprocal sin "
            "cos erf clamp clip add sub mul div true_divide truediv radd rsub rmul rtruediv rdiv iadd isub imul "
            "itruediv pow rpow maximum minimum where zeros_like ones_like lerp addcmul",
        ),
        (linear, "linear"),
        (matmul, "matmul bmm mm rmatmul"),
        (attention, "scaled_dot_product_attention"),
        (multi_head, "multi_head_attention_forward"),
        (convolution, "conv1d conv2d conv3d"),
        (prelu, "prelu"),
        (embedding, "embedding"),
        (layer_norm, "layer_norm rms_norm"),
        (batch_norm, "batch_norm instance_norm"),
        (group_norm, "group_norm"),
        (
            pooled,
            "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d"
            " adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d"
            " interpolate upsample",
        ),
        (padded, "pad"),
        (view, "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as"),
        (expand, "expand expand_as broadcast_to"),
        (transpose, "transpose swapaxes swapdims"),
        (t, "t"),
        (permute, "permute"),
        (reduced, "mean sum amax amin max min logsumexp argmax argmin"),
        (along, "softmax log_softmax normalize softmin"),
        (unbind, "unbind"),
        (chunk, "chunk tensor_split split split_with_sizes"),
        (getitem, "getitem"),
        (select, "select"),
        (narrow, "narrow"),
        (cat, "cat concat concatenate"),
        (stack, "stack"),
    ),
    **RECURRENT,
}
