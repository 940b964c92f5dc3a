"""Attention as torch calls it in one function: heads, and the dimensions of each head in an order of their own."""

from __future__ import annotations

from fl_privacy.steps.permute.groups import Axis, broadcast, dropped, fix, fixed, length, reshaped, selected, unite
from fl_privacy.steps.permute.trace import Axes, Call


def attention(call: Call) -> Axes:
    """softmax(q k^T) v, on axes (..., steps, width)."""
    query, key, value, mask, _, causal = call.given("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    q, k, v = (call.axes(each) for each in (query, key, value))
    batch = broadcast(broadcast(q[:-2], k[:-2]), v[:-2])
    unite(q[-1], k[-1])
    unite(k[-2], v[-2])
    if causal or mask is not None:
        fix(q[-2])
        fix(k[-2])
    kept = [*batch, q[-2], v[-1]]
    dropped(kept, k[-2])
    return kept


def multi_head(call: Call) -> tuple[Axes, ...]:
    """torch's own multi-head attention: heads and their dimensions are products of the embedding's axes."""
    names = (
        *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k"),
        *("bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training"),
        *("key_padding_mask", "need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight"),
        *("k_proj_weight", "v_proj_weight", "static_k", "static_v", "average_attn_weights", "is_causal"),
    )
    found = dict(zip(names, call.given(*names), strict=True))
    if any(found[name] is not None for name in ("bias_k", "static_k", "static_v", "key_padding_mask")):
        raise call.refuse("uses bias_k, static keys or padding; use plain attention")
    q, k, v = (call.axes(found[name]) for name in ("query", "key", "value"))
    heads, into = found["num_heads"], [each[-1] for each in (q, k, v)]
    if found["use_separate_proj_weight"]:
        weights = [call.axes(found[f"{name}_proj_weight"]) for name in "qkv"]
        outs = [weight[0] for weight in weights]
        for axis, weight in zip(into, weights, strict=True):
            unite(axis, weight[1])
        whole = None
    else:
        whole, embedded = call.axes(found["in_proj_weight"])
        for axis in into:
            unite(axis, embedded)
        outs = thirds(whole)
    if found["in_proj_bias"] is not None:
        (bias,) = call.axes(found["in_proj_bias"])
        if whole is not None:
            unite(bias, whole)
        else:
            for axis, third in zip(outs, thirds(bias), strict=True):
                unite(axis, third)
    (q_heads, q_each), (k_heads, k_each), (v_heads, v_each) = (_headed(axis, heads) for axis in outs)
    unite(q_heads, k_heads)
    unite(q_heads, v_heads)
    unite(q_each, k_each)
    unite(k[0], v[0])
    if found["attn_mask"] is not None or found["is_causal"]:
        fix(q[0])
        fix(k[0])
    out, mixed = call.axes(found["out_proj_weight"])
    unite(mixed, [*v_heads, *v_each])
    if found["out_proj_bias"] is not None:
        unite(out, call.axes(found["out_proj_bias"])[0])
    made = [*q[:-1], out]
    return (made,) if call.result[1] is None else (made, [fixed(size) for size in call.result[1].shape])


def thirds(axis: Axis) -> list[Axis]:
    """The axis of query, key and value one after the other, as the axis of each."""
    three, rest = reshaped([axis], (3, length(axis) // 3))
    return [selected([rest], three, index)[0] for index in range(3)]


def _headed(axis: Axis, heads: int) -> tuple[Axis, Axis]:
    outer, inner = reshaped([axis], (heads, length(axis) // heads))
    return outer, inner
