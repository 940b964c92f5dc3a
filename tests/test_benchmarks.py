"""Every benchmark runs at its quick size and reports each number; only the full size is compared with limits."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks.result import FOLDER, Result, line

ROOT = Path(__file__).parent.parent
LINES = {
    "kernels": (
        "parameter shuffle, extra memory",
        "row order, extra memory",
        "parameter shuffle, numba",
        "parameter shuffle, numpy",
        "naive column loop",
        "weighted mean",
        "split and join",
        "masks",
    ),
    "noise": ("Gaussian noise", "Gaussian noise, extra memory"),
    "compress": ("DSC, encode", "DSC, decode", "DSC, upload"),
    "permutation": ("permuting a model", "restoring a model"),
    "residues": (
        "rns, encode",
        "rns, decode the sum",
        "rns, upload",
        "fixed, encode",
        "fixed, decode the sum",
        "fixed, upload",
    ),
    "shares": (
        "shares for three mixes, modulo 2^32",
        "shares for three mixes, residues",
        "shares for three mixes, upload",
        "bit onions, three mixes",
    ),
    "upload": ("upload, stream to one message",),
    "side-by-side": ("4 uploads side by side to one",),
    "memory": ("shuffler, peak memory",),
    "rounds": ("rounds, digits, 1 per message", "rounds, digits, 2 per message"),
    "rounds-large": ("rounds, 0.1 M parameters",),
    "evaluation": ("3 rounds, evaluated by sites",),
    "source": ("R_P, MNIST CNN, 10 sites",),
    "secagg": ("three mixes to SecAgg+", "residues to secret sharing, upload by formula"),
    "inversion": ("DLG, images recovered", "DLG, whole gradients", "DLG, half of the coordinates"),
}
PROCESSES = (
    "upload",
    "memory",
    "rounds",
    "rounds-large",
    "evaluation",
    "secagg",
)  # start parties of a federation, or all
ELSEWHERE = ("traffic",)  # tests/test_traffic.py runs its quick size and looks at every number


def saved() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in FOLDER.iterdir()}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the quick sizes print in a process of their own, which loads once what they all need."""
    before = saved()
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", *PROCESSES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert saved() == before
    rows = iter(done.stdout.splitlines())
    found = {name: "\n".join(islice(rows, len(LINES[name]))) for name in PROCESSES}
    assert not list(rows)
    return found


def check(name: str, printed: str) -> None:
    found = [re.fullmatch(r"(.+?) {2,}([\d.e+-]+) (\S.*?) {2,}not judged", row) for row in printed.splitlines()]
    assert all(found), printed
    assert tuple(row[1] for row in found if row) == LINES[name]
    for row in found:
        assert row is not None
        value = float(row[2])
        assert value > 0 or (value == 0 and "extra memory" in row[1]), row[0]


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROCESSES)
def test_the_quick_size_of_whole_parties_reports_every_number_and_saves_none(
    name: str, printed: dict[str, str]
) -> None:
    check(name, printed[name])


@pytest.mark.parametrize("name", [name for name in program.BENCHMARKS if name not in (*PROCESSES, *ELSEWHERE)])
def test_the_quick_size_reports_every_number_and_saves_none(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = saved()
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", "--only", name])
    assert program.main() == 0
    check(name, capsys.readouterr().out)
    assert saved() == before


@pytest.mark.parametrize(("value", "options", "code"), [(1, [], 0), (3, [], 1), (3, ["--quick"], 0)])
def test_a_missed_limit_is_exit_code_1_only_at_the_full_size(
    value: float, options: list[str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "BENCHMARKS", {"one": lambda quick: [Result("a number", value, 2, "s")]})
    monkeypatch.setattr("benchmarks.result.FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options])
    assert program.main() == code
    assert (tmp_path / "one.json").exists() is not bool(options)


def test_a_line_says_which_side_of_its_limit_a_number_is_on() -> None:
    assert line(Result("n", 1, 2, "s")).split()[1:] == ["1", "s", "<=", "2", "ok"]
    assert line(Result("n", 1, 2, "s", "higher")).split()[1:] == ["1", "s", ">=", "2", "MISSED"]
