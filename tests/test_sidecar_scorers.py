"""Scorers and the worker that feeds them. Needs torch."""

import json
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ddrl_jax.data.digits import all_prompts, write_clips  # noqa: E402
from ddrl_jax.sidecar import worker as worker_module  # noqa: E402
from ddrl_jax.sidecar.codec import Identity, Unshuffle, parse_codec, to_video  # noqa: E402
from ddrl_jax.sidecar.protocol import EnqueueHeader, Limits  # noqa: E402
from ddrl_jax.sidecar.scorers import digits_training, load, resolve  # noqa: E402
from ddrl_jax.sidecar.scorers.brightness import Brightness  # noqa: E402
from ddrl_jax.sidecar.scorers.digits import Digits, motion_smoothness  # noqa: E402
from ddrl_jax.sidecar.worker import QueueFullError, Worker, score_in_fixed_batches  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    write_clips(folder / "scorer", "scorer", 1500, seed=0)
    write_clips(folder / "heldout", "heldout", 400, seed=1)
    digits_training.main(str(folder / "scorer"), str(folder / "weights"), steps=150)
    return folder


@pytest.fixture(scope="module")
def scorer(folder):
    scorer = Digits()
    scorer.load(str(folder / "weights"), "cpu")
    return scorer


@pytest.fixture(scope="module")
def clips(folder):
    stored = digits_training.read_clips(str(folder / "heldout"))
    video = digits_training.tensors(stored)[0][:, None].numpy()
    return video, [str(c) for c in stored["caption"]]


# --- codec ---


def test_unshuffle_layout():
    f, rng = 2, np.random.default_rng(0)
    video = rng.uniform(-1, 1, (2, 3, 4, 6, 8)).astype(np.float32)
    latent = np.zeros((2, 3 * f * f, 4, 3, 4), np.float32)
    for c in range(3):
        for dy in range(f):
            for dx in range(f):
                latent[:, (c * f + dy) * f + dx] = video[:, c, :, dy::f, dx::f]
    normalised = (latent - np.float32(-0.7)) / np.float32(0.6)
    decoded = parse_codec("unshuffle:factor=2,mean=-0.7,std=0.6").decode(normalised)
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, video, atol=2e-7)
    np.testing.assert_array_equal(Unshuffle(2).decode(latent), video)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "wan",
        "unshuffle",
        "unshuffle:factor=x",
        "unshuffle:factor=2,sd=1",
        "unshuffle:factor=2,std=0",
        "unshuffle:factor=2,mean=nan",
        "identity:factor=2",
    ],
)
def test_bad_codecs(text):
    with pytest.raises(ValueError, match=r"^codec: "):
        parse_codec(text)


def test_to_video():
    image = np.zeros((2, 4, 6, 3), np.uint8)
    image[1, 2, 3] = (0, 51, 255)
    video = to_video(image, "image", Identity())
    assert video.shape == (2, 3, 1, 4, 6) and video.dtype == np.float32
    np.testing.assert_allclose(video[1, :, 0, 2, 3], [-1, -0.6, 1], atol=1e-7)
    assert to_video(np.full((1, 1, 1, 2, 2), 255.0), "video", Identity()).max() == 1
    assert to_video(np.full((1, 1, 1, 2, 2), 3.0), "latent", Identity()).max() == 1  # clipped
    with pytest.raises(ValueError, match="no multiple of factor"):
        to_video(np.zeros((1, 3, 1, 2, 2)), "latent", Unshuffle(2))


# --- the fixed batch ---


@pytest.mark.parametrize("which", ["digits", "brightness"])
def test_scores_do_not_depend_on_batch_mates(which, scorer, clips):
    subject = scorer if which == "digits" else Brightness()
    video, prompts = clips
    video = video[:70] + np.random.default_rng(0).normal(0, 0.1, video[:70].shape).astype(np.float32)
    prompts = prompts[:70]
    whole = score_in_fixed_batches(subject, video, prompts)
    rng = np.random.default_rng(1)
    for count in (1, 2, 5, 15, 16, 17, 33, 70):
        rows = rng.permutation(70)[:count]  # other mates, and another place among them
        part = score_in_fixed_batches(subject, video[rows], [prompts[i] for i in rows])
        for name, values in part.items():
            np.testing.assert_array_equal(values, np.array(whole[name])[rows], err_msg=name)


