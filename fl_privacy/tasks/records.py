"""Records as a task's `data` returns them: arrays, tensors or PyTorch Datasets, checked and read into memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import DataError
from fl_privacy.tasks.data import Dataset, Parts
from fl_privacy.tasks.reader import check_room, read

RETURN = "return ((x, y), (x, y)), training and held-out records, or two PyTorch Datasets"
NAMES = ("training records", "held-out records")


def parts_of(returned: Any, where: str) -> Parts:
    """Training and held-out records of a site."""
    if isinstance(returned, Parts):
        return returned
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        count = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise DataError(f"{where}: data gave {type(returned).__name__}{count}; {RETURN}")
    train, held_out = (dataset_of(half, f"{where}: {name}") for half, name in zip(returned, NAMES, strict=True))
    if not len(train):
        raise DataError(f"{where}: data gave no training records; check the site's folder")
    if len(held_out) and held_out.x.shape[1:] != train.x.shape[1:]:
        shapes = f"{train.x.shape[1:]} to train on and {held_out.x.shape[1:]} held out"
        raise DataError(f"{where}: records have shape {shapes}; make them equal")
    if len(held_out) and held_out.forecast != train.forecast:
        kinds = " and ".join("floats" if half.forecast else "integers" for half in (train, held_out))
        raise DataError(f"{where}: labels are {kinds}, to train on and held out; make them equal")
    if len(held_out) and held_out.x.dtype != train.x.dtype:
        raise DataError(f"{where}: records are {train.x.dtype} and {held_out.x.dtype}; make them equal")
    return Parts(train, held_out)


def dataset_of(half: Any, where: str) -> Dataset:
    """One half; a PyTorch Dataset is read once, so put random changes into the task's `augment`."""
    if isinstance(half, Dataset):
        return half
    if isinstance(half, tuple | list) and len(half) == 2 and not hasattr(half, "__getitems__"):
        x, y = _array(half[0], f"{where}: x"), _array(half[1], f"{where}: y")
    elif not isinstance(half, str | bytes) and (hasattr(half, "__getitem__") or hasattr(half, "__iter__")):
        x, y = read(half, where)
    else:
        raise DataError(f"{where}: {type(half).__name__} was given; {RETURN}")
    if not x.ndim or not y.ndim:
        raise DataError(f"{where}: x has shape {x.shape} and y {y.shape}; {RETURN}")
    if len(x) != len(y):
        raise DataError(f"{where}: {len(x)} records and {len(y)} labels; give every record one label")
    return Dataset(_inputs(x, where), _labels(y, where))


def _array(values: Any, where: str) -> NDArray[Any]:
    """An array, a tensor, or lists of numbers of equal length."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: not an array ({str(error)[:150]}); give rows of equal length") from None


def _inputs(x: NDArray[Any], where: str) -> NDArray[Any]:
    """Numbers as float32; whole numbers stay whole, for models that look tokens up."""
    if _whole(x):
        return _converted(x, np.int64, where)
    if not np.issubdtype(x.dtype, np.floating):
        raise DataError(f"{where}: records are of type {x.dtype}; give numbers")
    if not np.isfinite(x).all():
        raise DataError(f"{where}: a record is not finite; replace or drop missing values")
    return _single(x, where)


def _whole(values: NDArray[Any]) -> bool:
    return any(np.issubdtype(values.dtype, known) for known in (np.integer, np.bool_))


def _labels(y: NDArray[Any], where: str) -> NDArray[Any]:
    y = y.reshape(len(y)) if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise DataError(f"{where}: labels have shape {y.shape}; give one number per record")
    if _whole(y):
        if len(y) and int(y.min()) < 0:
            raise DataError(f"{where}: label {int(y.min())} is negative; classes count from 0")
        return _converted(y, np.int64, where)
    if not np.issubdtype(y.dtype, np.floating):
        raise DataError(f"{where}: labels are of type {y.dtype}; give classes (integers from 0) or numbers (floats)")
    if not np.isfinite(y).all():
        bad = int((~np.isfinite(y)).sum())
        raise DataError(f"{where}: {bad} of {len(y)} labels are not finite; drop records without a label")
    return _single(y, where)


def _single(values: NDArray[Any], where: str) -> NDArray[np.float32]:
    """Finite numbers in the precision of a model."""
    made = _converted(values, np.float32, where)
    if not np.isfinite(made).all():
        raise DataError(f"{where}: a number is too large for float32; scale it")
    return made


def _converted(values: NDArray[Any], dtype: type[Any], where: str) -> NDArray[Any]:
    """In this type; refused where a copy would fill the memory, which bytes as integers of 64 bits soon do."""
    needed = 0 if values.dtype == dtype else values.size * np.dtype(dtype).itemsize
    check_room(needed, f"{where}: {len(values):,} of them")
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False)
