"""`dataset: load`: readings of one meter per site, from households that no list of ours has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from pydantic import ValidationError

from fl_privacy.config import Federation
from fl_privacy.errors import DataError
from fl_privacy.tasks import files, lcl, load as electricity
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.household import Load
from fl_privacy.tasks.models import build
from fl_privacy.tasks.train import Recipe, evaluate, fit
from fl_privacy.tasks.workload import layout_of
from profiles import QUICK

ROOT = Path(__file__).resolve().parent.parent
START = datetime(2024, 3, 1)
SMALL: dict[str, Any] = {"start": START, "days": 20, "minutes": 60, "length": 12, "stride": 1, "held_out": 96}
# The options that make `load` of Low Carbon London's files what `lcl` is.
LCL = {"time": "tstp", "value": "energy(kWh/hh)", "start": "2013-01-01", "days": 365, "windows": 5}


def made(**changes: Any) -> Load:
    return Load.model_validate(SMALL | changes)


def write(
    folder: Path, kwh: NDArray[np.float64], step: timedelta = timedelta(hours=1), header: str = "time,kwh"
) -> Path:
    lines = [f"{START + number * step},{value:.4f}" for number, value in enumerate(kwh.tolist())]
    (folder / "a.csv").write_text("\n".join([header, *lines]))
    return folder


def numbered(days: int = 20) -> NDArray[np.float64]:
    return np.arange(days * 24) / 1000


def problems(options: Load, folder: Path) -> str:
    with pytest.raises(DataError) as error:
        options.of_site("a", folder)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_record_is_the_readings_before_its_label(tmp_path: Path) -> None:
    data = made(scale={"mean": 0, "std": 1})
    found = data.of_site("a", write(tmp_path, numbered()))
    assert (data.shape, data.classes, data.preprocessing) == ((12, 3), 0, "public")
    assert len(found.train) == 20 * 24 - 96 - 12
    for half in (found.train, found.held_out):
        assert half.forecast
        np.testing.assert_allclose(half.y, half.x[:, -1, 0] + 0.001, atol=1e-6)
        # Hours are those of the reading that follows: at the label, of the label's own hour.
        hours = np.round(half.y * 1000) % 24
        np.testing.assert_allclose(half.x[:, -1, 1], np.sin(hours * np.pi / 12), atol=1e-5)


def test_no_held_out_record_shares_a_reading_with_a_training_record(tmp_path: Path) -> None:
    data = made(windows=2, held_out=48, scale={"mean": 0, "std": 1})
    found = data.of_site("a", write(tmp_path, numbered()))
    read = [
        {*half.x[:, :, 0].round(3).ravel().tolist(), *half.y.round(3).tolist()}
        for half in (found.train, found.held_out)
    ]
    assert not read[0] & read[1]
    assert len(read[0]) + len(read[1]) == 20 * 24
    assert min(read[1]) < max(read[0]), "the end of each window is held out, not the end of the time"


def test_local_scaling_is_by_the_training_readings(tmp_path: Path) -> None:
    data = made()
    assert data.preprocessing == "local"
    kwh = np.random.default_rng(0).gamma(2, 0.2, 20 * 24)
    first = data.of_site("a", write(tmp_path, kwh))
    kwh[-96:] = 9
    second = data.of_site("a", write(tmp_path, kwh))
    np.testing.assert_array_equal(first.train.x, second.train.x)
    assert abs(float(first.train.y.mean())) < 0.2
    assert 0.5 < float(first.train.y.std()) < 2


def test_gaps_and_readings_off_the_grid(tmp_path: Path) -> None:
    kwh = numbered()
    write(tmp_path, kwh)
    whole = made(longest_gap=2).of_site("a", tmp_path)
    lines = (tmp_path / "a.csv").read_text().splitlines()
    lines[100], lines[101] = "2024-03-01 00:07:00,99", f"{lines[101].split(',')[0]},Null"
    (tmp_path / "a.csv").write_text("\n".join(lines))
    filled = made(longest_gap=2).of_site("a", tmp_path)
    assert len(whole.train) - len(filled.train) == 2, "two readings that nobody knows are no labels"
    assert len(whole.train) - len(made(longest_gap=1).of_site("a", tmp_path).train) == 12 + 2, (
        "every record that has one"
    )


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["time,kwh", "yesterday,1", "2024-03-01 01:00,much"], "a.csv, line 2, column 'time': not a time (write it as"),
        (["time,kwh", "yesterday,1", "2024-03-01 01:00,much"], "a.csv, line 3, column 'kwh': not a number"),
        (["when,kwh", "2024-03-01 01:00,1"], "a.csv, line 1, column 'time': missing"),
        (["time,kwh"], "a.csv: no records"),
        (["time,kwh", "2025-03-01 01:00,1"], "has no reading at the times that start, days and minutes give"),
        (["time,kwh", "2024-03-01 01:00,1"], "no household has a training record"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, lines: list[str], reason: str) -> None:
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert reason in problems(made(), tmp_path)


def test_a_file_that_ends_before_the_held_out_days_is_refused(tmp_path: Path) -> None:
    assert "no record in the held-out parts" in problems(made(), write(tmp_path, numbered(16)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"minutes": 7}, "minutes: 7 do not divide a day"),
        ({"start": "2024-03-01T00:00+01:00"}, "write the time as it is in the file"),
        ({"windows": 20}, "use fewer windows or shorter records"),
        ({"scale": {"mean": 1}}, "give mean and std, or min and max"),
        ({"class_weights": [1, 2]}, "class_weights: 2 for 0 classes"),
        ({"days": 36_600, "minutes": 1, "length": 10_000, "held_out": 10_001}, "readings are too many; raise stride"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        made(**changes)


# Low Carbon London, as if its households were somebody's own


@pytest.fixture(scope="module")
def households(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The public archive, unpacked: one folder per household, named as a site."""
    for given in (os.environ.get(files.ENVIRONMENT), ROOT.parent / "shared" / "data"):
        if given and (Path(given) / "lcl" / lcl.ARCHIVE).exists():
            root = tmp_path_factory.mktemp("households")
            archive = (Path(given) / "lcl" / lcl.ARCHIVE).read_bytes()
            for name, content in files.unpack(archive, lcl.ARCHIVE, lcl.key).items():
                (folder := root / name.removesuffix(".csv").lower()).mkdir()
                (folder / name).write_bytes(content)
            yield root
            return
    pytest.skip(f"real data are not here: set {files.ENVIRONMENT} to a data folder with lcl (docs/tasks.md)")


