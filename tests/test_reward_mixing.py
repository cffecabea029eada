"""Several rewards: gates, and what advantages are made of."""

import numpy as np
import pytest

from ddrl_jax import scoring
from ddrl_jax.rewards import Scores, bounded, gated, passes_gates

from . import tiny

NAN = np.nan


def config(**reward):
    c = tiny.config()  # groups of four
    with c.unlocked():
        for name, value in reward.items():
            c.reward[name] = value
    return c


def scores(**columns):
    columns = {n.replace("_", "/"): np.array(v, np.float32) for n, v in columns.items()}
    valid = np.logical_and.reduce([np.isfinite(v) for v in columns.values()])
    return Scores(columns, valid, "", 0.0)


def test_a_gate_needs_its_minimum_and_its_score():
    passed, known = passes_gates({"s/safe": np.array([0.4, 0.5, 0.6, NAN])}, {"s/safe": 0.5})
    np.testing.assert_array_equal(passed, [False, True, True, False])
    np.testing.assert_array_equal(known, [True, True, True, False])
    with pytest.raises(KeyError, match="no score 's/other'"):
        passes_gates({"s/safe": np.zeros(2)}, {"s/other": 0.0})


def test_a_sample_that_fails_counts_as_its_groups_worst_and_never_as_better():
    r = np.array([[3.0, 1.0, 2.0, 9.0, -5.0, -6.0, -7.0, -8.0]])
    passed = np.array([True, True, True, False, False, True, True, True])
    out = gated(r, passed, np.ones(8, bool), 4)
    np.testing.assert_array_equal(out[0], [3, 1, 2, 1, -8, -6, -7, -8])
    # An invalid one is no floor, and stays what it is.
    valid = np.array([True, False, True, True, True, True, True, True])
    out = gated(r, passed, valid, 4)
    np.testing.assert_array_equal(out[0, :4], [3, 1, 2, 2])


def test_a_group_in_which_all_fail_teaches_nothing():
    out = gated(np.array([[3.0, 1.0, 2.0, 9.0]]), np.zeros(4, bool), np.ones(4, bool), 4)
    np.testing.assert_array_equal(out, np.full((1, 4), 1.0))


def test_bounds_clip_a_sub_score_before_its_weight():
    got = bounded({"a/x": np.array([-9.0, 0.5, NAN]), "b/overall": np.array([7.0, 8.0, 9.0])}, {"a/x": (-1, 1)})
    np.testing.assert_array_equal(got["a/x"], [-1, 0.5, NAN])
    np.testing.assert_array_equal(got["b/overall"], [7, 8, 9])
    np.testing.assert_array_equal(bounded(got, {"b": (0.0, 8.0), "c": (0.0, 1.0)})["b/overall"], [7, 8, 8])
    batch, weights = scores(a_x=[1, 2, 3, 4], a_y=[10, 20, 30, 40]), {"a/x": 1.0, "a/y": 0.5}
    for mix, wanted in (("sum", [[7, 12, 13, 13]]), ("normalised", [[2, 2, 3, 3], [10, 20, 20, 20]])):
        c = config(weights=weights, bounds={"a/x": (2.0, 3.0), "a/y": (-20.0, 20.0)}, mix=mix)
        np.testing.assert_allclose(scoring.training_rewards(batch, c)[0], wanted)


def test_a_sum_is_one_row_and_normalised_rewards_one_each():
    got = scores(a_x=[1, 2, 3, 4], a_y=[10, 20, 30, 40])
    rows, weights, valid, metrics = scoring.training_rewards(got, config(weights={"a/x": 1.0, "a/y": 0.5}))
    np.testing.assert_allclose(rows, [[6, 12, 18, 24]])
    np.testing.assert_allclose(weights, [1.0])
    assert valid.all() and metrics == {}
    rows, weights, _, _ = scoring.training_rewards(got, config(weights={"a/x": 1.0, "a/y": 0.5}, mix="normalised"))
    np.testing.assert_allclose(rows, [[1, 2, 3, 4], [10, 20, 30, 40]])
    np.testing.assert_allclose(weights, [1.0, 0.5])


def test_a_gate_reaches_the_rewards_and_its_rate_the_metrics():
    got = scores(a_x=[1, 2, 3, 4], a_safe=[1, 1, 0, 0])
    rows, _, valid, metrics = scoring.training_rewards(got, config(weights={"a/x": 1.0}, gates={"a/safe": 0.5}))
    np.testing.assert_allclose(rows, [[1, 2, 1, 1]])
    assert valid.all() and metrics == {"gate_rate": 0.5}


def test_nothing_that_came_back_has_as_many_rows_and_no_reward():
    lost = Scores({}, np.zeros(4, bool), "down", 0.0)
    for mix, count in (("sum", 1), ("normalised", 2)):
        rows, weights, valid, _ = scoring.training_rewards(lost, config(weights={"a/x": 1.0, "a/y": 2.0}, mix=mix))
        assert rows.shape == (count, 4) and weights.shape == (count,) and not valid.any() and np.isnan(rows).all()
