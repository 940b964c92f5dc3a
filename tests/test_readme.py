"""The README is true: its demo reaches the stated accuracy, its commands run, its links resolve."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from commands import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of what `make demo` runs, and the recorded run."""
    runs = tmp_path_factory.mktemp("runs")
    done = cli("up", ROOT / "configs" / "quickstart.yaml", "--engine", "local", "--runs-dir", runs, whole=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, next(runs.glob("quickstart-*"))


def test_the_demo_prints_accuracy_path_and_next_command(demo: tuple[str, Path]) -> None:
    printed, run = demo
    found = re.search(r"final accuracy (\d\.\d+) after 5 rounds", printed)
    assert found is not None
    assert float(found[1]) >= 0.90
    assert run.name in printed
    assert re.search(rf"try next .*fl-privacy transcript verify .*{run.name}", printed)


def commands() -> list[str]:
    block = README.split("## Use")[1].split("```")[0]
    found = [line.strip() for line in block.splitlines() if line.startswith("    fl-privacy")]
    assert len(found) >= 6
    return found


@pytest.mark.parametrize("line", [c for c in commands() if not {"up", "attack"} & set(c.split())])
def test_every_command_in_the_readme_runs(line: str, demo: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = [str(demo[1]) if word == "RUN" else word for word in shlex.split(line)[1:]]
    done = cli(*words)
    assert done.returncode == 0, done.stderr


def test_the_snippet_in_the_readme_runs(demo: tuple[str, Path]) -> None:
    snippet = README.split("```python\n")[1].split("```")[0]
    snippet = re.sub(r"runs/quickstart-[\w-]+", str(demo[1]), snippet)
    names: dict[str, object] = {}
    exec(snippet, names)
    assert names["arrays"]["updates"].shape == (5, 4810)  # type: ignore[index]


def test_every_link_in_the_readme_points_to_a_file() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_second_section_is_about_the_reader_s_own_data() -> None:
    assert re.findall(r"^## (.*)", README, flags=re.M)[:2] == ["Two commands", "Your own data and model"]
