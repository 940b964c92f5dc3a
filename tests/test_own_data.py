"""docs/own-data.md, followed word by word: a table without Python, a task of one's own, and both on real machines."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import hearts
from commands import cli
from fl_privacy.config import Federation
from fl_privacy.config.task import digest_of
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.preflight.checks import find_data
from fl_privacy.deploy.preflight.of_kit import run as preflight
from fl_privacy.deploy.processes import Fleet
from fl_privacy.errors import ConfigError, DataError, FederationError
from fl_privacy.tasks import accepted
from fl_privacy.tasks.making import task_of
from fl_privacy.tasks.workload import Workload, model_of
from fl_privacy.transcript import open_run
from fl_privacy.trial import check

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "own-data.md").read_text()
FILES = dict(re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", PAGE, flags=re.M | re.S))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S) for line in block.splitlines()]
CLINICS = ("clinic-a", "clinic-b", "clinic-c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page."""
    made = tmp_path_factory.mktemp("own")
    for name, text in FILES.items():
        (made / name).write_text(text)
    subprocess.run([sys.executable, "split.py"], cwd=made, check=True, timeout=120)
    return made


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_every_command_of_the_page_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    printed = {}
    for line in COMMANDS[1:]:
        words = line.split()
        assert words[0] == "fl-privacy"
        done = cli(*words[1:], whole=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        printed[line] = done.stdout
    assert "dpsgd          possible" in printed["fl-privacy task check task.py --data-dir clinic-a --site clinic-a"]
    plain, private = (float(re.findall(r"final accuracy (\d\.\d+)", text)[0]) for text in _runs(printed))
    assert plain > 0.88
    assert private > 0.85
    ledgers = re.findall(r"ledger (clinic-\w): epsilon (\d\.\d+) spent", _runs(printed)[1])
    assert [name for name, _ in ledgers] == list(CLINICS)
    assert all(7.9 < float(spent) <= 8 for _, spent in ledgers)
    views = [open_run(path).view("server") for path in sorted((folder / "runs").glob("*clinics-*"))]
    names = {event.name for view in views for r in view.rounds for event in view.events(r) if hasattr(event, "row")}
    assert not names  # rows have no owners


def _runs(printed: dict[str, str]) -> list[str]:
    return [text for line, text in printed.items() if " up " in line]


def test_sites_of_the_rehearsal_can_start_as_they_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "clinics", ignore=shutil.ignore_patterns("runs"))
    monkeypatch.chdir(tmp_path / "clinics")
    rehearsal = PAGE.partition("## A rehearsal")[2].partition("\n## ")[0]
    with Path("private.yaml").open("a") as config:
        config.writelines(re.findall(r"^hosts: .*\n", rehearsal, flags=re.M))
    provision, *others = re.findall(r"^    fl-privacy (.*)", rehearsal, flags=re.M)
    assert cli(*provision.split()).returncode == 0
    for command, _, policy in (line.partition(" > ") for line in others if " > " in line):
        Path(policy).write_text(cli(*command.split()).stdout)
    words = [word for line in others for word in line.partition(" > ")[0].split()]
    assert {Path(word) for word in words if word.startswith("rehearsal/")} == set(Path("rehearsal").iterdir())
    found = preflight(Folder.open(Path("rehearsal/clinic-a")), reach=False)  # what `site start` demands
    assert {check.name for check in found if not check.ok} <= {"path"}  # a folder of pytest may be too long for sockets


# Code is pinned


def load(folder: Path, code: str, **options: object) -> Federation:
    (folder / "task.py").write_text(code)
    task = json.dumps({"code": "task.py", "options": options})
    return Federation.parse(f"sites: {json.dumps([{'name': name} for name in CLINICS])}\ntask: {task}", folder=folder)


def test_the_digest_of_the_federation_contains_the_code_and_not_where_it_was(tmp_path: Path) -> None:
    one, other = load(tmp_path, FILES["task.py"]), load(tmp_path, FILES["task.py"] + "\n# changed\n")
    assert one.task.sha256 != other.task.sha256
    assert one.digest != other.digest
    again = Federation.parse(one.to_yaml())
    assert again.digest == one.digest
    assert again.task.source == FILES["task.py"]
    with pytest.raises(ConfigError, match=r"task\.source: does not have the digest"):
        Federation.parse(one.to_yaml().replace("costs three times", "costs ten times"))


