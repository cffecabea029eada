"""Which steps are trained: random subsets and the sliding window."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import random_steps, window_steps


def test_random_steps_are_an_ascending_subset_without_replacement():
    for seed in range(20):
        steps = np.asarray(random_steps(jax.random.key(seed), (9, 0, 4, 2, 7), 3))
        assert steps.dtype == np.int32 and steps.shape == (3,)
        assert (np.diff(steps) > 0).all() and set(steps.tolist()) <= {0, 2, 4, 7, 9}
    np.testing.assert_array_equal(random_steps(jax.random.key(0), (3, 1, 2), 3), [1, 2, 3])


def test_every_subset_is_equally_likely():
    draws = jax.vmap(lambda key: random_steps(key, range(5), 3))(jax.random.split(jax.random.key(0), 20000))
    counts = collections.Counter(map(tuple, np.asarray(draws).tolist()))
    assert set(counts) == set(itertools.combinations(range(5), 3))
    # 10 subsets, 2000 expected each with a std of 42: five of them.
    assert max(abs(n - 2000) for n in counts.values()) < 212


def test_random_steps_under_jit_depend_on_the_key_alone():
    f = jax.jit(lambda key: random_steps(key, range(15), 9))
    drawn = [f(jax.random.key(i)) for i in range(6)]
    for i, steps in enumerate(drawn):
        np.testing.assert_array_equal(steps, random_steps(jax.random.key(i), range(15), 9))
    assert len({tuple(s.tolist()) for s in drawn}) > 3 and f._cache_size() == 1


@pytest.mark.parametrize("jit", [False, True])
def test_the_window_starts_at_the_highest_noise_slides_and_starts_over(jit):
    f = lambda i: window_steps(i, 5, window=2, every=3)  # noqa: E731
    f = jax.jit(f) if jit else f
    firsts = [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [0] * 3 + [1]
    for iteration, first in enumerate(firsts):
        steps = f(iteration)
        assert steps.dtype == jnp.int32
        np.testing.assert_array_equal(steps, [first, first + 1])
    np.testing.assert_array_equal(f(100), [33 % 4, 33 % 4 + 1])


def test_a_window_of_everything_stands_still():
    for iteration in (0, 1, 50):
        np.testing.assert_array_equal(window_steps(iteration, 4, window=4, every=1), [0, 1, 2, 3])


def test_the_step_of_the_trainer_may_be_a_device_array_of_any_integer_type():
    for dtype in (jnp.int32, jnp.uint32):
        steps = window_steps(jnp.asarray(7, dtype), 10, window=3, every=2)
        assert steps.dtype == jnp.int32
        np.testing.assert_array_equal(steps, [3, 4, 5])


@pytest.mark.parametrize(
    ("f", "word"),
    [
        (lambda: random_steps(jax.random.key(0), range(4), 5), "count=5: expected 1 to 4"),
        (lambda: random_steps(jax.random.key(0), range(4), 0), "count=0"),
        (lambda: random_steps(jax.random.key(0), (1, 1), 1), r"candidates=\(1, 1\)"),
        (lambda: window_steps(0, 3, window=4, every=1), "window=4: expected 1 to 3"),
        (lambda: window_steps(0, 3, window=0, every=1), "window=0"),
        (lambda: window_steps(0, 3, window=2, every=0), "every=0"),
    ],
)
def test_errors_are_one_line(f, word):
    with pytest.raises(ValueError, match=word) as error:
        f()
    assert "\n" not in str(error.value)
