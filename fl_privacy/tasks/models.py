"""Models by name, initialised from a seed."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError
from fl_privacy.tasks.catalog import MODELS
from fl_privacy.tasks.train import drawing

HIDDEN = (64,)
LENET_SIDE = 32
SIGMOID_WIDTH, SIGMOID_RANGE = 12, 0.5
CNN_GRID = 2
CNN5_CHANNELS, CNN5_WIDTHS = (32, 64), (512, 128)
CNN1D_CHANNELS, CNN1D_KERNEL, CNN1D_POOL, CNN1D_WIDTH = (32, 64), 5, 4, 128
MOBILE_STEM = 32
# Channels and stride of each separable block.
MOBILE_BLOCKS = ((64, 2), (128, 2), (128, 1), (256, 1))
RESNET_WIDTHS = (64, 128, 256, 512)
RESNET_RESIDUALS = (1, 3)  # the blocks that a residual one follows
LSTM_HIDDEN = 32
TRANSFORMER_WIDTH, TRANSFORMER_HEADS, TRANSFORMER_LAYERS = 32, 4, 2
PLACES = 0.5  # as large as what a number of size 1 is embedded to: SGD finds smaller ones only after many rounds

MT_WORDS, MT_AT = 624, 24  # of MT19937, and where they are in the state of torch's generator
_key: ContextVar[bytes | None] = ContextVar("key", default=None)


def build(
    name: str, shape: tuple[int, ...], classes: int, seed: int, hidden: tuple[int, ...] | None = None
) -> nn.Module:
    """The named model for records of this shape, with one score per class, or one forecast if there are no classes."""
    if name not in BUILDERS:
        raise FederationError(f"task.model: {name!r} is unknown; use one of {', '.join(BUILDERS)}")
    if not MODELS[name].take(shape, classes):
        kind = f"{classes} classes" if classes else "a forecast"
        raise FederationError(f"task.model: {name!r} does not accept records of shape {shape} for {kind}; use mlp")
    if hidden is not None and name != "mlp":
        raise FederationError(f"task.hidden: only mlp supports it, and task.model is {name!r}; remove it")
    outputs = classes or 1
    return seeded(lambda: mlp(shape, outputs, hidden) if hidden is not None else BUILDERS[name](shape, outputs), seed)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A new model with weights that the seed determines; global generators are not affected."""
    with drawing(seed, torch.device("cpu")):
        if (key := _key.get()) is not None:
            _draw_from(key)
        return make()


@contextmanager
def keyed(key: bytes) -> Iterator[None]:
    """New models have weights from this key instead of a seed."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


def _draw_from(key: bytes) -> None:
    """Set the global generators by a key.

    torch seeds its generator (MT19937) with 32 bits, which can be tried. Here all 624 words of its state are drawn.
    """
    stream = Words(key)

    def words() -> NDArray[np.uint64]:
        return stream.take(MT_WORDS) & np.uint64(2**32 - 1)

    state, drawn = torch.Generator().manual_seed(0).get_state().numpy().copy(), words()
    state[MT_AT : MT_AT + drawn.nbytes] = drawn.view(np.uint8)
    torch.default_generator.set_state(torch.from_numpy(state))
    np.random.seed(words().astype(np.uint32))
    random.seed(words().tobytes())


def mlp(shape: tuple[int, ...], outputs: int, hidden: tuple[int, ...] = HIDDEN) -> nn.Module:
    """Fully connected layers with ReLU between them."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
    width = math.prod(shape)
    for i, following in enumerate(hidden, start=1):
        layers[f"fc{i}"] = nn.Linear(width, following)
        layers[f"relu{i}"] = nn.ReLU()
        width = following
    layers["out"] = nn.Linear(width, outputs)
    return nn.Sequential(layers)


