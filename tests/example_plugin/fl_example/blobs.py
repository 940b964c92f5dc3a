"""Two clouds of points, and a small network to tell them apart."""

import hashlib

import numpy as np

from fl_privacy import Task

TRAIN, TEST, FEATURES = 200, 60, 8


class Blobs(Task):
    preprocessing = "public"  # nothing is fitted to a site's records
    needs_data = False  # the records are made up

    def model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2))

    def data(self, site, folder):
        rng = np.random.default_rng(list(hashlib.sha256(site.encode()).digest()))
        y = rng.integers(2, size=TRAIN + TEST)
        x = rng.normal(size=(TRAIN + TEST, FEATURES)) + (y[:, None] - 0.5)
        return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
