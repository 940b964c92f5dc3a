"""Data sets, partitions, models and local training."""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image

from fl_privacy.errors import ConfigError, DataError, FederationError
from fl_privacy.tasks import cache, cifar10, digits, files, heart_disease, mnist
from fl_privacy.tasks.catalog import MODELS
from fl_privacy.tasks.data import Dataset, Split
from fl_privacy.tasks.dataset import DATASETS
from fl_privacy.tasks.models import BUILDERS, build
from fl_privacy.tasks.partition import fewest, partition
from fl_privacy.tasks.train import Recipe, device, evaluate, few_threads, fit
from fl_privacy.vector import flatten, load as load_vector
from profiles import examples

ROOT = Path(__file__).resolve().parent.parent
IMAGE_MODELS = sorted(set(MODELS) - {"lstm", "transformer", "cnn1d"})
NAMES = ("digits", "mnist", "cifar10", "imdb", "har", "synthetic", "heart-disease", "lcl")
BENCHMARKS = {name: DATASETS.get(name)() for name in NAMES}
PAIRS = [(name, m) for name, data in BENCHMARKS.items() for m in MODELS if MODELS[m].take(data.shape, data.classes)]


def load(name: str, data_dir: Path | None) -> Split:
    return DATASETS.get(name)().load(data_dir)


def data_dir() -> Path:
    """The real data; otherwise skips with how to provide them."""
    for given_dir in (os.environ.get(files.ENVIRONMENT), ROOT.parent / "shared" / "data"):
        if given_dir and Path(given_dir).is_dir():
            return Path(given_dir)
    pytest.skip(f"real data are missing: set {files.ENVIRONMENT} to a data folder (docs/tasks.md)")


