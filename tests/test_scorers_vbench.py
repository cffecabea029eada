"""VBench's five scores on tiny networks: against the originals' numbers, and formula by formula.

The numbers are what the originals make of the same tensors and clip: vision_transformer.py of facebookresearch/dino,
MUSIQ of pyiqa (IQA-PyTorch 01ae427), AMT-S and the scores of VBench (Vchitect/VBench 45e79ec).
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.nn import functional as F  # noqa: E402

from ddrl_jax.sidecar.scorers import amt, load, qwen_video, vbench  # noqa: E402
from tests import tiny_films  # noqa: E402

torch.set_num_threads(1)
TOLERANCE = 2e-6  # float32; a score is a mean of many numbers
CLIP = (7, 150, 200)


@pytest.fixture(scope="module")
def folder_and_nets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vbench")
    return folder, tiny_films.write_vbench(folder)


@pytest.fixture(scope="module")
def scorer(folder_and_nets):
    return load("vbench", str(folder_and_nets[0]), "cpu")[1]


@pytest.fixture(scope="module")
def frames():
    return qwen_video.levels(tiny_films.clip(*CLIP)).float()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


# ---- the originals' numbers ------------------------------------------------------------------------------------------


def test_the_scores_are_the_originals(scorer, frames):
    assert scorer.subject_consistency(frames) == pytest.approx(0.9991437395413717, abs=TOLERANCE)
    assert scorer.motion_smoothness(frames) == pytest.approx(0.5300761801016702, abs=TOLERANCE)
    assert scorer.motion_smoothness(frames[:6]) == pytest.approx(
        0.5294491721132898, abs=TOLERANCE
    )  # the last is left out
    assert scorer.imaging_quality(frames) == pytest.approx(-0.01271125657217843, abs=TOLERANCE)
    large = qwen_video.levels(tiny_films.clip(2, 300, 600, "big")).float()  # made smaller first
    wanted = (-1.2361222505569458 - 1.2299079895019531) / 2 / 100
    assert scorer.imaging_quality(large) == pytest.approx(wanted, abs=TOLERANCE)


def test_dino_places_its_positions_as_dino_does(scorer, frames):
    x = vbench.standardise(vbench.shorter_side(frames[:1], "bilinear"), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    wanted = [-0.09333406388759613, -0.045288801193237305, 0.42196542024612427, 0.0025015075225383043]
    got = scorer.dino(x, interpolate_pos_encoding=True).last_hidden_state[0, 0, :4]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
    table = scorer.dino.embeddings.position_embeddings
    assert vbench.dino_positions(scorer.dino.embeddings, torch.empty(1, 197, 48), 224, 224) is table
    placed = vbench.dino_positions(scorer.dino.embeddings, torch.empty(1, 1 + 14 * 18, 48), 224, 298)
    theirs = type(scorer.dino.embeddings).interpolate_pos_encoding(
        scorer.dino.embeddings, torch.empty(1, 1 + 14 * 18, 48), 224, 298
    )
    assert placed.shape == theirs.shape and 1e-3 < (placed - theirs).abs().max() < 0.5


# ---- formula by formula ----------------------------------------------------------------------------------------------


def cosine(a, b):
    return float(a @ b / a.norm() / b.norm())


def by_loops(features):
    """Both consistencies as the paper has them (sec. 4.1), frame by frame."""
    total = 0.0
    for t in range(1, len(features)):
        total += max(0.0, cosine(features[t - 1], features[t])) / 2 + max(0.0, cosine(features[0], features[t])) / 2
    return total / (len(features) - 1)


def clip_pixels(frames):
    """CLIP's input by the formulas of bicubic interpolation, one axis after the other."""

    def axis(x, size):  # along the last axis, a = -0.75
        n = x.shape[-1]
        at = (torch.arange(size, dtype=torch.float64) + 0.5) * n / size - 0.5
        low = at.floor()
        out = 0
        for k in range(-1, 3):
            d = (at - low - k).abs()
            near, far = 1.25 * d**3 - 2.25 * d**2 + 1, -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
            weight = torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))
            out = out + weight * x[..., (low + k).long().clamp(0, n - 1)]
        return out

    h, w = frames.shape[2:]
    tall = (224, int(224 * w / h)) if h <= w else (int(224 * h / w), 224)
    x = axis(axis(frames.double(), tall[1]).transpose(2, 3), tall[0]).transpose(2, 3)
    top, left = round((tall[0] - 224) / 2), round((tall[1] - 224) / 2)
    x = x[:, :, top : top + 224, left : left + 224] / 255
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return ((x - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std).double()[:, None, None]).float()