def logistic(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear layer: logistic regression for classes, linear regression for numbers."""
    return mlp(shape, outputs, hidden=())


def lenet5(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling; smaller images are enlarged by an integer factor and padded to 32x32."""
    channels, side, _ = shape
    factor = LENET_SIDE // side
    spare = LENET_SIDE - factor * side
    before, after = spare // 2, spare - spare // 2
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["enlarge"] = nn.Upsample(scale_factor=factor, mode="nearest") if factor > 1 else nn.Identity()
    layers["pad"] = nn.ZeroPad2d((before, after, before, after))
    for i, (width, following) in enumerate(((channels, 6), (6, 16)), start=1):
        layers |= {f"conv{i}": nn.Conv2d(width, following, 5), f"relu{i}": nn.ReLU(), f"pool{i}": nn.MaxPool2d(2)}
    layers["flat"] = nn.Flatten()
    for i, (width, following) in enumerate(((16 * 5 * 5, 120), (120, 84)), start=1):
        layers |= {f"fc{i}": nn.Linear(width, following), f"relu{i + 2}": nn.ReLU()}
    layers["out"] = nn.Linear(84, outputs)
    return nn.Sequential(layers)


def sigmoid_lenet(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The LeNet of DLG (Zhu et al. 2019): smooth, with large initial weights, so that its gradients leak most."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width, side = shape[0], shape[1]
    for i, stride in enumerate((2, 2, 1), start=1):
        layers[f"conv{i}"] = nn.Conv2d(width, SIGMOID_WIDTH, 5, stride, padding=2)
        layers[f"sigmoid{i}"] = nn.Sigmoid()
        width, side = SIGMOID_WIDTH, -(-side // stride)
    layers["flat"] = nn.Flatten()
    layers["out"] = nn.Linear(width * side**2, outputs)
    made = nn.Sequential(layers)
    for weight in made.parameters():
        nn.init.uniform_(weight, -SIGMOID_RANGE, SIGMOID_RANGE)
    return made


def cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Three 3x3 convolutions with GroupNorm: one site's batch statistics would be wrong for others, and would leak."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = shape[0]
    for i, (following, pool) in enumerate(((32, True), (64, True), (64, False)), start=1):
        layers[f"conv{i}"] = nn.Conv2d(width, following, 3, padding=1)
        layers[f"norm{i}"] = nn.GroupNorm(8, following)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(2) if pool else nn.AdaptiveAvgPool2d(CNN_GRID)
        width = following
    layers["flat"] = nn.Flatten()
    layers["out"] = nn.Linear(width * CNN_GRID**2, outputs)
    return nn.Sequential(layers)


def cnn5x5(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two 5x5 convolutions with max pooling and three linear layers, as in source inference (Hu et al. 2021)."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width, side = shape[0], shape[1]
    for i, following in enumerate(CNN5_CHANNELS, start=1):
        layers |= {f"conv{i}": nn.Conv2d(width, following, 5), f"relu{i}": nn.ReLU(), f"pool{i}": nn.MaxPool2d(2)}
        width, side = following, (side - 4) // 2
    layers["flat"] = nn.Flatten()
    width *= side**2
    for i, following in enumerate(CNN5_WIDTHS, start=1):
        layers |= {f"fc{i}": nn.Linear(width, following), f"relu{i + 2}": nn.ReLU()}
        width = following
    layers["out"] = nn.Linear(width, outputs)
    return nn.Sequential(layers)


class Channels(nn.Module):
    """A series as one-dimensional convolutions take it: features before steps."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if x.dim() == 3 else x.unsqueeze(1)


def cnn1d(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two convolutions over the steps of a series with max pooling, and two linear layers."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(channels=Channels())
    steps, width = shape[0], shape[1] if len(shape) == 2 else 1
    for i, following in enumerate(CNN1D_CHANNELS, start=1):
        layers[f"conv{i}"] = nn.Conv1d(width, following, CNN1D_KERNEL, padding=CNN1D_KERNEL // 2)
        layers |= {f"relu{i}": nn.ReLU(), f"pool{i}": nn.MaxPool1d(CNN1D_POOL)}
        width, steps = following, steps // CNN1D_POOL
    layers |= {"flat": nn.Flatten(), "fc1": nn.Linear(width * steps, CNN1D_WIDTH), "relu3": nn.ReLU()}
    layers["out"] = nn.Linear(CNN1D_WIDTH, outputs)
    return nn.Sequential(layers)


def mobilecnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Depthwise separable convolutions as in MobileNet (Howard et al. 2017), with GroupNorm instead of batch norm."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = MOBILE_STEM
    layers["stem"] = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
    layers["norm"] = nn.GroupNorm(8, width)
    layers["relu"] = nn.ReLU()
    for i, (following, stride) in enumerate(MOBILE_BLOCKS, start=1):
        layers[f"depth{i}"] = nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=False)
        layers[f"depth{i}_norm"] = nn.GroupNorm(8, width)
        layers[f"depth{i}_relu"] = nn.ReLU()
        layers[f"point{i}"] = nn.Conv2d(width, following, 1, bias=False)
        layers[f"point{i}_norm"] = nn.GroupNorm(8, following)
        layers[f"point{i}_relu"] = nn.ReLU()
        width = following
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flat"] = nn.Flatten()
    layers["out"] = nn.Linear(width, outputs)
    return nn.Sequential(layers)


class Residual(nn.Module):
    """Layers whose input is added to their output."""

    def __init__(self, layers: OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(layers)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layers(x)
        return x + changed


def _block(width: int, following: int, pool: bool = False) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(width, following, 3, padding=1, bias=False))
    layers |= {"norm": nn.GroupNorm(32, following), "relu": nn.ReLU()}
    return layers | {"pool": nn.MaxPool2d(2)} if pool else layers


def resnet9(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The nine-layer residual network of DAWNBench, with GroupNorm instead of batch norm."""
    widths = RESNET_WIDTHS
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(_block(shape[0], widths[0])))
    for i, (width, following) in enumerate(pairwise(widths), start=1):
        layers[f"block{i}"] = nn.Sequential(_block(width, following, pool=True))
        if i in RESNET_RESIDUALS:
            twice = [(f"{name}{n}", layer) for n in (1, 2) for name, layer in _block(following, following).items()]
            layers[f"residual{i}"] = Residual(OrderedDict(twice))
    layers |= {"pool": nn.AdaptiveMaxPool2d(1), "flat": nn.Flatten(), "out": nn.Linear(widths[-1], outputs)}
    return nn.Sequential(layers)


class Attention(nn.Module):
    """Self-attention in plain layers, each of which has per-record gradients."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        parts = self.inputs(x).view(batch, steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        weights = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(width // self.heads), dim=3)
        mixed: Tensor = self.out((weights @ value).transpose(1, 2).reshape(batch, steps, width))
        return mixed


def _attentive(width: int) -> nn.Module:
    """One layer of a transformer (Vaswani et al. 2017), with the norms first."""
    attend: OrderedDict[str, nn.Module] = OrderedDict(norm=nn.LayerNorm(width))
    attend["attention"] = Attention(width, TRANSFORMER_HEADS)
    feed: OrderedDict[str, nn.Module] = OrderedDict(norm=nn.LayerNorm(width))
    feed |= {"wide": nn.Linear(width, 2 * width), "relu": nn.ReLU(), "narrow": nn.Linear(2 * width, width)}
    return nn.Sequential(OrderedDict(attend=Residual(attend), feed=Residual(feed)))


class Transformer(nn.Module):
    """Two layers over the steps of a series, with a learned vector per place, and a linear head on the last step."""

    def __init__(self, steps: int, features: int, outputs: int, width: int = TRANSFORMER_WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.places = nn.Parameter(torch.randn(steps, width) * PLACES)
        self.layers = nn.Sequential(*(_attentive(width) for _ in range(TRANSFORMER_LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.embed(x if x.dim() == 3 else x.unsqueeze(2)) + self.places
        scores: Tensor = self.out(self.norm(self.layers(steps)[:, -1]))
        return scores


def transformer(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A small transformer over a series of numbers or of vectors."""
    return Transformer(shape[0], shape[1] if len(shape) == 2 else 1, outputs)


class Lstm(nn.Module):
    """One LSTM layer over a series of numbers or vectors, and a linear head on its last state."""

    def __init__(self, features: int, outputs: int, hidden: int = LSTM_HIDDEN) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x if x.dim() == 3 else x.unsqueeze(2))
        forecast: Tensor = self.out(states[:, -1])
        return forecast


def lstm(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """An LSTM over a series of any length."""
    return Lstm(shape[1] if len(shape) == 2 else 1, outputs)


Builder = Callable[[tuple[int, ...], int], nn.Module]
BUILDERS: dict[str, Builder] = {
    "mlp": mlp,
    "logistic": logistic,
    "lenet5": lenet5,
    "sigmoid-lenet": sigmoid_lenet,
    "cnn": cnn,
    "cnn5x5": cnn5x5,
    "mobilecnn": mobilecnn,
    "resnet9": resnet9,
    "lstm": lstm,
    "cnn1d": cnn1d,
    "transformer": transformer,
}
