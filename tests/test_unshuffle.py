import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax.models.unshuffle import Unshuffle


def test_channel_order_is_c_dy_dx():
    video = np.arange(2 * 3 * 2 * 4 * 6, dtype=np.float32).reshape(2, 3, 2, 4, 6)
    latent = Unshuffle(factor=2, mean=0.0, std=1.0).encode(video)
    assert latent.shape == (2, 12, 2, 2, 3)
    for c in range(3):
        for dy in range(2):
            for dx in range(2):
                np.testing.assert_array_equal(latent[:, (c * 2 + dy) * 2 + dx], video[:, c, :, dy::2, dx::2])


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_round_trip_and_units(xp, factor):
    video = np.random.default_rng(0).uniform(-1, 1, (2, 3, 2, 8, 12)).astype(np.float32)
    codec = Unshuffle(factor, mean=-0.8, std=0.45)
    latent = codec.encode(xp.asarray(video))
    assert isinstance(latent, type(xp.asarray(video))) and latent.dtype == np.float32
    np.testing.assert_allclose(np.mean(latent), (video.mean() + 0.8) / 0.45, rtol=1e-5)
    np.testing.assert_allclose(np.std(latent), video.std() / 0.45, rtol=1e-5)
    np.testing.assert_allclose(codec.decode(latent), video, atol=3e-7)


def test_exact_inverse_for_powers_of_two():
    video = np.random.default_rng(0).integers(0, 256, (1, 1, 4, 12, 12)).astype(np.float32) / 128 - 1
    codec = Unshuffle(2, mean=-0.5, std=0.5)
    np.testing.assert_array_equal(codec.decode(codec.encode(video)), video)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="5 x 4"):
        Unshuffle(2, 0.0, 1.0).encode(np.zeros((1, 1, 1, 5, 4)))
    with pytest.raises(ValueError, match="6 channels"):
        Unshuffle(2, 0.0, 1.0).decode(np.zeros((1, 6, 1, 2, 2)))
    with pytest.raises(ValueError, match="std 0"):
        Unshuffle(2, 0.0, 0.0)