def test_every_call_has_the_same_shape():
    seen = []

    class Shapes:
        batch_size = 4

        def score(self, videos, prompts):
            seen.append((tuple(videos.shape), len(prompts)))
            return {"n": videos.flatten(1).sum(1)}

    video = np.arange(10, dtype=np.float32).reshape(10, 1, 1, 1, 1)
    out = score_in_fixed_batches(Shapes(), video, [str(i) for i in range(10)])
    assert out == {"n": list(range(10))}
    assert seen == [((4, 1, 1, 1, 1), 4)] * 3


@pytest.mark.parametrize(
    "answer, expected",
    [
        ([1.0] * 4, "not a dict"),
        ({}, "not a dict"),
        ({"a": [1.0] * 3}, "4 numbers are needed"),
        ({"a": 1.0}, "4 numbers are needed"),
        ({"a": ["x"] * 4}, "could not convert"),
    ],
)
def test_scorers_that_answer_nonsense(answer, expected):
    class Bad:
        batch_size = 4

        def score(self, videos, prompts):
            return answer

    with pytest.raises(ValueError, match=expected):
        score_in_fixed_batches(Bad(), np.zeros((4, 1, 1, 1, 1), np.float32), [""] * 4)


# --- digits ---


def test_training_is_deterministic(folder, tmp_path):
    digits_training.main(str(folder / "scorer"), str(tmp_path), steps=150)
    for name in ("digits.safetensors", "digits.json"):
        assert (tmp_path / name).read_bytes() == (folder / "weights" / name).read_bytes()


def test_sub_scores_are_in_units_of_real_clips(folder, scorer):
    stored = digits_training.read_clips(str(folder / "scorer"))
    held = {k: v[np.arange(1500) % 10 == 9] for k, v in stored.items()}
    video = digits_training.tensors(held)[0][:, None].numpy()
    out = score_in_fixed_batches(scorer, video, [str(c) for c in held["caption"]])
    for name in ("text_alignment", "visual_quality", "motion_quality"):
        assert np.mean(out[name]) == pytest.approx(0, abs=1e-4)
        assert np.std(out[name], ddof=1) == pytest.approx(1, abs=1e-4)
    total = np.sum([out[n] for n in ("text_alignment", "visual_quality", "motion_quality")], axis=0)
    np.testing.assert_allclose(out["overall"], total, rtol=1e-9)


def test_each_sub_score_falls_for_its_own_fault(scorer, clips):
    video, prompts = clips
    rng = np.random.default_rng(0)
    real = score_in_fixed_batches(scorer, video, prompts)
    wrong = score_in_fixed_batches(scorer, video, prompts[1:] + prompts[:1])
    noisy = np.clip(video + rng.normal(0, 0.3, video.shape), -1, 1).astype(np.float32)
    noisy_scores = score_in_fixed_batches(scorer, noisy, prompts)
    shuffled = score_in_fixed_batches(scorer, video[:, :, [1, 3, 0, 2]], prompts)
    mean = {k: np.mean(v) for k, v in real.items()}
    assert np.mean(wrong["text_alignment"]) < mean["text_alignment"] - 2
    assert wrong["visual_quality"] == real["visual_quality"]
    assert np.mean(noisy_scores["visual_quality"]) < mean["visual_quality"] - 2
    assert np.mean(shuffled["motion_quality"]) < mean["motion_quality"] - 2


