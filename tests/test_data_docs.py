"""docs/data.md: every example is read as a federation and run on files as the page describes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from PIL import Image
from pyarrow import parquet
from pydantic import BaseModel

from fl_privacy.config import Federation
from fl_privacy.tasks.dataset import DATASETS
from fl_privacy.tasks.workload import Workload

PAGE = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
SITE = "hospital-a"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


EXAMPLES: list[dict[str, Any]] = [yaml.safe_load(text) for text in blocks("yaml")]


def table(folder: Path) -> None:
    """The page's own file, with more patients of other ages: of eight, there may be none to hold out."""
    (text,) = blocks("csv")
    header, *lines = text.splitlines()
    patients = [line.split(",") for line in lines]
    more = [[row[0], str(int(row[1]) + years), *row[2:]] for years in range(6) for row in patients]
    (folder / f"{SITE}.csv").write_text("\n".join([header, *map(",".join, more)]))


def images(folder: Path) -> None:
    rng, lines = np.random.default_rng(0), ["path,finding,part"]
    for number in range(40):
        kind = ["normal", "pneumonia"][number % 2]
        (folder / kind).mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / kind / f"{number:04d}.png")
        lines.append(f"{kind}/{number:04d}.png,{kind},{'test' if number < 9 else 'train'}")
    (folder / "labels.csv").write_text("\n".join(lines))


def arrays(folder: Path) -> None:
    rng = np.random.default_rng(0)
    part = ["test" if number % 4 == 0 else "train" for number in range(60)]
    beats = rng.integers(-1024, 1024, (60, 50, 2), np.int16)
    np.savez(folder / f"{SITE}.npz", beats=beats, rhythm=rng.integers(0, 5, 60))
    columns = {"age": rng.uniform(20, 90, 60), "creatinine": rng.uniform(0.5, 2, 60), "stay": rng.uniform(1, 9, 60)}
    parquet.write_table(pa.table(columns | {"part": part}), folder / f"{SITE}.parquet")


def load(folder: Path) -> None:
    rng, start = np.random.default_rng(0), datetime(2013, 1, 1)
    lines = [f"{start + n * timedelta(minutes=30)},{kwh:.3f}" for n, kwh in enumerate(rng.gamma(1, 0.2, 365 * 48))]
    (folder / f"{SITE}.csv").write_text("\n".join(["tstp,energy(kWh/hh)", *lines]))


FILES: dict[str, Callable[[Path], None]] = {"csv": table, "images": images, "arrays": arrays, "load": load}


def test_there_is_an_example_of_every_data_set() -> None:
    assert {example["task"]["dataset"] for example in EXAMPLES} == set(FILES)
    assert len(EXAMPLES) == 8


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_trains(number: int, tmp_path: Path) -> None:
    example = EXAMPLES[number] | {"sites": [{"name": SITE, "data": str(tmp_path)}, {"name": "hospital-b"}]}
    federation = Federation.model_validate(example | {"route": {"kind": "server"}})
    name = federation.task.dataset
    FILES[name](tmp_path)
    if name == "arrays":
        (tmp_path / f"{SITE}.{'parquet' if federation.task.data_set.classes else 'npz'}").unlink()
    work = Workload(federation)
    train, held_out = work.site_data(SITE), work.held_out(SITE)
    data = federation.task.data_set
    assert len(train) > len(held_out) > 0
    assert train.x.shape[1:] == data.shape
    assert work.model(torch.from_numpy(train.x[:2])).shape == (2, data.classes or 1)
    few = train.take(range(8))
    assert np.isfinite(work.update(work.initial, few, SITE, round=1)).all()


def fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields(kind)


@pytest.mark.parametrize("name", FILES)
def test_every_option_is_on_the_page(name: str) -> None:
    for option in fields(DATASETS.get(name)):
        assert re.search(rf"`[^`]*\b{option}\b[^`]*`|^ +.*\b{option}:", PAGE, re.MULTILINE), option
