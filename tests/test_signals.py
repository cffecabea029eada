"""The hacking signals on curves whose answer is known."""

import numpy as np
import pytest

from ddrl_jax.rl.signals import (
    heldout_loss_signal,
    image_statistics_signal,
    reward_slope_signal,
    reward_std_signal,
    sub_score_signal,
)


def test_heldout_loss():
    fine, bad = heldout_loss_signal([2.0, 2.3, 2.19]), heldout_loss_signal([2.0, 2.1, 2.21])
    assert (fine.name, fine.alarm, bad.alarm) == ("heldout_loss", False, True)
    np.testing.assert_allclose([fine.value, bad.value], [0.095, 0.105])
    assert "+10.5 %" in bad.evidence and bad.limit == 0.10
    assert heldout_loss_signal([2.0, 2.1, 2.21], limit=0.2).alarm is False


def test_reward_slope():
    noise = np.random.default_rng(0).normal(size=80) * 0.15
    slow, steep = 0.01 * np.arange(80) + noise, np.r_[np.zeros(40), 0.04 * np.arange(40)] + noise
    assert not reward_slope_signal(slow).alarm
    alarm = reward_slope_signal(steep)
    assert alarm.alarm and abs(alarm.value - 0.04) < 0.01 and alarm.name == "reward_slope"
    # In units of a spread of 4 it is an ordinary rise.
    assert not reward_slope_signal(steep, unit=4.0).alarm
    np.testing.assert_allclose(reward_slope_signal(0.5 * np.arange(10.0), unit=2.0).value, 0.25)
    assert reward_slope_signal(-steep).value < 0.01


def test_whether_the_reward_rose_is_told_by_its_ends():
    rise = np.r_[np.zeros(5), np.full(40, 9.0), np.full(5, 0.1)]
    assert reward_slope_signal(rise).rose and not reward_slope_signal(-rise).rose
    assert not reward_slope_signal(np.ones(50)).rose
    assert not reward_slope_signal(np.r_[np.zeros(45), -1.0, -1.0, -1.0, -1.0, 1.0]).rose  # a tenth is five updates
    assert not heldout_loss_signal([1.0, 2.0]).rose and not reward_slope_signal([]).rose


def test_reward_std():
    stds = np.linspace(1.4, 0.7, 50)
    alarm = reward_std_signal(stds)
    assert alarm.alarm and alarm.name == "reward_std"
    np.testing.assert_allclose(alarm.value, 1 - stds[-5:].mean() / stds[:5].mean())
    assert not reward_std_signal(stds[::-1]).alarm and not reward_std_signal(np.full(50, 1.2)).alarm


@pytest.mark.parametrize("signal", [heldout_loss_signal, reward_slope_signal, reward_std_signal])
@pytest.mark.parametrize("values", [[], [1.0], [np.nan, 1.0]])
def test_too_little_to_tell_is_no_alarm_and_says_so(signal, values):
    result = signal(values)
    assert not result.alarm and np.isnan(result.value) and result.evidence.endswith(".")


@pytest.mark.parametrize("signal", [heldout_loss_signal, reward_slope_signal, reward_std_signal])
def test_signals_are_plain_python(signal):
    result = signal(np.arange(1.0, 30.0))
    assert type(result.value) is float and type(result.alarm) is bool


def _sub(rewards, **curves):
    return sub_score_signal(rewards, curves, dict.fromkeys(curves, 1.0))


def test_average_up_while_one_falls():
    alarm = _sub([0.0, 1.0, 2.0], up=[0.0, 2.0, 4.0], down=[0.5, 0.4, 0.2], flat=[1.0, 1.0, 1.0])
    assert (alarm.name, alarm.alarm, alarm.limit) == ("sub_scores", True, 0.25)
    assert alarm.value == pytest.approx(0.3)
    assert alarm.evidence == (
        "Since the first evaluation the reward rose from 0 to 2 while down fell from 0.5 to 0.2, "
        "by 0.3 within-group standard deviations (limit 0.25)."
    )
    quiet = _sub([0.0, 1.0, 2.0], up=[0.0, 2.0, 4.0], down=[0.5, 0.4, 0.26])
    assert not quiet.alarm and quiet.value == pytest.approx(0.24)
    none = _sub([0.0, 2.0], up=[0.0, 2.0])
    assert none.value == 0.0 and not none.alarm and "No sub-score fell" in none.evidence


