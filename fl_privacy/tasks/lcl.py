"""Low Carbon London: half-hourly load of 60 households in 2013. 40 form 200 sites, 20 are an attacker's data."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np

from fl_privacy.errors import DataError
from fl_privacy.tasks import cache, files, load as electricity
from fl_privacy.tasks.catalog import LCL, LCL_HOUSEHOLDS, LCL_WINDOWS
from fl_privacy.tasks.data import Split
from fl_privacy.tasks.load import Columns, Plan, Readings

ARCHIVE = "lcl_2013_60households.tar.xz"
# Over names and files, not over the archive, which differs every time the public files are packed.
CONTENT = "c30372d4f3c30df3fe856826ef1c9a28f89220addcf24b4f29e4cde46efc07eb"
COLUMNS = Columns("LCLid", "tstp", "energy(kWh/hh)")
START = np.datetime64("2013-01-01T00:00", "ns")
STEPS = 365 * 48
# 73 days per window, of which the last 15 are held out.
PLAN = Plan(windows=LCL_WINDOWS, length=48, stride=7, held_out=15 * 48)


def load(data_dir: Path | None = None) -> Split:
    """The records of 200 sites, each a household in one of five windows of the year."""
    members, _ = sides(readings(data_dir))
    made = electricity.split(members, PLAN)
    if made.sites != LCL.sites:
        raise DataError(f"lcl: the files give {len(made.sites)} sites, not {len(LCL.sites)}; get them again")
    return made


def sides(found: Readings) -> tuple[Readings, Readings]:
    """The households of the federation, and the others."""
    return found.take(LCL_HOUSEHOLDS), found.take([name for name in found.households if name not in LCL_HOUSEHOLDS])


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
    tables = (electricity.read_csv(content, COLUMNS, f"lcl: {name}") for name, content in contents.items())
    found = electricity.on_grid(tables, START, STEPS)
    cache.write(kept, {"households": np.array(found.households), "kwh": found.kwh})
    return found


def key(path: PurePosixPath) -> str | None:
    """The name of a household's file, anywhere in the archive."""
    return path.name if path.match("MAC*.csv") else None
