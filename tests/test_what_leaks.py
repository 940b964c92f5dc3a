"""What docs/threat-model.md says does not hold, or only noise bounds: shown, so that the document stays true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from helpers import Array, refused, round_header
from inprocess import LENGTH, SITES, collected, federation, opened, shuffler_in, submission, updates
from shuffler_app.service import Shuffler

EVERYONE, WITHOUT = (0, 1, 2, 3), (1, 2, 3)  # with site-0 and without it


async def released(service: Shuffler, run: str, number: int, model: Array, sites: tuple[int, ...]) -> Array:
    """The sum of what the server gets of a round; sites send the same update for the same model, or nearly that."""
    names = [f"site-{i}" for i in sites]
    header = round_header(run, number, LENGTH, sites=names, cohort=len(sites), quorum=3)
    await opened(service, header, model)
    for index in sites:
        await service.submit(submission(header, updates(4)[index]), SITES[index])
    release, rows = await collected(service, header)
    assert release.phase == "released"
    return np.asarray(rows.astype(np.float64).sum(axis=0))


def test_two_nearly_equal_models_and_cohorts_that_differ_by_one_site_show_its_update(tmp_path: Path) -> None:
    """The journal compares models by their bytes: the same model is refused, one whose last bit differs is not."""
    service = shuffler_in(tmp_path, federation())
    model = np.ones(LENGTH, np.float32)

    async def main() -> Array:
        whole = await released(service, "run", 1, model, EVERYONE)
        with refused("FAILED_PRECONDITION"):
            await released(service, "run", 2, model, WITHOUT)
        return whole - await released(service, "run", 2, np.nextafter(model, np.float32(2)), WITHOUT)

    assert asyncio.run(main()) == pytest.approx(updates(4)[0], abs=1e-5)


def test_one_model_in_two_runs_and_cohorts_that_differ_by_one_site_show_its_update(tmp_path: Path) -> None:
    """One model, one cohort holds within a run; a site with `approve_runs` sees each run before it takes part."""
    service = shuffler_in(tmp_path, federation())
    model = np.ones(LENGTH, np.float32)

    async def main() -> Array:
        whole = await released(service, "one", 1, model, EVERYONE)
        return whole - await released(service, "two", 1, model, WITHOUT)

    assert asyncio.run(main()) == pytest.approx(updates(4)[0], abs=1e-5)


def test_a_round_is_released_when_its_slowest_site_has_sent(tmp_path: Path) -> None:
    """The server waits for the release, so it sees when that was; not whose update it was."""
    service = shuffler_in(tmp_path, federation())

    async def main() -> None:
        header = round_header("run", 1, LENGTH, cohort=4, quorum=3)
        await opened(service, header, np.ones(LENGTH, np.float32))
        waiting = asyncio.create_task(collected(service, header))
        for index in (0, 1, 2):
            await service.submit(submission(header, updates(4)[index]), SITES[index])
        await asyncio.sleep(0.2)
        assert not waiting.done()  # though the quorum is complete
        await service.submit(submission(header, updates(4)[3]), SITES[3])
        assert (await asyncio.wait_for(waiting, 5))[0].count == 4

    asyncio.run(main())
