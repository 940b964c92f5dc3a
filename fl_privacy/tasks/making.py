"""From a federation's config to its task: ours by name, a plug-in's, or the code that the config pins."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from fl_privacy.errors import ConfigError
from fl_privacy.tasks import code
from fl_privacy.tasks.task import TASKS, Task

if TYPE_CHECKING:
    from fl_privacy.config import Federation


def task_of(federation: Federation) -> Task:
    """The federation's task. This runs the task's code: at a site, only after its operator accepted it."""
    chosen = federation.task
    if not chosen.is_own:
        from fl_privacy.tasks.standard import Standard, Weighted

        return Standard(federation) if chosen.data_set.class_weights is None else Weighted(federation)
    return code.make(_kind(chosen.code, chosen.source, chosen.name, chosen.sha256), chosen.options, chosen.label)


@lru_cache(maxsize=4)
def _kind(file: str | None, source: str | None, name: str | None, sha256: str | None) -> type[Task]:
    if file is not None and source is not None:
        return code.load(source, file)
    from fl_privacy.tasks.installed import pinned

    assert name is not None
    if sha256 is not None:
        pinned(name, sha256)  # before its modules are imported, which runs code
    return TASKS.get(name)


def classes_of(federation: Federation) -> int:
    """The number of classes; 0: the label is a number. A task of your own says it, or its last linear layer does."""
    if not federation.task.is_own:
        return federation.task.data_set.classes
    task = task_of(federation)
    if task.classes is not None:
        return task.classes
    from fl_privacy.tasks.workload import model_of

    widths = [layer.out_features for layer in model_of(federation).modules() if hasattr(layer, "out_features")]
    if not widths:
        where = code.place(task, "model")
        raise ConfigError(f"{where}: the model has no linear layer at the end; set `classes` in the task")
    width = int(str(widths[-1]))
    return 0 if width == 1 else width
