"""Picture scorers on tiny random checkpoints, through the loaders that the real weights use: what they score against
the same networks run by transformers as their authors do, or written out in plain torch."""

import ast
import io
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from PIL import Image  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from ddrl_jax.sidecar.scorers import BUILT_IN, load, resolve  # noqa: E402
from ddrl_jax.sidecar.scorers import backbones as bb  # noqa: E402
from ddrl_jax.sidecar.scorers.hps_v2 import padded_pixels  # noqa: E402
from ddrl_jax.sidecar.worker import score_in_fixed_batches  # noqa: E402

from . import tiny_pictures as tiny  # noqa: E402
from .paths import ROOT  # noqa: E402

torch.set_num_threads(1)
PROMPTS = ["a red cat", "a photo of a dog and a cat", "dog", "", "a red red red dog", "photo"]
WITH_WEIGHTS = ("aesthetic", "clip_score", "hps_v2", "image_reward", "pick_score")
HPS, HEAD = "HPS_v2.1_compressed.pt", "sac+logos+ava1-l14-linearMSE.pth"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Scorer -> a folder of weights."""
    root = tmp_path_factory.mktemp("weights")
    tiny.write_clip(root / "clip")
    tiny.write_clip(root / "aesthetic", seed=1)
    tiny.write_head(root / "aesthetic" / HEAD, 24)
    vocabulary = tiny.write_clip_tokenizer(root / "hps_v2")
    tiny.clip_config(vocabulary, "gelu").save_pretrained(root / "hps_v2")
    torch.save({"epoch": 1, "state_dict": tiny.open_clip_state(vocabulary)}, root / "hps_v2" / HPS)
    tiny.write_image_reward(root / "image_reward")
    both = {"clip_score": root / "clip", "pick_score": root / "clip"}
    return {**both, **{name: root / name for name in ("aesthetic", "hps_v2", "image_reward")}}


@pytest.fixture(scope="module")
def scorers(folders):
    return {name: load(name, str(folder), "cpu")[1] for name, folder in folders.items()}


def clips(n=6, t=1, h=40, w=53, seed=0):
    """Smooth noise, so that a wrong crop or resize changes much."""
    x = torch.randn((n * t, 3, 6, 8), generator=torch.Generator().manual_seed(seed))
    x = F.interpolate(x, (h, w), mode="bicubic").view(n, t, 3, h, w).transpose(1, 2)
    return x.clamp(-1, 1).numpy()


def scores_of(scorer, videos, prompts=PROMPTS):
    return {k: np.array(v) for k, v in score_in_fixed_batches(scorer, videos, list(prompts)).items()}


def pils(videos, frame=0):
    levels = np.round((np.clip(videos[:, :, frame], -1, 1) + 1) * 127.5).astype(np.uint8)
    return [Image.fromarray(p) for p in levels.transpose(0, 2, 3, 1)]


# --- pictures ---


@pytest.mark.parametrize(
    ("total", "wanted", "indices"),
    [
        (1, 4, [0]),
        (4, 4, [0, 1, 2, 3]),
        (5, 4, [0, 1, 3, 4]),
        (8, 4, [1, 3, 5, 7]),
        (93, 4, [11, 34, 58, 81]),
        (9, 1, [4]),
    ],
)
def test_frames_are_the_middles_of_equal_parts(total, wanted, indices):
    assert bb.frame_indices(total, wanted) == indices


@pytest.mark.parametrize("size", [(28, 28), (40, 53), (53, 40), (31, 28), (20, 25), (28, 57), (96, 31)])
def test_pixels_are_those_of_transformers_image_processor(size):
    pil = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    processor = pil.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    [picture] = pils(clips(1, h=size[0], w=size[1]))
    theirs = processor(images=picture, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(bb.cropped_pixels(np.asarray(picture), 28, centre="floor"), theirs, rtol=0, atol=2e-6)


def test_half_a_pixel_goes_where_each_library_puts_it():
    # torchvision's CenterCrop: int(round((31 - 28) / 2)) = 2, and round(0.5) = 0; transformers': 3 // 2 = 1.
    ramp = np.broadcast_to(np.arange(31, dtype=np.uint8)[None, :, None], (28, 31, 3)).copy()
    assert bb.shortest_side(ramp, 28, centre="round")[0, 0, 0] == 2
    assert bb.shortest_side(ramp, 28, centre="floor")[0, 0, 0] == 1
    assert bb.shortest_side(ramp[:, :29], 28, centre="round")[0, 0, 0] == 0


def test_hps_pads_with_black_and_keeps_the_whole_picture():
    white = np.full((20, 41, 3), 255, np.uint8)
    pixels = padded_pixels(white, 28)  # 28/41 of 20 is 13.66, so 14 rows, 7 black ones on each side
    bright = pixels > 0
    assert bright[:, 7:21].all() and not bright[:, :7].any() and not bright[:, 21:].any()
    black = bb.normalised(torch.zeros(3, 1, 1))
    torch.testing.assert_close(pixels[:, :7], black.expand(3, 7, 28))
    same = np.asarray(pils(clips(1, h=28, w=28))[0])
    torch.testing.assert_close(padded_pixels(same, 28), bb.normalised(bb.unit_tensor(same)))
    # Shrunk with antialias: a fine checkerboard becomes grey, where without it stays black and white.
    board = (np.indices((84, 84)).sum(0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, 2)
    grey = bb.normalised(torch.full((3, 1, 1), 0.5))
    assert (padded_pixels(board, 28) - grey)[:, 4:-4, 4:-4].abs().max() < 0.1


# --- scores, against independent computations ---


def as_transformers_does(folder, pictures, prompts):
    """Embeddings as the READMEs compute them: padded to the longest only, with a mask; and the scale."""
    pil = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = pil.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    with torch.inference_mode():
        out = model(
            **tokenizer(prompts, padding=True, truncation=True, max_length=20, return_tensors="pt"),
            pixel_values=processor(images=pictures, return_tensors="pt").pixel_values,
        )
    return out.image_embeds.double().numpy(), out.text_embeds.double().numpy(), out.logits_per_image.diag().numpy()


def test_pick_score_is_the_logit_of_a_picture_and_its_prompt(scorers, folders):
    videos = clips(h=40, w=56)  # resized to 28 x 39: half a pixel apart, and so are the libraries
    image, text, logits = as_transformers_does(folders["pick_score"], pils(videos), PROMPTS)
    scores = scores_of(scorers["pick_score"], videos)
    assert np.std(logits) > 0.05  # else agreement would say nothing
    np.testing.assert_allclose(scores["overall"], logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(scores["cosine"], (image * text).sum(1), atol=1e-5)


def test_clip_score_is_the_papers_and_the_bare_cosine(scorers, folders):
    videos = clips(h=40, w=56)
    scores = scores_of(scorers["clip_score"], videos)
    pictures = [Image.fromarray(bb.shortest_side(np.asarray(p), 28, centre="round")) for p in pils(videos)]
    image, text, _ = as_transformers_does(folders["clip_score"], pictures, [f"A photo depicts {p}" for p in PROMPTS])
    cosine = (image * text).sum(1)
    np.testing.assert_allclose(scores["overall"], 2.5 * np.maximum(cosine, 0), atol=1e-4)
    image, text, _ = as_transformers_does(folders["clip_score"], pictures, PROMPTS)
    np.testing.assert_allclose(scores["cosine"], (image * text).sum(1), atol=1e-5)


def test_clip_score_is_never_negative_and_grows_with_the_cosine(scorers, monkeypatch):
    scorer = scorers["clip_score"]
    monkeypatch.setattr(scorer.clip, "cosines", lambda image, prompts: torch.tensor([[-0.2, 0.4], [0.1, 0.3]]).double())
    scores = scorer.score(torch.zeros(2, 3, 2, 28, 28), ["cat", "dog"])
    assert scores["overall"] == pytest.approx([2.5 * 0.2, 2.5 * 0.2])  # a frame below 0 counts as 0
    assert scores["cosine"] == pytest.approx([0.1, 0.2])


def test_hps_is_the_cosine_of_the_published_network(scorers, folders):
    videos, scorer = clips(), scorers["hps_v2"]
    state = torch.load(folders["hps_v2"] / HPS, weights_only=True)["state_dict"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["hps_v2"])
    ids = tokenizer(PROMPTS, padding="max_length", max_length=20, return_tensors="pt").input_ids
    pixels = torch.stack([padded_pixels(np.asarray(p), 28) for p in pils(videos)])
    image, text = tiny.open_clip_image(state, pixels), tiny.open_clip_text(state, ids, tokenizer.eos_token_id)
    cosine = F.cosine_similarity(image, text).numpy()
    assert np.std(cosine) > 0.02
    np.testing.assert_allclose(scores_of(scorer, videos)["overall"], cosine, atol=1e-5)


def test_hps_v2_0_and_safetensors_are_read_too(folders, tmp_path):
    from safetensors.torch import save_file

    state = torch.load(folders["hps_v2"] / HPS, weights_only=True)["state_dict"]
    expected = scores_of(load("hps_v2", str(folders["hps_v2"]), "cpu")[1], clips())["overall"]
    for i, name in enumerate(("HPS_v2_compressed.pt", "HPS_v2.1_compressed.safetensors")):
        folder = tmp_path / str(i)
        tiny.clip_config(tiny.write_clip_tokenizer(folder), "gelu").save_pretrained(folder)
        save_file(state, folder / name) if name.endswith("safetensors") else torch.save(
            {"state_dict": state}, folder / name
        )
        assert scores_of(load("hps_v2", str(folder), "cpu")[1], clips())["overall"].tolist() == expected.tolist()


def test_aesthetic_is_the_head_on_the_normalised_embedding(scorers, folders):
    videos = clips()
    model = transformers.CLIPModel.from_pretrained(folders["aesthetic"]).eval()
    pixels = torch.stack([bb.cropped_pixels(np.asarray(p), 28, centre="round") for p in pils(videos)])
    with torch.inference_mode():
        image = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output).double()
    head = torch.load(folders["aesthetic"] / HEAD, weights_only=True)
    rating = tiny.apply_head(head, image / image.norm(dim=1, keepdim=True))[:, 0].numpy()
    assert np.std(rating) > 0.01
    np.testing.assert_allclose(scores_of(scorers["aesthetic"], videos)["overall"], rating, rtol=1e-4, atol=1e-4)


def test_image_reward_is_the_published_network(scorers, folders):
    videos, scorer = clips(), scorers["image_reward"]
    state = torch.load(folders["image_reward"] / "ImageReward.pt", weights_only=True)
    assert scorer.size == 24  # patches of 8, 9 of them
    tokens = scorer.tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
    assert tokens.input_ids.shape == (6, 35) and tokens.input_ids[0, :5].tolist() == [2, 5, 10, 8, 3]
    pixels = torch.stack([bb.cropped_pixels(np.asarray(p), 24, centre="round") for p in pils(videos)])
    features = tiny.blip_features(state, pixels, tokens.input_ids, tokens.attention_mask)
    reward = (
        tiny.apply_head(state, features.double(), "mlp.layers.")[:, 0].numpy() - 0.16717362830052426
    ) / 1.0333394966054072
    assert np.std(reward) > 0.01
    np.testing.assert_allclose(scores_of(scorer, videos)["overall"], reward, rtol=1e-4, atol=1e-4)


def test_image_reward_reads_35_tokens(scorers):
    scorer, videos = scorers["image_reward"], clips(4)
    words = ["a", "red", "cat"] * 11  # 33, and two for the ends
    prompts = [" ".join(w) for w in (words, [*words, "dog"], [*words[:-1], "dog"], [*words[:-1], "dog", "dog"])]
    scores = scores_of(scorer, videos[[0] * 4], prompts)["overall"]
    assert scores[0] == scores[1] and scores[2] == scores[3] and scores[0] != scores[2]


def test_jpeg_is_minus_the_kilobytes():
    scorer = load("jpeg", None, "cpu")[1]
    videos = np.concatenate([clips(2, h=64, w=64), np.zeros((1, 3, 1, 64, 64), np.float32)])
    noise = np.random.default_rng(0).uniform(-1, 1, (1, 3, 1, 64, 64)).astype(np.float32)
    scores = scores_of(scorer, np.concatenate([videos, noise]), ["x"] * 4)["overall"]
    for picture, score in zip(pils(videos), scores, strict=False):
        out = io.BytesIO()
        picture.save(out, "JPEG", quality=95)
        assert score == pytest.approx(-len(out.getvalue()) / 1000)
    assert 0 > scores[2] > max(scores[:2]) and scores[3] < min(scores[:3])  # flat, smooth, noise


# --- what holds of all ---


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, "jpeg"])
def test_a_score_does_not_depend_on_the_batch_mates(scorers, name):
    scorer = scorers.get(name) or load(name, None, "cpu")[1]
    videos, others = clips(t=3), clips(t=3, seed=9)
    long = "a photo of a cat and a dog and a red red dog"
    alone = scores_of(scorer, videos[:1], PROMPTS[:1])
    mates = scores_of(scorer, np.concatenate([videos[:1], others[:5]]), [PROMPTS[0], *[long] * 5])
    last = scores_of(scorer, np.concatenate([others[:5], videos[:1]]), [*[long] * 5, PROMPTS[0]])
    for key, value in alone.items():
        assert value[0] == mates[key][0] == last[key][5]
        assert len(set(mates[key])) > 1


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, "jpeg"])
def test_a_clip_scores_the_mean_of_its_frames(scorers, name):
    scorer = scorers.get(name) or load(name, None, "cpu")[1]
    videos = clips(2, t=9)
    whole = scores_of(scorer, videos, PROMPTS[:2])
    chosen = [scores_of(scorer, videos[:, :, [i]], PROMPTS[:2]) for i in bb.frame_indices(9, 4)]
    for key, value in whole.items():
        np.testing.assert_allclose(value, np.mean([c[key] for c in chosen], 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["aesthetic", "jpeg"])
def test_one_channel_is_a_grey_picture(scorers, name):
    scorer = scorers.get(name) or load(name, None, "cpu")[1]
    grey = clips(2)[:, :1]
    prompts = PROMPTS[:2]
    assert scores_of(scorer, grey, prompts)["overall"] == pytest.approx(
        scores_of(scorer, grey.repeat(3, 1), prompts)["overall"]
    )


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_bfloat16_is_near_float32(scorers, folders, name):
    scorer = resolve(name)[1]()
    scorer.load(str(folders[name]), "cpu", dtype="bfloat16")
    exact, rough = scores_of(scorers[name], clips()), scores_of(scorer, clips())
    for key, value in exact.items():
        assert (rough[key] != value).any() or not value.any()
        np.testing.assert_allclose(rough[key], value, atol=0.05 * max(1, np.abs(value).max()))


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, "jpeg", "mini_clip"])
def test_what_it_needs_can_be_read_without_importing_it(name):
    """`sidecar build` runs before the scorer's environment is there."""
    module = ast.parse((ROOT / f"ddrl_jax/sidecar/scorers/{name}.py").read_text())
    class_name = BUILT_IN[name].partition(":")[2]
    [cls] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    [needs] = [node.value for node in cls.body if isinstance(node, ast.AnnAssign) and node.target.id == "requirements"]
    assert ast.literal_eval(needs) == resolve(name)[1].requirements
    assert resolve(name)[0] == resolve(name)[1].name == name


