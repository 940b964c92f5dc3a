"""A simulation's processes: forked before any thread, independent of each other's errors, ended with their parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from fl_privacy.deploy.environment import SET

SCRIPT = """
import json, os, signal
import psutil
from client_app.forks import Forks
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

threads = psutil.Process().num_threads()
forks = Forks(2)
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
context = Context(1, 3, {"partition-id": 2}, RecordDict(), {})
try:
    forks.process_message(Message(RecordDict(), 3, "query.unknown"), context)
    error = ""
except Exception as raised:
    error = str(raised)
reply, _ = forks.process_message(Message(RecordDict(), 3, "query"), context)
found = {"threads": threads, "error": error, "partition": reply.content["site"]["partition"]}
print(json.dumps(found | {"forks": [child.pid for child in psutil.Process().children()]}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The findings of a process with two forks, which was then killed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env={**os.environ, **SET}
    )
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


def test_no_thread_is_running_when_the_processes_fork(found: dict[str, Any]) -> None:
    assert found["threads"] == 1


def test_an_error_in_a_fork_fails_only_its_own_message(found: dict[str, Any]) -> None:
    assert "unknown" in found["error"]
    assert found["partition"] == 2


def test_forks_end_when_their_parent_is_killed(found: dict[str, Any]) -> None:
    assert len(found["forks"]) == 2
    alive = [psutil.Process(pid) for pid in found["forks"] if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(alive, timeout=20)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