def test_a_site_runs_only_what_its_operator_accepted_or_its_policy_lists(tmp_path: Path) -> None:
    federation, state = load(tmp_path, FILES["task.py"]), tmp_path / "state"
    with pytest.raises(ConfigError, match=r"task\.py \(sha256 \w+\) is not accepted at this site.*accept-task"):
        accepted.check(federation, state)
    accepted.check(federation, None, (str(federation.task.sha256),))
    accepted.accept(federation, state)
    accepted.check(federation, state)
    changed = load(tmp_path, FILES["task.py"].replace("[3.0, 1.0]", "[9.0, 1.0]"))
    with pytest.raises(ConfigError, match="not accepted"):
        accepted.check(changed, state)
    assert {line[:1] for line in accepted.changes(changed, state).splitlines() if "1.0]" in line} == {"+", "-"}


def test_a_run_that_somebody_sent_brings_no_code(tmp_path: Path) -> None:
    federation, state = load(tmp_path, FILES["task.py"]), tmp_path / "sites" / "clinic-a"
    with pytest.raises(ConfigError, match="no site here accepted"):
        accepted.check_here(federation, [state])
    accepted.accept(federation, state)
    accepted.check_here(federation, [tmp_path / "other", state])


@pytest.mark.parametrize("hidden", ["\x1b[8m", "\u202e", "\x08", "\u2028", "\x85", "\u200b"])
def test_an_operator_sees_every_character_of_the_code(hidden: str, tmp_path: Path) -> None:
    federation, state = load(tmp_path, f"x = 1  # harmless{hidden}\nimport os\n"), tmp_path / "state"
    shown = accepted.offered(federation, state)
    assert shown == f"x = 1  # harmless{hidden.encode('unicode_escape').decode()}\nimport os\n"
    accepted.accept(load(tmp_path, "x = 1\n"), state)
    assert shown.splitlines()[0] in accepted.offered(federation, state)
    assert hidden not in accepted.offered(federation, state)


def test_a_line_ends_for_an_operator_where_it_ends_for_python(tmp_path: Path) -> None:
    """In Python a carriage return ends a comment; on a terminal it would hide it."""
    source = "import os  # \ros = None\n"
    sha256 = digest_of(source)
    task = {"code": "task.py", "source": source, "sha256": sha256}
    federation = Federation.of({"sites": 3, "task": task}, folder=tmp_path)
    assert accepted.offered(federation, tmp_path) == "import os  # \nos = None\n"


def test_code_is_the_text_of_a_file_and_nothing_else(tmp_path: Path) -> None:
    source = "x = 1\n"
    task = {"name": "blobs", "source": source, "sha256": digest_of(source)}
    with pytest.raises(ConfigError, match=r"task\.source: is the text of task\.code, and there is none"):
        Federation.of({"sites": 3, "task": task}, folder=tmp_path)


@settings(max_examples=300)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=60))
def test_a_kit_carries_the_code_unchanged(source: str) -> None:
    task = {"code": "task.py", "source": source, "sha256": digest_of(source)}
    federation = Federation.of({"sites": 3, "task": task})
    assert Federation.parse(federation.to_yaml()) == federation


