"""Federations from Python: what `up` returns, the formats of its model, starting from one, and the notebook."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import signal
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fl_privacy
from commands import HEED, cli, json_of
from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError, TranscriptError
from fl_privacy.export.source import locate
from fl_privacy.export.write import write
from fl_privacy.tasks.workload import Workload, model_of
from fl_privacy.transcript import open_run, verify

ROOT = Path(__file__).parent.parent
CLOSE = 1e-5
CONFIG: dict[str, Any] = {
    "name": "python",
    "seed": 3,
    "sites": {"count": 3, "epsilon": [4, 8]},
    "rounds": 4,
    "task": {"dataset": "digits", "model": "mlp", "train": {"epochs": 1}},
    "privatise": {"kind": "ldp", "clip": 1.0, "delta": 1e-5},
    "combine": {"lr": 0.01, "kind": "fedavg"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(runs: Path) -> tuple[fl_privacy.Run, str]:
    """A run of four rounds, and what was printed meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = fl_privacy.up(CONFIG, engine="simulation", runs_dir=runs)
    return run, printed.getvalue()


@pytest.fixture(scope="module")
def run(trained: tuple[fl_privacy.Run, str]) -> fl_privacy.Run:
    return trained[0]


@pytest.fixture(scope="module")
def exported(run: fl_privacy.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last model in every format, with one attack on record."""
    (run.path / "attacks").mkdir()
    scored = {"observers": ["server"], "measures": {"linkage": {"value": 0.5, "half_interval": 0.1, "chance": 0.25}}}
    (run.path / "attacks" / "guess.json").write_text(json.dumps(scored))
    folder = tmp_path_factory.mktemp("models")
    for suffix in ("safetensors", "pt", "onnx"):
        run.export(folder / f"model.{suffix}")
    return folder


def rows(run: fl_privacy.Run) -> list[dict[str, Any]]:
    return open_run(run.path).metrics


def records(count: int = 7) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.e2e
def test_progress_is_plain_lines_where_there_is_no_terminal(trained: tuple[fl_privacy.Run, str]) -> None:
    printed = trained[1]
    assert "\x1b" not in printed
    assert [f"round   {n}" in printed for n in range(5)] == [True] * 5


@pytest.mark.e2e
def test_a_run_has_metrics_ledgers_and_status(run: fl_privacy.Run, runs: Path) -> None:
    assert run.status == "completed"
    assert [row["round"] for row in run.metrics] == [0, 1, 2, 3, 4]
    assert [(row["site"], row["charges"], row["unit"]) for row in run.ledgers] == [
        (f"site-{i}", 4, "site") for i in range(3)
    ]
    assert run.federation.name == "python"
    assert f"{run.name}: completed, round 4 of 4" in repr(run)
    assert fl_privacy.Run(run.name, runs).path == run.path
    assert run.path in [found.path for found in fl_privacy.runs(runs)]


@pytest.mark.e2e
def test_metrics_are_a_frame_where_pandas_is_installed(run: fl_privacy.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = types.ModuleType("pandas")
    pandas.DataFrame = lambda rows: ("frame", len(rows))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert run.metrics == ("frame", 5)


@pytest.mark.e2e
def test_the_plot_has_a_panel_per_metric(run: fl_privacy.Run) -> None:
    assert [axes.get_title() for axes in run.plot().axes] == ["accuracy", "loss"]
    (axes,) = run.plot("loss").axes
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [row["loss"] for row in rows(run)])


@pytest.mark.e2e
@pytest.mark.parametrize("round", [0, 1, 2, 3, 4, "last", "best"])
def test_the_model_of_every_round_scores_what_the_run_says(run: fl_privacy.Run, round: int | str) -> None:
    losses = {row["round"]: row["loss"] for row in rows(run)}
    best = min((n for n in losses if n), key=losses.__getitem__)
    number = {"last": 4, "best": best}.get(str(round), round)
    work = Workload(run.federation)
    found = work.evaluate(vector.flatten(run.model(round))[0])
    assert found.loss == pytest.approx(losses[int(number)], rel=1e-6)
    assert run.manifest["best"] == {"round": best, "metric": "loss", "value": pytest.approx(losses[best])}


def plain(path: Path) -> nn.Module:
    """The model in a file, with PyTorch and safetensors alone."""
    model = model_of(Federation.of(CONFIG))
    state = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.e2e
def test_all_formats_give_the_outputs_of_the_run_s_model(run: fl_privacy.Run, exported: Path) -> None:
    with torch.no_grad():
        wanted = run.model()(records()).numpy()
        for suffix in ("pt", "safetensors"):
            np.testing.assert_allclose(plain(exported / f"model.{suffix}")(records()), wanted, atol=CLOSE)
    session = ReferenceEvaluator(onnx.load(exported / "model.onnx"))
    (scores,) = session.run(["output"], {"input": records().numpy()})
    np.testing.assert_allclose(scores, wanted, atol=CLOSE)
    (one,) = session.run(["output"], {"input": records(1).numpy()})
    assert one.shape == (1, 10)


def inside(path: Path) -> dict[str, Any]:
    """The facts that a model file holds itself."""
    if path.suffix == ".onnx":
        props = {prop.key: prop.value for prop in onnx.load(path).metadata_props}
        found = props["fl-privacy"]
    elif path.suffix == ".pt":
        with zipfile.ZipFile(path) as archive:
            found = archive.read("archive/fl-privacy.json").decode()
    else:
        with safe_open(path, "numpy") as file:
            found = file.metadata()["fl-privacy"]
    return dict(json.loads(found))


@pytest.mark.e2e
def test_every_file_says_where_it_comes_from(run: fl_privacy.Run, exported: Path) -> None:
    cards = [inside(exported / f"model.{suffix}") for suffix in ("safetensors", "pt", "onnx")]
    assert cards[0] == cards[1] == cards[2]
    card, layout = cards[0], vector.flatten(run.model())[1]
    assert card["run_digest"] == hashlib.sha256((run.path / "manifest.json").read_bytes()).hexdigest()
    assert (card["run"], card["round"], card["rounds"], card["sites"]) == (run.name, 4, 4, 3)
    assert (card["layout_digest"], card["federation_digest"]) == (layout.digest, run.federation.digest)
    assert [(row["site"], row["unit"], row["adjacency"], row["delta"]) for row in card["spent"]] == [
        (f"site-{i}", "site", run.ledgers[i]["adjacency"], 1e-5) for i in range(3)
    ]
    assert card["attacks"][0]["measures"]["linkage"]["value"] == 0.5


@pytest.mark.e2e
def test_the_card_is_readable(run: fl_privacy.Run, exported: Path) -> None:
    text = (exported / "model.card.md").read_text()
    for wanted in (run.name, "3 sites", "| site-1 |", "| guess | server | linkage | 0.500 | 0.100 | 0.250 |", "1e-05"):
        assert wanted in text
    assert hashlib.sha256((run.path / "manifest.json").read_bytes()).hexdigest() in text


@pytest.mark.e2e
def test_the_lines_in_the_docs_load_it(run: fl_privacy.Run, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "models.md").read_text(), re.DOTALL)
    loading = [block for block in blocks if "load_state_dict" in block]
    assert len(loading) == 2
    for block in loading:
        exec(block, names)
        with torch.no_grad():
            np.testing.assert_allclose(names["model"](records()), run.model()(records()), atol=CLOSE)


@pytest.mark.e2e
def test_the_command_exports_by_name_and_says_what_is_wrong(run: fl_privacy.Run, runs: Path, tmp_path: Path) -> None:
    done = cli("export", run.name, "--runs-dir", runs, "--to", tmp_path / "m.pt", "--round", "2", "--json")
    assert (done.returncode, json_of(done)["round"]) == (0, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"m.pt", "m.card.md"}
    done = cli("export", run.path, "--to", tmp_path / "m.onnx", "--shape", "8,x")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "shape: '8,x' is not a shape" in done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "round", "shape", "said"),
    [
        ("m.h5", "last", None, "no suffix of a model file"),
        ("m.pt", "9", None, "no model after round 9: the run has 4 rounds"),
        ("m.pt", "new", None, "use last, best or a number"),
        ("m.onnx", "last", (1, 9, 9), "shape: the model takes no records"),
        ("m.onnx", "last", (10**9, 10**9), "shape: the model takes no records"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    run: fl_privacy.Run, tmp_path: Path, name: str, round: str, shape: tuple[int, ...] | None, said: str
) -> None:
    with pytest.raises(FederationError, match=said) as error:
        write(locate(run.path, round), tmp_path / name, shape)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
def test_a_checkpoint_that_was_changed_is_not_exported(run: fl_privacy.Run) -> None:
    path = run.path / "checkpoints" / "round-000004.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises(TranscriptError, match="changed since the run was signed"):
            run.model()
    finally:
        path.write_bytes(whole)


@pytest.mark.e2e
def test_a_sharded_federation_starts_from_the_model_and_stops_early(
    run: fl_privacy.Run, exported: Path, runs: Path
) -> None:
    """No round can improve the loss by 100, so the first stays the best and two more are waited for.

    The aggregators keep its shards meanwhile, and every site gets both models.
    """
    changed = {"route": {"kind": "shards", "aggregators": 2}, "stop": {"patience": 2, "min_delta": 100}}
    config = {**CONFIG, **changed, "name": "again", "rounds": 9, "audit": True}
    second = fl_privacy.up(config, engine="simulation", runs_dir=runs, init=exported / "model.safetensors", quiet=True)
    found = rows(second)
    assert found[0]["loss"] == pytest.approx(rows(run)[-1]["loss"], rel=1e-6)
    assert [row["round"] for row in found] == [0, 1, 2, 3]
    manifest = second.manifest
    assert manifest["best"]["round"] == 1
    assert manifest["stopped"]["round"] == 3
    assert "has not improved since round 1" in manifest["stopped"]["reason"]
    file = hashlib.sha256((exported / "model.safetensors").read_bytes()).hexdigest()
    assert manifest["config"]["init"]["sha256"] == file
    assert verify(second.path, (runs / "pki" / "ca.pem").read_bytes()).ok
    work = Workload(second.federation)
    for name, round in (("last", 3), ("best", 1)):  # no server has them: they are what the sites received
        scored = work.evaluate(vector.flatten(second.model(name))[0])
        assert scored.loss == pytest.approx(found[round]["loss"], rel=1e-6)
        kept = sorted((runs / "sites" / "again").glob(f"*/models/{second.name}/{name}.json"))
        assert [json.loads(path.read_text())["round"] for path in kept] == [round] * 3
    events = [json.loads(line) for line in (second.path / "logs" / "sites.log").read_text().splitlines()]
    assert {event["round"] for event in events if event["event"] == "charged"} == {1, 2, 3}
    assert not [event for event in events if event["event"] in ("failed", "refused", "not-sent")]


@pytest.mark.e2e
def test_a_model_of_another_layout_is_refused_before_anything_starts(exported: Path, tmp_path: Path) -> None:
    config = tmp_path / "federation.yaml"
    config.write_text("sites: 3\ntask: {hidden: [32]}\n")
    done = cli("up", config, "--init", exported / "model.pt", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2
    assert "fc1.weight is (64, 64), not (32, 64)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.e2e
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace, as a kernel does; the last expression of a cell is what the notebook shows."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "notebooks" / "first-federation.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert names["run"].status == "completed"
    assert names["run"].metrics[-1]["accuracy"] > 0.3
    assert "linkage" in (tmp_path / "model.card.md").read_text()


@pytest.mark.e2e
def test_the_snippet_on_the_page_runs(run: fl_privacy.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its federation is checked, and another one stands in for what it returns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fl_privacy, "up", lambda config, engine: Federation.of(config) and run)
    exec(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)[0], {})
    assert (tmp_path / "model.onnx").exists()


@pytest.mark.e2e
def test_an_interrupt_stops_all_processes_and_says_how_to_resume(tmp_path: Path) -> None:
    config = {**CONFIG, "rounds": 10_000}
    code = f"import fl_privacy; fl_privacy.up({config!r}, engine='simulation', runs_dir={str(tmp_path)!r})"
    with subprocess.Popen(
        [*HEED, sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        assert any(line.startswith("round   1") for line in up.stdout)
        up.send_signal(signal.SIGINT)
        printed, raised = up.communicate(timeout=120)
    assert up.returncode != 0
    assert raised.strip().splitlines()[-1].startswith("fl_privacy.errors.Interrupted")
    (run,) = fl_privacy.runs(tmp_path)
    hint = f'resume it with: fl_privacy.up(resume="{run.path}")'
    assert f"interrupted; all processes have been stopped; {hint}" in printed
    assert run.status == "interrupted"
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or ())]
    assert left == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"sites": 3, "round": 2}, "round: unknown key"),
        ("gone.yaml", "gone.yaml: cannot be read"),
        ({"sites": 3, "init": "gone.pt"}, "init"),
    ],
)
def test_a_wrong_config_is_one_line(config: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=said):
        fl_privacy.up(config, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_takes_no_other_initial_model(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(FederationError, match="init: a resumed run has its own initial model"):
        fl_privacy.up(resume="run", init=tmp_path / "model.pt", runs_dir=tmp_path)
    done = cli("up", "--resume", "run", "--init", tmp_path / "model.pt", "--runs-dir", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "init: a resumed run has its own initial model" in done.stderr


def test_an_unknown_engine_and_an_unknown_run_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="use local, simulation, compose"):
        fl_privacy.up({"sites": 3}, engine="cloud", runs_dir=tmp_path)
    with pytest.raises(FederationError, match=r"no such run|not a run"):
        fl_privacy.Run("gone", tmp_path)


def cpu_seconds(*command: str | Path) -> float:
    """Processor time of a command, the least of three: another process may have pushed it out of the caches."""
    code = "import os, subprocess, sys; subprocess.run(sys.argv[1:], stdout=-3, check=True); t = os.times(); "
    code += "print(t.children_user + t.children_system)"
    times = [subprocess.run([sys.executable, "-c", code, *command], capture_output=True, check=True) for _ in range(3)]
    return min(float(done.stdout) for done in times)


def test_importing_the_package_and_asking_for_help_are_quick() -> None:
    assert cpu_seconds(sys.executable, "-c", "import fl_privacy") < 0.3
    assert cpu_seconds(Path(sys.executable).with_name("fl-privacy"), "--help") < 0.5


def test_only_promised_names_are_attributes() -> None:
    assert {"up", "runs", "Run"} <= set(dir(fl_privacy))
    with pytest.raises(AttributeError, match="no attribute 'down'"):
        fl_privacy.down  # noqa: B018
