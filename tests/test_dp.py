"""Calibration, weights and the ledger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fl_privacy.combine import weights
from fl_privacy.dp import gaussian
from fl_privacy.dp.ledger import Charge, Ledger, LedgerError, compose
from fl_privacy.errors import FederationError
from fl_privacy.journal import beside
from profiles import examples

DELTA = 1e-5
# What noise of C sigma instead of 2 C sigma would really give under replacement.
HALF_NOISE = {0.5: 1.067, 1: 2.155, 2: 4.393, 4: 9.085, 8: 19.121}


@given(epsilon=st.floats(0.01, 50), delta=st.floats(1e-12, 0.1))
def test_sigma_is_the_least_sufficient_noise(epsilon: float, delta: float) -> None:
    sigma = gaussian.sigma(epsilon, delta)
    assert gaussian.delta(sigma, epsilon) <= delta * (1 + 1e-9)
    assert gaussian.delta(sigma * 0.999, epsilon) > delta


@given(epsilon=st.floats(0.01, 50))
def test_epsilon_is_the_inverse_of_sigma(epsilon: float) -> None:
    assert gaussian.epsilon(gaussian.sigma(epsilon, DELTA), DELTA) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(("epsilon", "real"), HALF_NOISE.items())
def test_half_the_noise_is_more_than_twice_the_epsilon(epsilon: float, real: float) -> None:
    assert gaussian.epsilon(gaussian.sigma(epsilon, DELTA) / 2, DELTA) == pytest.approx(real, abs=0.001)


def test_known_values() -> None:
    assert gaussian.sigma(1.0, 1e-5) == pytest.approx(3.7306, abs=1e-4)
    # The classic formula needs epsilon < 1: below, it is looser; far above, it gives too little noise.
    classic = {e: np.sqrt(2 * np.log(1.25 / DELTA)) / e for e in (0.5, 40.0)}
    assert gaussian.sigma(0.5, DELTA) < classic[0.5]
    assert gaussian.sigma(40.0, DELTA) > classic[40.0]


@pytest.mark.parametrize("epsilon", [0, -1, float("nan"), float("inf"), None])
def test_an_invalid_budget_is_refused(epsilon: float) -> None:
    with pytest.raises(FederationError, match="epsilon"):
        gaussian.sigma(epsilon, DELTA)


def test_precision_weights_give_the_least_noisy_mean() -> None:
    epsilons = [0.5, 1, 8]
    variances = np.array([gaussian.sigma(e, DELTA) ** 2 for e in epsilons])
    best = weights.RULES["precision"](epsilons, DELTA)
    best = best / best.sum()
    least = float(best**2 @ variances)
    for kind in ("equal", "epsilon"):
        other = weights.RULES[kind](epsilons, DELTA)
        assert float((other / other.sum()) ** 2 @ variances) > least


def round_charge(epsilon: float) -> Charge:
    return Charge(gaussian.sigma(epsilon, DELTA), unit="site", adjacency="replace")


def test_one_round_costs_its_epsilon() -> None:
    assert compose([round_charge(1.0)], DELTA) == pytest.approx(1.0, rel=1e-2)


@examples(5)
@given(count=st.integers(2, 20), epsilon=st.sampled_from((0.5, 1.0, 2.0)))
def test_rounds_compose_as_one_gaussian(count: int, epsilon: float) -> None:
    """n Gaussian rounds are exactly one with sigma / sqrt(n), which dp-accounting bounds closely from above."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    charge = round_charge(epsilon)
    spent = compose([charge] * count, DELTA)
    assert spent == pytest.approx(gaussian.epsilon(charge.noise / count**0.5, DELTA), rel=1e-9)
    bound = PLDAccountant().compose(dp_accounting.GaussianDpEvent(charge.noise), count).get_epsilon(DELTA)
    assert spent <= bound < spent * 1.01


