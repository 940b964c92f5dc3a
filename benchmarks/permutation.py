"""Permuting and restoring one large model, relative to a memcpy of it.

Both write to a vector that is there already.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from benchmarks.kernels import KEY, ratio
from benchmarks.result import Result
from fl_privacy.steps.permute import tazza
from fl_privacy.vector import flatten

WIDTHS, QUICK_WIDTHS = (64, 64, 128, 128, 256, 256, 512, 512, 512, 512), (16, 32)
DENSE, QUICK_DENSE = (2048, 384), (64,)
SIDE = 8


def run(quick: bool = False) -> list[Result]:
    """Convolutions of 3 x 3 and linear layers, 11.2 M parameters, in which every axis but the classes moves."""
    widths, dense = (QUICK_WIDTHS, QUICK_DENSE) if quick else (WIDTHS, DENSE)
    repeats = 1 if quick else 9
    module = _model(widths, dense)
    rules = tazza.rules(module, torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)))
    rule = rules.draw(KEY, "benchmark", 1)
    vector, layout = flatten(module)
    copy, out, moved = np.zeros_like(vector), np.zeros_like(vector), tazza.apply(vector, layout, rule)

    def memcpy() -> None:
        np.copyto(copy, vector)

    detail = {"parameters": layout.size, "moving": rules.moving}
    forward = ratio(lambda: tazza.apply(vector, layout, rule, out), memcpy, repeats)
    back = ratio(lambda: tazza.invert(moved, layout, rule, out), memcpy, repeats)
    return [
        Result("permuting a model", forward, 5, "x memcpy", detail=detail),
        Result("restoring a model", back, 5, "x memcpy", detail=detail),
    ]


def _model(widths: tuple[int, ...], dense: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for width, following in pairwise((3, *widths)):
        layers += [nn.Conv2d(width, following, 3, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    for width, following in pairwise((widths[-1], *dense)):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(dense[-1], 10))
