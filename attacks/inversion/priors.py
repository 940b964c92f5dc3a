"""What an attacker learns from records of its own: an enhancer of blurred images (ROG), and a generator (GGL)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, interpolate, one_hot

from fl_privacy.tasks.data import Dataset

FACTOR = 2  # of ROG's blur
LATENT, WIDE = 24, 256
ENHANCER_STEPS, ENHANCER_BATCH = 300, 16
GENERATOR_STEPS, GENERATOR_BATCH = 2000, 64
RATE = 2e-3
KINDNESS = 0.25  # the weight of the code's own length: lower gives sharper images
_last: dict[tuple[bytes, int, int], Priors] = {}


class Enhancer(nn.Module):
    """Three convolutions that add what a blur took away."""

    def __init__(self, channels: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.layers(x)
        return (x + added).clamp(0, 1)


class Generator(nn.Module):
    """The decoder of a variational autoencoder, given the class."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.shape, pixels = shape, int(torch.Size(shape).numel())
        self.layers = nn.Sequential(
            nn.Linear(LATENT + classes, WIDE), nn.ELU(), nn.Linear(WIDE, WIDE), nn.ELU(), nn.Linear(WIDE, pixels)
        )

    def forward(self, code: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.layers(torch.cat([code, y], dim=1)).sigmoid()
        return made.view(-1, *self.shape)


@dataclass(frozen=True)
class Priors:
    """Trained on held-out records."""

    enhancer: Enhancer
    generator: Generator


def blurred(x: Tensor) -> Tensor:
    """The image that a small one stands for."""
    side = tuple(x.shape[-2:])
    return enlarged(interpolate(x, scale_factor=1 / FACTOR, mode="area"), side)


def enlarged(small: Tensor, side: tuple[int, ...]) -> Tensor:
    return interpolate(small, size=list(side), mode="bicubic", align_corners=False)


def learn(records: Dataset, classes: int, seed: int) -> Priors:
    """Both from the attacker's own records; what this process learned last is kept, as an audit asks for it again."""
    key = hashlib.sha256(records.x.tobytes() + records.y.tobytes()).digest(), classes, seed
    if key not in _last:
        _last.clear()
        _last[key] = _learned(records, classes, seed)
    return _last[key]


def _learned(records: Dataset, classes: int, seed: int) -> Priors:
    """torch's global generator is not affected."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        x, y = torch.from_numpy(records.x), one_hot(torch.from_numpy(records.y), classes).float()
        return Priors(_enhancer(x).double(), _generator(x, y).double())


def _enhancer(x: Tensor) -> Enhancer:
    made = Enhancer(x.shape[1])
    optimiser = torch.optim.Adam(made.parameters(), RATE)
    for _ in range(ENHANCER_STEPS):
        batch = x[torch.randint(len(x), (ENHANCER_BATCH,))]
        error = (made(blurred(batch)) - batch).square().mean()
        optimiser.zero_grad()
        error.backward()
        optimiser.step()
    return made.eval().requires_grad_(False)


def _generator(x: Tensor, y: Tensor) -> Generator:
    """By the evidence lower bound (Kingma and Welling 2014), with the code's term weighted down."""
    made, pixels = Generator(tuple(x.shape[1:]), y.shape[1]), x[0].numel()
    encoder = nn.Sequential(nn.Linear(pixels + y.shape[1], WIDE), nn.ELU(), nn.Linear(WIDE, 2 * LATENT))
    optimiser = torch.optim.Adam([*made.parameters(), *encoder.parameters()], RATE)
    for _ in range(GENERATOR_STEPS):
        rows = torch.randint(len(x), (GENERATOR_BATCH,))
        mean, spread = encoder(torch.cat([x[rows].flatten(1), y[rows]], dim=1)).chunk(2, dim=1)
        code = mean + spread.exp() * torch.randn_like(mean)
        length = 0.5 * (mean.square() + (2 * spread).exp() - 2 * spread - 1).sum(dim=1).mean()
        error = binary_cross_entropy(made(code, y[rows]), x[rows], reduction="sum") / GENERATOR_BATCH
        optimiser.zero_grad()
        (error + KINDNESS * length).backward()
        optimiser.step()
    return made.eval().requires_grad_(False)
