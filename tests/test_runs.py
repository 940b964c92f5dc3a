"""Runs by name or path, the list of them, and what a miss shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import cli, json_of
from fl_privacy import __version__
from fl_privacy.errors import TranscriptError
from fl_privacy.ops.runs import find, folders, summaries
from test_status import STARTED, WAITING, Folder

NAMES = ("quickstart-20261116-101832-b03d", "quickstart-20261117-101832-77aa", "cardio-20261117-120000-0001")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs among what else lies in such a folder."""
    for name in NAMES:
        folder = Folder(tmp_path, name).manifest("completed", name=name.split("-")[0], route={"kind": "shuffler"})
        folder.log("server", STARTED).rounds(0, 1, 2)
    for other in ("pki", "sites/quickstart/site-0", "audits/baselines", ".state/gone"):
        (tmp_path / other).mkdir(parents=True)
    return tmp_path


def test_a_run_is_found_by_name_and_by_path(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    for run in (NAMES[0], runs / NAMES[0], str(runs / NAMES[0])):
        assert find(run, runs).resolve() == runs / NAMES[0]
    assert find(NAMES[0], Path("elsewhere")) == Path(NAMES[0])


def test_a_name_is_one_in_the_folder_of_runs_before_it_is_a_path(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = runs / "here"
    (here / NAMES[0] / "logs").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert find(NAMES[0], runs) == runs / NAMES[0]
    assert find(f"{here}/{NAMES[0]}", runs) == here / NAMES[0]


@pytest.mark.parametrize(
    ("miss", "shown"),
    [
        ("quickstart", r"did you mean quickstart-2026\S+ or quickstart-2026\S+\?"),
        ("cardio-20261117-120000-0002", r"did you mean cardio-20261117-120000-0001"),
        ("zzz", "runs there: "),
        ("pki", r"not a run|no such run"),
        ("", "no such run|not a run"),
        ("..", "not a run"),
    ],
)
def test_a_miss_shows_the_closest_names(runs: Path, miss: str, shown: str) -> None:
    with pytest.raises(TranscriptError, match=shown) as error:
        find(miss, runs)
    assert "\n" not in str(error.value)


def test_a_miss_by_path_looks_beside_it(runs: Path) -> None:
    with pytest.raises(TranscriptError, match=f"did you mean {NAMES[2]}"):
        find(runs / NAMES[2][:-1], Path("elsewhere"))


def test_only_runs_are_listed_newest_first_and_a_damaged_one_too(runs: Path) -> None:
    (runs / NAMES[1] / "manifest.json").write_text("{")
    assert {path.name for path in folders(runs)} == set(NAMES)
    made = [path.stat().st_mtime for path in folders(runs)]
    assert made == sorted(made, reverse=True)
    status = {one.run: one.status for one in summaries(runs)}
    assert status == {NAMES[0]: "completed", NAMES[1]: "damaged", NAMES[2]: "completed"}


def test_the_list_has_what_a_user_chooses_by(runs: Path) -> None:
    one = next(one for one in summaries(runs) if one.run == NAMES[2])
    assert (one.federation, one.route, one.round, one.rounds) == ("cardio", "shuffler", 2, 10)
    assert one.score == {"accuracy": 0.2, "loss": 1.0}
    assert one.size == sum(path.stat().st_size for path in (runs / one.run).rglob("*") if path.is_file())


def test_runs_prints_a_line_per_run_and_json(runs: Path) -> None:
    lines = cli("runs", "--runs-dir", runs).stdout.splitlines()
    assert len(lines) == 1 + len(NAMES)
    assert "accuracy 0.2000" in lines[1]
    listed = json_of(cli("runs", "--runs-dir", runs, "--json"))["runs"]
    assert {row["run"] for row in listed} == set(NAMES)
    assert json.dumps(listed)


def test_a_run_that_ended_before_its_first_round_never_started(tmp_path: Path) -> None:
    folder = Folder(tmp_path).log("server", WAITING)
    folder.home.mkdir(parents=True)
    (one,) = summaries(tmp_path)
    assert (one.status, one.round) == ("never started", 0)


def test_the_version_is_printed() -> None:
    assert cli("--version").stdout.strip() == f"fl-privacy {__version__}"