def test_a_household_gives_the_records_of_lcl_from_its_own_file(households: Path, tmp_path: Path) -> None:
    name = lcl.HOUSEHOLDS[3]
    (tmp_path / "lcl").mkdir()
    (tmp_path / "lcl" / f"{name}.csv").write_bytes((households / name.lower() / f"{name}.csv").read_bytes())
    windows = [lcl.Lcl().of_site(f"{name.lower()}-w{window}", tmp_path) for window in range(lcl.WINDOWS)]
    found = Load.model_validate(LCL).of_site(name.lower(), households)
    np.testing.assert_array_equal(found.train.x, np.concatenate([window.train.x for window in windows]))
    np.testing.assert_array_equal(found.held_out.y, np.concatenate([window.held_out.y for window in windows]))


def test_households_outside_the_shipped_list_train_from_their_own_files(households: Path) -> None:
    """Half-years of the 20 households that `lcl` has no site of: 40 sites less those whose meters were silent."""
    outsiders = sorted({path.name for path in households.iterdir()} - {name.lower() for name in lcl.HOUSEHOLDS})
    assert len(outsiders) == 20
    outsiders = outsiders[:: 4 if QUICK else 1]
    model = build("lstm", Load.model_validate(LCL).shape, 0, seed=0)
    learned, silent = [], []
    for start in ("2013-01-01", "2013-07-02"):
        data = Load.model_validate(LCL | {"start": start, "days": 182, "windows": 2})
        for site in outsiders:
            try:
                found = data.of_site(site, households)
            except DataError as error:
                silent.append(str(error))
                continue
            before = evaluate(model, found.held_out).loss
            fit(model, Dataset(found.train.x[::8], found.train.y[::8]), Recipe(1, 32, 0.05, 0.9), seed=0)
            learned.append(before - evaluate(model, found.held_out).loss)
    assert len(learned) + len(silent) == 2 * len(outsiders)
    assert len(learned) >= 1.5 * len(outsiders)
    assert sum(gain > 0 for gain in learned) > len(learned) / 2
    assert all("data: " in text or "load: " in text for text in silent)


def test_only_the_data_lines_of_the_shipped_config_change() -> None:
    shipped = yaml.safe_load((ROOT / "configs" / "household-load.yaml").read_text())
    data = {"dataset": "load", "options": LCL, "partition": {"kind": "by-site"}}
    changes = {"sites": 40, "task": shipped["task"] | data}
    own, theirs = Federation.model_validate(shipped | changes), Federation.model_validate(shipped)
    assert layout_of(own).digest == layout_of(theirs).digest
    assert {key for key in shipped if getattr(own, key, None) != getattr(theirs, key, None)} == {"sites", "task"}


def test_the_reader_gives_what_the_archive_gives(households: Path) -> None:
    with (households / "mac000002" / "MAC000002.csv").open("rb") as stream:
        table = electricity.read_csv(stream, lcl.COLUMNS, "MAC000002.csv")
    found = electricity.on_grid([table], lcl.START, lcl.STEPS)
    assert found.households == ("MAC000002",)
    np.testing.assert_allclose(found.kwh[0, :4], [0.219, 0.241, 0.191, 0.235])


def test_public_scaling_of_lcl_is_the_same_for_every_household(households: Path, tmp_path: Path) -> None:
    name = lcl.HOUSEHOLDS[3]
    (tmp_path / "lcl").mkdir()
    (tmp_path / "lcl" / f"{name}.csv").write_bytes((households / name.lower() / f"{name}.csv").read_bytes())
    public, local = lcl.Lcl(scaling="public"), lcl.Lcl()
    assert (public.preprocessing, local.preprocessing) == ("public", "local")
    found = public.of_site(f"{name.lower()}-w2", tmp_path).train
    raw = Load.model_validate(LCL | {"scale": {"mean": 0, "std": 1}}).of_site(name.lower(), households).train
    kwh = found.y.astype(np.float64) * lcl.USUAL[1] + lcl.USUAL[0]
    # Rounding of readings below 10 kWh to float32.
    assert np.abs(raw.y[:, None] - kwh[None, :]).min(axis=0).max() < 1e-5
