"""For tests: models of every kind that can be permuted, beside those of `fl_privacy.tasks.models`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fl_privacy.tasks import models
from fl_privacy.tasks.models import Residual

STEPS, FEATURES = 5, 3
SHIPPED = {
    "mlp": (1, 8, 8),
    "logistic": (5,),
    "lenet5": (1, 8, 8),
    "sigmoid-lenet": (3, 16, 16),
    "cnn": (3, 16, 16),
    "cnn5x5": (1, 16, 16),
    "mobilecnn": (3, 16, 16),
    "resnet9": (3, 16, 16),
    "lstm": (12, 3),
    "cnn1d": (32, 9),
    "transformer": (12, 3),
}


class Recurrent(nn.Module):
    """Two layers in both directions, read at the last step or by the last states."""

    def __init__(self, kind: str, states: bool = False) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(FEATURES, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.states, self.out = states, nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, last = self.layers(x)
        if not self.states:
            return self.out(output[:, -1])  # type: ignore[no-any-return]
        last = last[0] if isinstance(last, tuple) else last
        return self.out(torch.cat([last[-2], last[-1]], dim=1))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """torch's own transformer encoder, with a learned vector per place, and the mean over places."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.embed, self.places = nn.Linear(FEATURES, 16), nn.Parameter(torch.randn(1, STEPS, 16))
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(x) + self.places).mean(dim=1))  # type: ignore[no-any-return]


class Chunked(nn.Module):
    """Attention by `chunk`, heads by `view` and torch's fused product, read through a token of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.embed = nn.Parameter(torch.randn(1, 1, 12)), nn.Linear(FEATURES, 12)
        self.inputs, self.mixed, self.out = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], dim=1)
        parts = [p.view(len(x), -1, 3, 4).transpose(1, 2) for p in self.inputs(x).chunk(3, dim=-1)]
        mixed = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        return self.out(x[:, 0] + self.mixed(mixed)[:, 0])  # type: ignore[no-any-return]


class Transposed(nn.Module):
    """A layer over the other axis."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


def _wide(width: int, hidden: int) -> list[nn.Module]:
    return [nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)]


class Mixer(nn.Module):
    """MLP-Mixer on patches: layers over tokens and over channels in turn."""

    def __init__(self, tokens: int = 6, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        over_tokens = [nn.LayerNorm(width), Transposed(nn.Sequential(*_wide(tokens, 7)))]
        over_channels = [nn.LayerNorm(width), *_wide(width, 9)]
        self.blocks = nn.Sequential(*(Residual(_named(each)) for each in (over_tokens, over_channels)))
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.embed(x)).mean(dim=1))  # type: ignore[no-any-return]


def _named(layers: list[nn.Module]) -> OrderedDict[str, nn.Module]:
    return OrderedDict((str(number), layer) for number, layer in enumerate(layers))


class Words(nn.Module):
    """Token ids, a GRU, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.out = nn.Embedding(50, 16, padding_idx=0), nn.GRU(16, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(x).transpose(0, 1))[0][-1])  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight used twice, and an input that is used flat and by its axes."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.rows = nn.Linear(12, 6), nn.Linear(4, 6, bias=False)
        self.again, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.flat(x.flatten(1))) + self.rows(x).sum(dim=1)
        return self.out(torch.tanh(self.again(torch.tanh(self.again(hidden)))))  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    """Batch, instance and group normalisation, groups of channels, and a slope per channel."""
    return nn.Sequential(
        *(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Conv2d(8, 8, 3, groups=4), nn.InstanceNorm2d(8)),
        *(nn.Conv2d(8, 12, 1), nn.GroupNorm(6, 12), nn.Conv2d(12, 24, 3, groups=12), nn.Hardswish()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(24, 3)),
    )


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{kind: (partial(Recurrent, kind), (STEPS, FEATURES)) for kind in ("RNN", "GRU", "LSTM")},
    **{f"{kind} states": (partial(Recurrent, kind, True), (STEPS, FEATURES)) for kind in ("RNN", "GRU", "LSTM")},
    "encoder": (Encoder, (STEPS, FEATURES)),
    "encoder, norms first": (lambda: Encoder(True), (STEPS, FEATURES)),
    "chunked attention": (Chunked, (STEPS, FEATURES)),
    "mixer": (Mixer, (6, 8)),
    "convolutions": (convolutions, (4, 9, 9)),
    "tied": (Tied, (3, 4)),
    "words": (Words, (7,)),
}


def model(name: str) -> nn.Module:
    if name in SHIPPED:
        return models.build(name, SHIPPED[name], 0 if name == "lstm" else 10, seed=1)
    return models.seeded(OWN[name][0], 1)


def batch(name: str, count: int = 3, seed: int = 0) -> Tensor:
    shape = SHIPPED[name] if name in SHIPPED else OWN[name][1]
    draw = torch.Generator().manual_seed(seed)
    if name == "words":
        return torch.randint(0, 50, (count, *shape), generator=draw)
    return torch.randn((count, *shape), generator=draw)
