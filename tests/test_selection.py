"""Best-of-n: which members of a group are trained on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import FlowSDE, Objective, best_of_group, best_of_weights, loss_fn, sample

NAN = float("nan")


@pytest.mark.parametrize("jit", [False, True])
def test_the_best_and_the_worst_of_each_group(jit):
    rewards = [3.0, 1.0, 5.0, 2.0, 0.0, 4.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    f = lambda r: best_of_weights(r, 6, 4)  # noqa: E731
    ours = (jax.jit(f) if jit else f)(jnp.array(rewards))
    np.testing.assert_allclose(ours, [0, 1.5, 1.5, 0, 1.5, 1.5, 1.5, 1.5, 0, 0, 1.5, 1.5])
    np.testing.assert_allclose(best_of_weights(rewards, 6, 2), [0, 0, 3, 0, 3, 0, 3, 0, 0, 0, 0, 3])
    np.testing.assert_array_equal(best_of_weights(rewards, 6, 6), 1.0)


def test_ties_go_to_the_earlier_index():
    np.testing.assert_allclose(best_of_weights([7.0] * 4, 4, 2), [2, 0, 0, 2])
    np.testing.assert_allclose(best_of_weights([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], 6, 2), [3, 0, 0, 0, 0, 3])


@pytest.mark.parametrize("marker", ["mask", "nan", "inf", "-inf"])
def test_invalid_members_are_never_kept(marker):
    rewards, valid = np.array([1.0, 9.0, 3.0, 2.0, 4.0, 0.0]), np.ones(6, bool)
    if marker == "mask":
        valid[1] = False
    else:
        rewards[1] = float(marker)
    np.testing.assert_allclose(best_of_weights(rewards, 6, 2, valid), [0, 0, 0, 0, 3, 3])
    np.testing.assert_allclose(best_of_weights(rewards, 6, 4, valid), [1.5, 0, 1.5, 0, 1.5, 1.5])


def test_few_valid_members_are_kept_once_and_fewer_than_two_not_at_all():
    rewards = [NAN, 1.0, 2.0, NAN, NAN, 3.0, NAN, NAN, NAN, NAN, NAN, NAN]
    np.testing.assert_allclose(best_of_weights(rewards, 4, 4), [0, 1, 1, 0] + [0] * 4 + [0] * 4)
    np.testing.assert_allclose(best_of_weights([NAN, 1.0, 2.0, 3.0], 4, 4), [0, 1, 1, 1])


@pytest.mark.parametrize("jit", [False, True])
def test_the_index_of_the_best_member(jit):
    rewards = [1.0, 5.0, 2.0] + [4.0, 4.0, NAN] + [NAN, 2.0, NAN] + [NAN] * 3 + [9.0, 1.0, 0.0]
    valid = np.ones(15, bool)
    valid[12] = False
    f = lambda r, v: best_of_group(r, 3, v)  # noqa: E731
    index, alive = (jax.jit(f) if jit else f)(jnp.array(rewards), valid)
    assert index.dtype == jnp.int32 and alive.dtype == bool
    np.testing.assert_array_equal(np.asarray(index)[[0, 1, 2, 4]], [1, 3, 7, 13])
    np.testing.assert_array_equal(alive, [True, True, False, False, True])
    assert 9 <= index[3] < 12
    np.testing.assert_array_equal(best_of_group([-3.0, -1.0], 2)[0], [1])


def test_as_sample_weight_the_loss_is_the_mean_over_the_kept():
    toy = lambda params, x, sigma, cond: jnp.tanh(params * x + sigma[:, None])  # noqa: E731
    with jax.enable_x64(True):
        at = sample(
            0.7, jax.random.key(0), None, denoise=toy, process=FlowSDE(), shape=(8, 2), num_steps=4, record=(0, 2),
            keep_mean=True, dtype=jnp.float64,
        )[1]  # fmt: skip
        advantages = np.linspace(-1.0, 1.3, 8)
        weight = best_of_weights([4.0, 1.0, 2.0, 3.0, 0.0, 7.0, 6.0, 5.0], 4, 2)
        kept = np.array([0, 1, 4, 5])
        settings = dict(denoise=toy, process=FlowSDE(), objective=Objective(log_ratio="gaussian", clip_range=0.2))
        f = lambda p, at, a, w: loss_fn(p, at, a, None, None, None, sample_weight=w, **settings)[0]  # noqa: E731
        ours = jax.value_and_grad(f)(0.72, at, advantages, weight)
        theirs = jax.value_and_grad(f)(0.72, at.take_rows(kept), advantages[kept], None)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
        assert abs(theirs[1]) > 1e-4


def test_dtypes():
    assert best_of_weights(jnp.array([1, 2]), 2, 2).dtype == jnp.float32
    assert best_of_weights(jnp.array([1, 2], jnp.bfloat16), 2, 2).dtype == jnp.float32
    with jax.enable_x64(True):
        assert best_of_weights(jnp.array([1.0, 2.0], jnp.float32), 2, 2).dtype == jnp.float32


@pytest.mark.parametrize(
    ("f", "word"),
    [
        (lambda: best_of_weights(np.zeros(8), 4, 3), "keep=3: expected an even number, 2 to group_size=4"),
        (lambda: best_of_weights(np.zeros(8), 4, 0), "keep=0"),
        (lambda: best_of_weights(np.zeros(8), 4, 6), "keep=6"),
        (lambda: best_of_weights(np.zeros(8), 3, 2), "group_size=3"),
        (lambda: best_of_group(np.zeros(8), 1), "group_size=1"),
    ],
)
def test_errors_are_one_line(f, word):
    with pytest.raises(ValueError, match=word) as error:
        f()
    assert "\n" not in str(error.value)
