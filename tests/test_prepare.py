"""Synthetic clips of a base: what they are, that training takes them, and what is refused. No sidecar."""

import dataclasses
import functools
import json
import os
import shlex
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

from ddrl_jax import build, prepare, train
from ddrl_jax import config as config_lib
from ddrl_jax.checkpoint.manager import Checkpoints
from ddrl_jax.data import digits
from ddrl_jax.diffusion.sampler import sample
from ddrl_jax.logbook import Logbook

from . import tiny

CLIPS = 11


def tiny_config(**fields):
    config = tiny.config()
    config.prepare.clips = CLIPS
    for field, value in fields.items():
        section, _, name = field.partition("__")
        config[section][name] = value
    config_lib.validate(config)
    return config


def base_state(config, setup):
    """A state of finished pre-training whose raw weights and EMA are two networks."""
    optimizer, exponent = build.optimizer(config.pretrain), build.ema_exponent(config.pretrain)
    state = build.train_state(setup, build.init_params(config, setup.mesh, jax.random.key(0)), optimizer, exponent)

    def moved(tree, seed):
        leaves, form = jax.tree.flatten(tree)
        rng = np.random.default_rng(seed)
        new = [np.asarray(x) + 0.05 * rng.standard_normal(x.shape).astype(x.dtype) for x in leaves]
        return jax.tree.map(lambda old, x: jax.device_put(x, old.sharding), tree, form.unflatten(new))

    step = jax.device_put(np.int32(config.pretrain.steps), state.step.sharding)
    return dataclasses.replace(state, step=step, params=moved(state.params, 1), ema=moved(state.ema, 2))


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Of the test process's eight, so that chunks may have any size."""
    with pytest.MonkeyPatch.context() as patch:
        one = functools.partial(build.make_mesh, devices=jax.devices()[:1])
        patch.setattr(build, "make_mesh", one)
        yield


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Each call compiles its own programs: a cache, so that the same program is compiled once."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("xla")), 0.2), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    workdir, config = tmp_path_factory.mktemp("prepare") / "base", tiny_config()
    with Checkpoints(workdir / "checkpoints/pretrain", keep=1) as checkpoints:
        checkpoints.save(config.pretrain.steps, base_state(config, build.build(config)), wait=True)
    (workdir / "config.json").write_text(config_lib.to_json(config))
    return workdir


@pytest.fixture(scope="module")
def prepared(base):
    """The folder that the plain call makes."""
    assert prepare.run(tiny_config(), base) is True
    return base / "synthetic"


def made(base, out, **fields):
    """The clips of a call with fields changed."""
    assert prepare.run(tiny_config(prepare__out=str(out), pretrain__from_run=str(base), **fields), out.parent / "none")
    return digits.load_clips(out)


def test_the_folder_holds_clips_a_record_and_a_picture(base, prepared):
    assert sorted(p.name for p in prepared.iterdir()) == ["clips.npz", "sheet.png", "synthetic.json"]
    assert not list(base.glob(".synthetic*")) and prepared.stat().st_mode & 0o777 == 0o755
    clips = digits.load_clips(prepared)
    assert clips.video.shape == (CLIPS, 4, 12, 12, 1) and clips.video.std() > 10
    record = json.loads((prepared / "synthetic.json").read_text())
    expected = {"base": str(base), "stage": "pretrain", "step": 4, "clips": CLIPS, "guidance": 0.0, "seed": 0}
    assert {k: record[k] for k in expected} == expected
    assert record["num_steps"] == 4 and record["process"]["name"] == "edm_churn" and len(record["weights"]) == 16
    with Image.open(prepared / "sheet.png") as sheet:
        # Four columns of 4 frames of 4 * 12 pixels or a longer caption, three rows.
        assert sheet.width > 4 * 4 * 48 and sheet.height > 3 * 48


def test_captions_are_those_of_training_in_its_order(prepared):
    clips = digits.load_clips(prepared)
    training = train.clip_dataset(tiny_config(), build.make_mesh(tiny_config()), 1)
    assert clips.caption == [training[i]["caption"][0] for i in range(CLIPS)]
    table = {text: (digit, direction) for digit, direction, text in digits.all_prompts(heldout=False)}
    asked = [table[text] for text in clips.caption]
    np.testing.assert_array_equal(np.stack([clips.digit, clips.direction], 1), asked)


def by_hand(i, guidance=0.0):
    """Pixels (T,H,W,1) of clip i alone, from its definition: EMA weights, its own key, guidance written out."""
    config = tiny_config()
    setup = build.build(config)

    def denoise(params, x, sigma, cond):
        x0 = setup.denoise(params, x, sigma, cond)
        null = build.cond(jnp.zeros_like(cond["context"]))
        return (1 + guidance) * x0 - guidance * setup.denoise(params, x, sigma, null)

    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), prepare.STREAM), i)
    noise = jax.random.normal(key, (config.eval.num_steps + 1, 1, *setup.latent_shape))
    context = setup.text.embed(train.clip_dataset(config, setup.mesh, 1)[i]["caption"])

    @jax.jit
    def draw(params, context, noise):
        model = dict(denoise=denoise, process=setup.process, shape=(1, *setup.latent_shape))
        options = dict(num_steps=config.eval.num_steps, record=(), noise=(noise[0], noise[1:]))
        return sample(params, None, build.cond(context), **model, **options)[0]

    x0 = draw(base_state(config, setup).ema, context, noise)
    pixels = np.clip(np.asarray(setup.codec.decode(x0))[0], -1, 1)
    return (np.moveaxis(pixels, 0, -1) + 1) * 127.5


