"""Audits: a matrix is checked before it runs, resumes where it stopped, and reports our numbers beside the paper's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

import attacks
from attacks.audit import run
from attacks.audit.matrix import load
from attacks.common.knowledge import Knowledge, Need
from attacks.common.measure import Scores
from attacks.common.truth import Truth
from fl_privacy import cli
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.errors import ConfigError, LaunchError
from fl_privacy.reading import merged
from fl_privacy.report.interval import mean_interval
from fl_privacy.transcript.read import View

CONFIGS = Path(__file__).parent.parent / "configs"
MATRICES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "\ncells:" in path.read_text()]

MATRIX: dict[str, Any] = yaml.safe_load("""
name: tiny
title: A tiny audit
seeds: [1, 2]
attacks: [guess]
base:
  sites: {count: 4, epsilon: [1, 8]}
  rounds: 1
  task: {train: {epochs: 1}}
  privatise: {kind: ldp, clip: 0.5}
  route: {kind: shuffler, level: parameter, n_min: 2}
cells:
  plain: {route: {kind: server}}
  mixed: {}
measures: {leak: how much leaks}
tables:
  - id: leaks
    title: Leaks
    note: DenseNet is out of scope.
    corner: Method
    columns: [{title: Leak, measure: leak}, {title: Accuracy, measure: accuracy}]
    rows:
      - {title: Plain, cell: plain, paper: [[0.42, 0.02], null]}
      - {title: Mixed, cell: mixed, paper: ["≈ 1/n", 0.9]}
  - id: groups
    title: By bucket
    columns: [{title: Plain, cell: plain}, {title: Mixed, cell: mixed}]
    rows: [{title: high, measure: leak, group: "epsilon>4"}, {title: low, measure: guess/leak, group: "epsilon<=4"}]
reduced: {seeds: [1], cells: [mixed], changes: {rounds: 2}}
""")


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump({**MATRIX, **changes}, allow_unicode=True, sort_keys=False))
    return path


def replay(run_dir: Path, names: tuple[str, ...], data_dir: Path | None, seeds: int) -> dict[str, Any]:
    """An attack whose success is the run's seed divided by ten."""
    seed = json.loads((run_dir / "seed.json").read_text())
    measure = {"value": seed / 10, "chance": 0.05, "groups": {"epsilon>4": seed / 5, "epsilon<=4": float("nan")}}
    curves = {"cosine": {"x": [1, 8], "y": [0.1, 0.2]}, "other": "of no form we know"}
    return {name: {"measures": {"leak": measure}, "curves": curves} for name in names}


class Guess:
    """The attack that `replay` above replaces."""

    name, observers = "guess", ("server",)
    needs: frozenset[Need] = frozenset()

    def run(self, views: Mapping[str, View], knowledge: Knowledge, seed: int) -> None:
        raise AssertionError

    def score(self, findings: None, truth: Truth) -> Scores:
        raise AssertionError


class Engine:
    """Stands in for `up`: records what was run, and fails or is interrupted on request."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []
        self.trouble: Callable[[Federation], None] = lambda federation: None

    def __call__(
        self, federation: Federation, engine: str, runs_dir: Path, data_dir: Path | None = None, **_: Any
    ) -> Result:
        assert engine == "simulation"
        assert federation.audit
        path = runs_dir / "run"
        path.mkdir(parents=True)
        (path / "seed.json").write_text(str(federation.seed))
        self.trouble(federation)
        self.ran.append((federation.route.kind, federation.seed))
        return Result("run", "completed", 1, 0.75, 0.5, None, str(path), 1.0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine()
    monkeypatch.setattr(run, "up", made)
    monkeypatch.setattr(attacks, "replay", replay)
    monkeypatch.setattr(run, "ended", lambda path: {})  # the engine above leaves no transcript
    attacks.ATTACKS.add("guess", Guess())
    yield made
    attacks.ATTACKS.remove("guess")


def audit(*words: str | Path) -> int:
    """The command's exit code."""
    return cli._guarded(lambda: cli.app(["audit", *map(str, words)], standalone_mode=False))


ALL = [("server", 1), ("shuffler", 1), ("server", 2), ("shuffler", 2)]


# The matrix


def test_a_cell_overrides_the_base_and_a_new_kind_replaces_all_of_the_old_one() -> None:
    base = {"route": {"kind": "shuffler", "level": "layer"}, "task": {"train": {"epochs": 1, "lr": 0.1}}, "rounds": 3}
    cell = {"route": {"kind": "server"}, "task": {"train": {"epochs": 2}}}
    assert merged(base, cell) == {"route": {"kind": "server"}, "task": {"train": {"epochs": 2, "lr": 0.1}}, "rounds": 3}
    assert merged(base, {"route": {"level": "model"}})["route"] == {"kind": "shuffler", "level": "model"}