def test_motion_score_does_not_explode_on_real_or_nearly_real_clips(scorer, clips):
    video, prompts = clips
    still = np.repeat(video[:, :, :1], 4, 2)
    whole_pixel = np.stack([np.roll(video[:, :, 0], t, 2) for t in range(4)], 2)
    hazy = video + np.random.default_rng(0).normal(0, 0.1, video.shape).astype(np.float32)
    for name, shown in {"real": video, "still": still, "whole pixels": whole_pixel, "hazy": hazy}.items():
        z = np.array(score_in_fixed_batches(scorer, shown, prompts)["motion_quality"])
        assert z.max() < 2 and abs(np.median(z)) < 4, (name, z.max(), np.median(z))


def test_motion_formula_by_hand():
    clip = -torch.ones((1, 3, 5, 7))
    for t, column in enumerate((1, 2, 5)):  # second difference of the centre: 2 pixels
        clip[0, t, 2, column] = 1.0
    ink, speck, cells = 0.95 + 1e-4, 1e-4, 5 * 7
    mass = ink + speck * (cells - 1)
    centre = [(ink * c + speck * (3 * cells - c)) / mass for c in (1, 2, 5)]
    bend = (centre[0] - 2 * centre[1] + centre[2]) ** 2
    got = motion_smoothness(clip).item()
    spread = [
        (ink * (c - m) ** 2 + speck * (5 * sum((x - m) ** 2 for x in range(7)) - (c - m) ** 2)) / mass
        for c, m in zip((1, 2, 5), centre, strict=True)
    ]
    log_spread = np.log(np.sqrt(spread))
    change = np.sum(np.diff(log_spread) ** 2) / 2  # mass and vertical spread do not change
    assert got == pytest.approx(-np.log(bend / 0.15**2 + change / 0.1**2 + 0.02), abs=2e-4)


def test_unknown_prompts_and_shapes_fail_the_request(scorer):
    with pytest.raises(ValueError, match="prompt 'a cat' names no digit and direction"):
        scorer.score(torch.zeros(1, 1, 4, 12, 12), ["a cat"])
    with pytest.raises(ValueError, match=r"trained on \(4, 12, 12\)"):
        scorer.score(torch.zeros(1, 1, 4, 16, 12), ["a seven moving up"])


def test_colour_clips_are_scored_as_gray(scorer, clips):
    video, prompts = clips
    gray = score_in_fixed_batches(scorer, video[:8], prompts[:8])
    colour = score_in_fixed_batches(scorer, np.repeat(video[:8], 3, 1), prompts[:8])
    np.testing.assert_allclose(colour["overall"], gray["overall"], atol=1e-4)


def test_damaged_and_missing_weights(folder, tmp_path):
    with pytest.raises(ValueError, match="sidecar build --scorer digits"):
        Digits().load(str(tmp_path), "cpu")
    with pytest.raises(ValueError, match="sidecar build --scorer digits"):
        Digits().load(None, "cpu")
    for name in ("digits.safetensors", "digits.json"):
        (tmp_path / name).write_bytes((folder / "weights" / name).read_bytes())
    (tmp_path / "digits.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ValueError, match="damaged"):
        Digits().load(str(tmp_path), "cpu")


def test_files_are_readable_without_pickle(folder):
    config = json.loads((folder / "weights" / "digits.json").read_text())
    assert config["shape_THW"] == [4, 12, 12]
    assert config["digits"]["seven"] == 7 and len(config["digits"]) == 10
    assert config["directions"]["up left"] == 7 and len(config["directions"]) == 9


def test_every_prompt_is_understood_and_nonsense_is_not(scorer):
    for digit, direction, prompt in all_prompts():
        assert scorer._classes(prompt) == (digit, direction)
    for nonsense in ("", "a seven", "moving up", "a seven and an eight moving up", "a seven up and down"):
        with pytest.raises(ValueError, match="names no digit and direction"):
            scorer._classes(nonsense)


def test_captions_that_contradict_their_labels():
    clips = {"caption": np.array(["a one moving up", "a one staying still"]), "digit": np.array([1, 2])}
    with pytest.raises(ValueError, match="'a one staying still' does not tell digit 2"):
        digits_training.read_captions(clips | {"direction": np.array([0, 8])})


def test_unreadable_clips(tmp_path):
    with pytest.raises(ValueError, match=r"^data: "):
        digits_training.read_clips(str(tmp_path))
    (tmp_path / "clips.npz").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"^data: "):
        digits_training.read_clips(str(tmp_path))
    np.savez(tmp_path / "clips.npz", video=np.zeros((200, 4, 12, 12, 1), np.uint8))
    with pytest.raises(ValueError, match="lacks"):
        digits_training.read_clips(str(tmp_path))