def test_clips_are_samples_of_the_ema(prepared):
    video = digits.load_clips(prepared).video
    for i in (0, 9):  # the second one lies in the padded chunk
        np.testing.assert_allclose(video[i], by_hand(i), atol=0.51)


def test_guidance_is_that_of_prepare(base, prepared, tmp_path):
    guided = made(base, tmp_path / "guided", prepare__guidance=3.0).video
    np.testing.assert_allclose(guided[2], by_hand(2, guidance=3.0), atol=0.6)
    assert np.abs(guided.astype(int) - digits.load_clips(prepared).video).max() > 5


def test_neither_chunk_nor_number_of_clips_matters(base, prepared, tmp_path):
    plain = digits.load_clips(prepared)
    other = made(base, tmp_path / "other", eval__chunk=16, prepare__clips=20)
    assert other.caption[:CLIPS] == plain.caption
    # Rounding to bytes may fall either side where the float rounding of another batch size does.
    assert np.abs(other.video[:CLIPS].astype(int) - plain.video).max() <= 1
    assert len({video.tobytes() for video in other.video}) == 20


def test_the_same_call_makes_the_same_bytes_and_another_seed_others(base, prepared, tmp_path):
    again = made(base, tmp_path / "again")
    np.testing.assert_array_equal(again.video, digits.load_clips(prepared).video)
    config = tiny_config(prepare__out=str(tmp_path / "seed"), pretrain__from_run=str(base))
    config.seed = 1
    assert prepare.run(config, tmp_path / "none")
    assert np.abs(digits.load_clips(tmp_path / "seed").video.astype(int) - again.video).max() > 20


def test_training_takes_them(base, prepared, tmp_path):
    config = tiny_config(data__path=str(prepared))
    batches = train.clip_dataset(config, build.make_mesh(config), 16)  # more than there are
    stored = {text: [] for text in digits.load_clips(prepared).caption}
    for text, video in zip(digits.load_clips(prepared).caption, digits.load_clips(prepared).video, strict=True):
        stored[text].append(video)
    batch = batches[3]
    assert batch["video"].shape == (16, 1, 4, 12, 12)
    for text, video in zip(batch["caption"], batch["video"], strict=True):
        pixels = np.rint((np.moveaxis(video, 0, -1) + 1) * 127.5)
        assert any(np.array_equal(pixels, s) for s in stored[text])
    book = Logbook(tmp_path, tensorboard=False)
    with Checkpoints(tmp_path / "checkpoints/pretrain", keep=1) as checkpoints:
        trained = train.pretrain(config, build.build(config), book, checkpoints, lambda: False)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained))
    losses = [line["loss"] for line in tiny.lines(tmp_path, "pretrain")]
    assert len(losses) == 4 and np.isfinite(losses).all()


def test_a_second_call_makes_none_and_another_setting_is_refused(base, prepared, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "_sample", lambda *_: pytest.fail("sampled again"))
    assert prepare.run(tiny_config(), base) is True
    assert f"holds these {CLIPS} clips already" in capsys.readouterr().out
    with pytest.raises(config_lib.ConfigError, match=r"holds other clips, whose guidance is 0.0 and not 2.0; remove"):
        prepare.run(tiny_config(prepare__guidance=2.0), base)


