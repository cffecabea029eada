"""examples/theory: the formulas they stand on, against numbers from elsewhere; then each script with all its claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import FlowSDE
from tests.paths import ROOT

THEORY = ROOT / "examples/theory"


@pytest.fixture(autouse=True)
def _theory_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(THEORY))


def test_the_mixtures_denoiser_is_the_posterior_mean() -> None:
    from gaussian_mixture import Mixture

    mixture = Mixture((0.6, 0.4), ((-1.0,), (1.0,)), (0.5, 0.4))
    x0 = np.linspace(-5.0, 5.0, 4001)
    prior = 0.6 / 0.5 * np.exp(-2.0 * (x0 + 1.0) ** 2) + 0.4 / 0.4 * np.exp(-((x0 - 1.0) ** 2) / 0.32)
    with jax.enable_x64(True):
        for x, t in ((0.3, 0.4), (-1.2, 0.9), (2.0, 1.0), (0.05, 0.05)):
            weight = prior * np.exp(-0.5 * ((x - (1.0 - t) * x0) / t) ** 2)
            found = mixture.denoise(jnp.array([[x]]), jnp.array([t]))[0, 0]
            np.testing.assert_allclose(found, (weight @ x0) / weight.sum(), rtol=1e-9, atol=1e-9)


def test_a_tilted_mixture_is_p_exp_over_its_normaliser() -> None:
    from gaussian_mixture import Mixture

    mixture = Mixture((0.3, 0.7), ((-1.0, 0.5), (1.0, 0.0)), (0.5, 0.4))
    slope = (0.7, -1.1)
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (7, 2))
        expected = mixture.log_density(x) + x @ jnp.array(slope) - mixture.log_normaliser(slope)
        np.testing.assert_allclose(mixture.tilted(slope).log_density(x), expected, rtol=1e-12)
    # E exp(a x) of N(0,1) is exp(a^2/2).
    assert Mixture((1.0,), ((0.0,),), (1.0,)).log_normaliser((3.0,)) == pytest.approx(4.5)


def test_path_weights_of_the_exact_process() -> None:
    from affine_gaussian import path_weights

    process = FlowSDE(noise_level=2**0.5, shift=1.0)
    t = process.levels(12)
    steps = np.arange(1, 11)
    expected = (t[steps] - t[steps + 1]) * (1.0 - t[steps]) / t[steps] ** 3
    with jax.enable_x64(True):
        np.testing.assert_allclose(path_weights(process, 12, steps), expected, rtol=1e-12)
        # The first step has std sqrt 2 and the coefficient 1 - t'.
        np.testing.assert_allclose(path_weights(process, 12, np.array([0])), [(1.0 - t[1]) ** 2 / 4.0], rtol=1e-12)


def test_the_atom_of_the_practical_advantage() -> None:
    import practical_advantage

    x, data = practical_advantage.grid()
    for data_beta, atom in ((3.0, 0.0258), (1.0, 0.4588), (8.0, 0.0)):
        p, found = practical_advantage.closed_form(data_beta, data, x)
        assert found == pytest.approx(atom, abs=1e-4)
        assert practical_advantage.atom_formula(data_beta, data, x) == pytest.approx(atom, abs=1e-4)
        # The fixed point itself: (A - beta) p + beta p_data = 0 in every cell.
        mean, std = practical_advantage.moments(p, x)
        np.testing.assert_allclose(((x - mean) / std - data_beta) * p + data_beta * data, 0.0, atol=2e-4)


@pytest.mark.slow
def test_stationarity_fails_where_the_kernel_does_not_reverse_the_noising(monkeypatch: pytest.MonkeyPatch) -> None:
    import stationarity

    optimum = stationarity.DATA.tilted((1.0 / stationarity.BETA,))
    with jax.enable_x64(True):
        assert stationarity.size(stationarity.expected_gradients(optimum, 12)) < 0.15
        monkeypatch.setattr(stationarity, "PROCESS", FlowSDE(noise_level=0.7, shift=1.0))
        assert stationarity.size(stationarity.expected_gradients(optimum, 12)) > 0.3


def test_a_claim_that_does_not_hold_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    from claims import Claims

    claims = Claims()
    claims.check(True, "one is one")
    claims.check(float("nan") < 1.0, "nan is small")
    with pytest.raises(SystemExit) as stop:
        claims.finish()
    assert stop.value.code == 1
    assert capsys.readouterr().out.splitlines() == ["holds   one is one", "FAILED  nan is small", "1 claim(s) failed"]


def _run(script: str, figure: str, tmp_path: Path) -> None:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(THEORY / script), "--out", str(tmp_path)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "FAILED" not in run.stdout and run.stdout.count("holds ") >= 3
    assert (tmp_path / figure).read_text().rstrip().endswith("</svg>")


def test_practical_advantage(tmp_path: Path) -> None:
    _run("practical_advantage.py", "theory_4.svg", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "figure"),
    [("eq10_optimum.py", "theory_1.svg"), ("stationarity.py", "theory_2.svg"), ("reverse_kl.py", "theory_3.svg")],
)
def test_slow_script(script: str, figure: str, tmp_path: Path) -> None:
    _run(script, figure, tmp_path)
