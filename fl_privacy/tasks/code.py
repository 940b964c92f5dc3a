"""Somebody's own task code: loaded from text that was pinned, and its errors reported as theirs, with file and line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from traceback import walk_tb
from types import ModuleType
from typing import Any, Literal

from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.reading import validated
from fl_privacy.tasks import members
from fl_privacy.tasks.task import Task, own

MODULE = "fl_privacy_task"  # the name under which a task's file is imported, once per process and text


class TaskError(ConfigError):
    """An error in the user's own task, with file and line."""


def load(source: str, file: str) -> type[Task]:
    """The one Task class in the text of a file."""
    module = ModuleType(f"{MODULE}_{abs(hash(source)):x}")
    module.__file__ = file
    setattr(module, members.SOURCE, source)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look their module up
    # What it prints is no part of a command's output.
    with redirect_stdout(sys.stderr), theirs(file, "cannot be loaded", module.__name__):
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise TaskError(f"{file}:1: needs exactly one subclass of fl_privacy.Task, and has {names}")
    return found[0]


def make(kind: type[Task], options: dict[str, Any], file: str) -> Task:
    """The task with its options, validated by its own model."""
    member, why = members.problem(kind)
    if member:
        raise TaskError(f"{members.where(kind, member, file)}: {member}: {why}")
    # A key that nobody reads is a typing error, unless their model says what to do with it.
    extra: Literal["forbid"] | None = None if "extra" in kind.Options.model_config else "forbid"
    with theirs(file, "Options", kind.__module__):
        checked = validated(kind.Options, options, "task.options", extra)
    with theirs(members.where(kind, "__init__", file), "__init__", kind.__module__):
        return kind(checked)


def place(task: Task, method: str) -> str:
    """File and line of a method of theirs, for a problem with what it returned; of `model`, if they have none."""
    method = method if own(task, method) else "model"
    found = getattr(getattr(type(task), method), "__code__", None)
    return type(task).__name__ if found is None else f"{found.co_filename}:{found.co_firstlineno}"


@contextmanager
def theirs(label: str, what: str, module: str) -> Iterator[None]:
    """Report whatever their code raises as an error of theirs, at the last line of their package that was reached."""
    try:
        yield
    except FederationError:
        raise
    except SyntaxError as error:
        raise TaskError(f"{error.filename or label}:{error.lineno or 1}: {what}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        package, steps = module.partition(".")[0], walk_tb(error.__traceback__)
        lines = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in steps
            if str(frame.f_globals.get("__name__")).partition(".")[0] == package
        ]
        reason = " ".join(str(error).split())[:300]
        fix = "; install it, at every site too" if isinstance(error, ModuleNotFoundError) else ""
        raise TaskError(f"{[label, *lines][-1]}: {what}: {type(error).__name__}: {reason}{fix}") from None
