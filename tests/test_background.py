"""`fl-privacy site start | stop | status`: what it reports is true, and nothing half-started is left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from commands import cli, json_of
from fl_privacy.config import Federation
from fl_privacy.deploy.kits import background
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.provision import Choices, provision
from fl_privacy.deploy.kits.serve import alone
from fl_privacy.deploy.processes import OLD_LOGS, Fleet
from fl_privacy.dp import ldp
from fl_privacy.dp.ledger import Ledger
from fl_privacy.errors import LaunchError
from fl_privacy.identity.pki import Authority
from fl_privacy.ops.log import Log
from kits import POLICY
from netns import left

SERVES = """
import json, pathlib, subprocess, sys, time
run = pathlib.Path(sys.argv[1]) / "run"
child = subprocess.Popen(["sleep", "60"])
(run / "pids.json").write_text(json.dumps({"worker": child.pid}))
(run / "healthy").touch()
time.sleep(60)
"""
FALLS = "import time; time.sleep(1); print('error: is served already'); raise SystemExit(2)"


@pytest.fixture
def site(tmp_path: Path) -> Folder:
    hosts = {"superlink": "127.0.0.1:9", "shuffler": "127.0.0.1:9"}
    made = Federation.model_validate({"name": "kits", "sites": 3, "route": {"kind": "shuffler"}, "hosts": hosts})
    provision(made, tmp_path / "kits", Authority.open(tmp_path / "ca"), sign=True, choices=Choices(metrics=None))
    (tmp_path / "kits" / "site-0" / "policy.yaml").write_text(POLICY)
    return Folder.open(tmp_path / "kits" / "site-0")


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the test's own code instead of `fl-privacy serve`."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def instead(code: str, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(folder: Folder, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            command = [sys.executable, "-c", code, str(folder.path)]
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        started.append(process)
        return process

    monkeypatch.setattr(background, "_launch", launch)


@contextmanager
def served(folder: Folder) -> Iterator[None]:
    """A site served by systemd or a container: locked and healthy, without a pid file of ours."""
    folder.run.mkdir(exist_ok=True)
    (folder.run / "healthy").touch()
    os.utime(folder.run / "healthy", (time.time() + 600,) * 2)  # fresh, however long a command takes
    with (folder.run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_empty_folders_that_an_archiver_dropped_are_recreated(
    site: Folder, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(SERVES, started, monkeypatch)
    shutil.rmtree(site.logs)
    assert background.start(site)["state"] == "up"
    assert background.stop(site)["state"] == "down"
    assert started[0].poll() is not None


def test_a_full_disk_when_the_pid_is_written_leaves_nothing_running(
    site: Folder, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(SERVES, started, monkeypatch)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(LaunchError, match=r"site-0: did not start: .*No space left on device; "):
        background.start(site)
    assert started[0].poll() is not None


def test_a_site_served_by_another_supervisor_is_neither_started_nor_reported_stopped(
    site: Folder, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(SERVES, started, monkeypatch)
    with served(site):
        assert background.status(site)["state"] == "up"
        for action in (background.start, background.stop):
            with pytest.raises(LaunchError, match="by systemd, a container or fl-privacy serve; stop it there"):
                action(site)
    assert started == []
    assert background.status(site)["state"] == "down"  # it was healthy a moment ago and has ended


def test_the_health_file_of_a_killed_predecessor_does_not_count(
    site: Folder, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(FALLS, started, monkeypatch)
    site.run.mkdir()
    (site.run / "healthy").touch()
    with pytest.raises(LaunchError, match="did not start: is served already"):
        background.start(site)


def test_the_health_file_of_another_process_that_started_meanwhile_does_not_count(
    site: Folder, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_another = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'run' / 'healthy').touch()\n"
    instead(by_another + FALLS, started, monkeypatch)
    with pytest.raises(LaunchError, match="did not start: is served already"):
        background.start(site)


@pytest.mark.e2e
def test_a_real_site_that_cannot_start_leaves_nothing_behind_even_without_its_empty_folders(tmp_path: Path) -> None:
    hosts = {"superlink": "127.0.0.1:9", "shuffler": "127.0.0.1:9"}
    values = {"name": "kits", "sites": 3, "route": {"kind": "shuffler"}, "hosts": hosts}
    made = Federation.model_validate({**values, "task": {"dataset": "mnist", "model": "lenet5"}})
    (tmp_path / "mnist").mkdir()
    choices = Choices(metrics=None, data=tmp_path)
    provision(made, tmp_path / "kits", Authority.open(tmp_path / "ca"), sign=True, choices=choices)
    kit = tmp_path / "kits" / "site-0"
    (kit / "policy.yaml").write_text(POLICY)
    shutil.rmtree(kit / "logs")
    done = cli("site", "start", kit)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: site site-0: did not start: worker: data_dir: ")
    assert left(kit) == []
    assert json_of(cli("site", "status", kit, "--json"))["state"] == "down"


def test_checking_whether_a_kit_is_served_does_not_prevent_serving_it(site: Folder) -> None:
    site.run.mkdir()
    with (site.run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        with alone(site):
            assert site.served
        assert not site.served
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="is already served"), alone(site):
            pass


def test_the_output_of_a_background_site_is_bounded_like_the_other_logs(tmp_path: Path) -> None:
    fleet, log = Fleet(tmp_path, tmp_path / "pids.json"), tmp_path / "serve.log"
    for _ in range(OLD_LOGS + 3):
        log.write_bytes(b"x" * 101)
        fleet.trim(largest=100)
        assert log.stat().st_size == 0
    assert len(list(tmp_path.glob("serve.*.log"))) == OLD_LOGS


def test_a_copy_of_a_running_kit_does_not_count_as_running(
    site: Folder, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    instead(SERVES, started, monkeypatch)
    background.start(site)
    shutil.copytree(site.path, tmp_path / "copy")
    copy = Folder.open(tmp_path / "copy")
    assert background.status(copy)["state"] == "down"
    assert background.stop(copy)["state"] == "down"
    assert started[0].poll() is None


def test_status_reports_whether_the_superlink_is_reachable(
    site: Folder, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(SERVES, started, monkeypatch)
    assert background.start(site)["superlink"] is None
    log = site.logs / "relay.log"
    log.write_text('{"time":1.0,"event":"connected"}\n{"time":2.0,"event":"unreachable","reason":"refused"}\n')
    assert background.status(site)["superlink"] == "unreachable: refused"


def test_status_is_readable(site: Folder) -> None:
    """What the site did last, what it has spent and has left, and why it declined."""
    federation = {**site.federation.model_dump(mode="json"), "privatise": {"kind": "ldp"}}
    federation["sites"] = [{**one, "epsilon": 2.0} for one in federation["sites"]]
    made = Federation.model_validate(federation)
    provision(made, site.path.parent, Authority.open(site.path.parent.parent / "ca"), choices=Choices(metrics=None))
    Ledger(site.state / "ledger.jsonl", 9.0, 1e-5, "site-0").charge("attempt", ldp.charge(2.0, 1e-5))
    log = Log("site-0", site.logs / "worker.log", site.logs / "events.jsonl")
    log("metrics-failing", reason="metrics 127.0.0.1:9464: in use")
    log("not-sent", run="run-1", round=3, reason="budget: this round would raise epsilon\x1b[31m")
    with served(site):
        done = cli("site", "status", site.path)
        lines = {line[2:13].strip(): line[14:] for line in done.stdout.splitlines()[1:]}
    assert done.stdout.startswith("site-0 of federation kits: up\n")
    assert "not-sent, run run-1, round 3" in lines["last event"]
    assert "round 3 of run-1: budget: this round would raise epsilon [31m" in lines["declined"]
    assert lines["budget"].startswith("epsilon 2.000 spent in 1 rounds, 97.000 left, delta 1e-05 (unit: site")
    assert lines["metrics"] == "none: 127.0.0.1:9464: in use"
    found = json_of(cli("site", "status", site.path, "--json"))
    assert (round(found["ledger"]["remaining"], 6), found["declined"]["round"]) == (97, 3)
    log("done", run="run-1", first=1, last=site.federation.rounds + 2, rounds=12)
    assert f"done, run run-1, rounds 1 to {site.federation.rounds}, and the" in cli("site", "status", site.path).stdout
    log("uploaded", run="run-1", round=4)
    assert background.status(site)["declined"] is None


def test_status_shows_the_site_s_own_measures(site: Folder) -> None:
    """Of the newest model, and of the one that it trained without the others."""
    (site.state / "metrics").mkdir(parents=True)
    journal = [
        {"model": 3, "recall": 0.25, "accuracy": 0.5, "loss": 1.25, "rmse": None, "confusion": [[1, 2], [3, 4]]},
        {"model": 4, "metrics_error": "task.py:9: metrics: KeyError: 'x'", "accuracy": 0.75, "loss": 1.0},
        {"model": "alone", "epochs": 9, "recall": 0.125, "accuracy": 0.375},
    ]
    (site.state / "metrics" / "run-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal))
    shown = cli("site", "status", site.path).stdout
    assert "own metrics run-1, model 4: accuracy 0.75, loss 1, task.py:9: metrics: KeyError: 'x'\n" in shown
    assert "trained alone: recall 0.125, accuracy 0.375\n" in shown
    assert json_of(cli("site", "status", site.path, "--json"))["own"]["global"]["model"] == 4
