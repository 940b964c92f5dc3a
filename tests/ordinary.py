"""For tests that run as root: commands as an ordinary user."""

from __future__ import annotations

import sys
from pathlib import Path

from fl_privacy.deploy.confine import user

UID = 60_700  # not one that SuperNodes get
# Python may lie in a folder that only root can enter. In a mount namespace it also lies in one that everybody can.
CODE = f"""
import os, sys
from pathlib import Path
from fl_privacy.deploy.confine import user, view
from fl_privacy.deploy.confine.__main__ import _python
system = [Path("/") / name for name in ("usr", "lib", "lib64", "bin", "sbin", "etc", "sys")]
view.enter([*system, *_python()], [Path("/proc"), Path("/dev"), Path(sys.argv[1])])
user.become({UID})
os.chdir(sys.argv[1])
os.execvp(sys.argv[2], sys.argv[2:])
"""


def prefix(folder: Path) -> list[str]:
    """What to put before a command of a user who owns this folder."""
    user.give(folder, UID)
    return [sys.executable, "-c", CODE, str(folder)]
