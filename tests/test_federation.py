"""Whole federations of real processes, on both engines."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from commands import HEED, PATIENCE, PROGRAM, Command, cli, json_of
from fl_privacy.config import Federation
from fl_privacy.deploy import flower
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.ops.status import read as read_status
from fl_privacy.transcript import open_run, verify
from fl_privacy.transcript.chain import read_head
from fl_privacy.transcript.events import Row
from fl_privacy.transcript.run import places

REPEATABLE = """
name: repeatable
seed: 7
sites: 4
cohort: 3
quorum: 3
rounds: 4
reproducible: true
audit: true
deadline: 60
rounds_per_message: 1
task: {partition: {kind: dirichlet, alpha: 0.5}, train: {epochs: 2}}
"""


def final_model(path: Path | str) -> np.ndarray:
    return load_file(sorted((Path(path) / "checkpoints").glob("*.safetensors"))[-1])["model"]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Running processes with this run's state folder on their command line."""
    marks = (str(run_dir), str(run_dir.parent / ".state" / run_dir.name))
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if any(mark in line for mark in marks) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def unbroken(runs: Path) -> Result:
    """The reproducible federation on the local engine."""
    return up(Federation.parse(REPEATABLE), "local", runs)


def test_a_local_run_completes_and_learns(unbroken: Result) -> None:
    assert (unbroken.status, unbroken.rounds) == ("completed", 4), unbroken.reason
    assert unbroken.accuracy is not None
    assert unbroken.accuracy > 0.8


def test_nothing_is_left_running(unbroken: Result) -> None:
    assert processes_of(Path(unbroken.path)) == []


def test_simulation_gives_the_same_model_bit_for_bit(unbroken: Result, runs: Path) -> None:
    simulated = up(Federation.parse(REPEATABLE), "simulation", runs)
    assert simulated.status == "completed", simulated.reason
    assert np.array_equal(final_model(simulated.path), final_model(unbroken.path))
    assert processes_of(Path(simulated.path)) == []
    check_pins(simulated, runs)


def check_pins(result: Result, runs: Path) -> None:
    """Every view and truth names the run's nonce, and the manifest pins its last record."""
    path, ca = Path(result.path), (runs / "pki" / "ca.pem").read_bytes()
    manifest, found = open_run(path).manifest, {where: read_head(path / where) for where in places(path)}
    assert set(found) >= {"views/server", "views/shuffler", "truth/site-0"}
    assert manifest["heads"] == found
    assert {head["nonce"] for head in found.values()} == {manifest["nonce"]}
    assert verify(path, ca, result.head).ok


def test_every_view_verifies_against_the_authority(unbroken: Result, runs: Path) -> None:
    report = verify(unbroken.path, (runs / "pki" / "ca.pem").read_bytes())
    assert report.ok, report.problems
    assert {"server", "shuffler"} <= set(open_run(unbroken.path).observers)
    check_pins(unbroken, runs)


def test_the_server_sees_only_mixed_updates_from_the_shuffler(unbroken: Result) -> None:
    """The same values in every column, in another order, and nothing else from the sites."""
    run = open_run(unbroken.path)
    moved = 0
    for round in run.view("server").rounds:
        seen, _ = run.view("server").round(round)
        sent, _ = run.view("shuffler").round(round)
        assert np.array_equal(np.sort(seen["updates"], axis=0), np.sort(sent["updates"], axis=0))
        moved += int((seen["updates"] != sent["updates"]).sum())
    cells = sum(run.view("server").round(t).arrays["updates"].size for t in run.view("server").rounds)
    assert 0.5 < moved / cells < 0.8  # two of three stay in place by chance


def test_no_field_of_the_server_view_names_who_sent_a_row(unbroken: Result) -> None:
    view = open_run(unbroken.path).view("server")
    for round in view.rounds:
        events = [event.to_json() for event in view.events(round)]
        rows = [event for event in events if event.get("name") in ("site-0", "site-1", "site-2", "site-3")]
        assert {event["kind"] for event in rows} <= {"invited", "receipt"}
        invited = [event["name"] for event in rows if event["kind"] == "invited"]
        assert invited == sorted(invited)


def test_the_truth_equals_what_the_shuffler_received(unbroken: Result) -> None:
    run = open_run(unbroken.path)
    view = run.view("shuffler")
    rows = [event for event in view.events(1) if isinstance(event, Row)]
    assert len(rows) == len(view.round(1).arrays["updates"])
    for event in rows:
        update = run.truth(event.name).round(1).arrays["update"]
        assert np.array_equal(update, view.round(1).arrays["updates"][event.row])


def test_the_fab_holds_only_its_pyproject() -> None:
    names = zipfile.ZipFile(BytesIO(flower.build_app())).namelist()
    assert sorted(names) == [".info/CONTENT", "pyproject.toml"]


def test_the_installed_code_ran(unbroken: Result, runs: Path) -> None:
    """What Flower unpacked at each site contains no Python, so none of it can have run."""
    unpacked = list((runs / ".state" / unbroken.run).rglob("flwr/apps/**/pyproject.toml"))
    assert len(unpacked) >= 3
    assert [p for folder in unpacked for p in folder.parent.rglob("*.py")] == []


def follow(hint: str) -> dict[str, Any]:
    """Run the command of a hint to resume; what it prints as JSON."""
    program, *arguments = shlex.split(hint.removeprefix("resume the run with: "))
    assert Path(program).resolve() == PROGRAM.resolve()
    return dict(json_of(cli(*arguments, "--json", whole=True)))


def wait_for_event(log: Path, event: str, count: int = 1, timeout: float = PATIENCE) -> None:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if log.exists() and log.read_text().count(f'"event":"{event}"') >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no event {event} within {timeout} s")