def test_every_cell_has_its_first_seed_before_any_has_its_second(tmp_path: Path) -> None:
    jobs = load(written(tmp_path)).jobs
    assert [(job.cell, job.seed) for job in jobs] == [("plain", 1), ("mixed", 1), ("plain", 2), ("mixed", 2)]
    assert all(job.federation.audit and job.federation.seed == job.seed for job in jobs)


def test_the_reduction_applies_before_every_cell(tmp_path: Path) -> None:
    found = load(written(tmp_path), reduced=True)
    assert [(job.label, job.federation.rounds) for job in found.jobs] == [("mixed-seed-1", 2)]
    assert found.name == "tiny-reduced"


def test_a_cell_may_have_its_own_attacks_and_seeds(tmp_path: Path) -> None:
    found = load(written(tmp_path, cells={"plain": {"attacks": [], "seeds": [9]}, "mixed": {}}))
    assert [(job.seed, job.attacks) for job in found.jobs] == [(9, ()), (1, ("guess",)), (2, ("guess",))]


def with_table(**changes: Any) -> dict[str, Any]:
    return {"tables": [{**MATRIX["tables"][0], **changes}]}


PROBLEMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"seeds": []}, ("seeds",)),
    ({"seeds": [1, 1]}, ("seeds", "twice", "remove")),
    ({"sedes": [1]}, ("sedes", "unknown key")),
    ({"cells": {"Not a name": {}}}, ("cells", "Not a name")),
    ({"cells": {"plain": {"seed": 3}, "mixed": {}}}, ("cells.plain", "seed", "remove")),
    ({"cells": {"plain": {"rounds": 0}, "mixed": {"cohort": 9}}}, ("cells.plain: rounds", "cells.mixed", "at most 4")),
    (with_table(rows=[{"title": "Plain", "cell": "plane"}]), ("leaks", "'plane'", "use one of plain, mixed")),
    (with_table(rows=[{"title": "Plain"}]), ("'Plain'", "no cell", "give the row or the column one")),
    (with_table(rows=[{"title": "P", "cell": "plain", "paper": [1]}]), ("paper has 1", "2 columns")),
    ({"tables": [MATRIX["tables"][0]] * 2}, ("leaks", "twice")),
    (with_table(formula="guesswork"), ("guesswork", "use one of distribution_time")),
    (with_table(formula="distribution_time", given={"speed": 1}), ("'Plain'", "distribution_time", "speed")),
    (with_table(formula="utility", given={"method": "x"}), ("utility: method: 'x' is unknown", "use one of")),
    ({"reduced": {"cells": ["nothing"]}}, ("reduced.cells", "'nothing'")),
]


