"""IMDB: a review becomes the same vector whatever else is there, and files that are not the public ones are refused."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.errors import DataError
from fl_privacy.tasks import imdb


def lines(*reviews: tuple[str, int, str]) -> bytes:
    return b"\n".join(json.dumps({"split": s, "label": y, "text": t}).encode() for s, y, t in reviews)


def test_words_are_counted_without_case_and_markup() -> None:
    assert imdb.words("Don't.<br /><br />DON'T! A film") == ["don't", "don't", "a", "film"]
    arrays = imdb.counted(lines(("train", 1, "good good film"), ("test", 0, "bad film")))
    assert arrays["train_x"].shape == (1, imdb.FEATURES)
    assert (arrays["train_x"].sum(), arrays["train_x"].max()) == (3, 2)
    assert (arrays["train_y"].tolist(), arrays["test_y"].tolist()) == ([1], [0])


@given(st.lists(st.lists(st.sampled_from(["a", "bad", "good", "film"]), max_size=400), min_size=1, max_size=4))
def test_a_vector_depends_on_its_own_review_alone_and_has_one_length(reviews: list[list[str]]) -> None:
    bags = np.stack([imdb.bag(found) for found in reviews])
    together = imdb.scaled(bags)
    for row, bag in enumerate(bags):
        assert np.array_equal(together[row], imdb.scaled(bag[None])[0])
    for length, found in zip(np.linalg.norm(together, axis=1), reviews, strict=True):
        assert length == pytest.approx(10 if found else 0, rel=1e-5)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a complete"):
        imdb.unpack(b"no archive", tmp_path)
    with pytest.raises(DataError, match="SHA-256"):
        imdb.unpack(lzma.compress(lines(("train", 1, "another file"))), tmp_path)