def one_line(error: pytest.ExceptionInfo[FederationError]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


# Data sets


def test_digits_are_complete_stratified_and_scaled() -> None:
    split = load("digits", None)
    assert (len(split.train), len(split.test)) == (1438, 359)
    assert split.train.x.dtype == np.float32
    assert split.train.y.dtype == np.int64
    assert split.train.x.min() == 0
    assert split.train.x.max() == 1
    train, test = np.bincount(split.train.y), np.bincount(split.test.y)
    assert np.all(np.abs(test - (train + test) / 5) < 1)


def test_digits_match_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    np.testing.assert_array_equal(digits.bundled(), np.c_[bunch.data, bunch.target].astype(np.float32))


@pytest.mark.parametrize("name", ["digits", "heart-disease", "mnist", "lcl"])
def test_a_data_set_matches_the_catalog(name: str) -> None:
    entry = BENCHMARKS[name]
    split = load(name, data_dir() if entry.needs_data else None)
    assert (split.shape, split.classes, split.sites) == (entry.shape, entry.classes, entry.sites)
    assert len(split.train) == entry.train
    for half in (split.train, split.test):
        assert half.x.shape == (len(half), *entry.shape)
        assert half.x.dtype == np.float32
        assert half.forecast == (entry.classes == 0)
        if not entry.classes:
            assert half.y.dtype == np.float32
        else:
            assert set(np.unique(half.y)) == set(range(entry.classes))


def test_catalog_loaders_and_builders_have_the_same_names() -> None:
    assert set(MODELS) == set(BUILDERS)
    assert {name for name, data in BENCHMARKS.items() if data.needs_data} == set(files.SOURCES)


def test_mnist_known_values() -> None:
    split = load("mnist", data_dir())
    assert (len(split.train), len(split.test)) == (60_000, 10_000)
    assert np.bincount(split.train.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert split.test.y[:5].tolist() == [7, 2, 1, 0, 4]
    assert split.train.x.mean() == pytest.approx(0.1307, abs=1e-4)


def test_heart_disease_has_the_sizes_of_flamby() -> None:
    split = load("heart-disease", data_dir())
    assert split.train.site is not None
    assert split.test.site is not None
    assert np.bincount(split.train.site).tolist() == [199, 172, 30, 85]
    assert np.bincount(split.test.site).tolist() == [104, 89, 16, 45]


def test_heart_disease_is_scaled_by_each_centre_s_training_patients() -> None:
    train = load("heart-disease", data_dir()).train
    for centre in range(4):
        x = train.x[train.site == centre].astype(np.float64)
        spread = x.std(axis=0, ddof=1)
        # float32 rounding of 13 columns of at most 199 values below 10.
        np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
        assert np.all((np.abs(spread - 1) < 1e-5) | (spread < 1e-5))


def test_public_scaling_of_heart_disease_needs_no_other_patient() -> None:
    """The records of a centre are the same, whatever its other patients are, and of a size that trains."""
    data = DATASETS.get("heart-disease").model_validate({"scaling": "public"})
    assert (data.preprocessing, DATASETS.get("heart-disease")().preprocessing) == ("public", "local")
    raw = heart_disease.encode(heart_disease.complete_rows(heart_disease.read_centre(data_dir(), "va")))
    whole, first = heart_disease.by_range(raw), heart_disease.by_range(raw[:1])
    np.testing.assert_array_equal(whole[:1], first)
    train = data.of_site("va", data_dir()).train
    assert {row.tobytes() for row in train.x} <= {row.tobytes() for row in whole}
    pooled = data.load(data_dir()).train.x
    assert np.abs(pooled.mean(axis=0)).max() < 2
    assert 0.1 < pooled.std(axis=0).min() < pooled.std(axis=0).max() < 2


def test_heart_disease_rows() -> None:
    text = (
        "63,1,1,145,233,1,2,150,0,2.3,3,0,6,0\n50,0,4,?,200,0,0,120,1,1,?,?,?,2\n40,0,3,120,200,0,1,120,1,1,?,?,?,2\n"
    )
    rows = heart_disease.complete_rows(text)
    assert rows.shape == (2, 11)
    assert heart_disease.encode(rows).tolist() == [
        [63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1],
        [40, 0, 120, 200, 0, 120, 1, 1, 0, 1, 0, 1, 0],
    ]


def test_take_keeps_records_labels_and_sites_together() -> None:
    data = Dataset(np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4), np.array([0, 0, 1, 1]))
    taken = data.take([3, 0])
    assert len(taken) == 2
    assert taken.x.tolist() == [[6, 7], [0, 1]]
    assert taken.y.tolist() == [3, 0]
    assert taken.site is not None
    assert taken.site.tolist() == [1, 0]
    with pytest.raises(DataError):
        Dataset(np.zeros((2, 1), np.float32), np.zeros(3, np.int64))


def test_the_first_sites_are_the_first_of_the_data() -> None:
    data = Dataset(np.arange(6, dtype=np.float32)[:, None], np.arange(6), np.array([0, 1, 2, 0, 1, 2]))
    whole = Split(data, data.take([1, 2]), 6, (1,), ("a", "b", "c"))
    first = whole.first_sites(2)
    assert first.sites == ("a", "b")
    assert first.train.y.tolist() == [0, 1, 3, 4]
    assert first.test.y.tolist() == [1]
    assert whole.first_sites(3) is whole
    with pytest.raises(DataError, match="no sites"):
        Split(Dataset(data.x, data.y), data, 6, (1,), ("a", "b", "c")).first_sites(1)


def test_data_do_not_need_torch() -> None:
    modules = "fl_privacy.config, fl_privacy.tasks.lcl, fl_privacy.tasks.partition"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# Broken and missing data


@pytest.mark.parametrize("name", sorted(files.SOURCES))
def test_missing_data_are_reported_with_what_where_and_how(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(files.ENVIRONMENT, raising=False)
    with pytest.raises(DataError) as error:
        load(name, None)
    assert all(word in one_line(error) for word in ("data_dir", name, "--data-dir", files.ENVIRONMENT))
    monkeypatch.setenv(files.ENVIRONMENT, str(tmp_path))
    with pytest.raises(DataError) as error:
        load(name, None)
    assert all(word in one_line(error) for word in (str(tmp_path / name), files.SOURCES[name], "--data-dir"))


def test_an_unknown_data_set_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'nosuch' is unknown; use one of digits"):
        load("nosuch", None)


def write(root: Path, name: str, content: bytes, listed: bytes | None = None) -> Path:
    """Write a file to a data folder and, on request, a SHA256SUMS with the sum of `listed` for it."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)
    if listed is not None:
        (root / files.SUMS).write_text(f"{hashlib.sha256(listed).hexdigest()}  ./{name}\n")
    return root


def archive(images: dict[str, bytes], prefix: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as tar:
        for name, content in images.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "listed", "reason"),
    [
        ("mnist/train-images-idx3-ubyte.gz", b"changed", b"original", "SHA256SUMS says"),
        ("mnist/train-images-idx3-ubyte.gz", gzip.compress(b"other", mtime=0), None, "expected (unpacked)"),
        ("mnist/train-images-idx3-ubyte.gz", gzip.compress(b"cut off" * 99, mtime=0)[:-9], None, "not a complete gzip"),
        ("heart-disease/processed.cleveland.data", b"1,2,3\n", None, "expected a74b7efa"),
        ("heart-disease/processed.cleveland.data", b"changed", b"original", "SHA256SUMS says"),
        ("cifar10/cifar10_jpg.tar.xz", b"not an archive", None, "not a complete archive"),
        ("cifar10/cifar10_jpg.tar.xz", b"changed", b"original", "SHA256SUMS says"),
        ("lcl/lcl_2013_60households.tar.xz", b"not an archive", None, "not a complete archive"),
        ("lcl/lcl_2013_60households.tar.xz", archive({"MAC000002.csv": b""}), None, "expected (all files)"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, listed: bytes | None, reason: str
) -> None:
    with pytest.raises(DataError) as error:
        load(name.split("/")[0], write(tmp_path, name, content, listed))
    assert reason in one_line(error)
    assert name in one_line(error)


def test_sums_are_read_as_sha256sum_writes_them(tmp_path: Path) -> None:
    (tmp_path / files.SUMS).write_text("aa  ./a/b\nbb *c d\n\nnoise\n")
    assert files.listed_sums(tmp_path) == {"a/b": "aa", "c d": "bb"}
    (tmp_path / files.SUMS).write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read as text"):
        files.listed_sums(tmp_path)


def test_embedded_sums_match_the_data_folder() -> None:
    listed = files.listed_sums(data_dir())
    for centre, digest in heart_disease.SUMS.items():
        assert listed.get(f"heart-disease/processed.{centre}.data", digest) == digest
    assert len(mnist.unpack(data_dir(), "t10k-labels-idx1-ubyte")) == mnist.LABELS_HEADER + 10_000


# CIFAR-10, on a small archive


def png(pixels: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(out, format="PNG")
    return out.getvalue()


def small_cifar() -> tuple[dict[str, bytes], dict[str, NDArray[np.uint8]]]:
    rng = np.random.default_rng(0)
    names = ["train/truck/0001.jpg", "train/bird/0002.jpg", "train/bird/0001.jpg", "test/airplane/0000.jpg"]
    pixels = {name: rng.integers(0, 256, BENCHMARKS["cifar10"].shape, dtype=np.uint8) for name in names}
    return {name: png(image) for name, image in pixels.items()}, pixels


def test_a_cifar_archive_is_decoded_exactly_and_in_a_fixed_order() -> None:
    images, pixels = small_cifar()
    read = cifar10.read_tar(archive(images | {"README.md": b"not an image"}))
    arrays = cifar10.decode(read)
    assert list(read) == sorted(images)
    assert arrays["train_y"].tolist() == [2, 2, 9]
    assert arrays["test_y"].tolist() == [0]
    for row, name in enumerate(sorted(n for n in images if n.startswith("train"))):
        np.testing.assert_array_equal(arrays["train_x"][row], pixels[name])


def test_the_content_sum_ignores_only_the_packing() -> None:
    images, _ = small_cifar()
    packed_again = dict(reversed(images.items()))
    total = files.content_sum(cifar10.read_tar(archive(images)))
    assert files.content_sum(cifar10.read_tar(archive(packed_again, prefix="repository/"))) == total
    for changed in (
        images | {"test/airplane/0000.jpg": images["train/bird/0001.jpg"]},
        {name: content for name, content in images.items() if name != "train/truck/0001.jpg"},
    ):
        assert files.content_sum(cifar10.read_tar(archive(changed))) != total


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train/bird/1.jpg", b"not an image"),
        ("train/bird/1.jpg", png(np.zeros((3, 8, 8), np.uint8))),
        ("train/bird/1.jpg", png(np.zeros((3, 32, 32), np.uint8))[:-30]),
        ("train/unicorn/1.jpg", png(np.zeros((3, 32, 32), np.uint8))),
    ],
)
def test_a_wrong_image_is_named(name: str, content: bytes) -> None:
    with pytest.raises(DataError) as error:
        cifar10.decode({name: content})
    assert name in one_line(error)


@pytest.fixture
def small_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], NDArray[np.float32]]:
    """The cifar10 loader on a small archive, with its own cache folder."""
    images, _ = small_cifar()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "CONTENT", files.content_sum(dict(sorted(images.items()))))
    monkeypatch.setattr(cifar10, "SIZES", {"train": 3, "test": 1})
    root = write(tmp_path / "data", f"cifar10/{cifar10.ARCHIVE}", archive(images))
    return lambda: load("cifar10", root).train.x


def refuse(*_: object) -> None:
    raise AssertionError("decoded again")


def test_the_cache_saves_decoding(
    small_loader: Callable[[], NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small_loader()
    monkeypatch.setattr(cifar10, "decode", refuse)
    np.testing.assert_array_equal(small_loader(), first)


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_cache_is_rebuilt(
    small_loader: Callable[[], NDArray[np.float32]], tmp_path: Path, damage: bytes | None
) -> None:
    first = small_loader()
    (cached,) = (tmp_path / "cache" / "fl-privacy").iterdir()
    whole = cached.read_bytes()
    cached.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    np.testing.assert_array_equal(small_loader(), first)
    assert [path.read_bytes() == whole for path in cached.parent.iterdir()] == [True]


def test_without_a_cache_folder_loading_works(
    small_loader: Callable[[], NDArray[np.float32]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(small_loader()) == 3


def test_cifar10_itself_if_it_is_cached() -> None:
    root = data_dir()
    path = root / "cifar10" / cifar10.ARCHIVE
    cached = cache.path("cifar10", files.sha256(path.read_bytes())) if path.exists() else None
    arrays = cifar10.read_cache(cached)
    if arrays is None:
        pytest.skip("CIFAR-10 is not cached: load it once")
    assert np.bincount(arrays["train_y"]).tolist() == [5000] * 10
    assert np.bincount(arrays["test_y"]).tolist() == [1000] * 10


# Partitions

labels = hnp.arrays(np.int64, st.integers(1, 200), elements=st.integers(0, 9))
seeds = st.integers(0, 2**63 - 1)


@given(labels, st.data(), st.sampled_from(["iid", "dirichlet"]), seeds, st.floats(1e-300, 1e6))
def test_a_partition_is_disjoint_complete_and_leaves_no_site_empty(
    y: NDArray[np.int64], data: st.DataObject, kind: str, seed: int, alpha: float
) -> None:
    sites = data.draw(st.integers(1, len(y)))
    parts = partition(y, sites, kind, seed, alpha)  # type: ignore[arg-type]
    assert len(parts) == sites
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(y)))
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert min(map(len, parts)) >= fewest(len(y), sites) >= 1


@given(labels, st.data(), st.sampled_from(["iid", "dirichlet"]), seeds)
def test_a_partition_is_repeatable(y: NDArray[np.int64], data: st.DataObject, kind: str, seed: int) -> None:
    sites = data.draw(st.integers(1, len(y)))
    first, second = (partition(y, sites, kind, seed) for _ in range(2))  # type: ignore[arg-type]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(labels, st.data(), st.sampled_from(["iid", "dirichlet"]), seeds, st.integers(1, 20))
def test_a_limit_of_records_leaves_every_site_a_part_of_its_share(
    y: NDArray[np.int64], data: st.DataObject, kind: str, seed: int, records: int
) -> None:
    sites = data.draw(st.integers(1, len(y)))
    whole = partition(y, sites, kind, seed)  # type: ignore[arg-type]
    parts = partition(y, sites, kind, seed, records=records)  # type: ignore[arg-type]
    for share, part in zip(whole, parts, strict=True):
        assert len(part) == min(records, len(share))
        assert np.isin(part, share).all()
        assert np.all(np.diff(part) > 0)


@given(labels, st.data(), seeds)
def test_iid_parts_are_nearly_equal(y: NDArray[np.int64], data: st.DataObject, seed: int) -> None:
    sizes = [len(part) for part in partition(y, data.draw(st.integers(1, len(y))), "iid", seed)]
    assert max(sizes) - min(sizes) <= 1


def test_seeds_differ() -> None:
    y = load("digits", None).train.y
    for kind in ("iid", "dirichlet"):
        first, second = (partition(y, 5, kind, seed)[0] for seed in (0, 1))  # type: ignore[arg-type]
        assert not np.array_equal(first, second)


def skew(y: NDArray[np.int64], parts: list[NDArray[np.int64]]) -> float:
    """Mean total variation distance between a site's labels and all labels."""
    everywhere = np.bincount(y, minlength=10) / len(y)
    return float(np.mean([np.abs(np.bincount(y[p], minlength=10) / len(p) - everywhere).sum() / 2 for p in parts]))


def test_smaller_alpha_is_more_skewed() -> None:
    y = load("digits", None).train.y
    skews = [
        np.mean([skew(y, partition(y, 5, "dirichlet", seed, alpha)) for seed in range(10)]) for alpha in (0.1, 1, 100)
    ]
    assert skews[0] > skews[1] > skews[2]


@given(hnp.arrays(np.int64, st.integers(1, 50), elements=st.integers(0, 4)))
def test_by_site_gives_each_centre_its_own_records(site: NDArray[np.int64]) -> None:
    centres = np.unique(site)
    parts = partition(np.zeros(len(site), np.int64), len(centres), "by-site", 0, site=site)
    for centre, part in zip(centres, parts, strict=True):
        np.testing.assert_array_equal(part, np.flatnonzero(site == centre))


@pytest.mark.parametrize(
    ("sites", "kind", "alpha", "site", "reason"),
    [
        (0, "iid", 0.5, None, "sites: 0"),
        (5, "iid", 0.5, None, "sites: 5 cannot share 4 records; use 1 to 4"),
        (2, "dirichlet", 0.0, None, "alpha: 0.0"),
        (2, "dirichlet", float("nan"), None, "alpha: nan"),
        (2, "by-site", 0.5, None, "use iid or dirichlet"),
        (3, "by-site", 0.5, [0, 0, 1, 1], "2 centres, not 3; use sites: 2"),
        (1, "by-site", 0.5, [0, 0, 1, 1], "2 centres, not 1; use sites: 2"),
        (2, "nosuch", 0.5, None, "'nosuch' is unknown"),
    ],
)
def test_an_impossible_partition_is_refused(
    sites: int, kind: str, alpha: float, site: list[int] | None, reason: str
) -> None:
    with pytest.raises(FederationError) as error:
        partition(np.zeros(4, np.int64), sites, kind, 0, alpha, None if site is None else np.array(site))  # type: ignore[arg-type]
    assert reason in one_line(error)


# Models


@pytest.mark.parametrize(("dataset", "model"), PAIRS)
def test_every_model_that_fits_outputs_class_scores_or_a_forecast(dataset: str, model: str) -> None:
    entry = BENCHMARKS[dataset]
    built = build(model, entry.shape, entry.classes, seed=0)
    for batch in (1, 3):
        assert built(torch.zeros(batch, *entry.shape)).shape == (batch, entry.classes or 1)


@pytest.mark.parametrize(("dataset", "model"), PAIRS)
def test_every_model_is_restored_from_its_vector(dataset: str, model: str) -> None:
    entry = BENCHMARKS[dataset]
    built, other = (build(model, entry.shape, entry.classes, seed) for seed in (0, 1))
    weights, layout = flatten(built)
    load_vector(other, weights, layout)
    x = torch.ones(2, *entry.shape)
    assert torch.equal(built(x), other(x))
    assert layout.size == sum(w.numel() for w in built.parameters())


def test_images_fit_the_image_models_and_series_those_for_series() -> None:
    images = {(d, m) for d in ("digits", "mnist", "cifar10") for m in IMAGE_MODELS} - {("digits", "cnn5x5")}
    series = {(d, "cnn1d") for d in ("imdb", "har", "synthetic", "lcl")}
    others = ("imdb", "har", "synthetic", "heart-disease", "lcl")
    vectors = {(d, m) for d in others for m in ("mlp", "logistic", "transformer")}
    assert set(PAIRS) == images | vectors | series | {("lcl", "lstm")}


@examples(15)
@given(st.sampled_from(PAIRS), seeds)
def test_a_seed_determines_the_weights_and_does_not_touch_torch_s_state(pair: tuple[str, str], seed: int) -> None:
    entry = BENCHMARKS[pair[0]]
    before = torch.get_rng_state()
    first, second, other = (flatten(build(pair[1], entry.shape, entry.classes, s))[0] for s in (seed, seed, seed ^ 1))
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


def test_known_sizes() -> None:
    size = {m: flatten(build(m, (1, 28, 28), 10, 0))[1].size for m in IMAGE_MODELS}
    assert size["lenet5"] == 61_706
    assert size["cnn5x5"] == 643_850  # as in the paper
    assert flatten(build("cnn5x5", (3, 32, 32), 10, 0))[1].size == 940_362
    assert size["mlp"] == 784 * 64 + 64 + 64 * 10 + 10
    assert flatten(build("mlp", (1, 28, 28), 10, 0, hidden=(4096, 1940)))[1].size == pytest.approx(11.2e6, rel=0.01)
    assert flatten(build("mlp", (13,), 2, 0, hidden=()))[1].size == 13 * 2 + 2
    assert flatten(build("lstm", (48,), 0, 0))[1].size == 4 * 32 * (1 + 32 + 2) + 33
    assert 50_000 < flatten(build("mobilecnn", (3, 32, 32), 10, 0))[1].size < 200_000


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("nosuch", (1, 8, 8), None),
        ("transformer", (1, 8, 8), None),
        ("cnn", (13,), None),
        ("mobilecnn", (1, 8, 9), None),
        ("lstm", (13,), None),
        ("cnn", (1, 8, 8), (4,)),
    ],
)
def test_an_impossible_model_is_refused(name: str, shape: tuple[int, ...], hidden: tuple[int, ...] | None) -> None:
    with pytest.raises(FederationError) as error:
        build(name, shape, 10, 0, hidden)
    assert "task." in one_line(error)