@pytest.mark.parametrize(("changes", "named"), PROBLEMS, ids=[" ".join(p[1])[:40] for p in PROBLEMS])
def test_a_problem_names_the_field_and_the_fix_and_nothing_runs(
    changes: dict[str, Any],
    named: tuple[str, ...],
    tmp_path: Path,
    engine: Engine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert audit(written(tmp_path, **changes), "--out", tmp_path / "out") == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert all(word in printed for word in named), printed
    assert engine.ran == []


def test_an_unknown_attack_is_reported_before_anything_runs(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(written(tmp_path, attacks=["guesses"]), "--out", tmp_path / "out") == 2
    assert "'guesses' is unknown; use one of inversion, membership, " in capsys.readouterr().err
    assert engine.ran == []


def test_reduced_needs_a_reduction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reduced"):
        load(written(tmp_path, reduced=None), reduced=True)


def test_missing_data_are_reported_before_anything_runs(tmp_path: Path, engine: Engine) -> None:
    cells = {"a": {}, "b": {"task": {"dataset": "mnist"}}}
    assert audit(written(tmp_path, cells=cells, tables=[], reduced=None), "--data-dir", tmp_path) == 2
    assert engine.ran == []


@pytest.mark.parametrize("path", MATRICES, ids=[path.stem for path in MATRICES])
@pytest.mark.parametrize("reduced", [False, True])
def test_the_shipped_matrices_are_valid(path: Path, reduced: bool, tmp_path: Path) -> None:
    """Each cell is valid, also with the other `privatise`, and each measure of a table is explained."""
    switched = tmp_path / path.name
    text = path.read_text()
    switched.write_text(text if "allocation:" in text else text.replace("kind: dpsgd", "kind: ldp"))  # dpsgd's alone
    matrix = load(switched, reduced).matrix
    places = [place for table in matrix.tables for row in table.rows for place in table.places(row)]
    assert {place.measure for place in places if place.computed is None} <= matrix.measures.keys()


# The ten baseline federations: budgets, noise, route and weights of each defence.
BUDGETS = {"count": 10, "epsilon": [0.5, 1, 2, 4, 8]}
DPSGD = {"kind": "dpsgd", "clip": 1.0, "delta": 1e-5}
BUCKETS = {"n_min": 2, "buckets": "published"}
DEFENCES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "no-defence": (10, {"kind": "none"}, {"kind": "server"}, "equal"),
    "plain-dp": (BUDGETS, DPSGD, {"kind": "server"}, "epsilon"),
    "shuffle-dp": (BUDGETS, DPSGD, {"kind": "shuffler", "level": "model", "n_min": 2}, "epsilon"),
    "layer-shuffle": (BUDGETS, DPSGD, {"kind": "shuffler", "level": "layer", **BUCKETS}, "epsilon"),
    "intrashuffler": (BUDGETS, DPSGD, {"kind": "shuffler", "level": "parameter", **BUCKETS}, "epsilon"),
}


@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize("partition", [{"kind": "dirichlet", "alpha": 0.3}, {"kind": "iid"}], ids=["", "iid"])
def test_the_baselines_are_five_defences_on_two_partitions(defence: str, partition: dict[str, Any]) -> None:
    jobs = {job.cell: job for job in load(CONFIGS / "baselines.yaml").jobs}
    assert len(jobs) == 10
    sites, privatise, route, weights = DEFENCES[defence]
    expected = {
        "name": "baselines",
        "seed": 7,
        "sites": sites,
        "cohort": 10,
        "quorum": 8,
        "rounds": 10,
        "audit": True,
        "task": {"dataset": "digits", "model": "mlp", "partition": partition},
        "privatise": privatise,
        "route": route,
        "combine": {"kind": "fedavg", "weights": weights},
    }
    cell = f"{defence}-iid" if partition["kind"] == "iid" else defence
    assert jobs[cell].federation == Federation.model_validate(expected)
    assert jobs[cell].attacks == ("privacy-inference",)


# Running


def test_everything_is_run_once_and_the_report_has_both_numbers(tmp_path: Path, engine: Engine) -> None:
    out = tmp_path / "out"
    assert audit(written(tmp_path), "--out", out) == 0
    assert engine.ran == ALL
    report = (out / "report.md").read_text()
    # 0.1 and 0.2: Student's t with one degree of freedom is 12.706, the standard error 0.05.
    for text in ("**0.150 ± 0.635**", "0.420 ± 0.020", "≈ 1/n", "0.050", "DenseNet is out of scope", "how much leaks"):
        assert text in report
    results = json.loads((out / "results.json").read_text())
    entry = results["tables"][0]["rows"][0]["entries"][0]
    assert (entry["per_seed"], entry["paper"]) == ({"1": 0.1, "2": 0.2}, {"mean": 0.42, "spread": 0.02})
    high, low = (row["entries"][0] for row in results["tables"][1]["rows"])
    assert high["mean"] == pytest.approx(0.3)
    assert (low["n"], low["mean"]) == (0, None)
    assert results["machine"]["cores"] >= 1
    assert {path.name for path in (out / "figures").iterdir()} == {
        "leaks.svg",
        "groups.svg",
        "curve-guess-cosine.svg",
    }
    assert not (out / "runs").exists()


def test_a_table_may_show_a_closed_form(tmp_path: Path, engine: Engine) -> None:
    table = {
        "id": "times",
        "title": "Times",
        "formula": "distribution_time",
        "given": {"size": 5.2e9, "rate": 20e6, "clients": 20},
        "plot": "lines",
        "logarithmic": True,
        "columns": [{"title": "FedAvg", "given": {"method": "fedavg"}}, {"title": "ERIS", "given": {"method": "eris"}}],
        "rows": [{"title": "10", "given": {"clients": 10}}, {"title": "20"}],
    }
    assert audit(written(tmp_path, tables=[table]), "--out", tmp_path / "out") == 0
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())["tables"]
    means = [[entry["mean"] for entry in row["entries"]] for row in found["rows"]]
    # K (S + S) / r, and (K - 1) / K of twice S / r
    assert means == [[pytest.approx(5200), pytest.approx(468)], [pytest.approx(10400), pytest.approx(494)]]
    assert "**5200.000**" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "figures" / "times.svg").exists()


def test_a_second_call_runs_only_what_is_missing(tmp_path: Path, engine: Engine) -> None:
    out = tmp_path / "out"
    assert audit(written(tmp_path), "--out", out) == 0
    assert audit(written(tmp_path, seeds=[1, 2, 3]), "--out", out) == 0
    assert engine.ran[4:] == [("server", 3), ("shuffler", 3)]
    third = load(written(tmp_path)).jobs[2]
    (out / "cells" / f"{run.key(third)}.json").write_text('{"half')
    assert audit(written(tmp_path), "--out", out) == 0
    assert engine.ran[6:] == [("server", 2)]