def test_no_module_comes_from_the_folder_that_a_command_is_called_in(tmp_path: Path) -> None:
    """Kits are served from inside their folder: a file in it must not stand in for a module of ours."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('code of the folder')\n")
    fleet = Fleet(tmp_path / "logs", tmp_path / "pids.json")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        child = fleet.start("worker", [sys.executable, "-m", "client_app.worker", "--help"])
        assert child.process.wait(60) == 0, child.log.read_text()
    finally:
        os.chdir(before)


# A task's own errors are reported as such

BROKEN = {
    "syntax": ("class X(:\n", r"task\.py:1: cannot be loaded: invalid syntax"),
    "no class": ("x = 1\n", r"task\.py:1: needs exactly one subclass of fl_privacy\.Task, and has none"),
    "import": ("import numpy\nimport nosuchmodule\n", r"task\.py:2: cannot be loaded: ModuleNotFoundError"),
    "exits": ("import sys\n\nsys.exit(0)\n", r"task\.py:3: cannot be loaded: SystemExit: 0"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_cannot_be_loaded_is_named_with_its_line(kind: str, tmp_path: Path) -> None:
    code, message = BROKEN[kind]
    with pytest.raises(FederationError, match=message) as error:
        model_of(load(tmp_path, code))
    assert "\n" not in str(error.value)


HEAD = "import numpy as np\nfrom torch import nn\nimport torch\nfrom fl_privacy import Task\nclass T(Task):\n"
MODEL = "    def model(self):\n        return nn.Linear(2, 2)\n"
DATA = "    def data(self, site, folder):\n        return {}\n"
GOOD = "(np.zeros((4, 2)), np.arange(4) % 2), (np.zeros((2, 2)), np.arange(2))"
RUNS = {
    "raises in data": (MODEL + DATA.format("1 / 0"), r"task\.py:9: data of site 'clinic-a': ZeroDivisionError"),
    "no pair": (MODEL + DATA.format("5"), "data gave int; return"),
    "empty": (MODEL + DATA.format("(np.zeros((0, 2)), np.zeros(0)), (np.zeros((0, 2)), np.zeros(0))"), "no training"),
    "mismatched": (
        MODEL + DATA.format("(np.zeros((4, 2)), np.zeros(3)), (np.zeros((0, 2)), np.zeros(0))"),
        "4 records",
    ),
    "not finite": (MODEL + DATA.format("(np.full((4, 2), np.nan), np.zeros(4)), (np.zeros((0, 2)), [])"), "not finite"),
    "too large": (MODEL + DATA.format("(np.full((4, 2), 1e300), np.zeros(4)), (np.zeros((0, 2)), [])"), "too large"),
    "exits": (
        MODEL + DATA.format("exit('no such file')"),
        r"task\.py:9: data of site 'clinic-a': SystemExit: no such file",
    ),
    "negative label": (MODEL + DATA.format("(np.zeros((4, 2)), np.full(4, -1)), (np.zeros((0, 2)), [])"), "label -1"),
    "label out of range": (
        MODEL + DATA.format("(np.zeros((4, 2)), np.full(4, 2)), (np.zeros((0, 2)), [])"),
        "label 2 is out of range: the model has 2 outputs; use labels from 0 to 1",
    ),
    "no parameters": ("    def model(self):\n        return nn.Identity()\n" + DATA.format(GOOD), "no parameters"),
    "wrong width": (
        "    def model(self):\n        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))\n"
        + DATA.format(GOOD),
        r"task\.py:6: model\(\): layer 0 \(Linear\(in_features=3, .*\) cannot take an input of shape \(2,\): ",
    ),
    "wrong width inside": (
        "    def model(self):\n        return nn.Sequential(nn.Linear(2, 4), nn.Linear(5, 2))\n" + DATA.format(GOOD),
        r"task\.py:6: model\(\): layer 1 \(Linear.* an input of shape \(4,\): .*; a record has shape \(2,\)",
    ),
    "no module": ("    def model(self):\n        return 3\n" + DATA.format(GOOD), "model gave int"),
    "scalar loss": (
        MODEL + DATA.format(GOOD) + "    def loss(self, o, t):\n        return nn.functional.cross_entropy(o, t)\n",
        r'loss gave shape \(\); return one loss per record \(reduction="none"\)',
    ),
    "error in loss": (
        MODEL + DATA.format(GOOD) + "    def loss(self, o, t):\n        raise KeyError('x')\n",
        r"task\.py:11: .*KeyError",
    ),
}


@pytest.mark.parametrize("kind", RUNS)
def test_whatever_a_task_does_wrong_is_one_line_about_the_task(kind: str, tmp_path: Path) -> None:
    code, message = RUNS[kind]
    with pytest.raises(FederationError, match=message) as error:
        check(load(tmp_path, HEAD + code), "clinic-a", tmp_path)
    assert "\n" not in str(error.value)
    assert re.match(r"task\.py:\d+: ", str(error.value))


@pytest.mark.parametrize("spoil", ["m.bias.data.fill_(np.nan)", "m.register_buffer('mask', torch.tensor(-np.inf))"])
def test_a_new_model_that_is_not_finite_is_refused(spoil: str, tmp_path: Path) -> None:
    model = f"    def model(self):\n        m = nn.Linear(2, 2)\n        {spoil}\n        return m\n"
    with pytest.raises(FederationError, match=r"task\.py:6: (bias|mask) of the new model is not finite; .*persistent"):
        model_of(load(tmp_path, HEAD + model))


def test_a_file_is_compiled_as_it_stands(tmp_path: Path) -> None:
    """Not with the __future__ imports of the module that loads it."""
    task = task_of(load(tmp_path, HEAD + "    size: int = 3\n"))
    assert type(task).__annotations__ == {"size": int}


def test_a_check_says_whose_records_it_read_and_how_to_read_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FL_PRIVACY_DATA", raising=False)
    (tmp_path / "task.py").write_text(HEAD + MODEL + DATA.format("open(folder / f'{site}.csv')"))
    missing = cli("task", "check", tmp_path / "task.py", "--data-dir", tmp_path).stderr
    assert "data of site 'site-0': FileNotFoundError" in missing
    assert "--site NAME reads those of another" in missing
    nowhere = cli("task", "check", tmp_path / "task.py").stderr
    assert nowhere == "error: data_dir: none is given, and task.py reads files; pass --data-dir DIR\n"


def test_a_file_of_any_name_can_be_checked(tmp_path: Path) -> None:
    path = tmp_path / "trial #1: {a}, b.py"
    path.write_text(HEAD + MODEL + DATA.format("5"))
    done = cli("task", "check", path, "--data-dir", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{path.name}:8: data gave int" in done.stderr


def test_options_are_checked_by_the_task_s_own_model(tmp_path: Path) -> None:
    assert task_of(load(tmp_path, FILES["task.py"], hidden=3)).options.hidden == 3
    with pytest.raises(ConfigError, match=r"task\.options: hidden: 'wide' was given"):
        task_of(load(tmp_path, FILES["task.py"], hidden="wide"))
    with pytest.raises(ConfigError, match=r"task\.options: "):
        task_of(load(tmp_path, HEAD + MODEL + DATA.format(GOOD), unknown=1))


# What the rest of a task may bring


def test_an_optimizer_and_augment_of_the_task_are_used(folder: Path, tmp_path: Path) -> None:
    own = (
        "    seen = []\n    def optimizer(self, parameters):\n        return torch.optim.Adam(parameters, lr=0.01)\n"
        "    def augment(self, records):\n        self.seen.append(len(records))\n        return records\n"
    )
    federation = load(tmp_path, HEAD + MODEL + DATA.format(GOOD) + own)
    work = Workload(federation, tmp_path)
    update = work.update(work.initial, work.site_data("clinic-a"), "clinic-a", 1)
    assert sum(type(work.task).seen) == 4 * federation.task.train.epochs
    # Adam's first steps have the length of its learning rate, whatever the gradient.
    assert 0 < abs(update).max() <= 0.01 * 1.01 * federation.task.train.epochs


def test_pytorch_datasets_are_records_too(tmp_path: Path) -> None:
    code = DATA.format("tuple(torch.utils.data.TensorDataset(torch.zeros(n, 2), torch.arange(n) % 2) for n in (6, 2))")
    work = Workload(load(tmp_path, HEAD + MODEL + code), tmp_path)
    assert (len(work.site_data("clinic-a")), len(work.held_out("clinic-a"))) == (6, 2)
    assert work.site_data("clinic-a").y.tolist() == [0, 1, 0, 1, 0, 1]


def test_dpsgd_demands_public_preprocessing_and_layers_with_records_of_their_own(folder: Path) -> None:
    report = check(Federation.load(folder / "private.yaml"), "clinic-a", folder / "clinic-a")
    assert report.dpsgd == ""
    bad = FILES["task.py"].replace("nn.ReLU()", "nn.BatchNorm1d(self.options.hidden)")
    assert (
        "BatchNorm1d '1' has no per-record privacy" in check(load(folder, bad), "clinic-a", folder / "clinic-a").dpsgd
    )
    local = FILES["task.py"].replace('"public"', '"local"')
    assert "preprocessing is local" in check(load(folder, local), "clinic-a", folder / "clinic-a").dpsgd
    (folder / "task.py").write_text(FILES["task.py"])


def test_what_dpsgd_cannot_train_is_found_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    layer = FILES["task.py"].replace("nn.ReLU()", "nn.BatchNorm1d(self.options.hidden)")
    for code, said in ((layer, "BatchNorm1d '1'"), (FILES["task.py"].replace('"public"', '"local"'), "scaled by")):
        (tmp_path / "task.py").write_text(code)
        text = FILES["private.yaml"].replace("data: clinic-", f"data: {folder}/clinic-")
        with pytest.raises(FederationError, match=said):
            find_data(Federation.parse(text, folder=tmp_path), None)


def test_the_template_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("task", "new", "heart-rate").returncode == 0
    assert "class HeartRateTask(Task)" in (tmp_path / "heart-rate" / "task.py").read_text()
    runpy.run_path("heart-rate/test_task.py")["test_the_task_trains"](tmp_path)
    assert "already exists" in cli("task", "new", "heart-rate").stderr


# A site reads its own folder


def test_heart_disease_needs_only_the_own_centre_s_file(tmp_path: Path) -> None:
    apart = Workload(Federation.model_validate(hearts.federation("hearts", hearts.spread(tmp_path))))
    pooled = Workload(Federation.model_validate(hearts.federation("hearts")), hearts.data_folder())
    for centre in hearts.CENTRES:
        one, other = apart.site_data(centre), pooled.site_data(centre)
        assert (one.x == other.x).all()
        assert (one.y == other.y).all()
    with pytest.raises(DataError, match=r"processed\.va\.data cannot be read"):
        apart.federation.task.data_set.of_site("va", tmp_path / "cleveland")
