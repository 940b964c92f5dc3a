"""`dataset: images`: one folder per class or a table of labels, and what is said of bad files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from fl_privacy.errors import DataError
from fl_privacy.tasks import images
from fl_privacy.tasks.images import Images
from profiles import examples

OPTIONS: dict[str, Any] = {"size": 8, "channels": 3, "levels": ["cat", "dog"], "held_out": {"ratio": 0.5}}
TABLE: dict[str, Any] = {"table": {"path": "image"}, "held_out": {"column": "part"}}


def made(**changes: Any) -> Images:
    return Images.model_validate(OPTIONS | changes)


def pixels(number: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, shape or (8, 8, 3), dtype=np.uint8)


def save(path: Path, array: NDArray[Any], **how: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **how)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Twenty images: the even ones are cats."""
    for number in range(20):
        save(tmp_path / ["cat", "dog"][number % 2] / f"{number:02d}.png", pixels(number))
    return tmp_path


def problems(options: Images, folder: Path) -> str:
    with pytest.raises(DataError) as error:
        options.of_site("a", folder)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_folders_are_classes_and_pixels_are_channels_first(site: Path) -> None:
    data = made()
    found = data.of_site("a", site)
    assert (data.shape, data.classes, data.preprocessing) == ((3, 8, 8), 2, "public")
    expected = {
        (pixels(number).transpose(2, 0, 1).astype(np.float32) * np.float32(1 / 255)).tobytes(): number % 2
        for number in range(20)
    }
    read = {x.tobytes(): int(y) for half in (found.train, found.held_out) for x, y in zip(half.x, half.y, strict=True)}
    assert read == expected


def test_a_table_names_images_labels_and_parts(site: Path) -> None:
    lines = [
        f"{['cat', 'dog'][n % 2]}/{n:02d}.png,{['dog', 'cat'][n % 2]},{'test' if n < 5 else ''}" for n in range(20)
    ]
    (site / "labels.csv").write_text("\n".join(["image,label,part", *lines]))
    found = made(**TABLE).of_site("a", site)
    assert found.held_out.y.tolist() == [1, 0, 1, 0, 1]
    assert len(found.train) == 15
    np.testing.assert_array_equal(found.held_out.x[0], pixels(0).transpose(2, 0, 1) * np.float32(1 / 255))


def test_channels_size_and_scale_are_those_of_the_config(site: Path) -> None:
    save(site / "cat" / "grey.jpg", pixels(1, 30, 20))
    save(site / "dog" / "see-through.png", pixels(1, 8, 8, 4))
    data = made(channels=1, size=(16, 12), resize=True, mean=[0.5], std=[0.25])
    found = data.of_site("a", site)
    plain = made(channels=1, size=(16, 12), resize=True).of_site("a", site)
    assert found.train.x.shape[1:] == data.shape == (1, 16, 12)
    np.testing.assert_allclose(found.train.x, (plain.train.x - 0.5) / 0.25, rtol=1e-6)
    assert len(found.train) + len(found.held_out) == 22
    shifted, unshifted = (made(mean=mean, resize=True).of_site("a", site).train.x for mean in ([0, 0.5, 1], [0]))
    for channel, offset in enumerate((0, 0.5, 1)):
        np.testing.assert_allclose(unshifted[:, channel] - shifted[:, channel], offset, atol=1e-6)


def test_every_bad_image_is_named_at_once(site: Path) -> None:
    (site / "cat" / "torn.png").write_bytes((site / "cat" / "00.png").read_bytes()[:-60])
    (site / "cat" / "scan.dcm").write_bytes(b"DICM")
    (site / "cat" / ".DS_Store").write_bytes(b"ignored")
    save(site / "dog" / "deep.png", np.zeros((8, 8), np.uint16))
    save(site / "dog" / "large.png", pixels(1, 9, 8, 3))
    save(site / "wolf" / "1.png", pixels(1))
    text = problems(made(), site)
    assert text.startswith(f"data: 5 problems in {site}: ")
    for part in (
        "cat/torn.png: not a whole PNG or JPEG file (save it again)",
        "cat/scan.dcm: not an image (.png, .jpg, .jpeg; convert or remove it)",
        "dog/deep.png: pixels of mode I;16 (save it as 8-bit grey or RGB)",
        "dog/large.png: 9x8, not 8x8 (resize it or set task.options.resize)",
        "wolf: a folder that is no class (rename it or add it to task.options.levels)",
    ):
        assert part in text


def test_every_bad_line_of_a_table_is_named_at_once(site: Path) -> None:
    lines = ["cat/00.png,cat,test", "cat/99.png,cat,test", "../secret.png,cat,", "/etc/passwd,cat,", "cat/02.png,wolf,"]
    (site / "labels.csv").write_text("\n".join(["image,label,part", *lines]))
    text = problems(made(**TABLE), site)
    assert text.startswith(f"data: 4 problems in {site}: ")
    assert "labels.csv, line 3, column 'image': there is no such file (correct the path or add the image)" in text
    assert "labels.csv, lines 4, 5, column 'image': not a path below the site's folder" in text
    assert "labels.csv, line 6, column 'label': none of the 2 levels" in text
    assert "labels.csv cannot be read" not in text
    (site / "labels.csv").unlink()
    assert "labels.csv cannot be read (No such file" in problems(made(**TABLE), site)


def test_no_images_and_too_many_are_refused(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "images: there are 0 (put some into one folder per class" in problems(
        made(), tmp_path_factory.mktemp("none")
    )
    monkeypatch.setattr(images, "LARGEST", 4 * 3 * 64 * 19)
    assert "images: there are 20 (use at most 19)" in problems(made(), site)


def test_an_image_that_unpacks_to_gigabytes_is_not_decoded(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_PIXELS", 100)
    save(site / "cat" / "bomb.png", np.zeros((11, 10), np.uint8))
    assert "cat/bomb.png: more than 100 pixels (make it smaller)" in problems(made(resize=True), site)


@examples(100)
@given(number=st.integers(0, 2**32), cut=st.integers(0, 300))
def test_a_damaged_image_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, number: int, cut: int) -> None:
    path = tmp_path_factory.mktemp("site") / "one.png"
    rng = np.random.default_rng(number)
    save(path, pixels(0), format=["PNG", "JPEG"][number % 2])
    content = bytearray(path.read_bytes())
    for at in rng.integers(0, len(content), 4):
        content[at] = rng.integers(256)
    path.write_bytes(content[: len(content) - cut] if number % 3 else content)
    with suppress(ValueError):
        made(resize=True)._image(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"levels": ["cat"]}, "at least 2"),
        ({"levels": ["cat", "cat"]}, "one is there twice"),
        ({"mean": [0.5, 0.5]}, "give one number, or 3 as there are channels"),
        ({"held_out": {"column": "part"}}, "folders have no columns"),
        ({"channels": 2}, "Input should be 1 or 3"),
        ({"table": {"file": "../labels.csv"}}, "below the site's folder"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        made(**changes)
