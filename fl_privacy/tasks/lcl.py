"""Low Carbon London: half-hourly load of 60 households in 2013. 40 form 200 sites, 20 are an attacker's data."""

from __future__ import annotations

import io
from pathlib import Path, PurePosixPath
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_privacy.errors import DataError
from fl_privacy.tasks import cache, files, load as electricity
from fl_privacy.tasks.data import Dataset, Parts, Split
from fl_privacy.tasks.dataset import Benchmark
from fl_privacy.tasks.load import Columns, Plan, Readings, Table

ARCHIVE = "lcl_2013_60households.tar.xz"
# Over names and files, not over the archive, which differs every time the public files are packed.
CONTENT = "c30372d4f3c30df3fe856826ef1c9a28f89220addcf24b4f29e4cde46efc07eb"
COLUMNS = Columns("LCLid", "tstp", "energy(kWh/hh)")
START = np.datetime64("2013-01-01T00:00", "ns")
STEPS = 365 * 48
# Four of the first 44 are unusable: MAC000008, 16 and 28 lack months, and 37 uses nothing in 99 of 100 half-hours.
HOUSEHOLDS = tuple(f"MAC{number:06d}" for number in range(2, 46) if number not in (8, 16, 28, 37))
WINDOWS = 5
# 73 days per window, of which the last 15 are held out.
PLAN = Plan(windows=WINDOWS, length=48, stride=7, held_out=15 * 48)
# Mean and deviation in kWh per half-hour, for `scaling: public`: 3,200 kWh per year is the medium consumption of a
# British household (Ofgem, 2013), and readings deviate from it by more than it is: most are low, and a few are peaks.
USUAL = (3200 / (365 * 48), 0.25)


class Lcl(Benchmark):
    """The records of 200 sites, each a household in one of five windows of the year."""

    own_sites: ClassVar[bool] = True
    record: ClassVar[tuple[int, ...]] = (PLAN.length, electricity.FEATURES)
    # Window by window, so the first 40 sites are 40 different households.
    sites: ClassVar[tuple[str, ...]] = tuple(f"{name.lower()}-w{w}" for w in range(WINDOWS) for name in HOUSEHOLDS)
    train: ClassVar[int] = 78_129
    attacker: ClassVar[str | None] = "fl_privacy.tasks.lcl_attacker:FACTS"

    scaling: Literal["local", "public"] = Field(
        "local", description="by each household's own training readings, or by the usual load of a household"
    )

    @property
    def preprocessing(self) -> str:
        return self.scaling

    @property
    def statistics(self) -> tuple[float, float] | None:
        """Mean and deviation to scale by; None: those of each household."""
        return {"local": None, "public": USUAL}[self.scaling]

    def load(self, folder: Path | None) -> Split:
        members, _ = sides(readings(folder))
        made = electricity.split(members, PLAN, self.statistics)
        if made.sites != self.sites:
            raise DataError(f"lcl: the files give {len(made.sites)} sites, not {len(self.sites)}; get them again")
        return made

    def of_site(self, site: str, folder: Path | None) -> Parts:
        """From the household's own CSV file if the folder has it, else from the archive of all."""
        name, number = site.rpartition("-")[0].upper(), self.sites.index(site)
        made = electricity.split(household(folder, name).take([name]), PLAN, self.statistics)
        here = made.sites.index(site)
        train, held_out = (half.take(np.flatnonzero(half.site == here)) for half in (made.train, made.test))
        return Parts(*(Dataset(half.x, half.y, np.full(len(half), number)) for half in (train, held_out)))


def household(folder: Path | None, name: str) -> Readings:
    """The readings of one household, or of all where they come as one archive."""
    file = files.folder(folder, "lcl") / "lcl" / f"{name}.csv"
    if not file.exists():
        return readings(folder)
    content = files.read(folder, "lcl", file.name)
    return electricity.on_grid([table(content, file.name)], START, STEPS)


def table(content: bytes, name: str) -> Table:
    """The rows of a household's file."""
    return electricity.read_csv(io.BytesIO(content), COLUMNS, f"lcl/{name}")


def sides(found: Readings) -> tuple[Readings, Readings]:
    """The households of the federation, and the others."""
    return found.take(HOUSEHOLDS), found.take([name for name in found.households if name not in HOUSEHOLDS])


def readings(data_dir: Path | None = None) -> Readings:
    """All 60 households on the half-hours of 2013."""
    archive = files.read(data_dir, "lcl", ARCHIVE)
    kept = cache.path("lcl", files.sha256(archive))
    arrays = cache.read(kept, ("households", "kwh"))
    if arrays is not None and arrays["kwh"].shape == (len(arrays["households"]), STEPS):
        return Readings(tuple(map(str, arrays["households"])), arrays["kwh"], START)
    contents = files.unpack(archive, f"lcl/{ARCHIVE}", key)
    path = files.folder(data_dir, "lcl") / "lcl" / ARCHIVE
    files.check(path, files.content_sum(contents), CONTENT, "expected (all files)")
    found = electricity.on_grid((table(content, name) for name, content in contents.items()), START, STEPS)
    cache.write(kept, {"households": np.array(found.households), "kwh": found.kwh})
    return found


def key(path: PurePosixPath) -> str | None:
    """The name of a household's file, anywhere in the archive."""
    return path.name if path.match("MAC*.csv") else None
