"""The hacking signals on curves whose answer is known."""

import numpy as np
import pytest

from ddrl_jax.rl.signals import heldout_loss_signal, reward_slope_signal, reward_std_signal


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