# Training


def some_digits(count: int = 100) -> Dataset:
    return load("digits", None).train.take(range(count))


def digits_mlp() -> torch.nn.Module:
    return build("mlp", (1, 8, 8), 10, seed=3)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_the_step_matches_torch_optim(momentum: float, weight_decay: float) -> None:
    data, mine = some_digits(), digits_mlp()
    theirs = copy.deepcopy(mine)
    fit(mine, data, Recipe(2, 16, 0.05, momentum, weight_decay), seed=5)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        for rows in torch.randperm(len(data), generator=generator).split(16):
            sgd.zero_grad()
            x, y = torch.from_numpy(data.x)[rows], torch.from_numpy(data.y)[rows]
            torch.nn.functional.cross_entropy(theirs(x), y).backward()
            sgd.step()
    # 14 steps, each rounded to float32: weights stay below 1, so the error is far below 1400 units in the last place.
    np.testing.assert_allclose(flatten(mine)[0], flatten(theirs)[0], atol=1400 * np.finfo(np.float32).eps / 2, rtol=0)


@pytest.mark.parametrize("model", [m for d, m in PAIRS if d == "digits"])
def test_two_runs_give_the_same_bits(model: str) -> None:
    def run(seed: int) -> tuple[float, bytes]:
        built = build(model, (1, 8, 8), 10, seed=0)
        loss = fit(built, some_digits(20), Recipe(2, 10, 0.02, 0.9, 1e-4, 0.1), seed)
        return loss, flatten(built)[0].tobytes()

    torch.manual_seed(1)
    first = run(7)
    torch.manual_seed(2)
    assert run(7) == first
    assert run(8) != first


