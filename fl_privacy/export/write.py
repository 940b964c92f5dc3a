"""Writing a model and its card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy import vector
from fl_privacy.errors import FederationError
from fl_privacy.export import card
from fl_privacy.export.source import Found
from fl_privacy.files import write_public
from fl_privacy.models.initial import differences

if TYPE_CHECKING:
    from torch import nn


def module(found: Found) -> nn.Module:
    """The torch module with the model's weights, ready to predict."""
    from fl_privacy.tasks.workload import model_of

    made = model_of(found.federation)
    if differing := differences(vector.flatten(made)[1], found.layout):
        raise FederationError(f"task: its model is not the one of run {found.name}: {'; '.join(differing[:5])}")
    vector.load(made, found.model, found.layout)
    return made.eval()


def write(found: Found, to: Path, shape: tuple[int, ...] | None = None) -> tuple[Path, dict[str, Any]]:
    """Write the model in the format of the suffix of `to`, and its card beside it; returns the card's file and facts.

    `shape` is that of one record, for ONNX; default: the task's.
    """
    from fl_privacy.models import formats

    facts = card.facts(found)
    formats.write(to, module(found), shape or record_shape(found), card.to_json(facts))
    beside = to.with_suffix(".card.md")
    write_public(beside, card.to_markdown(facts, to.stem).encode())
    return beside, facts


def record_shape(found: Found) -> tuple[int, ...] | None:
    """The shape of one record, where the task states it."""
    from fl_privacy.tasks.catalog import TASKS

    return TASKS.get(found.federation.task.dataset).shape
