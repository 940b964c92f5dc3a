"""Kills processes at exact points of their own code; Python imports this file at start-up if PYTHONPATH has its folder.

FL_PRIVACY_FAULTS names a folder with `plan.json`: where metrics and process numbers are, and a list of faults,
which happen in turn, each once the run has come some rounds further. Fault number n is done when `n.done` exists.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

GAP = 2  # rounds between two faults
RESTART = 6.0  # seconds to wait for a process that is being restarted: rounds may be shorter than its pause
FOLDER = Path(os.environ.get("FL_PRIVACY_FAULTS", ""))
PLAN = json.loads((FOLDER / "plan.json").read_text()) if "FL_PRIVACY_FAULTS" in os.environ else {"faults": []}
POINTS = {fault["point"] for fault in PLAN["faults"]}


def rounds() -> int:
    found = list(Path(PLAN["runs"]).glob(PLAN["metrics"]))
    return found[0].read_bytes().count(b"\n") if found else 0


def reached(point: str, when: str) -> None:
    """Kill whom the next fault names, if this is its point and its time."""
    number = sum(1 for _ in FOLDER.glob("*.done"))
    if number >= len(PLAN["faults"]):
        return
    fault, now = PLAN["faults"][number], rounds()
    before = int((FOLDER / f"{number - 1}.done").read_text()) if number else 0
    here = (fault["point"], fault["when"]) == (point, when) and fault["process"] in " ".join(sys.orig_argv)
    if not here or now < before + GAP:
        return
    until = time.monotonic() + RESTART
    while not (victims := [os.getpid()] if fault["victim"] == "self" else others(fault["victim"])):
        if time.monotonic() > until:
            return
        time.sleep(0.05)
    try:
        (FOLDER / f"{number}.done").open("x").write(str(now))
    except FileExistsError:
        return
    for victim in victims:
        os.kill(victim, signal.SIGKILL)


def others(name: str) -> list[int]:
    """A process by its name in a table of processes.

    `name/program` is what it started, `^name` what it is a fork of, and `name@kit` that of one kit.
    """
    import psutil

    name, _, kit = name.partition("@")
    parent, _, program = name.partition("/")
    found = []
    for table in Path(PLAN["runs"]).glob(PLAN["pids"]):
        pid = json.loads(table.read_text()).get(parent.removeprefix("^"))
        if pid is None or f"/{kit}" not in str(table):
            continue
        with contextlib.suppress(psutil.Error):  # it has just exited
            named = psutil.Process(pid)
            itself = [psutil.Process(named.ppid())] if parent.startswith("^") else [named]
            family = named.children(recursive=True) if program else itself
            alive = [process for process in family if process.status() != psutil.STATUS_ZOMBIE]
            found += [process.pid for process in alive if program in " ".join(process.cmdline())]
    return found


def wrapped(point: str, function: Any) -> Any:
    def before() -> None:
        reached(point, "before")

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def generator(*args: Any, **options: Any) -> Any:
            before()
            async for part in function(*args, **options):
                yield part
            reached(point, "after")

        return generator
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **options: Any) -> Any:
            before()
            result = await function(*args, **options)
            reached(point, "after")
            return result

        return coroutine

    @functools.wraps(function)
    def plain(*args: Any, **options: Any) -> Any:
        before()
        result = function(*args, **options)
        reached(point, "after")
        return result

    return plain


class Finder:
    """Finds the modules that have points, and wraps these when they are loaded."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> Any:
        points = [point for point in POINTS if point.startswith(f"{name}:")]
        spec = importlib.machinery.PathFinder.find_spec(name, path) if points else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            for point in points:
                *owners, last = point.partition(":")[2].split(".")
                owner = functools.reduce(getattr, owners, module)
                setattr(owner, last, wrapped(point, getattr(owner, last)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if POINTS:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