@pytest.mark.slow
def test_full_training_reaches_its_accuracy_on_unseen_scans(tmp_path):
    write_clips(tmp_path / "scorer", "scorer", 6000, seed=0)
    write_clips(tmp_path / "heldout", "heldout", 2000, seed=1)
    clips = digits_training.read_clips(str(tmp_path / "scorer"))
    nets = digits_training.train(clips)
    told = digits_training.accuracy(nets, digits_training.read_clips(str(tmp_path / "heldout")))
    assert told["digit"] > 0.90 and told["direction"] > 0.99 and told["real"] > 0.90, told


# --- finding scorers ---


def test_resolve(tmp_path):
    assert resolve("brightness") == ("brightness", Brightness)
    file = tmp_path / "my_scorer.py"
    methods = "    def load(self, weights, device): 1 / batch\n    def score(self, videos, prompts): return {}\n"
    file.write_text(f"batch = 0\nclass Mine:\n{methods}\nclass Half:\n    score = load = 3")
    name, cls = resolve(f"{file}:Mine")
    assert name == "my_scorer" and cls.__name__ == "Mine"
    with pytest.raises(ValueError, match="scorer my_scorer: ZeroDivisionError: division by zero"):
        load(f"{file}:Mine", None, "cpu")
    file.write_text(f"batch = 1\nclass Mine:\n    name = 'nice'\n    batch_size = 0\n{methods}")
    assert resolve(f"{file}:Mine")[0] == "nice"
    with pytest.raises(ValueError, match="scorer nice: batch_size 0"):
        load(f"{file}:Mine", None, "cpu")
    for spec, expected in {
        "nope": "none of .*brightness.*digits",
        f"{file}:Other": "no class 'Other'",
        f"{file}:Half": "no class 'Half' with the methods `load` and `score`",
        f"{tmp_path}/missing.py:A": "no Python file",
        "os:system": "no Python file",
    }.items():
        with pytest.raises(ValueError, match=expected):
            resolve(spec)
    file.write_text("import nonexistent_module_xyz")
    with pytest.raises(ValueError, match="fails to import"):
        resolve(f"{file}:Mine")


# --- worker ---


def header(count, **reward_fn):
    return EnqueueHeader(prompts=["p"] * count, reward_fn=reward_fn or {"brightness": 1.0})


def wait(worker, uuid, name="brightness"):
    while (out := worker.get(uuid, name))[0] == 400:
        worker.drain(0.05)
    return out


def test_one_scorer_failing_leaves_the_other_alone():
    class Broken:
        batch_size = 2

        def score(self, videos, prompts):
            raise RuntimeError("out of\nmemory")

    worker = Worker({"brightness": Brightness(), "broken": Broken()}, Identity(), Limits())
    uuid = worker.add(header(3, broken=1.0, brightness=1.0), np.zeros((3, 1, 1, 2, 2), np.float32))
    assert wait(worker, uuid, "broken") == (
        422, {"message": "scorer broken: RuntimeError: out of memory"})  # fmt: skip
    status, answer = wait(worker, uuid)
    assert status == 200 and answer["scores"] == {"brightness/overall": [0.0] * 3}
    assert answer["type"] == "brightness" and answer["input_info"]["shape"] == [3, 1, 1, 2, 2]
    assert float(answer["duration"]) >= 0 and float(answer["decoded_duration"]) >= 0
    assert worker.get(uuid, "brightness")[0] == 200  # an answer lost on the way can be asked for again
    assert worker.get(uuid, "other")[0] == 422
    assert worker.get("0" * 32, "brightness")[0] == 404


