"""A task of your own: one class in one Python file, or in an installed package.

A site runs it only if its operator accepted exactly this code. See docs/tasks.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from fl_privacy.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn


class NoOptions(BaseModel):
    """A task without options."""

    model_config = ConfigDict(extra="forbid")


class Task:
    """What a federation learns. `model` and `data` are required; the rest has a default."""

    Options: ClassVar[type[BaseModel]] = NoOptions  # validates `task.options`
    preprocessing: ClassVar[str] = "local"  # `public`: nothing is fitted to a site's own records, as dpsgd demands
    needs_data: ClassVar[bool] = True  # in a site's folder; False: `folder` may be None
    classes: ClassVar[int | None] = None  # 0: labels are numbers; default: the width of the model's last linear layer
    attacker: ClassVar[str | None] = None  # module:name of what fl_privacy/tasks/attacker.py calls Facts

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def model(self) -> nn.Module:
        """A new model. The federation's seed determines its weights."""
        raise NotImplementedError("model: return an nn.Module")

    def data(self, site: str, folder: Path) -> Any:
        """Training and held-out records of a site, from its own folder: a pair of (x, y) or of PyTorch Datasets."""
        raise NotImplementedError("data: return training and held-out records")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record (`reduction="none"`); default: cross-entropy for classes, squared error for numbers."""
        from fl_privacy.tasks.train import loss_of

        return loss_of(outputs, targets, "none")

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Further measures on a site's held-out records; they stay at the site."""
        return {}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Any:
        """A torch optimiser for one round; default (None): SGD as in `task.train`."""
        return None

    def augment(self, records: Tensor) -> Tensor:
        """A batch of training records, changed at random; default: unchanged."""
        return records


TASKS: Registry[type[Task]] = Registry("fl_privacy.tasks", {}, Task)


def own(task: Task, hook: str) -> bool:
    """Whether the task brings its own version of an optional method."""
    return getattr(type(task), hook) is not getattr(Task, hook)
