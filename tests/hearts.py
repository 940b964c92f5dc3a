"""For tests: heart disease with one folder per centre, which contains only that centre's file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from fl_privacy.round.checkpoints import Checkpoints

CENTRES = ("cleveland", "hungarian", "switzerland", "va")
ROUNDS = 3


def data_folder() -> Path:
    """The data folder with all centres' files."""
    given = os.environ.get("FL_PRIVACY_DATA")
    if not given or not (Path(given) / "heart-disease").is_dir():
        pytest.skip("needs the heart-disease files in FL_PRIVACY_DATA")
    return Path(given)


def spread(folder: Path) -> dict[str, Path]:
    """A folder per centre, readable by the user of a container too."""
    source = data_folder() / "heart-disease"
    for centre in CENTRES:
        own = folder / centre / "heart-disease"
        own.mkdir(parents=True)
        shutil.copyfile(source / f"processed.{centre}.data", own / f"processed.{centre}.data")
        for path in (folder / centre, own):
            path.chmod(0o755)
    return {centre: folder / centre for centre in CENTRES}


def federation(name: str, folders: dict[str, Path] | None = None) -> dict[str, Any]:
    """A repeatable federation of the centres, with their folders or without."""
    task = {"dataset": "heart-disease", "partition": {"kind": "by-site"}, "train": {"epochs": 2, "lr": 0.01}}
    sites = [{"name": c, **({"data": str(folders[c])} if folders else {})} for c in CENTRES]
    return {"name": name, "sites": sites, "rounds": ROUNDS, "reproducible": True, "task": task}


def model_of(run: Path) -> NDArray[Any]:
    """The model after the last round."""
    return Checkpoints(run / "checkpoints").load(ROUNDS)["model"]