@given(epsilon=st.floats(0.01, 999), delta=st.floats(1e-12, 0.01))
def test_noise_for_a_budget_never_spends_more_than_it(epsilon: float, delta: float) -> None:
    spent = gaussian.epsilon(gaussian.sigma(epsilon, delta), delta)
    assert epsilon * (1 - 1e-6) < spent <= epsilon


def test_a_ledger_refuses_the_round_that_would_overspend(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", epsilon=2.0, delta=DELTA)
    for round in range(3):  # 1, 1.47, 1.83; the fourth would make 2.15
        assert ledger.charge(f"round-{round}", round_charge(1.0))
    with pytest.raises(LedgerError, match="nothing was spent"):
        ledger.charge("round-3", round_charge(1.0))
    assert ledger.spent() <= 2.0
    assert ledger.remaining() == pytest.approx(2.0 - ledger.spent())
    before = (tmp_path / "ledger").read_bytes()
    with pytest.raises(LedgerError):
        ledger.charge("another", round_charge(1.0))
    assert (tmp_path / "ledger").read_bytes() == before


def test_the_same_attempt_is_charged_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", 10.0, DELTA)
    assert ledger.charge("a", round_charge(1.0))
    assert not ledger.charge("a", round_charge(1.0))
    assert not Ledger(tmp_path / "ledger", 10.0, DELTA).charge("a", round_charge(1.0))
    with pytest.raises(LedgerError, match="different terms"):
        ledger.charge("a", round_charge(2.0))


def test_units_are_never_mixed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", 10.0, DELTA)
    ledger.charge("a", round_charge(1.0))
    with pytest.raises(LedgerError, match="give the federation another name"):
        ledger.charge("b", Charge(1.0, unit="record", adjacency="add-or-remove", rate=0.1, steps=10))


def test_two_processes_share_one_ledger(tmp_path: Path) -> None:
    one, two = (Ledger(tmp_path / "ledger", 2.0, DELTA) for _ in range(2))
    one.charge("a", round_charge(1.0))
    two.charge("b", round_charge(1.0))
    one.charge("c", round_charge(1.0))
    with pytest.raises(LedgerError):
        two.charge("d", round_charge(1.0))


@examples(60)
@given(data=st.data())
def test_a_changed_byte_is_detected(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("l") / "ledger"
    ledger = Ledger(path, 10.0, DELTA, site="site-0")
    for name in "abc":
        ledger.charge(name, round_charge(1.0))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 2))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=str(path)):
        Ledger(path, 10.0, DELTA, site="site-0")


def test_a_ledger_of_another_site_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger", 10.0, DELTA, site="site-0")
    with pytest.raises(LedgerError, match="site-0"):
        Ledger(tmp_path / "ledger", 10.0, DELTA, site="site-1")


def test_a_line_truncated_by_a_crash_was_never_charged(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path, 10.0, DELTA)
    ledger.charge("a", round_charge(1.0))
    whole, note = path.read_bytes(), beside(path).read_bytes()
    ledger.charge("b", round_charge(1.0))
    path.write_bytes(whole + path.read_bytes()[len(whole) : -20])
    beside(path).write_bytes(note)
    again = Ledger(path, 10.0, DELTA)
    assert again.spent() == pytest.approx(1.0, rel=1e-2)
    assert path.read_bytes() == whole
    assert again.charge("b", round_charge(1.0))


def test_sigkill_loses_no_charge(tmp_path: Path) -> None:
    """Once a process reports a charge, the charge is durable, whatever kills the process."""
    script = f"""
import sys
from fl_privacy.dp.ledger import Charge, Ledger
ledger = Ledger({str(tmp_path / "ledger")!r}, 1000.0, {DELTA})
for i in range(10_000):
    ledger.charge(f"round-{{i}}", Charge(100.0, "site", "replace"))
    print(i, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(3)]
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.readlines()
    lines = (tmp_path / "ledger").read_text().splitlines()[1:]
    names = [json.loads(line)["entry"]["name"] for line in lines if line.endswith("}")]
    assert len(said) >= 3
    assert {f"round-{line.strip()}" for line in said if line.endswith("\n")} <= set(names)