def test_a_scorer_that_exits_does_not_take_the_worker_along():
    class Quits:
        batch_size = 2

        def score(self, videos, prompts):
            raise SystemExit(3)

    worker = Worker({"quits": Quits(), "brightness": Brightness()}, Identity(), Limits())
    zeros = np.zeros((1, 1, 1, 2, 2), np.float32)
    assert wait(worker, worker.add(header(1, quits=1.0), zeros), "quits")[0] == 422
    assert wait(worker, worker.add(header(1), zeros))[0] == 200


class Records:
    """Notes the samples of each batch (their first pixel) and the prompts."""

    def __init__(self, batch_size, fails_at=None):
        self.batch_size, self.fails_at, self.seen = batch_size, fails_at, []

    def score(self, videos, prompts):
        first = videos[:, 0, 0, 0, 0].tolist()
        self.seen.append((first, list(prompts)))
        if self.fails_at in first:
            raise ValueError("cannot")
        return {"first": videos[:, 0, 0, 0, 0], "mean": videos.mean((1, 2, 3, 4))}


class Pieces(Identity):
    def __init__(self):
        object.__setattr__(self, "decoded", [])

    def decode(self, latents):
        self.decoded.append(len(latents))
        return super().decode(latents)


LATENTS = np.random.default_rng(0).uniform(-1, 1, (17, 1, 2, 4, 4)).astype(np.float32)  # 128 bytes each


def recorded(monkeypatch, clips, *scorers):
    monkeypatch.setattr(worker_module, "_PIECE_BYTES", int(clips * LATENTS[0].nbytes))
    codec, named = Pieces(), {f"s{i}": scorer for i, scorer in enumerate(scorers)}
    worker = Worker(named, codec, Limits())
    asked = EnqueueHeader(prompts=[f"p{i}" for i in range(17)], reward_fn=dict.fromkeys(named, 1.0))
    uuid = worker.add(asked, LATENTS)
    return codec.decoded, {name: wait(worker, uuid, name) for name in named}


@pytest.mark.parametrize(
    ("clips", "sizes", "decoded"),
    [
        (100, (2,), [2, 15]),  # what a clip has is known when the first are decoded
        (4.5, (2,), [2, 4, 4, 4, 3]),
        (4.5, (2, 3), [6, 6, 5]),
        (0.5, (1,), [1] * 17),
        (0.5, (4, 1), [4, 4, 4, 4, 1]),
        (100, (16, 3), [17]),
    ],
)
def test_a_request_is_decoded_and_scored_in_pieces(monkeypatch, clips, sizes, decoded):
    scorers = [Records(size) for size in sizes]
    pieces, answers = recorded(monkeypatch, clips, *scorers)
    assert pieces == decoded
    for i, scorer in enumerate(scorers):
        # As if all of it had been decoded first: the same batches, the same scores.
        whole = Records(scorer.batch_size)
        values = score_in_fixed_batches(whole, LATENTS, [f"p{i}" for i in range(17)])
        assert scorer.seen == whole.seen
        status, answer = answers[f"s{i}"]
        assert status == 200 and answer["scores"] == {f"s{i}/{key}": column for key, column in values.items()}
        assert answer["input_info"]["shape"] == list(LATENTS.shape)


def test_a_scorer_that_fails_in_a_later_piece(monkeypatch):
    good, bad = Records(2), Records(2, fails_at=float(LATENTS[5, 0, 0, 0, 0]))
    pieces, answers = recorded(monkeypatch, 2, good, bad)
    assert answers["s1"] == (422, {"message": "scorer s1: cannot"}) and len(bad.seen) == 3
    assert answers["s0"][0] == 200 and len(answers["s0"][1]["scores"]["s0/first"]) == 17
    pieces, answers = recorded(monkeypatch, 2, bad)
    assert answers["s0"][0] == 422 and pieces == [2, 2, 2]  # nobody is left to decode the rest for


