"""Writing a model and its card. A run may come from anywhere, and its config may hold code: that is not run unasked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy import vector
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.export import card
from fl_privacy.export.source import Found
from fl_privacy.files import write_public
from fl_privacy.models.initial import differences
from fl_privacy.tasks import accepted

if TYPE_CHECKING:
    from torch import nn


def module(found: Found) -> nn.Module:
    """The torch module with the model's weights, ready to predict; runs the task's code, if that was accepted here."""
    from fl_privacy.tasks.workload import model_of

    task = found.federation.task
    if not may_run(found):
        fix = "export the weights as .pt or .safetensors, which runs no code, and load them into your own module"
        raise ConfigError(f"task: no site here accepted {task.label} (sha256 {task.sha256}); {fix}")
    made = model_of(found.federation)
    if differing := differences(vector.flatten(made)[1], found.layout):
        raise FederationError(f"task: its model is not the one of run {found.name}: {'; '.join(differing[:5])}")
    vector.load(made, found.model, found.layout)
    return made.eval()


def may_run(found: Found) -> bool:
    """Whether the task is ours, or code that a site on this machine or the owner of the kit has accepted."""
    task = found.federation.task
    ours = not task.is_own or found.code == task.sha256
    return ours or any(accepted.may_run(found.federation, state) for state in found.states.values())


def write(found: Found, to: Path, shape: tuple[int, ...] | None = None) -> tuple[Path, dict[str, Any]]:
    """Write the model in the format of the suffix of `to`, and its card beside it; returns the card's file and facts.

    `shape` is that of one record, for ONNX; default: the task's.
    """
    from fl_privacy.models import formats

    facts = card.facts(found)
    needed = to.suffix in formats.TRACED or may_run(found)  # a module also has buffers that are not trained
    model = module(found) if needed else formats.tensors(found.model, found.layout)
    formats.write(to, model, shape or record_shape(found), card.to_json(facts))
    beside = to.with_suffix(".card.md")
    write_public(beside, card.to_markdown(facts, to.stem).encode())
    return beside, facts


def record_shape(found: Found) -> tuple[int, ...] | None:
    """The shape of one record, where the task states it."""
    task = found.federation.task
    return None if task.is_own else task.data_set.shape
