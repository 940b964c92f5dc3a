"""Two clouds of points, and a small network to tell them apart."""

import numpy as np

from fl_privacy.tasks.catalog import Entry
from fl_privacy.tasks.data import Dataset, Split

TRAIN, TEST, FEATURES = 600, 200, 8

TASK = Entry(
    shape=(FEATURES,),
    classes=2,
    train=TRAIN,
    loader="fl_example.blobs:load",
    model="fl_example.blobs:network",
    needs_data=False,
)


def load(data_dir):
    rng = np.random.default_rng(7)
    y = rng.integers(2, size=TRAIN + TEST)
    x = rng.normal(size=(TRAIN + TEST, FEATURES)) + (y[:, None] - 0.5)
    data = Dataset(x.astype(np.float32), y)
    train, test = data.take(range(TRAIN)), data.take(range(TRAIN, TRAIN + TEST))
    return Split(train, test, TASK.classes, TASK.shape)


def network():
    from torch import nn

    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2))