def test_a_base_of_other_weights_is_another_base(base, prepared, monkeypatch):
    load = train.load_base
    monkeypatch.setattr(train, "load_base", lambda *a: jax.tree.map(lambda x: 2 * x, load(*a)))
    with pytest.raises(config_lib.ConfigError, match="holds other clips, whose weights is"):
        prepare.run(tiny_config(), base)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_leaves_within_a_chunk_and_writes_nothing(base, tmp_path, monkeypatch, capsys, number):
    calls = []
    sampler = prepare.sampler

    def interrupted(*arguments):
        draw = sampler(*arguments)

        def call(*a):
            calls.append(1)
            os.kill(os.getpid(), number)
            return draw(*a)

        return call

    config = tiny_config(prepare__out=str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "sampler", interrupted)
        assert prepare.run(config, base) is False
    assert len(calls) == 1 and list(tmp_path.iterdir()) == []
    assert f"stopped after 8 of {CLIPS} clips; nothing is written" in capsys.readouterr().out
    assert prepare.run(config, base) is True


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_write_that_fails_leaves_nothing(base, tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(prepare, "_sheet", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        prepare.run(tiny_config(prepare__out=str(tmp_path / "out")), base)
    assert list(tmp_path.iterdir()) == []


def test_samples_that_are_not_finite_are_no_data(base, tmp_path, monkeypatch):
    load = train.load_base
    monkeypatch.setattr(train, "load_base", lambda *a: jax.tree.map(lambda x: x * np.nan, load(*a)))
    with pytest.raises(train.RunStopped, match="8 of clips 0 to 7 are not finite, and nothing is written"):
        prepare.run(tiny_config(prepare__out=str(tmp_path / "out")), base)
    assert list(tmp_path.iterdir()) == []


def _file(path):
    path.write_text("x")


def _taken(path):
    path.mkdir()
    (path / "notes.txt").write_text("x")


def _real_clips(path):
    digits.write_clips(path, "train", 2)


def _damaged(path):
    path.mkdir()
    (path / "synthetic.json").write_text("{}")
    (path / "clips.npz").write_text("x")


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (_file, "is a file; it must be a folder that is new or empty"),
        (_taken, "holds something else; it must be a folder that is new or empty"),
        (_real_clips, "holds something else"),
        (_damaged, r"holds damaged clips \(.*not a readable npz file"),
    ],
)
def test_a_folder_that_holds_something_else_is_left_alone(base, tmp_path, there, message):
    there(tmp_path / "out")
    before = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(config_lib.ConfigError, match=message) as error:
        prepare.run(tiny_config(prepare__out=str(tmp_path / "out")), base)
    assert "\n" not in str(error.value) and str(error.value).startswith("config.prepare.out='")
    assert {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_an_empty_folder_is_filled(base, prepared, tmp_path):
    (tmp_path / "out").mkdir()
    np.testing.assert_array_equal(made(base, tmp_path / "out").video, digits.load_clips(prepared).video)


def test_a_place_that_cannot_be_made_is_refused_before_anything_is_sampled(base, tmp_path):
    _file(tmp_path / "file")
    with pytest.raises(config_lib.ConfigError, match=r"cannot be made \(.*\); take another folder"):
        prepare.run(tiny_config(prepare__out=str(tmp_path / "file/out")), base)


def test_no_base_is_one_line(base, tmp_path):
    with pytest.raises(config_lib.ConfigError, match=r"workdir='.*none': holds no run to sample from; train one there"):
        prepare.run(tiny_config(), tmp_path / "none")
    with pytest.raises(config_lib.ConfigError, match=r"config.pretrain.from_run='nowhere'"):
        prepare.run(tiny_config(pretrain__from_run="nowhere"), tmp_path / "none")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "checkpoints").symlink_to(base / "checkpoints")
    config = tiny_config(pretrain__steps=5)
    (unfinished / "config.json").write_text(config_lib.to_json(config))
    with pytest.raises(config_lib.ConfigError, match="is at step 4 of 5; finish it"):
        prepare.run(config, unfinished)
    with pytest.raises(config_lib.ConfigError, match=r"config.model.width=64: workdir=.* holds a run with 32"):
        prepare.run(tiny_config(model__width=64), base)
    assert not (tmp_path / "none/synthetic").exists()


def test_data_that_are_rendered_only_are_refused(base, tmp_path):
    config = tiny_config(prepare__out=str(tmp_path / "out"))
    config.data.name = "words"
    with pytest.raises(config_lib.ConfigError, match=r"config.data.name='words': must be 'digits'"):
        prepare.run(config, base)
    assert list(tmp_path.iterdir()) == []


def test_fewer_than_one_clip_is_refused():
    with pytest.raises(config_lib.ConfigError, match=r"config.prepare.clips=0: must be at least 1"):
        tiny_config(prepare__clips=0)


def test_the_next_command_trains_another_workdir_from_the_same_base(base, prepared, capsys):
    arguments = ["--config=configs/quickstart.py", f"--workdir={base}", "--mode=prepare", "--config.seed=0"]
    arguments += ["--config.prepare.guidance=0.0", "--config.train.steps=0"]
    assert prepare.run(tiny_config(), base, arguments=arguments)
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("train on them: ")]
    assert shlex.split(line.removeprefix("train on them: ")) == [
        *("python", "-m", "ddrl_jax.main", "--config=configs/quickstart.py", "--config.seed=0"),
        *(f"--config.pretrain.from_run={base}", f"--config.data.path={prepared}", f"--workdir={base}-synthetic"),
    ]


def test_the_mode_on_one_device_draws_the_same_clips(base, prepared, tmp_path):
    arguments = ["--mode=prepare", f"--config.prepare.out={tmp_path / 'out'}", f"--config.prepare.clips={CLIPS}"]
    process = tiny.main(base, *arguments)
    assert process.returncode == 0, process.err
    assert f"--config.data.path={tmp_path / 'out'}" in process.out and "report:" not in process.out
    video = digits.load_clips(tmp_path / "out").video
    assert np.abs(video.astype(int) - digits.load_clips(prepared).video).max() <= 1
    command = json.loads((tmp_path / "out/synthetic.json").read_text())["command"]
    assert command.endswith(shlex.join([f"--workdir={base}", *arguments]))
    process = tiny.main(base, *arguments, "--config.prepare.clips=0")
    assert process.returncode == 2 and process.err.strip() == "error: config.prepare.clips=0: must be at least 1"