def test_units_are_each_its_own():
    curves = {"a": [3.0, 0.0], "b": [0.3, 0.0]}
    signal = sub_score_signal([0.0, 1.0], curves, {"a": 30.0, "b": 0.5})
    assert signal.value == pytest.approx(0.6) and "b fell" in signal.evidence
    assert sub_score_signal([0.0, 1.0], curves, {"a": 30.0}).value == pytest.approx(0.1)
    assert np.isnan(sub_score_signal([0.0, 1.0], curves, {"a": 0.0}).value)
    # A reward that rose by a hundredth of its spread has not risen.
    assert sub_score_signal([0.0, 1.0], curves, {"b": 0.5}, reward_unit=100.0).value == 0.0
    assert sub_score_signal([0.0, 1.0], curves, {"b": 0.5}, reward_unit=3.9).alarm


def test_a_fall_without_a_rise_of_the_reward_is_no_trade():
    assert _sub([1.0, 0.0], a=[1.0, 0.0]).value == 0.0
    assert _sub([0.0, 0.24], a=[1.0, 0.0]).value == 0.0
    assert _sub([0.0, 0.26], a=[1.0, 0.0]).value == 1.0


def test_a_gain_that_was_traded_away_later_is_seen():
    signal = _sub([0.0, 1.0, 2.0], a=[0.0, 0.9, 0.5], b=[0.0, 0.1, 1.5])
    assert signal.value == pytest.approx(0.4)
    assert signal.evidence.startswith("Since evaluation 2 the reward rose from 1 to 2 while a fell from 0.9 to 0.5")
    # What was lost on the way and came back is not held against the run.
    assert _sub([0.0, 1.0, 2.0], a=[0.9, 0.1, 0.9]).value == 0.0


def test_sub_scores_with_gaps():
    nan = np.nan
    assert _sub([0.0, 1.0, 2.0], a=[nan, 1.0, 0.5]).value == pytest.approx(0.5)
    assert _sub([0.0, nan, 2.0], a=[0.5, 9.0, 0.1]).value == pytest.approx(0.4)
    assert np.isnan(_sub([0.0, 1.0, 2.0], a=[1.0, 0.5, nan]).value)
    assert np.isnan(_sub([0.0, 1.0, nan], a=[1.0, 0.5, 0.0]).value)
    with pytest.raises(ValueError, match=r"sub_scores\['a'\] = \(3,\): must be of the rewards' length, \(2,\)"):
        _sub([0.0, 1.0], a=[1.0, 0.5, 0.1])


def test_image_statistics():
    curves = {"edge_density": [0.2, 9.0, 0.21], "temporal_difference": [0.1, 0.1, 0.084], "saturation": [np.nan] * 3}
    alarm = image_statistics_signal(curves)
    assert (alarm.name, alarm.alarm, alarm.limit) == ("image_statistics", True, 0.15)
    assert alarm.value == pytest.approx(0.16)  # a fall counts as a rise does
    assert "temporal difference moved most: from 0.1 to 0.084 (-16.0 %, limit 15 % either way)" in alarm.evidence
    assert not image_statistics_signal(curves, limit=0.17).alarm
    curves["edge_density"][-1] = 0.234
    assert image_statistics_signal(curves).value == pytest.approx(0.17)
    still = image_statistics_signal({"temporal_difference": [0.0, 0.5]})
    assert np.isnan(still.value) and not still.alarm  # of nothing there is no share


@pytest.mark.parametrize("values", [[], [1.0], [np.nan, 1.0]])
def test_too_little_of_several_curves(values):
    for result in (_sub(values, a=values), _sub(values), image_statistics_signal({"a": values}), _sub([])):
        assert not result.alarm and np.isnan(result.value) and result.evidence.endswith(".")


def test_new_signals_are_plain_python():
    for result in (_sub(np.arange(3.0), a=-np.arange(3.0)), image_statistics_signal({"a": np.arange(1.0, 3.0)})):
        assert type(result.value) is float and type(result.alarm) is bool
