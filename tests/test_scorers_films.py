"""VideoAlign and Cosmos-Reason1's reward on tiny checkpoints: against the originals' numbers, and formula by formula.

The numbers are what the originals make of the same checkpoints and clips, with tiny_films.QUESTIONNAIRE and SYSTEM in
the place of their prompts, which are not in this repository: VideoAlign's reward model (KwaiVGI/VideoAlign 219ab9d)
with transformers 4.45.2, cosmos-rl's cosmos_reason1 (89f2e5b) with transformers 4.51.3.
"""

import hashlib
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ddrl_jax.sidecar.scorers import cosmos_reason1, load, qwen_video, video_align  # noqa: E402
from ddrl_jax.sidecar.worker import score_in_fixed_batches  # noqa: E402
from tests import tiny_films  # noqa: E402

torch.set_num_threads(1)
FPS4, FPS16 = {"video_fps": 4.0}, {"video_fps": 16.0}
PROMPT = "a red fox"
SHORT, LONG = (9, 60, 90), (24, 200, 330)
TOLERANCE = 5e-6  # float32, two layers: what two versions of transformers differ by is 5e-7


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video_reward")
    tiny_films.write_video_reward(folder)
    return folder


@pytest.fixture(scope="module")
def aligned(reward_folder):
    return load("video_align", str(reward_folder), "cpu")[1]


@pytest.fixture(scope="module")
def reason_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cosmos_reason1")
    tiny_films.write_cosmos_reason1(folder)
    return folder


@pytest.fixture(scope="module")
def reasoner(reason_folder):
    return load("cosmos_reason1", str(reason_folder), "cpu")[1]


def score(scorer, videos, prompts, infos):
    with torch.inference_mode():
        return scorer.score(torch.stack(videos), prompts, infos)


# ---- the originals' numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "info", "wanted"),
    [
        (SHORT, FPS4, (-1.3999598026275635, -0.24508386850357056, -0.5523406863212585)),
        (LONG, FPS16, (-1.3957983255386353, -0.11208826303482056, -0.753852367401123)),
    ],
)
def test_video_align_is_the_original(aligned, size, info, wanted):
    scores = score(aligned, [tiny_films.clip(*size)], [PROMPT], [info])
    unit = tiny_films.UNITS
    for name, original, raw in zip(("vq", "mq", "ta"), ("VQ", "MQ", "TA"), wanted, strict=True):
        got = scores[name][0] * unit[f"{original}_std"] + unit[f"{original}_mean"]
        assert got == pytest.approx(raw, abs=TOLERANCE)
    assert scores["overall"][0] == pytest.approx(sum(scores[n][0] for n in ("vq", "mq", "ta")), abs=1e-12)


@pytest.mark.parametrize(
    ("size", "info", "no", "logits"),
    [
        (SHORT, FPS4, 0.6836268305778503, (0.03750509023666382, 0.8079949021339417)),
        (LONG, FPS16, 0.6926800012588501, (0.1324833482503891, 0.9451618194580078)),
    ],
)
def test_cosmos_reason1_is_the_original(reasoner, size, info, no, logits):
    scores = score(reasoner, [tiny_films.clip(*size)], [PROMPT], [info])
    assert scores["overall"][0] == pytest.approx(no, abs=TOLERANCE)
    assert (scores["yes_logit"][0], scores["no_logit"][0]) == pytest.approx(logits, abs=TOLERANCE)


# ---- prompt.txt ------------------------------------------------------------------------------------------------------


BOTH = [
    (
        video_align,
        "video_align",
        tiny_films.write_video_reward,
        "KwaiVGI/VideoAlign, prompt_template.py, .*{text_prompt}",
    ),
    (cosmos_reason1, "cosmos_reason1", tiny_films.write_cosmos_reason1, "nvidia-cosmos/cosmos-rl, reward_service/"),
]


