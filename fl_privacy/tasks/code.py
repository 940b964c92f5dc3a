"""Somebody's own task code: loaded from text that was pinned, and its errors reported as theirs, with file and line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.reading import validated
from fl_privacy.tasks.task import Task

MODULE = "fl_privacy_task"  # the name under which a task's file is imported, once per process and text


class TaskError(ConfigError):
    """An error in the user's own task, with file and line."""


def load(source: str, file: str) -> type[Task]:
    """The one Task class in the text of a file."""
    module = ModuleType(f"{MODULE}_{abs(hash(source)):x}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses and pydantic look their module up
    with theirs(file, "cannot be loaded"):
        exec(compile(source, file, "exec"), module.__dict__)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise TaskError(f"{file}: needs exactly one subclass of fl_privacy.Task, and has {names}")
    return found[0]


def make(kind: type[Task], options: dict[str, Any], file: str) -> Task:
    """The task with its options, validated by its own model."""
    with theirs(file, "Options"):
        checked = validated(kind.Options, options, "task.options")
    with theirs(file, "__init__"):
        return kind(checked)


@contextmanager
def theirs(file: str, what: str) -> Iterator[None]:
    """Report whatever their code raises as an error of theirs, at the last line of their file that was reached."""
    try:
        yield
    except FederationError:
        raise
    except SyntaxError as error:
        raise TaskError(f"{error.filename or file}:{error.lineno or 0}: {what}: {error.msg}") from None
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == Path(file)]
        where = f"{file}:{frames[-1].lineno}" if frames else file
        reason = " ".join(str(error).split())[:300]
        raise TaskError(f"{where}: {what}: {type(error).__name__}: {reason}") from None