def test_fedprox_pulls_towards_the_start() -> None:
    def distance(mu: float) -> float:
        model = digits_mlp()
        start = flatten(model)[0]
        fit(model, some_digits(), Recipe(3, 16, 0.05, proximal=mu), seed=0)
        return float(np.linalg.norm(flatten(model)[0] - start))

    distances = [distance(mu) for mu in (0.0, 0.1, 1.0, 10.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] / 2


def test_one_fedprox_step_from_the_start_is_one_fedavg_step() -> None:
    results = []
    for mu in (0.0, 5.0):
        model = digits_mlp()
        fit(model, some_digits(16), Recipe(1, 16, 0.1, proximal=mu), seed=0)
        results.append(flatten(model)[0])
    np.testing.assert_array_equal(*results)


def test_training_learns_and_reports_each_epoch() -> None:
    model, seen = digits_mlp(), []
    before = evaluate(model, some_digits())
    loss = fit(model, some_digits(), Recipe(20, 16, 0.1), 0, progress=lambda epoch, value: seen.append((epoch, value)))
    after = evaluate(model, some_digits())
    assert [epoch for epoch, _ in seen] == list(range(20))
    assert seen[-1][1] == loss < seen[0][1]
    assert after.loss < before.loss
    assert after.accuracy > 0.9 > before.accuracy


def test_evaluation_neither_depends_on_batches_nor_changes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = digits_mlp().train()
    before = flatten(model)[0]
    whole = evaluate(model, some_digits())
    monkeypatch.setattr("fl_privacy.tasks.train.EVALUATION_BATCH", 7)
    parts = evaluate(model, some_digits())
    assert parts.accuracy == whole.accuracy
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert model.training
    np.testing.assert_array_equal(flatten(model)[0], before)


def test_small_models_train_on_one_thread_and_the_setting_is_restored() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    torch.set_num_threads(2)
    try:
        fit(
            digits_mlp(),
            some_digits(16),
            Recipe(1, 16, 0.1),
            0,
            progress=lambda *_: seen.append(torch.get_num_threads()),
        )
        with few_threads(torch.nn.Linear(1001, 1000)):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 2]


