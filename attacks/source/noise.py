"""Shadow sets that an attacker knows only roughly: images turned, mirrored, or with other colours (Tables 4 and 5).

Colours change as in torchvision's ColorJitter: brightness, contrast, saturation and hue, each by a random factor of its
own per image, in this order. Grey images have neither saturation nor hue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_privacy.tasks.data import Dataset

COLOURS = 3
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in grey (ITU-R BT.601)
TURN = 30.0  # degrees

Change = Callable[[Tensor, torch.Generator], Tensor]


def rotated(images: Tensor, draw: torch.Generator, most: float = TURN) -> Tensor:
    """Every image by a random angle of at most `most` degrees; corners that come in are 0."""
    angles = (torch.rand(len(images), generator=draw) * 2 - 1) * math.radians(most)
    cos, sin, none = angles.cos(), angles.sin(), torch.zeros(len(images))
    turns = torch.stack([torch.stack([cos, -sin, none], 1), torch.stack([sin, cos, none], 1)], 1)
    grid = torch.nn.functional.affine_grid(turns, list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, mode="bilinear", align_corners=False)


def mirrored(images: Tensor, draw: torch.Generator) -> Tensor:
    """Left and right exchanged."""
    return images.flip(3)


def upside_down(images: Tensor, draw: torch.Generator) -> Tensor:
    """Top and bottom exchanged."""
    return images.flip(2)


def coloured(strength: float) -> Change:
    """Brightness, contrast and saturation by up to a share `strength`, hue by a tenth of it (of the colour circle)."""

    def change(images: Tensor, draw: torch.Generator) -> Tensor:
        def factor(spread: float) -> Tensor:
            return (1 + spread * (torch.rand(len(images), generator=draw) * 2 - 1))[:, None, None, None]

        images = (images * factor(strength)).clamp(0, 1)
        images = blended(images, grey(images).mean(dim=(2, 3), keepdim=True), factor(strength))
        if images.shape[1] != COLOURS:
            return images
        images = blended(images, grey(images), factor(strength))
        return turned_hue(images, (factor(strength / 10) - 1)[:, :, 0, 0])

    return change


def grey(images: Tensor) -> Tensor:
    """One channel; of a grey image itself."""
    if images.shape[1] != COLOURS:
        return images
    return (images * images.new_tensor(LUMA)[None, :, None, None]).sum(dim=1, keepdim=True)


def blended(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """`share` of the images and the rest of the others; a share above 1 goes away from them."""
    return (share * images + (1 - share) * others).clamp(0, 1)


def turned_hue(images: Tensor, turns: Tensor) -> Tensor:
    """The hue of each image turned by so much of the colour circle; brightest and darkest channel stay as they are."""
    top, low = images.max(dim=1).values, images.min(dim=1).values
    span = top - low
    safe = torch.where(span > 0, span, torch.ones_like(span))
    red, green, blue = images.unbind(1)
    sixth = torch.where(
        red == top,
        ((green - blue) / safe) % 6,
        torch.where(green == top, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue = (sixth + 6 * turns[:, :, None]) % 6
    channels = [top - span * (1 - ((hue + shift) % 6 - 3).abs().sub(1).clamp(0, 1)) for shift in (0, 4, 2)]
    return torch.stack(channels, 1)


NOISES: Mapping[str, Change] = {
    "rotation": rotated,
    "mirrored": mirrored,
    "upside down": upside_down,
    "colour 0.2": coloured(0.2),
    "colour 0.4": coloured(0.4),
    "colour 0.6": coloured(0.6),
}


def noisy(records: Dataset, name: str, seed: int) -> Dataset:
    """Images with this noise; with colours, pixels are taken to be from 0 to 1."""
    draw = torch.Generator().manual_seed(seed)
    made: NDArray[np.float32] = NOISES[name](torch.from_numpy(np.asarray(records.x, np.float32)), draw).numpy()
    return replace(records, x=made)


def is_images(records: Dataset) -> bool:
    return records.x.ndim == 4