def interrupt(engine: str, runs: Path, tmp_path: Path, event: str, count: int = 1) -> tuple[Path, list[str]]:
    """A run that was interrupted by Ctrl-C when its server had logged so many of these events, and what was printed."""
    config = tmp_path / "repeatable.yaml"
    config.write_text(REPEATABLE)
    before = set(runs.iterdir())
    arguments = ("up", str(config), "--runs-dir", str(runs), "--engine", engine)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: Command | subprocess.Popen[str]
    if engine == "local":  # as a user does; the others are forks, which load nothing
        process = subprocess.Popen([*HEED, str(PROGRAM), *arguments], **pipes)
    else:
        process = Command(*arguments, whole=True)
    while not (found := [p for p in runs.iterdir() if p not in before and p.name.startswith("repeatable-")]):
        time.sleep(0.05)
    wait_for_event(found[0] / "logs" / "server.log", event, count)
    if isinstance(process, Command):
        process.signal(signal.SIGINT)
        done = process.end(timeout=60)
        code, errors = done.returncode, done.stderr
    else:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        code = process.returncode
    assert code == 130
    assert errors.splitlines()[-1] == "interrupted; all processes have been stopped"
    return found[0], errors.splitlines()[:-1]


@pytest.mark.parametrize("engine", ["local", "simulation"])
def test_ctrl_c_leaves_nothing_behind_and_the_run_resumes_to_the_same_model(
    engine: str, tmp_path: Path, unbroken: Result, runs: Path
) -> None:
    interrupted, (hint,) = interrupt(engine, runs, tmp_path, "evaluated", 3)
    assert processes_of(interrupted) == []
    assert verify(interrupted, (runs / "pki" / "ca.pem").read_bytes()).ok
    assert open_run(interrupted).manifest["status"] == read_status(interrupted).state == "interrupted"
    assert open_run(interrupted).manifest["rounds"] in (1, 2, 3)  # round 2 may not have its checkpoint yet
    resumed = follow(hint)
    assert (resumed["status"], resumed["rounds"], resumed["run"]) == ("completed", 4, interrupted.name)
    assert open_run(interrupted).view("server").rounds == [1, 2, 3, 4]
    assert open_run(interrupted).manifest["rounds"] == 4
    assert [row["round"] for row in open_run(interrupted).metrics] == [0, 1, 2, 3, 4]
    assert verify(interrupted, (runs / "pki" / "ca.pem").read_bytes(), resumed["head"]).ok
    assert np.array_equal(final_model(interrupted), final_model(unbroken.path))


@pytest.mark.parametrize("event", ["waiting", "round"])
def test_a_run_is_resumed_before_its_first_checkpoint_too(
    event: str, tmp_path: Path, unbroken: Result, runs: Path
) -> None:
    interrupted, (hint,) = interrupt("simulation", runs, tmp_path, event)
    assert not list(interrupted.glob("checkpoints/*.safetensors"))
    assert "resume it with" in cli("status", interrupted).stdout
    resumed = follow(hint)
    assert (resumed["status"], resumed["rounds"]) == ("completed", 4)
    assert np.array_equal(final_model(interrupted), final_model(unbroken.path))
    assert verify(interrupted, (runs / "pki" / "ca.pem").read_bytes()).ok


def test_a_run_of_which_nothing_is_there_cannot_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "never" / "logs").mkdir(parents=True)
    (tmp_path / ".state" / "never").mkdir(parents=True)
    assert "never started" in cli("status", tmp_path / "never").stdout
    refused = cli("up", "--resume", tmp_path / "never")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "never started; start a new run" in refused.stderr


@pytest.mark.e2e
def test_missing_data_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    config = tmp_path / "mnist.yaml"
    config.write_text("sites: 3\nrounds: 1\ntask: {dataset: mnist}")
    done = cli("up", config, "--runs-dir", tmp_path / "runs", "--data-dir", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "mnist" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()  # nothing was started, and no run was made


def test_a_full_disk_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small]).returncode:
        pytest.skip("needs root and permission to mount a small file system")
    try:
        config = tmp_path / "c.yaml"
        config.write_text("sites: 3")
        done = cli("up", config, "--runs-dir", small / "runs")
    finally:
        subprocess.run(["umount", small], check=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "disk" in done.stderr


@pytest.mark.e2e
def test_a_run_whose_sites_fail_ends_with_a_reason(runs: Path) -> None:
    """With an exploding learning rate every site refuses to send, and the run reports it instead of waiting."""
    text = "sites: 3\nrounds: 1\nattempts: 1\ntask: {train: {lr: 1.0e+30}}"
    result = up(Federation.parse(text), "simulation", runs)
    assert result.status == "failed"
    assert "0 of 3 updates came" in result.reason


@pytest.mark.e2e
def test_up_prints_one_line_of_json_at_the_end_and_the_server_route_names_every_row(tmp_path: Path) -> None:
    """The baseline, from the command line."""
    config = tmp_path / "c.yaml"
    config.write_text("sites: 3\nrounds: 1\nroute: {kind: server}\ntask: {train: {epochs: 1}}")
    done = cli("up", config, "--engine", "simulation", "--runs-dir", tmp_path / "runs", "--json", whole=True)
    assert done.returncode == 0, done.stderr
    result = json_of(done)
    assert result["status"] == "completed"
    assert {"run", "status", "rounds", "accuracy"} <= result.keys()
    shown = json_of(cli("transcript", "show", result["path"], "--json"))
    assert shown["views"]["server"]["arrays"]["updates"] == [3, 4810]
    assert cli("transcript", "verify", result["path"]).returncode == 0
    events = open_run(result["path"]).view("server").events(1)
    assert {e.name: e.row for e in events if isinstance(e, Row)} == {f"site-{i}": i for i in range(3)}
