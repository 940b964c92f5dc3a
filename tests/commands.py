"""Run the command line as a user does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).with_name("fl-privacy")
# The test runner may ignore SIGINT (a background job does), and children inherit that.
HEED = ("env", "--default-signal=SIGINT")
PATIENCE = 600  # seconds for a whole run, on two cores beside other tests
# Commands are forked from a process that has imported what most of them need: importing takes longer than they do.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fl_privacy.cli", "fl_privacy.tasks.workload", "fl_privacy.deploy.kits.provision"])


def cli(*arguments: str | Path, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run `fl-privacy` in a process of its own."""
    command = [str(PROGRAM), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_program, args=(command, files, dict(os.environ)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, process.exitcode, *(file.read_text() for file in files))


def _program(command: list[str], files: list[Path], environment: dict[str, str]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    from fl_privacy.cli import main

    main()


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The last line of the output, parsed."""
    return json.loads(done.stdout.strip().splitlines()[-1])


def interrupt(config: Path, runs: Path, engine: str, event: str) -> Path:
    """Start a run, press Ctrl-C when the server has logged an event, and return the run's folder."""
    before = set(runs.iterdir())
    command = [*HEED, str(PROGRAM), "up", str(config), "--runs-dir", str(runs)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "--engine", engine], **quiet) as process:
        logged = f'"event":"{event}"'
        while True:
            assert process.poll() is None, "the run ended before the event"
            logs = [path for run in set(runs.iterdir()) - before for path in run.glob("logs/server.log")]
            if logs and logged in logs[0].read_text():
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    return logs[0].parent.parent
