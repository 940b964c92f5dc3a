"""Regularisation of local training: dropout, label smoothing and random crops (Athanasiou et al. 2026, Table 2).

And InstaHide, which was made against the reconstruction of records (its Table 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, log_softmax

from fl_privacy.errors import FederationError

if TYPE_CHECKING:
    from fl_privacy.tasks.train import Loss

Augment = Callable[[Tensor], Tensor]
LARGEST_PART = 0.65  # of any record in a mixture: InstaHide's c_1


@contextmanager
def dropout(model: nn.Module, share: float, draw: torch.Generator) -> Iterator[None]:
    """While this is open, a share of what the last linear layer gets is 0, and the rest is scaled up."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not share or not linear:
        yield
        return

    def drop(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        kept = torch.rand(inputs[0].shape, generator=draw) >= share
        return (inputs[0] * kept.to(inputs[0].device) / (1 - share),)

    hook = linear[-1].register_forward_pre_hook(drop)
    try:
        yield
    finally:
        hook.remove()


def smoothed(loss: Loss, share: float) -> Loss:
    """A share of every label goes to all classes equally (Szegedy et al. 2016); numbers to predict have no classes."""

    def made(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
        if labels.is_floating_point():
            return loss(outputs, labels, reduction)
        even = -log_softmax(outputs, dim=1).mean(dim=1)
        each = (1 - share) * loss(outputs, labels, "none") + share * even
        reduced = {"mean": each.mean, "sum": each.sum}.get(reduction)
        return each if reduced is None else reduced()

    return made


def cropped(augment: Augment, side: int, draw: torch.Generator) -> Augment:
    """After `augment`, a square of this side from a random place of every image, enlarged to the image's size."""

    def made(records: Tensor) -> Tensor:
        images = augment(records)
        if images.dim() != 4 or min(images.shape[2:]) < side:
            shape = tuple(images.shape[1:])
            raise FederationError(f"train.crop: {side} does not fit records of shape {shape}; lower it or remove it")
        height, width = images.shape[2:]
        tops, lefts = (
            torch.randint(size - side + 1, (len(images),), generator=draw).tolist() for size in (height, width)
        )
        pieces = [
            one[:, top : top + side, left : left + side] for one, top, left in zip(images, tops, lefts, strict=True)
        ]
        return interpolate(torch.stack(pieces), (height, width), mode="bilinear", align_corners=False)

    return made


class Hidden(NamedTuple):
    """Encoded records, the rows that were mixed into each, and their parts in it: (k, records)."""

    records: Tensor
    rows: Tensor
    parts: Tensor


@dataclass(frozen=True)
class InstaHide:
    """Each record is mixed with k - 1 others of the site, then every number gets a random sign (Huang et al. 2020).

    That is the form within one data set: the labels are mixed in the same proportion. With k = 1 only signs are drawn.
    """

    k: int
    draw: torch.Generator

    def __call__(self, x: Tensor, rows: Tensor, augment: Augment) -> Hidden:
        """Encode these rows of all the site's records; nothing is drawn twice, so no encoding is reused."""
        others = torch.randint(len(x), (self.k - 1, len(rows)), generator=self.draw).to(rows.device)
        chosen, parts = torch.cat([rows[None], others]), self.parts(len(rows)).to(x.device)
        shape = (-1, *[1] * (x.dim() - 1))
        mixed = sum(part.view(shape) * augment(x[row]) for row, part in zip(chosen, parts, strict=True))
        assert isinstance(mixed, Tensor)
        signs = 2 * torch.randint(2, mixed.shape, generator=self.draw).to(mixed) - 1
        return Hidden(mixed * signs, chosen, parts)

    def parts(self, records: int) -> Tensor:
        """Random parts that add up to 1, none above `LARGEST_PART`: a larger one is moved towards the mean."""
        if self.k == 1:
            return torch.ones(1, records)
        drawn = torch.rand((self.k, records), generator=self.draw) + 1e-6
        even, parts = 1 / self.k, drawn / drawn.sum(dim=0)
        return even + (parts - even) * ((LARGEST_PART - even) / (parts.amax(dim=0) - even)).clamp(max=1)
