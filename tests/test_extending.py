"""docs/extending.md, followed: its code blocks are the example package, and its commands run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from client_app.pipeline import Pipeline
from fl_privacy import registry
from fl_privacy.coding import Payload
from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError
from fl_privacy.steps.base import At, Seat
from fl_privacy.transcript.read import Run, open_run

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "tests" / "example_plugin"
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", PAGE, flags=re.M | re.S))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S) for line in block.splitlines()]
PIP = ("install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
ADDED = {
    ("fl_privacy.tasks", "blobs"),
    ("fl_privacy.steps", "compress.float16"),
    ("fl_privacy.rules", "weiszfeld"),
    ("fl_privacy.attacks", "largest-update"),
    ("fl_privacy.routes", "no-copies"),
    ("fl_privacy.behaviours", "opposite"),
}
PARAMETERS = 1000
RECEIVED = 4 * 178 * 2  # bytes per round: four updates of 178 float16

Shell = Callable[[str], str]


def test_the_page_shows_the_package_word_for_word() -> None:
    there = {str(path.relative_to(EXAMPLE)): path.read_text() for path in EXAMPLE.rglob("*.*") if path.is_file()}
    packaged = {name: text for name, text in FILES.items() if not name.endswith(".yaml")}
    assert packaged == {name: text for name, text in there.items() if text and "__pycache__" not in name}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as pip installs it, in its own folder: the environment of the tests does not change."""
    folder = tmp_path_factory.mktemp("extending")
    for name, text in FILES.items():
        path = folder / name if name.endswith(".yaml") else folder / "fl-example" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "fl-example" / "fl_example" / "__init__.py").touch()
    command = [sys.executable, "-m", "pip", *PIP, "--target", folder / "site", folder / "fl-example"]
    subprocess.run(command, check=True, timeout=120)
    return folder


