"""Group-normalised advantages with invalid members."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import group_advantages

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
