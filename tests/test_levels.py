"""Levels, preconditioning and the laws of the training level, against golden/."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import DanceSDE, EDMChurn, FlowSDE, karras_levels
from ddrl_jax.diffusion import preconditioning
from ddrl_jax.diffusion.training_levels import log_normal_sigma, training_sigma

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def sampler():
    return np.load(GOLDEN / "sampler.npz")


@pytest.mark.parametrize(("low", "high", "steps"), [(0.01, 200, 20), (0.002, 80, 35), (0.01, 200, 35)])
def test_karras_levels_match_golden(sampler, low, high, steps):
    levels = karras_levels(low, high, steps)
    assert levels.dtype == np.float64 and levels.shape == (steps + 1,)
    assert (levels[0], levels[-1]) == (high, low)
    np.testing.assert_allclose(levels, sampler[f"sigmas/{low}_{high}_{steps}_7.0"], rtol=1e-12)
    np.testing.assert_array_equal(EDMChurn(sigma_min=low, sigma_max=high).levels(steps), levels)


def test_flow_levels_match_golden():
    flow = np.load(GOLDEN / "flow.npz")
    np.testing.assert_allclose(FlowSDE().levels(10), flow["flow_grpo/sigmas"], rtol=1e-6)
    np.testing.assert_allclose(DanceSDE().levels(16), flow["dance_grpo/sigmas"], rtol=1e-6)


@pytest.mark.parametrize("process", [EDMChurn(), FlowSDE(), DanceSDE()])
@pytest.mark.parametrize("steps", [1, 2, 17, 400])
def test_levels_are_float64_descending_with_exact_ends(process, steps):
    levels = process.levels(steps)
    assert isinstance(levels, np.ndarray) and levels.dtype == np.float64 and levels.shape == (steps + 1,)
    assert (np.diff(levels) < 0).all()
    assert (levels[0], levels[-1]) == ((200.0, 0.01) if isinstance(process, EDMChurn) else (1.0, 0.0))


@pytest.mark.parametrize("name", ["rf", "edm", "edm1"])
def test_preconditioning_matches_golden(sampler, name):
    with jax.enable_x64(True):
        sigma = sampler["scaling/sigma"]
        if name == "rf":
            ours = preconditioning.rectified_flow(sigma)
            weight = preconditioning.rectified_flow_loss_weight(sigma)
        else:
            sigma_data = {"edm": 0.5, "edm1": 1.0}[name]
            ours = preconditioning.edm(sigma, sigma_data)
            weight = preconditioning.edm_loss_weight(sigma, sigma_data)
        for field in ours._fields:
            # The reference computes 1 - s, which costs it 5e-12 at sigma 1e5.
            np.testing.assert_allclose(getattr(ours, field), sampler[f"scaling/{name}/{field}"], rtol=2e-11)
        np.testing.assert_allclose(weight, sampler[f"scaling/{name}/loss_weight"], rtol=1e-12)


def test_rectified_flow_is_accurate_in_float32_at_large_sigma():
    # 1 - s in float32 is off by 0.14 % here.
    ours = preconditioning.rectified_flow(jnp.float32(1e5))
    assert abs(float(ours.c_skip) * (1 + 1e5) - 1) < 1e-6


STRATEGIES = {
    "none": "none",
    "uniform80_2000": "uniform80_2000",
    "LOGUNIFORM200_100000": "loguniform200_100000",
    "shift24": "shift24",
    "balanced_two_heads_v1": "balanced_two_heads_v1",
}


def assert_below_quantiles(draws, levels, quantiles):
    """The fraction of draws below each exact quantile, within 4.5 standard errors of its level."""
    below = (np.asarray(draws)[None] < quantiles[:, None]).mean(1)
    error = np.sqrt(levels * (1 - levels) / draws.size)
    np.testing.assert_array_less(np.abs(below - levels) / error, 4.5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_sigma_strategies_match_golden(name):
    golden = np.load(GOLDEN / "sigma_strategies.npz")
    draws = training_sigma(jax.random.key(5), (200_000,), strategy=STRATEGIES[name])
    assert_below_quantiles(draws, golden["quantile_levels"], golden[f"{name}/quantiles_exact"])


def test_hardcoded_20steps_has_the_golden_support_at_equal_frequencies():
    golden = np.load(GOLDEN / "sigma_strategies.npz")
    draws = training_sigma(jax.random.key(1), (100_000,), strategy="hardcoded_20steps")
    values, counts = np.unique(np.asarray(draws), return_counts=True)
    np.testing.assert_allclose(values, golden["hardcoded_20steps/support_float32_sorted"], rtol=1e-6)
    expected = draws.size / 22
    assert ((counts - expected) ** 2 / expected).sum() < 49  # chi-square, 21 degrees of freedom, p = 5e-4


def test_images_get_no_multiplier_and_no_strategy():
    golden = np.load(GOLDEN / "sigma_strategies.npz")
    draws = log_normal_sigma(jax.random.key(2), (200_000,), mean=math.log(4.0), std=1.2)
    assert_below_quantiles(draws, golden["quantile_levels"], golden["image_batch_any_strategy/quantiles_exact"])


def test_the_processes_draw_their_training_laws():
    golden = np.load(GOLDEN / "sigma_strategies.npz")
    draws = EDMChurn().draw_sigma(jax.random.key(3), (100, 2000))
    assert draws.shape == (100, 2000) and draws.dtype == jnp.float32
    levels = golden["quantile_levels"]
    assert_below_quantiles(draws.reshape(-1), levels, golden["LOGUNIFORM200_100000/quantiles_exact"])
    small = EDMChurn(train_mean=0.0, train_std=0.5, train_multiplier=2.0, high_sigma_ratio=0.0)
    log = np.log(np.asarray(small.draw_sigma(jax.random.key(3), (100_000,))))
    np.testing.assert_allclose([log.mean(), log.std()], [math.log(2.0), 0.5], atol=0.01)
    for process in (FlowSDE(), DanceSDE(shift=5.0)):
        t = np.asarray(process.draw_sigma(jax.random.key(4), (100_000,)), np.float64)
        logit = np.log(t) - np.log1p(-t)
        np.testing.assert_allclose([logit.mean(), logit.std()], [0.0, 1.0], atol=0.015)
    with jax.enable_x64(True):
        assert EDMChurn().draw_sigma(jax.random.key(3), (2,)).dtype == jnp.float64


def test_bad_settings_are_one_line_errors():
    for make, word in (
        (lambda: EDMChurn(sigma_min=2.0, sigma_max=1.0), "sigma_min=2.0"),
        (lambda: EDMChurn(solver="3ab"), "solver='3ab'"),
        (lambda: EDMChurn(s_churn=-1.0), "s_churn=-1.0"),
        (lambda: FlowSDE(noise_level=-0.1), "noise_level=-0.1"),
        (lambda: DanceSDE(shift=0.0), "shift=0.0"),
        (lambda: karras_levels(0.0, 1.0, 3), "sigma_min=0.0"),
        (lambda: karras_levels(0.1, 1.0, 0), "num_steps=0"),
        (lambda: training_sigma(jax.random.key(0), (2,), strategy="x"), "strategy='x'"),
    ):
        with pytest.raises(ValueError) as error:
            make()
        assert word in str(error.value) and "\n" not in str(error.value)