@pytest.mark.parametrize("turned", [False, True])
def test_background_consistency_and_aesthetic_quality(scorer, folder_and_nets, frames, turned):
    base, large, head, *_ = folder_and_nets[1]
    frames = frames.transpose(2, 3) if turned else frames
    pixels = clip_pixels(frames)
    features = base.get_image_features(pixel_values=pixels).pooler_output.double()
    assert scorer.background_consistency(frames) == pytest.approx(by_loops(features), abs=TOLERANCE)
    features = large.get_image_features(pixel_values=pixels).pooler_output.double()
    scores = [float(f / f.norm() @ head.weight[0].double() + head.bias[0]) for f in features]
    assert scorer.aesthetic_quality(frames) == pytest.approx(np.mean(scores) / 10, abs=TOLERANCE)


def test_consistency_takes_no_cosine_below_zero():
    features = torch.tensor([[1.0, 0.0], [-1.0, 1e-3], [0.0, 2.0]])
    assert vbench.consistency(features) == pytest.approx(by_loops(features.double()), abs=1e-12)
    assert vbench.consistency(features[:2]) == 0
    assert vbench.consistency(features[:1].repeat(5, 1)) == pytest.approx(1, abs=1e-12)


def test_subject_consistency_from_dinos_features(scorer, frames):
    x = F.interpolate(frames, (224, 298), mode="bilinear") / 255
    mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    x = (x - mean[:, None, None]) / std[:, None, None]
    tokens = [scorer.dino(f[None], interpolate_pos_encoding=True).last_hidden_state[0, 0].double() for f in x]
    assert scorer.subject_consistency(frames) == pytest.approx(by_loops(tokens), abs=TOLERANCE)


def test_imaging_quality_from_musiqs_scores(scorer, folder_and_nets, frames):
    musiq = folder_and_nets[1][3]
    wanted = np.mean([float(musiq(f[None] / 255)) for f in frames]) / 100
    assert scorer.imaging_quality(frames) == pytest.approx(wanted, abs=TOLERANCE)


def test_motion_smoothness_from_the_guesses(scorer, folder_and_nets, frames):
    net = folder_and_nets[1][4]
    padded = F.pad(frames / 255, (4, 4, 5, 5), mode="replicate")  # 150 x 200 -> 160 x 208
    differences = []
    for t in (1, 3, 5):
        guess = (net(padded[t - 1 : t], padded[t + 1 : t + 2])[0, :, 5:155, 4:204] * 255).byte().double()
        differences.append(float((guess - frames[t].double()).abs().mean()))
    assert scorer.motion_smoothness(frames) == pytest.approx(1 - np.mean(differences) / 255, abs=1e-9)