def test_another_version_of_the_attacks_measures_again(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load(written(tmp_path)).jobs[0]
    before = run.key(job)
    monkeypatch.setattr(run, "SUITE", run.SUITE + 1)
    assert run.key(job) != before


def test_cells_with_the_same_federation_share_their_runs(tmp_path: Path, engine: Engine) -> None:
    cells = {**MATRIX["cells"], "again": {}}
    assert audit(written(tmp_path, cells=cells), "--out", tmp_path / "out") == 0
    assert engine.ran == ALL
    cell = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]["again"]
    assert cell["measures"]["guess/leak"]["n"] == 2


def test_a_failure_is_recorded_and_the_other_cells_still_run(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    def trouble(federation: Federation) -> None:
        if federation.route.kind == "server":
            raise LaunchError("no room") if federation.seed == 1 else ZeroDivisionError("by zero")

    engine.trouble = trouble
    out = tmp_path / "out"
    assert audit(written(tmp_path), "--out", out, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [(f["cell"], f["seed"]) for f in found["failures"]] == [("plain", 1), ("plain", 2)]
    assert found["failures"][0]["reason"] == "no room"
    assert "ZeroDivisionError" in found["failures"][1]["reason"]
    assert "ZeroDivisionError" in (out / "runs" / "plain-seed-2" / "traceback.txt").read_text()
    assert engine.ran == [ALL[1], ALL[3]]
    report = (out / "report.md").read_text()
    assert "no room" in report
    assert "missing" in report
    engine.trouble = lambda federation: None
    assert audit(written(tmp_path), "--out", out) == 0
    assert engine.ran[2:] == [ALL[0], ALL[2]]


def test_an_interruption_keeps_finished_cells_and_no_partial_ones(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    def trouble(federation: Federation) -> None:
        if federation.seed == 2:
            raise KeyboardInterrupt

    engine.trouble = trouble
    out = tmp_path / "out"
    assert audit(written(tmp_path), "--out", out) == 130
    assert "2 of 4 runs are done; the same command continues" in capsys.readouterr().err
    assert len(list((out / "cells").iterdir())) == 2
    assert list((out / "runs").iterdir()) == []
    assert "2 of 4 runs are finished" in (out / "report.md").read_text()
    engine.trouble = lambda federation: None
    assert audit(written(tmp_path), "--out", out) == 0
    assert engine.ran == ALL


def test_runs_are_kept_on_request(tmp_path: Path, engine: Engine) -> None:
    assert audit(written(tmp_path), "--out", tmp_path / "out", "--keep-runs", "--reduced") == 0
    assert (tmp_path / "out" / "runs" / "mixed-seed-1" / "run").is_dir()
    assert "one seed, so without" in (tmp_path / "out" / "report.md").read_text()


def test_a_second_audit_in_the_same_folder_is_refused(tmp_path: Path, engine: Engine) -> None:
    with run._alone(tmp_path / "out"):
        assert audit(written(tmp_path), "--out", tmp_path / "out") == 2
    assert engine.ran == []


def test_a_measure_that_no_run_has_is_reported(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"title": "Plain", "cell": "plain", "measure": ["leek", "leak"], "group": [None, "epsilon>9"]}]
    assert audit(written(tmp_path, **with_table(rows=rows)), "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "no measure 'leek'; it has accuracy, leak, loss, parameters" in printed
    assert "no group 'epsilon>9' of leak; it has epsilon<=4, epsilon>4" in printed


# Numbers


def test_intervals_use_student_s_t() -> None:
    """Quantiles of Student's t from tables: 4.303 for two degrees of freedom, 2.776 for four."""
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))
    assert mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])[1] == pytest.approx(2.7764 * math.sqrt(2.5 / 5), rel=1e-4)
    assert mean_interval([0.7]) == (0.7, None)


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6), st.floats(-10, 10))
def test_an_interval_shifts_with_its_values(values: list[float], step: float) -> None:
    mean, half = mean_interval(values)
    moved, same = mean_interval([value + step for value in values])
    assert half is not None
    assert moved == pytest.approx(mean + step, abs=1e-9)
    assert same == pytest.approx(half, abs=1e-8)


def test_the_command_line_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, fl_privacy.cli; print([m for m in ('torch', 'matplotlib', 'attacks') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_shipped_matrix_is_valid_and_options_go_with_their_data_set() -> None:
    for path in (Path(__file__).parent.parent / "configs" / "papers").glob("*.yaml"):
        assert load(path, False).jobs
        assert load(path, True).jobs
    below = {"task": {"dataset": "lcl", "options": {"scaling": "public"}, "model": "lstm"}}
    assert merged(below, {"task": {"dataset": "mnist"}})["task"] == {"dataset": "mnist", "model": "lstm"}
    assert merged(below, {"task": {"model": "mlp"}})["task"]["options"] == {"scaling": "public"}