@pytest.mark.parametrize(("module", "name", "write", "source"), BOTH)
def test_no_prompt_says_where_to_take_it(tmp_path, module, name, write, source):
    write(tmp_path)
    (tmp_path / "prompt.txt").unlink()
    with pytest.raises(ValueError, match=rf"^scorer {name}: weights: no prompt.txt in .*{source}") as error:
        load(name, str(tmp_path), "cpu")
    assert "\n" not in str(error.value)
    (tmp_path / "prompt.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=rf"prompt.txt is no UTF-8 text; .*{source}"):
        load(name, str(tmp_path), "cpu")


@pytest.mark.parametrize(("module", "name", "write", "source"), BOTH)
def test_another_prompt_than_the_trained_one_is_told(tmp_path, monkeypatch, caplog, module, name, write, source):
    write(tmp_path)
    digest = hashlib.sha256((tmp_path / "prompt.txt").read_bytes()).hexdigest()
    trained = module.PROMPT_SHA256
    load(name, str(tmp_path), "cpu")
    (said,) = (r.getMessage() for r in caplog.records if r.name == "ddrl_jax.sidecar")
    assert all(part in said for part in (str(tmp_path / "prompt.txt"), digest, trained)) and "\n" not in said
    caplog.clear()
    monkeypatch.setattr(module, "PROMPT_SHA256", digest)
    load(name, str(tmp_path), "cpu")
    assert not [r for r in caplog.records if r.name == "ddrl_jax.sidecar"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{text_prompt}", "a fox"),
        ("<|VQ_reward|>", ""),
        ("<|VQ_reward|>", "<|VQ_reward|><|VQ_reward|>"),
        ("<|VQ_reward|>", "<|TA_reward|>"),
    ],
)
def test_a_questionnaire_without_its_places_is_refused(tmp_path, old, new):
    tiny_films.write_video_reward(tmp_path)
    (tmp_path / "prompt.txt").write_text(tiny_films.QUESTIONNAIRE.replace(old, new))
    with pytest.raises(ValueError, match=r"prompt.txt in .* needs a place {text_prompt} and, .* <\|VQ_reward\|>, "):
        load("video_align", str(tmp_path), "cpu")


# ---- video and chat --------------------------------------------------------------------------------------------------


def test_patches_are_the_image_processors():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = qwen_video.levels(tiny_films.clip(2, 56, 84))[0]
    wanted = Qwen2VLImageProcessorPil()(images=[picture.permute(1, 2, 0).numpy()], return_tensors="pt")
    got, grid = qwen_video.patches(torch.stack([picture, picture]))  # a picture is a video of itself twice
    assert grid.tolist() == wanted["image_grid_thw"].tolist()
    np.testing.assert_allclose(got, wanted["pixel_values"], rtol=0, atol=1e-6)


def test_patches_of_a_video():
    frames = qwen_video.levels(tiny_films.clip(5, 56, 84))
    got, grid = qwen_video.patches(frames)
    assert grid.tolist() == [[3, 4, 6]]
    frames = torch.cat([frames, frames[-1:]]).double() / 255  # an odd frame is taken twice
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073], dtype=torch.float64)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711], dtype=torch.float64)
    n = 0
    for t in range(3):
        for row, column in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):  # of tokens
            for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):  # of patches in a token
                y, x = 14 * (2 * row + dy), 14 * (2 * column + dx)
                cut = frames[2 * t : 2 * t + 2, :, y : y + 14, x : x + 14]
                cut = ((cut - mean[:, None, None]) / std[:, None, None]).transpose(0, 1)
                np.testing.assert_allclose(got[n], cut.flatten(), rtol=0, atol=1e-6)
                n += 1
    assert n == len(got)


@pytest.mark.parametrize(
    ("size", "pixels", "wanted"),
    [  # what VideoAlign's smart_resize (vision_process.py) gives
        ((480, 832), (100352, 200704), (336, 588)),
        ((720, 1280), (100352, 200704), (336, 588)),
        ((56, 84), (100352, 200704), (280, 392)),
        ((30, 3000), (100352, 200704), (56, 3192)),
        ((300, 300), (100352, 200704), (336, 336)),
    ],
)
def test_sizes(size, pixels, wanted):
    assert qwen_video.fit(*size, *pixels) == wanted


def test_a_ribbon_has_no_size():
    with pytest.raises(ValueError, match="200 times"):
        qwen_video.fit(10, 2001, 1, 10**6)


@pytest.mark.parametrize(
    ("total", "fps", "wanted"),
    [
        (93, 16.0, 12), (81, 16.0, 10), (24, 16.0, 4), (3, 16.0, 2), (5000, 2.0, 768), (9, 4.0, 4), (40, 16.0, 4),
    ],
)  # fmt: skip
def test_video_align_looks_at_two_frames_a_second(total, fps, wanted):
    indices = video_align.frame_indices(total, fps, 2.0)
    assert len(indices) == wanted and indices[0] == 0 and indices[-1] == total - 1
    assert video_align.frame_indices(total, fps, 2.0, 2) == [0, total - 1]
    assert np.ptp(np.diff(indices)) <= 1  # even


