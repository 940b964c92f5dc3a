"""Run the command line as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def cli(*arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("fl-privacy")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The last line of the output, parsed."""
    return json.loads(done.stdout.strip().splitlines()[-1])
