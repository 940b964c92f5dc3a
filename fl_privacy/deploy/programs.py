"""`python -m fl_privacy.deploy.programs PROGRAM ...`: a program of Flower, whose own programs are forks of it.

A SuperNode starts a SuperExec, and a SuperExec starts a new process for every message; each would import Flower again.
Here a process forks once before its program starts. The fork has only imported modules: it holds no key and no data,
and each program that this one starts later is a fork of it. Where that fails, it is started as Flower would start it.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from fl_privacy.deploy.forkserver import Forked, Nursery

MODULE = "fl_privacy.deploy.programs"
EXEC = "flwr.supercore.cli.flower_superexec"


class Parent(NamedTuple):
    """A program that starts others: the module that does it, and what it and they import."""

    starts: str
    imports: tuple[str, ...]


PARENTS = {
    "flower-superlink": Parent("flwr.superlink.cli.flower_superlink", ("flwr.superlink.cli.flwr_serverapp", EXEC)),
    "flower-supernode": Parent("flwr.supernode.start_client_internal", ("flwr.supernode.cli.flwr_clientapp", EXEC)),
    "flower-superexec": Parent("flwr.supercore.superexec.executor.subprocess_executor", (EXEC,)),
}


def program(name: str) -> str:
    """A program of this environment."""
    return str(Path(sys.executable).with_name(name))


def forking(name: str) -> list[str]:
    """The command of a program whose own programs are forks of it."""
    return [sys.executable, "-m", MODULE, name]


def modules(name: str) -> tuple[str, ...]:
    """What a fork server loads for this program."""
    return (MODULE, *PARENTS[name].imports)


def main() -> None:
    name = sys.argv[1]
    if sys.platform == "linux" and name in PARENTS:
        parent = PARENTS[name]
        for module in parent.imports:
            import_module(module)
        _replace_popen(import_module(parent.starts), Nursery(name))
    sys.argv = [program(name), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _replace_popen(module: Any, nursery: Nursery) -> None:
    """Flower has no setting for how it starts a program: the module gets a `subprocess` of its own."""

    def popen(command: Sequence[str], **options: Any) -> Forked | subprocess.Popen[bytes]:
        with suppress(OSError):
            return nursery.popen([*forking(command[0]), *command[1:]], **options)
        return subprocess.Popen(command, **options)

    module.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})


if __name__ == "__main__":
    main()
