"""The programs that Flower's own programs start are forks of them, or new processes where that is not possible."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from fl_privacy.deploy import environment
from fl_privacy.deploy.programs import PARENTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Flower's programs fork on Linux only")

SCRIPT = """
import json, sys, time
from importlib import import_module

import psutil
from fl_privacy.deploy import programs
from fl_privacy.deploy.forkserver import Nursery

name, killed = sys.argv[1:]
parent = programs.PARENTS[name]
for module in parent.imports:
    import_module(module)
module, threads = import_module(parent.starts), psutil.Process().num_threads()
programs._replace_popen(module, Nursery(name))
(nursery,) = psutil.Process().children()
until = time.monotonic() + 30
while "forkserver" not in (line := " ".join(nursery.cmdline()))[-40:] and time.monotonic() < until:
    time.sleep(0.01)
found = {"threads": threads, "nursery": line}
if killed == "killed":
    nursery.kill()
    time.sleep(0.2)
quiet = module.subprocess.Popen(["flower-superexec", "--version"], stdout=module.subprocess.DEVNULL)
session = module.subprocess.Popen(["flower-superexec", "--version"], start_new_session=True)
found |= {"kinds": [type(one).__name__ for one in (quiet, session)], "codes": [quiet.wait(60), session.wait(60)]}
print(json.dumps(found), flush=True)
"""


def found(name: str, killed: bool = False) -> tuple[dict[str, Any], list[str]]:
    """What the script found, and what the programs printed that it started."""
    command = [sys.executable, "-c", SCRIPT, name, "killed" if killed else ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment.own())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return json.loads(next(line for line in lines if line.startswith("{"))), [one for one in lines if "{" not in one]


@pytest.mark.parametrize("name", PARENTS)
def test_a_program_starts_its_own_as_forks(name: str) -> None:
    told, printed = found(name)
    assert (told["threads"], told["kinds"], told["codes"]) == (1, ["Forked", "Forked"], [0, 0])
    assert told["nursery"].endswith(f"forkserver for {name}")
    assert [line.startswith("Flower version") for line in printed] == [True]  # the other one is quiet


def test_without_its_fork_server_a_program_starts_new_processes() -> None:
    told, printed = found("flower-supernode", killed=True)
    assert (told["kinds"], told["codes"], len(printed)) == (["Popen", "Popen"], [0, 0], 1)


@pytest.mark.parametrize("name", PARENTS)
def test_flower_starts_programs_where_we_replace_it(name: str) -> None:
    assert inspect.getsource(import_module(PARENTS[name].starts)).count("subprocess.Popen(") >= 1
