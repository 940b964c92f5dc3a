"""`dataset: images`: PNG and JPEG files of a site, in one folder per class or listed in a CSV file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from fl_privacy.choices import Model
from fl_privacy.tasks import tables
from fl_privacy.tasks.data import Parts, scale
from fl_privacy.tasks.dataset import DataSet
from fl_privacy.tasks.findings import Findings
from fl_privacy.tasks.own_files import LARGEST, HeldOut, Inside, contents, inside, opened, own_folder, parts

ENDINGS = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG")
MODES = {1: "L", 3: "RGB"}  # by channels
MODES_READ = ("1", "L", "LA", "P", "RGB", "RGBA")  # up to 8 bits per channel
MOST_PIXELS = 2**26  # of one image before it is resized

Side = Annotated[int, Field(ge=1, le=4096)]
Entry = tuple[str, int, bool | None]  # path below the site's folder, class, whether a column holds it out


def _both_sides(value: Any) -> Any:
    """`32` means 32x32."""
    return (value, value) if isinstance(value, int) else value


class Listed(Model):
    """A CSV file with one line per image."""

    file: Inside = Field("labels.csv", description="in the site's folder")
    path: str = Field("file", min_length=1, description="column of the image's path below the site's folder")
    label: str = Field("label", min_length=1, description="column of the class")
    delimiter: Literal[",", ";", "\t", "|"] = ","


class Images(DataSet):
    """Images of one size. The config names the classes, so that their order never depends on the data."""

    own_sites: ClassVar[bool] = True

    size: Annotated[tuple[Side, Side], BeforeValidator(_both_sides)] = Field(
        description="height and width in pixels, or one number for both"
    )
    channels: Literal[1, 3] = Field(3, description="1: grey, 3: colour")
    levels: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=2, description="the classes in their order: the names of the folders, or the labels in the CSV file"
    )
    table: Listed | None = Field(None, description="the CSV file of labels; default: one folder per class")
    resize: bool = Field(False, description="resize images of another size; default: they are a problem")
    mean: tuple[float, ...] = Field((0.0,), description="of pixels from 0 to 1; for each channel, or one for all")
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field((1.0,), description="as `mean`")
    held_out: HeldOut = HeldOut()

    @model_validator(mode="after")
    def _consistent(self) -> Images:
        if len(set(self.levels)) < len(self.levels):
            raise ValueError("levels: one is there twice; remove it")
        if not {len(self.mean), len(self.std)} <= {1, self.channels}:
            raise ValueError(f"mean and std: give one number, or {self.channels} as there are channels")
        if self.held_out.column is not None and self.table is None:
            raise ValueError("held_out.column: folders have no columns; use a ratio, or a table of labels")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self.size)

    @property
    def classes(self) -> int:
        return len(self.levels)

    def of_site(self, site: str, folder: Path | None) -> Parts:
        root = own_folder(site, folder)
        found = Findings(root)
        entries = list(self._in_folders(root, found) if self.table is None else self._in_table(root, found))
        pixels = self._decoded(root, entries, found)
        found.check()
        y = np.array([label for _, label, _ in entries], np.int64)
        marked = None if self.held_out.column is None else np.array([mark for _, _, mark in entries], np.bool_)
        held_out = self.held_out.choose(contents(pixels, y), marked, root)
        mean, std = (np.array(given, np.float32)[:, None, None] for given in (self.mean, self.std))
        return parts((scale(pixels) - mean) / std, y, held_out, root)

    def _in_folders(self, root: Path, found: Findings) -> Iterator[Entry]:
        for folder in sorted(path for path in root.iterdir() if path.is_dir() and not _hidden(path)):
            if folder.name not in self.levels:
                found.of(folder.name)("a folder that is no class (rename it or add it to task.options.levels)")
                continue
            for path in sorted(path for path in folder.iterdir() if not _hidden(path)):
                name = f"{folder.name}/{path.name}"
                if path.suffix.lower() in ENDINGS and path.is_file():
                    yield name, self.levels.index(folder.name), None
                else:
                    found.of(name)(f"not an image ({', '.join(ENDINGS)}; convert or remove it)")

    def _in_table(self, root: Path, found: Findings) -> Iterator[Entry]:
        assert self.table is not None
        paths = tables.Texts()

        def path(cell: str) -> float:
            if not (root / inside(cell)).is_file():
                raise ValueError("there is no such file (correct the path or add the image)")
            return paths(cell)

        columns = [(self.table.path, path), (self.table.label, tables.level(self.levels, ()))]
        if self.held_out.column is not None:
            columns.append((self.held_out.column, lambda cell: float(cell == self.held_out.value)))
        with opened(root / self.table.file) as stream:
            cells = tables.read(stream, self.table.file, columns, found, self.table.delimiter)
        found.check()
        names = list(paths.places)
        for row in cells.astype(np.int64).tolist():
            yield names[row[0]], row[1], bool(row[2]) if row[2:] else None

    def _decoded(self, root: Path, entries: list[Entry], found: Findings) -> NDArray[np.uint8]:
        """The pixels of all images, channels first."""
        most = LARGEST // (4 * math.prod(self.shape))
        if not 0 < len(entries) <= most:
            fix = f"use at most {most}" if entries else "put some into one folder per class, or name a table"
            found.of("images")(f"there are {len(entries)} ({fix})")
            found.check()
        pixels = np.zeros((len(entries), *self.shape), np.uint8)
        for row, (name, _, _) in enumerate(entries):
            try:
                pixels[row] = self._image(root / name)
            except ValueError as error:
                found.of(name)(str(error))
        return pixels

    def _image(self, path: Path) -> NDArray[np.uint8]:
        """One image, channels first; a ValueError has the problem and the fix."""
        from PIL import Image

        height, width = self.size
        try:
            with Image.open(path, formats=FORMATS) as image:
                problem = self._unfit(image.mode, *image.size)
                if not problem:
                    made = image.convert(MODES[self.channels]).resize((width, height), Image.Resampling.BILINEAR)
        except (OSError, SyntaxError, EOFError, ValueError, Image.DecompressionBombError):
            problem = "not a whole PNG or JPEG file (save it again)"
        if problem:
            raise ValueError(problem)
        return np.asarray(made, np.uint8).reshape(height, width, self.channels).transpose(2, 0, 1)

    def _unfit(self, mode: str, width: int, height: int) -> str:
        """Why an image cannot be used, or an empty string."""
        if mode not in MODES_READ:
            return f"pixels of mode {mode} (save it as 8-bit grey or RGB)"
        if (height, width) != self.size and not self.resize:
            return f"{height}x{width}, not {self.size[0]}x{self.size[1]} (resize it or set task.options.resize)"
        return f"more than {MOST_PIXELS} pixels (make it smaller)" if height * width > MOST_PIXELS else ""


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")