def test_impossible_training_is_refused() -> None:
    with pytest.raises(FederationError, match=r"train\.lr: with 1e\+30"):
        fit(digits_mlp(), some_digits(), Recipe(3, 16, 1e30), 0)
    with pytest.raises(FederationError, match="no records"):
        fit(digits_mlp(), some_digits(0), Recipe(1, 16, 0.1), 0)
    with pytest.raises(FederationError, match="no records"):
        evaluate(digits_mlp(), some_digits(0))
    with pytest.raises(FederationError, match=r"train\.epochs: 0"):
        Recipe(0, 16, 0.1)
    with pytest.raises(FederationError, match=r"train\.momentum: -1"):
        Recipe(1, 16, 0.1, momentum=-1)


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "cuda:x", ""])
def test_a_missing_device_is_refused(name: str) -> None:
    with pytest.raises(FederationError) as error:
        device(name)
    assert repr(name) in one_line(error)


def test_five_rounds_of_plain_averaging_reach_90_percent() -> None:
    """The default demo in one process: five skewed sites, unweighted mean of their updates."""
    split, model = load("digits", None), build("mlp", (1, 8, 8), 10, seed=0)
    parts = partition(split.train.y, 5, "dirichlet", seed=0, alpha=0.5)
    weights, layout = flatten(model)
    for number in range(5):
        trained = []
        for site, rows in enumerate(parts):
            load_vector(model, weights, layout)
            fit(model, split.train.take(rows), Recipe(5, 16, 0.1, momentum=0.9), seed=10 * number + site)
            trained.append(flatten(model)[0])
        weights = np.mean(trained, axis=0, dtype=np.float32)
    load_vector(model, weights, layout)
    assert evaluate(model, split.test).accuracy >= 0.9