@pytest.fixture
def plugged(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package in this process too."""
    monkeypatch.syspath_prepend(str(installed / "site"))
    registry._installed.cache_clear()
    yield installed
    registry._installed.cache_clear()


@pytest.fixture(scope="module")
def shell(installed: Path) -> Shell:
    """Runs a command of the page in the package's folder; returns the output."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(installed / "site"), "COLUMNS": "200"}

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=installed, env=env, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return done.stdout

    return run


# What is installed


def test_plugins_lists_built_in_and_installed_ones_with_their_package(shell: Shell) -> None:
    found = json.loads(shell("fl-privacy plugins --json"))["plugins"]
    theirs = [plugin for plugin in found if plugin["package"] == "fl-example"]
    assert {(plugin["group"], plugin["name"]) for plugin in theirs} == ADDED
    assert {plugin["version"] for plugin in theirs} == {"0.1.0"}
    assert not [plugin for plugin in found if plugin["problem"]]
    ours = {plugin["name"]: plugin for plugin in found if plugin["package"] == "fl-privacy"}
    assert {"digits", "privatise.ldp", "shuffler", "fedavg", "privacy-inference"} <= set(ours)
    assert ours["digits"]["target"] == "fl_privacy.tasks.digits:Digits"
    text = shell("fl-privacy plugins")
    assert re.search(r"compress\.float16 .* fl-example 0\.1\.0 .* fl_example\.float16:Float16", text)


def write_package(folder: Path, name: str, points: str, **modules: str) -> None:
    """A package as pip would unpack it."""
    info = folder / f"{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(points)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


def test_an_unusable_plugin_is_listed_with_the_reason(
    plugged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = (
        "[fl_privacy.rules]\nbroken = raises_on_import:X\nfedavg = not_a_rule:X\nwrong = not_a_rule:X\n"
        "weiszfeld = not_a_rule:X\n[fl_privacy.tasks]\nabsent = no_such_module:X\n"
        "[fl_privacy.steps]\nprivatise.weak = plain_step:Plain\n"
    )
    plain = "from fl_privacy.steps.base import Step\nclass Plain(Step):\n    kind: str = 'weak'\n"
    modules = {"raises_on_import": "raise RuntimeError('no licence')", "not_a_rule": "X = dict", "plain_step": plain}
    write_package(tmp_path, "fl-broken", points, **modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._installed.cache_clear()
    from fl_privacy.combine.rules import RULES, FedAvg
    from fl_privacy.tasks.task import TASKS

    problems = {(p.name, p.package): p.problem for p in [*RULES.plugins(), *TASKS.plugins()] if p.problem}
    assert problems == {
        ("broken", "fl-broken"): "plug-in 'broken' of fl-broken 2.0: RuntimeError: no licence",
        ("fedavg", "fl-broken"): "fl-privacy has one of this name, which is used",
        ("wrong", "fl-broken"): "plug-in 'wrong' of fl-broken 2.0: not_a_rule:X is not a Rule",
        **dict.fromkeys(
            [("weiszfeld", "fl-broken"), ("weiszfeld", "fl-example")],
            "plug-in 'weiszfeld': comes from fl-broken 2.0 and fl-example 0.1.0; uninstall all but one",
        ),
        ("absent", "fl-broken"): (
            "plug-in 'absent' of fl-broken 2.0: ModuleNotFoundError: No module named 'no_such_module'"
        ),
    }
    assert RULES.get("fedavg") is FedAvg
    for text, reason in {
        "combine: {kind: broken}": "no licence",
        "combine: {kind: weiszfeld}": "uninstall all but one",
        "privatise: {kind: weak}": "is not a Privatise",
    }.items():
        with pytest.raises(ConfigError, match=reason) as error:
            Federation.parse(f"sites: 3\n{text}")
        assert "\n" not in str(error.value)


# The task


def test_a_config_names_the_known_tasks(plugged: Path) -> None:
    from fl_privacy.tasks.installed import digest
    from fl_privacy.tasks.making import task_of

    with pytest.raises(ConfigError, match=r"task\.name: 'blob' is not installed here; known: blobs"):
        Federation.parse("sites: 3\ntask: {name: blob}")
    with pytest.raises(ConfigError, match=r"task\.dataset: 'blobs' was given: unknown; use one of digits"):
        Federation.parse("sites: 3\ntask: {dataset: blobs}")
    with pytest.raises(ConfigError, match=r"task\.model: your own task brings its data and its model"):
        Federation.parse("sites: 3\ntask: {name: blobs, model: cnn}")
    federation = Federation.parse("sites: 3\ntask: {name: blobs}")
    assert federation.task.sha256 == digest("blobs")
    other = federation.to_yaml().replace(str(federation.task.sha256), "a" * 64)
    with pytest.raises(ConfigError, match="another version than the federation's"):
        task_of(Federation.parse(other))


OTHER = "from fl_privacy import Task\nfrom pathlib import Path\nPath({mark!r}).touch()\nclass Other(Task): pass\n"


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Federation, Path]]:
    """A federation that pins a task, which was then changed here; the mark of the code that has run."""
    mark = tmp_path / "ran"
    write_package(tmp_path, "fl-other", "[fl_privacy.tasks]\nother = other_task:Other\n", other_task="# first\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._installed.cache_clear()
    federation = Federation.parse("sites: 3\ntask: {name: other}")
    (tmp_path / "other_task.py").write_text(OTHER.format(mark=str(mark)))
    yield federation, mark
    registry._installed.cache_clear()


def test_code_of_another_version_is_not_even_imported(changed: tuple[Federation, Path], tmp_path: Path) -> None:
    from fl_privacy.tasks.making import task_of

    federation, mark = changed
    with pytest.raises(ConfigError, match="another version than the federation's"):
        task_of(federation)
    assert not mark.exists()


def test_an_operator_accepts_the_version_that_is_shown(changed: tuple[Federation, Path], tmp_path: Path) -> None:
    from fl_privacy.tasks import accepted

    federation, _ = changed
    for step in (accepted.offered, accepted.accept):
        with pytest.raises(ConfigError, match="another version than the federation's"):
            step(federation, tmp_path / "state")
    assert not accepted.may_run(federation, tmp_path / "state")


def test_compiled_modules_of_a_package_are_pinned_too(plugged: Path) -> None:
    from fl_privacy.tasks.installed import digest

    before, package = digest("blobs"), plugged / "site" / "fl_example"
    for name, counts in (("fast.so", True), ("hidden.pyc", True), ("notes.txt", False)):
        (package / name).write_bytes(b"1")
        assert (digest("blobs") != before) is counts
        (package / name).unlink()


def test_an_error_in_the_package_is_reported_with_file_and_line(plugged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_privacy.tasks.code import TaskError
    from fl_privacy.tasks.making import task_of
    from fl_privacy.tasks.workload import Workload

    federation = Federation.parse("sites: 3\ntask: {name: blobs}")
    module = sys.modules[type(task_of(federation)).__module__]
    monkeypatch.setattr(module, "TRAIN", "many")
    with pytest.raises(TaskError, match=r"/fl_example/blobs\.py:\d+: data of site 'site-0': TypeError"):
        Workload(federation).site_data("site-0")


def test_reading_a_config_with_the_task_imports_no_torch(installed: Path, shell: Shell) -> None:
    shell(
        "python -c \"import sys; from fl_privacy.config import Federation; Federation.load('extended.yaml'); "
        "sys.exit('torch' in sys.modules)\""
    )


def test_the_task_s_own_model_follows_the_seed_and_trains_under_dpsgd(plugged: Path, tmp_path: Path) -> None:
    from client_app.site import Site
    from fl_privacy.identity.keyring import Keyring
    from fl_privacy.tasks.workload import Workload, model_of
    from fl_privacy.theory.budget import tiers
    from fl_privacy.vector import flatten

    text = "sites: {count: 3, epsilon: 4}\ntask: {name: blobs}\nprivatise: {kind: dpsgd}\nseed: 5"
    federation = Federation.parse(text)
    first, again, other = (flatten(model_of(federation.model_copy(update={"seed": seed})))[0] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    (budget,) = tiers(federation)
    assert budget.unit == "record"
    work = Workload(federation)
    site = Site(federation, "site-0", Keyring(tmp_path), [], state=tmp_path, workload=work)
    payload = site.parcel(At("run", 1, "a"), work.initial).payload
    assert payload.shape == work.initial.shape
    assert payload.any()


# The step


def pipeline(plugged: Path, state: Path | None, config: str = "") -> Pipeline:
    federation = Federation.parse(f"sites: 3\ncompress: {{kind: float16}}\n{config}")
    work: Any = SimpleNamespace()
    return Pipeline(Seat(federation, "site-0", work, 10, state))


def sent(steps: Pipeline, round: int, update: np.ndarray, attempt: str = "a") -> Payload:
    at = At("run", round, attempt)
    steps.inward(np.zeros(PARAMETERS, np.float32), at)
    return steps.outward(update, at)


def updates() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=PARAMETERS).astype(np.float32) for _ in range(4)]


def test_rounding_errors_are_carried_over_and_survive_a_crash(plugged: Path, tmp_path: Path) -> None:
    running = pipeline(plugged, tmp_path / "whole")
    whole = [sent(running, round, update) for round, update in enumerate(updates(), 1)]
    # A crash between two rounds: the next object knows only what is on disk.
    broken = [sent(pipeline(plugged, tmp_path / "broken"), round, update) for round, update in enumerate(updates(), 1)]
    for one, other in zip(whole, broken, strict=True):
        assert one.dtype == np.float16
        np.testing.assert_array_equal(one, other)
    # The updates sent differ from those trained only by the last rounding: half a unit in the last place.
    total, wanted = np.sum(whole, axis=0, dtype=np.float64), np.sum(updates(), axis=0, dtype=np.float64)
    last = np.spacing(np.abs(whole[-1])).astype(np.float64)
    assert np.all(np.abs(total - wanted) <= last / 2 + 1e-6)
    forgetful = np.sum([update.astype(np.float16) for update in updates()], axis=0, dtype=np.float64)
    assert np.abs(total - wanted).sum() < np.abs(forgetful - wanted).sum()


def test_a_resent_attempt_is_the_same_bytes(plugged: Path, tmp_path: Path) -> None:
    first, second, third, _ = updates()
    steps = pipeline(plugged, tmp_path)
    sent(steps, 1, first)
    original = sent(steps, 2, second)
    assert sent(steps, 2, second).tobytes() == original.tobytes()
    assert sent(pipeline(plugged, tmp_path), 2, second).tobytes() == original.tobytes()
    assert sent(steps, 2, second, attempt="b").tobytes() == original.tobytes()
    following = sent(steps, 3, third)
    assert sent(pipeline(plugged, tmp_path), 3, third).tobytes() == following.tobytes()


def test_half_the_bytes_on_every_route(plugged: Path) -> None:
    for route in ("server", "shuffler", "shards"):
        plain = Federation.parse(f"sites: 3\nroute: {{kind: {route}}}")
        half = Federation.parse(f"sites: 3\nroute: {{kind: {route}}}\ncompress: {{kind: float16}}")
        (before,), (after,) = (
            [cost.bytes_out for cost in f.route.cost(f, PARAMETERS) if cost.party == "site"] for f in (plain, half)
        )
        assert (before, after) == (4 * PARAMETERS, 2 * PARAMETERS)


def test_float16_and_the_geometric_median_refuse_what_they_do_not_support(plugged: Path) -> None:
    with pytest.raises(ConfigError, match="weiszfeld needs whole updates"):
        Federation.parse("sites: 3\nroute: {kind: shards}\ncombine: {kind: weiszfeld}")
    # The shuffler cannot add the missing noise to such rows.
    with pytest.raises(ConfigError, match=r"'levelled' adds noise to float32, and updates are float16; use published"):
        Federation.parse(
            "sites: {count: 3, epsilon: 1}\nprivatise: {kind: ldp}\ncompress: {kind: float16}\n"
            "route: {kind: shuffler, buckets: levelled}"
        )
    with pytest.raises(ConfigError, match=r"combine\.iterations"):
        Federation.parse("sites: 3\ncombine: {kind: weiszfeld, iterations: 0}")


def test_the_geometric_median_resists_an_outlier_and_the_order_of_rows(plugged: Path) -> None:
    rule = Federation.parse("sites: 3\nroute: {kind: shuffler, level: model}\ncombine: {kind: weiszfeld}").combine
    rows = np.random.default_rng(1).normal(1, 0.1, size=(5, 20)).astype(np.float32)
    rows[3] = -1000
    found = rule.aggregate(rows, None, exact=True)
    assert np.abs(found - 1).max() < 0.3
    np.testing.assert_array_equal(found, rule.aggregate(rows[::-1], None, exact=True))


# End to end


@pytest.fixture(scope="module")
def followed(shell: Shell) -> dict[str, str]:
    """Every command of the page after the installation, with its output."""
    assert COMMANDS[0] == "pip install ./fl-example"
    return {command: shell(command) for command in COMMANDS[1:]}


def the_run(installed: Path, name: str) -> Path:
    (run,) = (installed / "runs").glob(f"{name}-*")
    return run


def learns(run: Run) -> None:
    assert run.metrics[-1]["accuracy"] > 0.85 > run.metrics[0]["accuracy"]
    assert run.metrics[-1]["bytes"] == RECEIVED


def scores(run: Path) -> dict[str, float]:
    (found,) = (run / "attacks").glob("*.json")
    measure = json.loads(found.read_text())["measures"]["found"]
    return {key: measure[key] for key in ("value", "chance")}


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_page_can_be_followed(followed: dict[str, str], installed: Path) -> None:
    assert "fl-example 0.1.0" in followed["fl-privacy plugins"]
    for name, observers in {"extended": {"server", "shuffler"}, "flipped": {"server"}}.items():
        run = open_run(the_run(installed, name))
        assert set(run.observers) == observers
        for observer in observers:
            view = run.view(observer)
            for round in view.rounds:
                assert view.round(round).arrays["updates"].dtype == np.float16
        assert run.manifest["versions"]["fl-example"] == "0.1.0"
        learns(run)
    assert "178 parameters" in followed["fl-privacy plan extended.yaml"]
    # Three seeds of three rounds: whatever the guess, chance is one in four.
    assert scores(the_run(installed, "extended"))["chance"] == 0.25
    assert scores(the_run(installed, "flipped")) == {"value": 1.0, "chance": 0.25}


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_simulation_runs_the_same_package(shell: Shell, installed: Path) -> None:
    shell("fl-privacy up extended.yaml --engine simulation --runs-dir simulated")
    (run,) = (installed / "simulated").glob("extended-*")
    learns(open_run(run))
