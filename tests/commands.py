"""Run the command line as a user does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any


def cli(*arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("fl-privacy")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The last line of the output, parsed."""
    return json.loads(done.stdout.strip().splitlines()[-1])


def interrupt(config: Path, runs: Path, engine: str, event: str) -> Path:
    """Start a run, press Ctrl-C when the server has logged an event, and return the run's folder."""
    before = set(runs.iterdir())
    command = [str(Path(sys.executable).with_name("fl-privacy")), "up", str(config), "--runs-dir", str(runs)]
    # The test runner may ignore SIGINT (a background job does), and children inherit that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "--engine", engine], preexec_fn=heed, **quiet) as process:  # type: ignore[call-overload]
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
