"""HAR: windows of raw signals, none of which is on both sides of the split; and the synthetic set, made by seed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks import har
from fl_privacy.tasks.synthetic import Synthetic


def recorded(stretches: list[tuple[int, int]]) -> har.Arrays:
    """One recording of person 2 with stretches of (activity, readings); every reading has its own number."""
    labels, start = [], 1
    for activity, length in stretches:
        labels.append((3, 2, activity, start, start + length - 1))
        start += length
    numbers = np.repeat(np.arange(start - 1, dtype=np.int16)[:, None], 3, axis=1)
    return {"labels": np.array(labels), "acc_03_02": numbers, "gyro_03_02": numbers}


def numbers_of(x: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.rint(x[:, :, 0] / har.ACCELERATION).astype(np.int64)


@given(lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 900)), min_size=1, max_size=5))
def test_windows_are_of_one_activity_and_no_reading_is_on_both_sides(lengths: list[tuple[int, int]]) -> None:
    arrays = recorded(lengths)
    parts = har.of_person(arrays, 1) if any(activity <= har.ACTIVITIES for activity, _ in lengths) else None
    if parts is None:
        return
    seen: dict[str, set[int]] = {}
    for side, data in (("train", parts.train), ("held out", parts.held_out)):
        numbers = numbers_of(data.x)
        assert (np.diff(numbers, axis=1) == 1).all()
        for window, activity in zip(numbers, data.y, strict=True):
            (label,) = [a for _, _, a, s, e in arrays["labels"].tolist() if s - 1 <= window[0] and window[-1] < e]
            assert label == activity + 1 <= har.ACTIVITIES
        seen[side] = set(numbers.ravel().tolist())
        assert data.site is not None
        assert set(data.site.tolist()) <= {1}
    assert not seen["train"] & seen["held out"]
    whole = sum(max(0, (round(n - round(0.2 * n)) - 128) // 64 + 1) for a, n in lengths if a <= 6 and n >= 128)
    assert len(parts.train) == whole


def test_signals_are_in_their_units() -> None:
    parts = har.of_person(recorded([(1, 800)]), 1)
    assert parts.train.x[0, 1].tolist() == pytest.approx([1 / 720] * 3 + [np.pi / 180 * 0.0175] * 3)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "har").mkdir()
    (tmp_path / "har" / har.ARCHIVE).write_bytes(b"no archive")
    with pytest.raises(DataError, match="not a complete"):
        har.read(tmp_path)
    packed = io.BytesIO()
    np.savez(packed, **recorded([(1, 300)]))
    (tmp_path / "har" / har.ARCHIVE).write_bytes(packed.getvalue())
    with pytest.raises(DataError, match="SHA-256"):
        har.read(tmp_path)


def test_the_synthetic_set_depends_on_its_seed_and_a_linear_classifier_labels_it() -> None:
    split, again, other = (Synthetic(seed=seed).load() for seed in (0, 0, 1))
    assert (len(split.train), len(split.test)) == (Synthetic.train, 20_000)
    assert np.array_equal(split.train.x, again.train.x)
    assert not np.array_equal(split.train.y, other.train.y)
    assert set(split.train.y.tolist()) == set(range(10))
    deviations = split.train.x.std(axis=0)
    assert np.allclose(deviations, np.arange(1, 61) ** -0.6, rtol=0.02)  # j^-1.2 as variance
    assert np.allclose(split.train.x.mean(axis=0), 0, atol=0.02)