def test_scores_of_other_names_in_a_later_piece(monkeypatch):
    class Renames(Records):
        def score(self, videos, prompts):
            super().score(videos, prompts)
            return {f"n{len(self.seen) // 2}": [0.0] * 2}

    _, answers = recorded(monkeypatch, 2, Renames(2))
    assert answers["s0"] == (422, {"message": "scorer s0: it named its scores ['n1'] here and ['n0'] before"})


def test_a_piece_is_gone_before_the_next_is_decoded(monkeypatch):
    alive = []

    class Watches(Identity):
        def decode(self, latents):
            alive.append(sum(ref() is not None for ref in refs))
            video = super().decode(latents)
            refs.append(weakref.ref(video))
            return video

    refs = []
    monkeypatch.setattr(worker_module, "_PIECE_BYTES", 1)
    worker = Worker({"brightness": Records(4)}, Watches(), Limits())
    assert wait(worker, worker.add(header(17), LATENTS))[0] == 200
    assert alive == [0] * 5


def test_a_decoded_video_is_clipped_where_it_is():
    class Fixed:
        video = np.array([-3.0, 0.5, 3.0], np.float32).reshape(1, 1, 1, 1, 3)

        def decode(self, latents):
            return self.video

    assert to_video(LATENTS, "latent", Fixed()) is Fixed.video
    assert Fixed.video.ravel().tolist() == [-1.0, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_what_was_sent_is_not_changed(dtype):
    sent = np.random.default_rng(0).integers(0, 255, (2, 3, 2, 4, 4)).astype(dtype)
    before = sent.copy()
    got = to_video(sent, "video", Identity())
    np.testing.assert_array_equal(sent, before)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, sent.astype(np.float32) / np.float32(127.5) - np.float32(1.0))
    for codec in (Identity(), Unshuffle(1)):
        to_video(sent, "latent", codec)
        np.testing.assert_array_equal(sent, before)


def test_undecodable_latents_fail_with_the_reason():
    worker = Worker({"brightness": Brightness()}, Unshuffle(2), Limits())
    status, answer = wait(worker, worker.add(header(1), np.zeros((1, 3, 1, 2, 2), np.float32)))
    assert status == 422 and "latent channels: 3" in answer["message"]


def test_not_a_number_becomes_null():
    class Nan:
        batch_size = 2

        def score(self, videos, prompts):
            return {"a": [float("nan"), float("inf")]}

    worker = Worker({"nan": Nan()}, Identity(), Limits())
    uuid = worker.add(header(2, nan=1.0), np.zeros((2, 1, 1, 2, 2), np.float32))
    assert wait(worker, uuid, "nan")[1]["scores"] == {"nan/a": [None, None]}


def test_queue_and_results_are_bounded():
    import threading

    go = threading.Event()

    class Slow:
        batch_size = 1

        def score(self, videos, prompts):
            go.wait(20)
            return {"overall": [1.0]}

    worker = Worker({"slow": Slow()}, Identity(), Limits(queue=3, results=4, queue_bytes=10_000))
    one = np.zeros((1, 1, 1, 2, 2), np.float32)
    uuids = [worker.add(header(1, slow=1.0), one) for _ in range(3)]
    with pytest.raises(QueueFullError):
        worker.add(header(1, slow=1.0), one)
    assert worker.get(uuids[0], "slow")[0] == 400
    go.set()
    for uuid in uuids:
        assert wait(worker, uuid, "slow")[0] == 200
    for _ in range(10):
        uuids.append(worker.add(header(1, slow=1.0), one))
        assert wait(worker, uuids[-1], "slow")[0] == 200
    assert worker.pending == 0 and worker.get(uuids[-1], "slow")[0] == 200
    assert worker.get(uuids[0], "slow")[0] == 404  # expired
    go.clear()
    worker.add(header(1, slow=1.0), np.zeros((1, 1, 1, 50, 40), np.float32))
    with pytest.raises(QueueFullError):  # by bytes
        worker.add(header(1, slow=1.0), np.zeros((1, 1, 1, 50, 40), np.float32))
    go.set()