# --- what is refused ---


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_without_its_weights_a_scorer_says_what_it_needs(name, tmp_path):
    for weights in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=rf"^scorer {name}: weights: .*a folder with .* is needed$"):
            load(name, weights, "cpu")


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_an_unknown_dtype_is_refused(folders, name):
    with pytest.raises(ValueError, match="dtype: 'int3'; float32, bfloat16, float16 is needed"):
        resolve(name)[1]().load(str(folders[name]), "cpu", dtype="int3")


class Evil:
    def __reduce__(self):
        return print, ("loaded",)


@pytest.mark.parametrize("what", ["pickle", "cut", "a list"])
def test_no_other_pickle_is_read(folders, tmp_path, what, capsys):
    for source in folders["hps_v2"].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    file = tmp_path / HPS
    if what == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        torch.save({"state_dict": Evil()} if what == "pickle" else [torch.zeros(1)], file)
    with pytest.raises(ValueError, match=r"HPS_v2\.1") as caught:
        load("hps_v2", str(tmp_path), "cpu")
    assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value)
    assert "loaded" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("hps_v2", "visual.transformer.resblocks.1.attn.in_proj_weight"),
        ("hps_v2", "text_projection"),
        ("image_reward", "blip.visual_encoder.blocks.1.norm2.weight"),
        ("image_reward", "blip.text_encoder.encoder.layer.0.crossattention.self.key.weight"),
        ("image_reward", "mlp.layers.7.bias"),
        ("aesthetic", "layers.4.weight"),
        ("pick_score", "text_model.encoder.layers.1.mlp.fc2.weight"),
    ],
)
@pytest.mark.parametrize("harm", ["missing", "reshaped"])
def test_a_checkpoint_is_whole_or_refused(folders, tmp_path, name, tensor, harm):
    from safetensors.torch import load_file, save_file

    for source in folders[name].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    file = tmp_path / {"hps_v2": HPS, "image_reward": "ImageReward.pt", "aesthetic": HEAD}.get(
        name, "model.safetensors"
    )
    whole = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    state = dict(whole.get("state_dict", whole))
    value = state.pop(tensor)
    if harm == "reshaped":
        state[tensor] = value[..., None].repeat(*[1] * value.ndim, 3)
    save_file(state, file, {"format": "pt"}) if file.suffix == ".safetensors" else torch.save(state, file)
    with pytest.raises(ValueError, match=f"^scorer {name}: ") as caught:
        load(name, str(tmp_path), "cpu")
    assert "\n" not in str(caught.value) and "weights" in str(caught.value)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_without_a_tokenizer_nothing_is_scored(folders, tmp_path, name):
    """transformers would make an empty one, and every prompt would be the same to it."""
    for source in folders[name].iterdir():
        if not source.name.startswith(("tokenizer", "vocab", "merges")):
            (tmp_path / source.name).write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match=rf"^scorer {name}: weights: no tokenizer in "):
        load(name, str(tmp_path), "cpu")


def test_a_tokenizer_of_another_network_is_refused(folders, tmp_path):
    for source in folders["pick_score"].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    tokenizer = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["unheard", "of"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokens, the network \d+"):
        load("pick_score", str(tmp_path), "cpu")


def test_a_med_config_that_is_none_is_refused(folders, tmp_path):
    for source in folders["image_reward"].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "med_config.json").write_text(json.dumps({"hidden_size": 32}))
    with pytest.raises(ValueError, match=r"med_config\.json in .* is no BERT's config"):
        load("image_reward", str(tmp_path), "cpu")
