"""Image statistics on clips whose answer is known by hand."""

import colorsys

import numpy as np
import pytest

from ddrl_jax.data.image_statistics import NAMES, image_statistics


def clip(x_CTHW):
    """Pixel values in [0, 1] -> one clip in [-1, 1]."""
    return np.asarray(x_CTHW, np.float32)[None] * 2 - 1


def of(x_CTHW):
    return {name: float(value[0]) for name, value in image_statistics(clip(x_CTHW)).items()}


def test_a_ramp_has_its_slope_as_edge_density():
    rows, columns = np.mgrid[:5, :4]
    ramp = (0.03 * columns + 0.04 * rows)[None, None]
    assert of(ramp)["edge_density"] == pytest.approx(0.05, rel=1e-5)  # 3-4-5
    assert of(0.1 * columns[None, None])["edge_density"] == pytest.approx(0.1, rel=1e-5)
    assert of(0.1 * rows[None, None])["edge_density"] == pytest.approx(0.1, rel=1e-5)


def test_edges_are_those_of_every_frame_and_of_the_grey_image():
    step = np.zeros((1, 2, 3, 5))
    step[:, 1, :, 2:] = 0.8  # one of four forward differences, in one of two frames
    assert of(step)["edge_density"] == pytest.approx(0.8 / 4 / 2, rel=1e-5)
    red = np.concatenate([step, np.zeros((2, 2, 3, 5))])
    assert of(red)["edge_density"] == pytest.approx(0.8 / 4 / 2 / 3, rel=1e-5)


def test_saturation_is_hsvs():
    rng = np.random.default_rng(0)
    video = rng.uniform(size=(3, 2, 4, 5)).astype(np.float32)
    video[:, 0, 0, 0] = 0.0  # black has none
    expected = np.mean([colorsys.rgb_to_hsv(*pixel)[1] for pixel in video.reshape(3, -1).T.astype(float)])
    assert of(video)["saturation"] == pytest.approx(expected, abs=1e-5)
    assert of(np.array([0.8, 0.6, 0.2])[:, None, None, None] * np.ones((1, 1, 2, 2)))["saturation"] == pytest.approx(
        0.75
    )
    assert of(np.full((3, 1, 2, 2), 0.4))["saturation"] == pytest.approx(0.0, abs=1e-6)
    assert of(np.zeros((3, 1, 2, 2)))["saturation"] == 0.0


def test_temporal_difference():
    video = np.zeros((3, 4, 2, 2))
    video[0, 1] = 0.6  # one of three channels: there in frame 1, gone in frame 2
    assert of(video)["temporal_difference"] == pytest.approx(2 * 0.6 / 3 / 3, rel=1e-5)
    assert of(np.full((1, 4, 2, 2), 0.3))["temporal_difference"] == 0.0


def test_brightness_and_contrast():
    video = np.zeros((1, 2, 1, 4))
    video[0, 0] = [0.0, 0.0, 0.4, 0.8]  # mean 0.3, distances 0.3 0.3 0.1 0.5
    video[0, 1] = 0.9  # a bright frame is no contrast
    found = of(video)
    assert found["brightness"] == pytest.approx((0.3 + 0.9) / 2, rel=1e-5)
    assert found["contrast"] == pytest.approx(0.3 / 2, rel=1e-5)


def test_what_does_not_exist_is_nan_and_nothing_else_is():
    nan = {name for name, value in of(np.full((1, 1, 2, 2), 0.3)).items() if np.isnan(value)}
    assert nan == {"saturation", "temporal_difference"}
    assert np.isnan(of(np.full((3, 2, 1, 5), 0.3))["edge_density"])
    assert not any(np.isnan(value) for value in of(np.full((3, 2, 2, 2), 0.3)).values())


def test_clips_do_not_mix_and_a_nan_stays_in_its_own():
    video = np.random.default_rng(0).uniform(-1, 1, size=(3, 3, 2, 4, 4)).astype(np.float32)
    video[1, 0, 0, 0, 0] = np.nan
    found = image_statistics(video)
    assert tuple(found) == NAMES
    for name, value in found.items():
        assert value.shape == (3,) and value.dtype == np.float64
        assert np.isfinite(value[[0, 2]]).all() and np.isnan(value[1]), name
        assert value[2] == image_statistics(video[2:])[name][0]
    assert image_statistics(np.empty((0, 3, 2, 4, 4), np.float32))["contrast"].shape == (0,)


@pytest.mark.parametrize(
    ("video", "message"),
    [
        (np.zeros((2, 3, 4, 4)), r"video = \(2, 3, 4, 4\): must be"),
        (np.zeros((2, 2, 3, 4, 4)), r"with C 1 or 3"),
        (np.zeros((2, 3, 0, 4, 4)), r"no empty clips"),
        (np.zeros((2, 3, 1, 4, 4), np.uint8), r"video = uint8: must be floating point"),
        (np.full((2, 3, 1, 4, 4), -1.01), r"values up to 1.01 in size: must be in \[-1, 1\]"),
    ],
)
def test_bad_input(video, message):
    with pytest.raises(ValueError, match=message):
        image_statistics(video)
