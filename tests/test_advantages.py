"""Group-normalised advantages with invalid members."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import (
    EDMChurn,
    Objective,
    Trajectory,
    group_advantages,
    log_partition,
    loss_fn,
    mixed_advantages,
    partition_advantages,
)

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("std", ["group", "batch"])
def test_flow_grpo_golden(std, jit):
    golden = np.load(GOLDEN / "flow.npz")
    f = functools.partial(group_advantages, group_size=4, std=std, ddof=0)
    with jax.enable_x64(True):
        ours = (jax.jit(f) if jit else f)(golden["flow_grpo/adv/rewards"])
        np.testing.assert_allclose(ours, golden[f"flow_grpo/adv/global_std{std == 'batch'}"], rtol=1e-9)


def test_ddrl_golden():
    golden = np.load(GOLDEN / "loss.npz")
    with jax.enable_x64(True):
        for case in ("ddrl_full", "ddrl_exp_reward", "wide_clip"):
            ours = group_advantages(golden[f"{case}/rewards"], 4, reward_clip=5.0)
            np.testing.assert_allclose(ours, golden[f"{case}/advantages"], rtol=1e-9)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("marker", ["mask", "nan", "inf", "-inf"])
def test_an_invalid_reward_takes_the_mean_of_the_valid_ones(marker, jit):
    rewards, valid = np.array([1.0, 2.0, 99.0, 6.0, 0.0, 1.0, 2.0, 3.0]), np.ones(8, bool)
    if marker == "mask":
        valid[2] = False
    else:
        rewards[2] = float(marker)
    f = lambda r, v: group_advantages(r, 4, v)  # noqa: E731
    ours = (jax.jit(f) if jit else f)(rewards, valid)
    filled = np.array([1.0, 2.0, 3.0, 6.0])
    np.testing.assert_allclose(ours[:4], (filled - 3.0) / (filled.std(ddof=1) + 1e-4), rtol=1e-5)
    assert ours[2] == 0.0
    np.testing.assert_allclose(
        ours[4:], np.array([-1.5, -0.5, 0.5, 1.5]) / (np.std([0, 1, 2, 3], ddof=1) + 1e-4), rtol=1e-5
    )


def test_a_group_with_fewer_than_two_valid_members_is_dead():
    nan = np.nan
    ours = group_advantages([nan, nan, nan, 5.0, 1.0, 3.0, nan, nan, nan, nan, nan, nan], 4)
    np.testing.assert_array_equal(ours[:4], 0.0)
    np.testing.assert_array_equal(ours[8:], 0.0)
    filled = np.array([1.0, 3.0, 2.0, 2.0])
    np.testing.assert_allclose(ours[4:8], (filled - 2) / (filled.std(ddof=1) + 1e-4), rtol=1e-5)
    np.testing.assert_array_equal(group_advantages([nan] * 4, 2, std="batch"), 0.0)


def test_batch_std_is_over_live_members_only():
    nan = np.nan
    rewards = [0.0, 1.0, nan, 2.0, 100.0, nan, nan, nan, 4.0, 6.0, 5.0, 5.0]
    ours = group_advantages(rewards, 4, std="batch", ddof=0)
    live = np.array([0.0, 1.0, 2.0, 4.0, 6.0, 5.0, 5.0])  # the fill and the dead group are not in it
    scale = live.std() + 1e-4
    np.testing.assert_allclose(ours, np.array([-1, 0, 0, 1, 0, 0, 0, 0, -1, 1, 0, 0]) / scale, rtol=1e-5, atol=1e-7)


def test_reward_clip_comes_before_the_statistics():
    clipped = group_advantages([-50.0, 0.0, 1.0, 7.0], 4, reward_clip=5.0)
    np.testing.assert_allclose(clipped, group_advantages([-5.0, 0.0, 1.0, 5.0], 4), rtol=1e-6)
    # An infinite reward is invalid, not clipped.
    np.testing.assert_allclose(
        group_advantages([np.inf, 0.0, 1.0, 7.0], 4, reward_clip=5.0), group_advantages([2.0, 0.0, 1.0, 5.0], 4),
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def test_equal_rewards_and_dtypes():
    np.testing.assert_allclose(group_advantages([3.0] * 4, 4), 0.0)
    assert group_advantages(jnp.array([1, 2, 3, 4]), 2).dtype == jnp.float32
    assert group_advantages(jnp.array([1, 2], jnp.bfloat16), 2).dtype == jnp.float32
    with jax.enable_x64(True):
        assert group_advantages(jnp.array([1.0, 2.0], jnp.float32), 2, std="batch").dtype == jnp.float32
        assert group_advantages(jnp.array([1.0, 2.0], jnp.float64), 2).dtype == jnp.float64


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        (dict(group_size=1), "group_size=1"),
        (dict(group_size=3), "group_size=3"),
        (dict(group_size=2, ddof=2), "ddof=2"),
        (dict(group_size=2, std="all"), "std='all'"),
        (dict(group_size=2, reward_clip=0.0), "reward_clip=0.0"),
    ],
)
def test_errors_are_one_line(kwargs, word):
    with pytest.raises(ValueError) as error:
        group_advantages(np.zeros(4), **kwargs)
    assert word in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("std", ["group", "batch"])
def test_the_gradient_is_finite_where_all_rewards_are_equal(std):
    f = lambda r: (group_advantages(r, 3, std=std) * jnp.array([1.0, 2.0, -1.0] * 2)).sum()  # noqa: E731
    for rewards in ([0.5, 0.5, 0.5, 1.0, 2.0, 4.0], [0.5] * 6):
        grad = jax.grad(f)(jnp.array(rewards))
        assert np.isfinite(grad).all() and np.abs(grad[:3]).max() > 0.01
    np.testing.assert_allclose(grad[:3], (np.array([1, 2, -1]) - 2 / 3) / 1e-4, rtol=1e-5)


# --- Several rewards ------------------------------------------------------------------------------------------------

NAN = float("nan")
TWO = np.array([[1.0, 2.0, 6.0, 3.0, 0.0, 1.0, 2.0, 7.0], [300.0, 100.0, 200.0, 500.0, 4.0, 3.0, 2.0, 1.0]])


@pytest.mark.parametrize("jit", [False, True])
def test_mixed_advantages_are_the_weighted_mean_of_each_rewards_own(jit):
    with jax.enable_x64(True):
        f = lambda r, w: mixed_advantages(r, w, 4, eps=0.0)  # noqa: E731
        f = jax.jit(f) if jit else f
        normalised = (TWO.reshape(2, 2, 4) - TWO.reshape(2, 2, 4).mean(-1, keepdims=True)) / TWO.reshape(2, 2, 4).std(
            -1, ddof=1, keepdims=True
        )
        for weights in ([3.0, 1.0], [0.5, -2.0], [0.0, 1.0]):
            expected = np.einsum("r,rgn->gn", weights, normalised).reshape(-1) / np.abs(weights).sum()
            np.testing.assert_allclose(f(TWO, np.array(weights)), expected, rtol=1e-12, atol=1e-15)
        # Units do not matter, and a weight's own scale does not either.
        np.testing.assert_allclose(
            f(TWO * np.array([[1e3], [-1e-3]]), np.array([30.0, -10.0])), f(TWO, np.array([3.0, 1.0])), rtol=1e-12
        )


@pytest.mark.parametrize("options", [{}, {"std": "batch", "ddof": 0}, {"reward_clip": 2.0, "eps": 1e-2}])
def test_one_reward_is_group_advantages(options):
    rewards, valid = np.array([1.0, 2.0, NAN, 6.0, 0.0, 1.0, 2.0, 3.0]), np.arange(8) != 4
    for weight in (1.0, 0.3):
        np.testing.assert_allclose(
            mixed_advantages(rewards[None], [weight], 4, valid, **options),
            group_advantages(rewards, 4, valid, **options),
            rtol=1e-6,
        )


def test_a_sample_counts_only_where_all_rewards_are_valid():
    rewards = TWO.copy()
    rewards[1, 2], rewards[0, 5], rewards[1, 6], rewards[1, 7] = NAN, np.inf, NAN, NAN
    ours = mixed_advantages(rewards, [1.0, 1.0], 4)
    # Sample 2's 6 is in neither mean; the second group has one valid member left and is dead for both rewards.
    one, two = (group_advantages([*r[:2], NAN, r[3]], 4) for r in TWO[:, :4])
    np.testing.assert_allclose(ours[:4], 0.5 * one + 0.5 * two, rtol=1e-6)
    assert ours[2] == 0.0 and abs(ours[0]) > 0.1
    np.testing.assert_array_equal(ours[4:], 0.0)
    by_mask = mixed_advantages(TWO, [1.0, 1.0], 4, np.isfinite(rewards))
    np.testing.assert_array_equal(by_mask, ours)
    np.testing.assert_array_equal(mixed_advantages(TWO, [1.0, 1.0], 4, np.isfinite(rewards).all(0)), ours)
    assert np.isfinite(jax.grad(lambda r: (mixed_advantages(r, [1.0, 1.0], 4) ** 2).sum())(rewards)).all()


@pytest.mark.parametrize(
    ("weights", "word"),
    [([0.0, 0.0], r"weights=\[0.0, 0.0\]: expected finite numbers"), ([NAN, 1.0], r"weights=\[nan, 1.0\]")],
)
def test_bad_weights_are_a_one_line_error(weights, word):
    with pytest.raises(ValueError, match=word) as error:
        mixed_advantages(TWO, weights, 4)
    assert "\n" not in str(error.value)


# --- Eq. 8's own argument -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_log_partition_by_hand(jit):
    rewards = np.array([0.0, np.log(3.0), NAN, 1.0, 2.0, 5.0])
    f = lambda r, v: log_partition(r, 3, 1.0, v)  # noqa: E731
    with jax.enable_x64(True):
        z = (jax.jit(f) if jit else f)(rewards, np.array([1, 1, 1, 1, 1, 0], bool))
        # mean(1, 3) = 2; mean(e, e^2) over the two valid ones.
        np.testing.assert_allclose(z, [np.log(2.0), np.log((np.e + np.e**2) / 2)], rtol=1e-14)
        scaled = log_partition(10.0 * rewards[:2], 2, 10.0)
        np.testing.assert_allclose(scaled, [10.0 * np.log(2.0)], rtol=1e-14)


def test_log_partition_neither_overflows_nor_invents():
    z = log_partition([1e4, 1e4 - 1.0, -1e4, -1e4, NAN, NAN], 2, 0.5)
    np.testing.assert_allclose(z[:2], [1e4 + 0.5 * np.log((1 + np.exp(-2)) / 2), -1e4], rtol=1e-6)
    assert np.isnan(z[2])
    # Between the mean (beta to infinity) and the maximum (beta to 0).
    rewards = [0.0, 1.0, 3.0]
    np.testing.assert_allclose(log_partition(rewards, 3, 1e4), [4 / 3], rtol=1e-3)
    np.testing.assert_allclose(log_partition(rewards, 3, 1e-3), [3.0], atol=2e-3)
    grad = jax.grad(lambda r: log_partition(r, 2, 1.0)[0])(jnp.array([0.0, jnp.log(3.0), NAN, NAN]))
    np.testing.assert_allclose(grad[:2], [0.25, 0.75], rtol=1e-6)  # a softmax


def test_partition_advantages_are_the_argument_of_eq_8():
    z = np.array([1.0, -2.0, NAN])
    rewards = np.array([1.0, 3.0, NAN, -2.0, 5.0, 6.0])
    ours = partition_advantages(rewards, z, 2, 0.5)
    np.testing.assert_allclose(ours, [0.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(partition_advantages(rewards, z, 2, 0.5, np.arange(6) != 1), np.zeros(6))
    # With it lambda(u) = -exp(-u) has mean -1 over the tilted reference: E_ref[exp(r/beta)] exp(-Z/beta) = 1.
    with jax.enable_x64(True):
        reference = np.random.default_rng(0).normal(size=8)
        z = log_partition(reference, 4, 0.7)
        u = np.asarray(partition_advantages(reference, z, 4, 0.7)).reshape(2, 4)
        np.testing.assert_allclose(np.exp(u).mean(1), 1.0, rtol=1e-12)


@pytest.mark.parametrize(
    ("f", "word"),
    [
        (lambda: log_partition(np.zeros(4), 2, 0.0), "beta=0.0: expected more than 0"),
        (lambda: log_partition(np.zeros(4), 3, 1.0), "group_size=3: expected a divisor of the 4 rewards"),
        (lambda: partition_advantages(np.zeros(4), np.zeros(2), 2, -1.0), "beta=-1.0"),
    ],
)
def test_partition_errors_are_one_line(f, word):
    with pytest.raises(ValueError, match=word) as error:
        f()
    assert "\n" not in str(error.value)
    with pytest.raises(AssertionError):
        partition_advantages(np.zeros(4), np.zeros(3), 2, 1.0)


def test_the_exact_objective_weighs_the_score_by_exp_of_minus_the_argument():
    # Eq. 8 with an on-policy rollout: the gradient is E[lambda(u) grad log p], lambda(u) = -exp(-u).
    with jax.enable_x64(True):
        rewards, beta = np.array([0.3, -1.0, 2.0, 0.5]), 0.8
        z = log_partition([0.0, 1.0, 0.4, 0.2], 2, beta)
        advantages = partition_advantages(rewards, z, 2, beta)
        rng = np.random.default_rng(0)
        x, x_next, std = rng.normal(size=(1, 4, 3)), rng.normal(size=(1, 4, 3)), np.array([0.6])
        at = Trajectory(x=x, x_next=x_next, sigma=np.array([1.1]), sigma_next=np.array([0.7]), std=std, num_steps=5)
        process = EDMChurn(solver="1euler")
        f = lambda p: loss_fn(  # noqa: E731
            p, at, advantages, None, None, None, denoise=lambda p, x, sigma, cond: p * x, process=process,
            objective=Objective(reward_transform="exp", adv_clip=None, log_ratio="gaussian_sum"),
        )  # fmt: skip
        _, metrics = f(0.9)
        weight = -np.exp(-(rewards - np.repeat(z, 2)) / beta)
        np.testing.assert_allclose(metrics["parts"]["policy"][0], -weight, rtol=1e-12)
        # mean = x + (x0 - x)(1 - 0.7/1.1) for x0 = p x.
        a = 1 - 0.7 / 1.1
        score = ((x_next[0] - x[0] * (1 + a * (0.9 - 1))) * a * x[0]).sum(1) / std**2
        np.testing.assert_allclose(jax.grad(lambda p: f(p)[0])(0.9), -(weight * score).mean(), rtol=1e-12)