def test_cosmos_reason1_looks_at_160_frames_at_most():
    assert cosmos_reason1.sample(93, 16.0) == (list(range(92)), 16.0)
    assert cosmos_reason1.sample(161, 16.0) == (list(range(0, 160, 2)), 8.0)  # 81 of them: the odd one goes
    assert cosmos_reason1.sample(160, 16.0) == (list(range(160)), 16.0)


@pytest.mark.parametrize("system", [video_align.SYSTEM, "Another."])
def test_the_chat_is_the_template(aligned, system):
    grid = torch.tensor([[2, 4, 6]])
    ids = qwen_video.chat(aligned.tokenizer, system, "\nWhat is it?\n", grid)[0]
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "\nWhat is it?\n"}]}]
    if system != video_align.SYSTEM:  # the template's own where there is none
        messages.insert(0, {"role": "system", "content": system})
    text = aligned.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text = text.replace(qwen_video.VIDEO_TOKEN, qwen_video.VIDEO_TOKEN * 12)
    assert ids.tolist() == aligned.tokenizer(text).input_ids


@pytest.mark.parametrize(("frames", "fps"), [(4, 2.0), (8, 4.0), (6, 16.0), (12, 3.0)])
def test_positions_are_qwen2_5_vls(reasoner, frames, fps):
    """Where the video is short for its size, transformers 4 and 5 agree on where the text goes on."""
    grid = torch.tensor([[frames // 2, 12, 16]])
    ids = qwen_video.chat(reasoner.tokenizer, "system", "question", grid)
    token = reasoner.model.config.video_token_id
    wanted, _ = reasoner.model.model.get_rope_index(
        ids, 2 * (ids == token).int(), video_grid_thw=grid, second_per_grid_ts=torch.tensor([2 / fps])
    )
    assert torch.equal(cosmos_reason1.positions(ids[0], token, grid, 2 * 2 / fps), wanted)


def test_text_goes_on_after_a_long_video(reasoner):
    grid = torch.tensor([[5, 2, 2]])
    ids = torch.tensor([7, *[reasoner.model.config.video_token_id] * 5, 8, 9])
    got = cosmos_reason1.positions(ids, reasoner.model.config.video_token_id, grid, 1.5)[:, 0]
    assert got.tolist() == [[0, 1, 2, 4, 5, 7, 8, 9], [0, 1, 1, 1, 1, 1, 8, 9], [0, 1, 1, 1, 1, 1, 8, 9]]


# ---- formulas from the backbones' features ---------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("adapter", [False, True])
def test_video_align_is_a_head_on_the_reward_tokens(tmp_path, outputs, adapter):
    """The tensors that the checkpoint amounts to, LoRA added by hand, put through the tower layer by layer."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    wanted = tiny_films.write_video_reward(tmp_path, outputs, adapter)
    scorer = load("video_align", str(tmp_path), "cpu")[1]
    clip = tiny_films.clip(*SHORT)
    got = score(scorer, [clip], [PROMPT], [FPS4])

    config = Qwen2VLConfig.from_pretrained(tmp_path / "Qwen2-VL-2B-Instruct")
    config.text_config.vocab_size = len(wanted["model.embed_tokens.weight"])
    tower = Qwen2VLModel(config).eval()
    tower.load_state_dict(
        {n.replace("model.", "language_model."): v for n, v in wanted.items() if n[:7] not in ("lm_head", "rm_head")}
    )
    frames = qwen_video.levels(clip)[[0, 3, 5, 8]].float()
    frames = torch.nn.functional.interpolate(frames, (280, 392), mode="bicubic", antialias=True).clamp(0, 255).round()
    pixels, grid = qwen_video.patches(frames)
    question = tiny_films.QUESTIONNAIRE.replace("{text_prompt}", PROMPT)
    ids = qwen_video.chat(scorer.tokenizer, video_align.SYSTEM, question, grid)[0]
    with torch.inference_mode():
        x = tower.language_model.embed_tokens(ids)
        x[ids == config.video_token_id] = tower.visual(pixels, grid).pooler_output
        hidden = tower.language_model(
            inputs_embeds=x[None], position_ids=torch.arange(len(ids))[None]
        ).last_hidden_state
    for k, (name, token) in enumerate(zip(("vq", "mq", "ta"), tiny_films.REWARD, strict=True)):
        (where,) = (ids == scorer.tokenizer.convert_tokens_to_ids(token)).nonzero()[:, 0].tolist()
        raw = float(hidden[0, where].double() @ wanted["rm_head.weight"][k if outputs == 3 else 0].double())
        mean, std = (tiny_films.UNITS[f"{name.upper()}_{unit}"] for unit in ("mean", "std"))
        assert got[name][0] == pytest.approx((raw - mean) / std, abs=2e-5)


def test_rewards_without_units_are_raw(reward_folder, tmp_path, aligned):
    folder = tmp_path / "copy"
    folder.mkdir()
    for entry in reward_folder.iterdir():
        (folder / entry.name).symlink_to(entry)
    (folder / "model_config.json").unlink()
    config = json.loads((reward_folder / "model_config.json").read_text())
    del config["inference_config"]
    (folder / "model_config.json").write_text(json.dumps(config))
    raw = score(load("video_align", str(folder), "cpu")[1], [tiny_films.clip(*SHORT)], [PROMPT], [FPS4])
    in_units = score(aligned, [tiny_films.clip(*SHORT)], [PROMPT], [FPS4])
    assert in_units["mq"][0] == pytest.approx((raw["mq"][0] + 0.25) / 0.5, abs=1e-9)


def test_rank_stabilised_lora_is_scaled_by_the_root():
    state = {
        "l.base_layer.weight": torch.ones(2, 3),
        "l.lora_A.default.weight": torch.ones(4, 3),
        "l.lora_B.default.weight": torch.ones(2, 4),
        "h.original_module.weight": torch.zeros(1),
        "h.modules_to_save.default.weight": torch.ones(1),
    }
    merged = video_align.merge_lora(state, 0.5, torch.float32)
    assert merged.keys() == {"l.weight", "h.weight"}
    assert torch.equal(merged["l.weight"], torch.full((2, 3), 1 + 0.5 * 4)) and merged["h.weight"] == 1
    with pytest.raises(ValueError, match="plain LoRA"):
        video_align.merge_lora(state | {"l.lora_magnitude_vector.default.weight": torch.ones(2)}, 0.5, torch.float32)


def test_cosmos_reason1_is_the_softmax_of_no_against_yes(reasoner):
    clip = tiny_films.clip(*SHORT)
    got = score(reasoner, [clip, clip], ["Is it odd?", ""], [FPS4, FPS4])
    with torch.inference_mode():
        frames = cosmos_reason1.resize(qwen_video.levels(clip)[:8], (140, 196))
        pixels, grid = qwen_video.patches(frames)
        for i, question in enumerate(("Is it odd?", "Does the video contain any anomalies or artifacts?")):
            ids = qwen_video.chat(reasoner.tokenizer, tiny_films.SYSTEM, question, grid)
            types = 2 * (ids == reasoner.model.config.video_token_id).int()
            out = reasoner.model(
                input_ids=ids, pixel_values_videos=pixels, video_grid_thw=grid, mm_token_type_ids=types,
                second_per_grid_ts=torch.tensor([0.5]), output_hidden_states=True,
            )  # fmt: skip
            logits = out.hidden_states[-1][0, -1].double() @ reasoner.model.lm_head.weight.double().T
            tokens = [reasoner.tokenizer.encode(word)[0] for word in ("Yes", "No")]
            assert tokens[0] != tokens[1]
            wanted = torch.softmax(logits[tokens], 0)[1]
            assert got["overall"][i] == pytest.approx(float(wanted), abs=TOLERANCE)
    assert abs(got["overall"][0] - got["overall"][1]) > 1e-4  # the question counts


# ---- what a scorer owes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["aligned", "reasoner"])
def test_a_score_does_not_depend_on_batch_mates(request, fixture):
    scorer = request.getfixturevalue(fixture)
    clips = [tiny_films.clip(*SHORT, name=name) for name in ("one", "two", "three")]
    prompts, infos = [PROMPT, "a cake", "snow " * 40], [FPS4, FPS16, FPS4]
    together = score(scorer, clips, prompts, infos)
    assert len(set(together["overall"])) == 3
    for i in (2, 0):
        assert score(scorer, [clips[i]], [prompts[i]], [infos[i]]) == {n: [v[i]] for n, v in together.items()}


def test_the_worker_hands_on_frames_per_second(aligned):
    clips = [tiny_films.clip(*SHORT, name=name) for name in ("one", "two", "three")]
    infos = [FPS4, FPS16, {"video_fps": 2.0}]
    got = score_in_fixed_batches(aligned, torch.stack(clips).numpy(), [PROMPT] * 3, infos)
    assert got == score(aligned, clips, [PROMPT] * 3, infos)
    assert got["mq"][0] != score(aligned, clips[:1], [PROMPT], [{"video_fps": 2.0}])["mq"][0]


@pytest.mark.parametrize("token", ["<|video_pad|>", "<|im_end|>", "<|VQ_reward|>"])
def test_a_prompt_with_a_special_token_gets_no_score(request, token):
    for fixture in ("aligned", "reasoner") if "reward" not in token else ("aligned",):
        special_token_gets_no_score(request.getfixturevalue(fixture), token)


def special_token_gets_no_score(scorer, token):
    clip = tiny_films.clip(*SHORT)
    scores = score(scorer, [clip, clip], [f"a {token} fox", PROMPT], [FPS4, FPS4])
    for values in scores.values():
        assert math.isnan(values[0]) and math.isfinite(values[1])


@pytest.mark.parametrize("fixture", ["aligned", "reasoner"])
@pytest.mark.parametrize(
    ("size", "info", "says"),
    [
        (SHORT, {}, "video_fps is None"),
        (SHORT, {"video_fps": 0}, "above 0"),
        (SHORT, {"video_fps": "16"}, "video_fps is '16'"),
        (SHORT, {"video_fps": math.nan}, "video_fps is nan"),
        (SHORT, {"video_fps": True}, "video_fps is True"),
        ((1, 60, 90), FPS4, "1 frame; .* at least 2"),
    ],
)
def test_bad_videos_are_told(request, fixture, size, info, says):
    with pytest.raises(ValueError, match=says):
        score(request.getfixturevalue(fixture), [tiny_films.clip(*size)], [PROMPT], [info])


def test_gray_is_a_picture_and_four_channels_are_not(aligned):
    gray = tiny_films.clip(*SHORT)[:1]
    wanted = score(aligned, [gray.expand(3, -1, -1, -1)], [PROMPT], [FPS4])
    assert score(aligned, [gray], [PROMPT], [FPS4]) == wanted
    with pytest.raises(ValueError, match="4 channels"):
        score(aligned, [gray.expand(4, -1, -1, -1)], [PROMPT], [FPS4])


@pytest.mark.parametrize("name", ["video_align", "cosmos_reason1"])
def test_no_weights_say_what_to_put_there(tmp_path, name):
    for weights in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=r"^scorer \w+: weights: .*(VideoReward|Cosmos-Reason1)"):
            load(name, weights, "cpu")


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("data_config", "prompt_template_type", "simple"),
        ("data_config", "sample_type", "multi_pts"),
        ("model_config", "use_special_tokens", False),
    ],
)
def test_another_reward_model_is_refused(tmp_path, section, field, value):
    tiny_films.write_video_reward(tmp_path)
    config = json.loads((tmp_path / "model_config.json").read_text())
    config[section][field] = value
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        load("video_align", str(tmp_path), "cpu")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"data_config": {"fps": 2.0}, "model_config": {}}'])
def test_a_config_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "model_config.json").write_text(text)
    with pytest.raises(ValueError, match="is not VideoAlign's"):
        load("video_align", str(tmp_path), "cpu")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path):
    tiny_films.write_video_reward(tmp_path)
    file = tmp_path / "checkpoint-100/model.pth"
    state = torch.load(file, weights_only=True)
    del state["base_model.model.model.norm.weight"]
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"1 tensors are missing, language_model.norm.weight first"):
        load("video_align", str(tmp_path), "cpu")


def test_bfloat16_is_near(reward_folder, reason_folder, aligned, reasoner):
    clip = tiny_films.clip(*SHORT)
    for cls, folder, exact in (
        (video_align.VideoAlign, reward_folder, aligned),
        (cosmos_reason1.CosmosReason1, reason_folder, reasoner),
    ):
        scorer = cls()
        scorer.load(str(folder), "cpu", dtype="bfloat16")
        got, wanted = (score(s, [clip], [PROMPT], [FPS4])["overall"][0] for s in (scorer, exact))
        assert got == pytest.approx(wanted, abs=0.3) and got != wanted
        with pytest.raises(ValueError, match="dtype"):
            cls().load(str(folder), "cpu", dtype="int8")