def test_the_frame_between_of_equal_frames_with_no_flow_is_that_frame():
    """Zero last layers: no flow, half of each frame, nothing added."""
    net = amt.AmtS().eval()
    state = tiny_films.fill(net.state_dict())
    ends = (
        "decoder4.convblock.2",
        "decoder3.convblock.2",
        "decoder2.convblock.2",
        "decoder1.convblock.2",
        "comb_block.2",
    )
    for name in state:
        if name.startswith(ends) or ".flow_head.2" in name:
            state[name] = torch.zeros_like(state[name])
    net.load_state_dict(state)
    a, b = (tiny_films.noise(name, (1, 3, 128, 144)) / 2 + 0.5 for name in "ab")
    # Warping by nothing looks a float32 rounding of 144 columns beside each pixel of noise: 1e-5.
    np.testing.assert_allclose(net(a, a), a, rtol=0, atol=2e-5)
    np.testing.assert_allclose(net(a, b), (a + b) / 2, rtol=0, atol=2e-5)


# ---- what a scorer owes ----------------------------------------------------------------------------------------------


def test_overall_is_the_mean_and_scores_do_not_depend_on_batch_mates(scorer):
    clips = [tiny_films.clip(3, 130, 140, name) for name in ("one", "other")]
    together = scorer.score(torch.stack(clips), ["", ""])
    assert list(together) == [*vbench.SCORES, "overall"]
    for i in (1, 0):
        assert scorer.score(clips[i][None], ["prompts do not count"]) == {n: [v[i]] for n, v in together.items()}
        assert together["overall"][i] == pytest.approx(np.mean([together[n][i] for n in vbench.SCORES]), abs=1e-12)
    assert together["overall"][0] != together["overall"][1]


@pytest.mark.parametrize("size", [(2, 150, 200), (7, 100, 200), (7, 150, 127)])
def test_small_videos_are_refused(scorer, size):
    with pytest.raises(ValueError, match="3 frames of 128 x 128"):
        scorer.score(tiny_films.clip(*size)[None], [""])


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (vbench.DINO + "/config.json", "no dino-vitb16/config.json"),
        (vbench.AESTHETIC, "none of sa_0_4_vit_l_14_linear"),
        (vbench.MUSIQ, "none of musiq_spaq"),
        (vbench.AMT, "none of amt-s"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(folder_and_nets, tmp_path, file, says):
    for source in folder_and_nets[0].rglob("*"):
        if source.is_file() and (name := str(source.relative_to(folder_and_nets[0]))) != file:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).symlink_to(source)
    with pytest.raises(ValueError, match=f"^scorer vbench: weights: {says}"):
        load("vbench", str(tmp_path), "cpu")


def test_files_that_do_not_fit_are_refused(folder_and_nets, tmp_path):
    def with_file(name, state):
        for source in folder_and_nets[0].iterdir():
            (tmp_path / source.name).unlink(missing_ok=True)
            (tmp_path / source.name).symlink_to(source)
        (tmp_path / name).unlink()
        torch.save(state, tmp_path / name)
        load("vbench", str(tmp_path), "cpu")

    state = torch.load(folder_and_nets[0] / vbench.MUSIQ, weights_only=True)
    with pytest.raises(ValueError, match="MUSIQ"):
        with_file(vbench.MUSIQ, {n: v for n, v in state.items() if n != "head.weight"})
    with pytest.raises(ValueError, match="not MUSIQ's"):
        with_file(vbench.MUSIQ, {"head.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"amt-s\.pth"):
        with_file(vbench.AMT, {"conv1.weight": torch.ones(1)})


def test_a_vit_that_lacks_a_tensor_is_refused(folder_and_nets, tmp_path):
    from safetensors.torch import load_file, save_file

    for source in folder_and_nets[0].iterdir():
        if source.name != vbench.DINO:
            (tmp_path / source.name).symlink_to(source)
    (tmp_path / vbench.DINO).mkdir()
    dino = folder_and_nets[0] / vbench.DINO
    (tmp_path / vbench.DINO / "config.json").write_text((dino / "config.json").read_text())
    state = load_file(dino / "model.safetensors")
    del state["layernorm.bias"]
    save_file(state, tmp_path / vbench.DINO / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 tensors, the first being layernorm\.bias"):
        load("vbench", str(tmp_path), "cpu")
