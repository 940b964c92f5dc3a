"""Run the command line as a user does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from fl_privacy.deploy.engines.workspace import SIMULATED_SITES
from fl_privacy.deploy.forkserver import ForkServer
from fl_privacy.deploy.programs import modules
from fl_privacy.roles import ROLES

PROGRAM = Path(sys.executable).with_name("fl-privacy")
# The test runner may ignore SIGINT (a background job does), and children inherit that.
HEED = ("env", "--default-signal=SIGINT")
PATIENCE = 600  # seconds for a whole run, on two cores beside other tests
STARTED_WITH = dict(os.environ)  # a test may change its own
# Commands are forked from a process that has imported what most of them need: importing takes longer than they do.
LIGHT = ("forked", "fl_privacy.cli.run", "fl_privacy.tasks.workload", "fl_privacy.deploy.kits.provision")
FLOWER = (*modules("flower-superlink"), *modules("flower-supernode"), "fl_privacy.deploy.confine")
OURS = (*(role.module for role in ROLES.values() if role.module), SIMULATED_SITES, "fl_privacy.gate.relay")
WHOLE = (*LIGHT, *FLOWER, *OURS, "fl_privacy.gate.gate")
END_TO_END = False  # some tests start federations: one process that has loaded all is less than two


class Command:
    """A running `fl-privacy`, in a process of its own, in this folder or another machine."""

    def __init__(self, *arguments: str | Path, machine: str = "", whole: bool = False) -> None:
        """`whole`: the processes of the federation that it starts are forks too."""
        self.line, self._folder = [str(PROGRAM), *map(str, arguments)], tempfile.mkdtemp()
        files = self._files
        where: dict[str, Any] = {"folder": str(Path.cwd()), "errors": str(files[1]), "program": str(PROGRAM)}
        where |= {"machine": machine, "forks": whole}
        command = [sys.executable, "-m", "forked", json.dumps(where), *self.line[1:]]
        with files[0].open("wb") as output:
            server = _server(os.getpid(), WHOLE if whole or END_TO_END else LIGHT)
            self._process = server.start(command, os.environ, output)

    @property
    def _files(self) -> list[Path]:
        return [Path(self._folder, name) for name in ("stdout", "stderr")]

    def poll(self) -> int | None:
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def printed(self) -> str:
        """So far, with the errors."""
        return "".join(file.read_text() for file in self._files if file.exists())

    def end(self, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise
        made = subprocess.CompletedProcess(self.line, code, *(file.read_text() for file in self._files))
        shutil.rmtree(self._folder)
        return made


@cache
def _server(owner: int, modules: tuple[str, ...]) -> ForkServer:
    here = os.pathsep.join(filter(None, (str(Path(__file__).parent), STARTED_WITH.get("PYTHONPATH"))))
    return ForkServer(modules, {**STARTED_WITH, "PYTHONPATH": here, "PYTHONSAFEPATH": "1"})


def cli(
    *arguments: str | Path, timeout: float = PATIENCE, machine: str = "", whole: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `fl-privacy` to its end in a process of its own."""
    return Command(*arguments, machine=machine, whole=whole).end(timeout)


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The last line of the output, parsed."""
    return json.loads(done.stdout.strip().splitlines()[-1])


def interrupt(config: Path, runs: Path, engine: str, event: str) -> Path:
    """Start a run, press Ctrl-C when the server has logged an event, and return the run's folder."""
    before = set(runs.iterdir())
    process = Command("up", config, "--runs-dir", runs, "--engine", engine, whole=True)
    logged = f'"event":"{event}"'
    while True:
        assert process.poll() is None, "the run ended before the event"
        logs = [path for run in set(runs.iterdir()) - before for path in run.glob("logs/server.log")]
        if logs and logged in logs[0].read_text():
            break
        time.sleep(0.02)
    process.signal(signal.SIGINT)
    process.end(timeout=60)
    return logs[0].parent.parent
