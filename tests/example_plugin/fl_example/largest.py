"""Whose update is the largest of a round? Records that the model fits badly make large updates."""

import numpy as np

from attacks.common.measure import Measure, Scores
from fl_privacy.transcript.events import Invited, Row


class LargestUpdate:
    name = "largest-update"
    observers = ("server",)  # whose view it reads
    needs = frozenset()  # beside the view and the federation's config: nothing

    def run(self, views, knowledge, seed):
        """By round, the site with the largest row; a guess where rows have no names."""
        rng, found = np.random.default_rng(seed), {}
        for round in views["server"].rounds:
            events = views["server"].events(round)
            rows = views["server"].round(round).arrays["updates"].astype(np.float32)
            largest = np.linalg.norm(rows, axis=1).argmax()
            names = [e.name for e in events if isinstance(e, Row) and e.row == largest]
            invited = [e.name for e in events if isinstance(e, Invited)]
            found[round] = names[0] if names else rng.choice(invited)
        return found

    def score(self, findings, truth):
        right, chance = [], []
        for round, name in findings.items():
            sizes = {site: np.linalg.norm(update) for site, update in truth.clean(round).items()}
            right.append(name == max(sizes, key=sizes.get))
            chance.append(1 / len(sizes))
        return Scores({"found": Measure(np.mean(right), np.mean(chance))})


ATTACK = LargestUpdate()
