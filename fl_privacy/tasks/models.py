"""Models by name, initialised from a seed."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

from fl_privacy.errors import FederationError
from fl_privacy.tasks.catalog import MODELS

HIDDEN = (64,)
LENET_SIDE = 32
CNN_GRID = 2


def build(
    name: str, shape: tuple[int, ...], classes: int, seed: int, hidden: tuple[int, ...] | None = None
) -> nn.Module:
    """The named model for records of this shape; the seed decides the weights, and torch's own stream is untouched."""
    if name not in BUILDERS:
        raise FederationError(f"task.model: {name!r} is unknown; use one of {', '.join(BUILDERS)}")
    if not MODELS[name].take(shape):
        raise FederationError(f"task.model: {name!r} does not take records of shape {shape}; use mlp")
    if hidden is not None and name != "mlp":
        raise FederationError(f"task.hidden: only the mlp has hidden widths, and task.model is {name!r}; remove it")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return mlp(shape, classes, hidden) if hidden is not None else BUILDERS[name](shape, classes)


def mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = HIDDEN) -> nn.Module:
    """Fully connected layers with ReLU between them."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
    width = math.prod(shape)
    for i, following in enumerate(hidden, start=1):
        layers[f"fc{i}"] = nn.Linear(width, following)
        layers[f"relu{i}"] = nn.ReLU()
        width = following
    layers["out"] = nn.Linear(width, classes)
    return nn.Sequential(layers)


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling; smaller images are enlarged by a whole factor and padded to its 32x32."""
    channels, side, _ = shape
    factor = LENET_SIDE // side
    spare = LENET_SIDE - factor * side
    before, after = spare // 2, spare - spare // 2
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        enlarge=nn.Upsample(scale_factor=factor, mode="nearest") if factor > 1 else nn.Identity(),
        pad=nn.ZeroPad2d((before, after, before, after)),
        conv1=nn.Conv2d(channels, 6, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        fc1=nn.Linear(16 * 5 * 5, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        out=nn.Linear(84, classes),
    )
    return nn.Sequential(layers)


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three 3x3 convolutions; GroupNorm, because batch statistics of one site are wrong for another and leak."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = shape[0]
    for i, (following, pool) in enumerate(((32, True), (64, True), (64, False)), start=1):
        layers[f"conv{i}"] = nn.Conv2d(width, following, 3, padding=1)
        layers[f"norm{i}"] = nn.GroupNorm(8, following)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(2) if pool else nn.AdaptiveAvgPool2d(CNN_GRID)
        width = following
    layers["flat"] = nn.Flatten()
    layers["out"] = nn.Linear(width * CNN_GRID**2, classes)
    return nn.Sequential(layers)


BUILDERS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {"mlp": mlp, "lenet5": lenet5, "cnn": cnn}
