"""From published files and a folder of videos to exported weights: the Cosmos recipe, nothing but its sizes changed.

Every stage is the command a user types, in a process of its own. The sidecar decodes latents with its Torch Wan VAE.
"""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from ddrl_jax.checkpoint import load_pretrained
from ddrl_jax.checkpoint.lora_files import load_lora
from ddrl_jax.data.latent_cache import LatentCache
from ddrl_jax.models import WanCodec
from ddrl_jax.models.lora import merge_lora

from . import tiny_cosmos
from .paths import ROOT
from .test_weights import TWIN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_cosmos.everything(tmp_path_factory.mktemp("cosmos"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder of its own whose videos are encoded, for tests that only need that."""
    folder = tiny_cosmos.everything(tmp_path_factory.mktemp("prepared"))
    run(folder, "prepare", workdir="prepare")
    return folder


def run(folder, mode, *flags, status=0, workdir="run", devices=1):
    command = [sys.executable, "-m", "ddrl_jax.main", "--config=configs/cosmos2b.py", f"--mode={mode}"]
    command += [f"--workdir={folder / workdir}", *tiny_cosmos.flags(folder), *flags]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1500)
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def lines(folder, stage, workdir="run"):
    rows = map(json.loads, (folder / workdir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["stage"] == stage]


def test_the_whole_way(folder):
    said = run(folder, "check")
    assert "FAIL" not in said and "8 videos to encode, 3 skipped" in said and "to mend" not in said

    said = run(folder, "prepare")
    for name in ("corrupt", "short", "silent"):
        assert f"skipped {name}: " in said
    index = json.loads((folder / "data/latents/index.json").read_text())
    assert index["finished"] and sum(shard["clips"] for shard in index["shards"]) == 8

    said = run(folder, "train")
    ddrl = lines(folder, "ddrl")
    assert [row["step"] for row in ddrl] == [0, 1]
    assert all(row["valid_rate"] == 1.0 and np.isfinite(row["data_loss"]) and row["grad_norm"] > 0 for row in ddrl)
    assert ddrl[0]["ratio_mean"] == pytest.approx(1.0)
    assert len(list((folder / "run/eval/000002/videos").glob("*.mp4"))) == 4
    assert (folder / "run/report/index.html").is_file()

    # Both orientations were trained on, and a run that was resumed is one that never stopped.
    run(folder, "train", "--config.train.steps=4")
    assert lines(folder, "ddrl")[:2] == ddrl
    run(folder, "train", "--config.train.steps=4", workdir="straight")
    told = ("step", "reward", "data_loss", "policy_loss", "grad_norm", "update_norm", "ratio_mean")
    resumed, straight = ([{k: row[k] for k in told} for row in lines(folder, "ddrl", w)] for w in ("run", "straight"))
    assert [row["step"] for row in resumed] == [0, 1, 2, 3] and resumed == straight

    for weights in ("raw", "ema"):
        flags = ["--config.export.format=diffusers", f"--config.export.weights={weights}"]
        run(folder, "export", *flags, f"--config.export.out={folder / weights}", "--config.train.steps=4")
    said = run(folder, "export", "--config.train.steps=4", "--config.export.step=77", status=2)
    assert "77" in said and "4" in said
    run(folder, "export", "--config.export.format=pt", "--config.train.steps=4", f"--config.export.out={folder / 'pt'}")

    graphdef, raw = load_pretrained(folder / "raw")
    _, ema = load_pretrained(folder / "ema")
    _, base = load_pretrained(folder / "model.pt")
    assert _distance(raw, base) > 0 and _distance(ema, base) > 0
    _, again = load_pretrained(next((folder / "pt").glob("*.pt")))
    assert _distance(ema, again) == 0
    _diffusers_agrees(folder / "raw", graphdef, raw)


def test_training_prepares_what_is_not_prepared(folder, tmp_path):
    data = tiny_cosmos.videos(tmp_path / "data", count=6)
    said = run(folder, "train", "--config.train.steps=1", f"--config.data.path={data}", workdir="unprepared")
    assert "6 videos to use, 3 skipped" in said and len(lines(folder, "ddrl", "unprepared")) == 1


def test_text_from_a_cache_or_the_sidecar_is_the_text_of_the_device(prepared):
    """The same features to the last bit from the cache, and up to bfloat16's rounding from torch."""
    first = {}
    for where in ("device", "cached", "sidecar"):
        flags = ["--config.train.steps=1", f"--config.text_encoder.where={where}"]
        said = run(prepared, "train", *flags, workdir=where)
        assert ("embedding 8 captions" in said) == (where == "cached")
        (first[where],) = lines(prepared, "ddrl", where)
    for name in ("data_loss", "reward", "grad_norm"):
        assert first["cached"][name] == first["device"][name]
        assert first["sidecar"][name] == pytest.approx(first["device"][name], rel=0.05, abs=2e-3)


def test_evaluation_begins_with_the_frames_it_is_given_and_is_the_same_on_eight_devices(prepared):
    data = shutil.copytree(prepared / "data", prepared / "data32")
    shutil.rmtree(data / "latents")  # of the VAE in bfloat16
    picture = tiny_cosmos.clip(5)[0]
    Image.fromarray(picture).save(prepared / "first.png")
    rows = [{"caption": "a red box moves right"}, {"caption": "a green box moves up", "image": "first.png"}]
    (prepared / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [f"--config.eval.prompts={prepared / 'prompts.jsonl'}", "--config.model.dtype=float32"]
    flags += ["--config.text_encoder.dtype=float32", "--config.codec.dtype=float32", f"--config.data.path={data}"]
    flags += [
        "--config.eval.clips=8",
        "--config.eval.clips_during=8",
        "--config.eval.chunk=8",
        "--config.train.micro_batch=8",
    ]
    seen = {}
    for devices in (1, 8):
        run(prepared, "eval", *flags, f"--config.mesh.fsdp={devices}", workdir=f"eval{devices}", devices=devices)
        folder = prepared / f"eval{devices}/eval/000000"
        assert len(list((folder / "videos").glob("*.mp4"))) == 8
        seen[devices] = np.load(folder / "samples.npz")["video"].astype(int)
    assert np.abs(seen[1] - seen[8]).max() <= 1
    # Given frames are those of the picture, sent through the VAE and back; the others are the network's own.
    first = seen[1][:, 0]
    assert np.abs(first[1] - first[3]).max() == 0 and np.abs(first[0] - first[2]).max() > 0
    codec = WanCodec(*load_pretrained(prepared / "tokenizer.pth"))
    pixels = np.moveaxis(picture.astype(np.float32) / 127.5 - 1, -1, 0)[None, :, None]
    back = np.clip(codec.decode(codec.encode(pixels))[0, :, 0], -1, 1)
    assert np.abs(np.moveaxis(back + 1, 0, -1) * 127.5 - first[1]).max() <= 1
    # A prompt's samples are its own, wherever it stands; and the base is evaluated again where it was.
    (prepared / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows[::-1])))
    run(prepared, "eval", *flags, workdir="eval_turned")
    turned = np.load(prepared / "eval_turned/eval/000000/samples.npz")["video"].astype(int)
    assert np.abs(turned[0] - seen[1][1]).max() <= 1 and np.abs(turned[1] - seen[1][0]).max() <= 1
    run(prepared, "eval", *flags, workdir="eval_turned")


def test_synthetic_videos_of_the_base_are_data(prepared):
    (prepared / "captions.txt").write_text("a red box moves right\na blue box moves up\n")
    out = prepared / "synthetic"
    flags = [f"--config.prepare.prompts={prepared / 'captions.txt'}", f"--config.prepare.out={out}"]
    run(prepared, "prepare", *flags, "--config.prepare.clips=5", workdir="synthetic_run")
    cache = LatentCache(out / "latents")
    assert sorted(cache.names) == [f"synthetic-{i:07d}" for i in range(5)]
    assert sorted(set(cache.captions)) == ["a blue box moves up", "a red box moves right"]
    run(prepared, "train", "--config.train.steps=1", f"--config.data.path={out}", workdir="on_synthetic")
    assert len(lines(prepared, "ddrl", "on_synthetic")) == 1


def test_an_adapter_is_trained_and_exported_merged_and_separate(prepared):
    flags = ["--config.lora.rank=4", "--config.lora.alpha=8", "--config.train.learning_rate=0.01"]
    said = run(prepared, "train", *flags, workdir="lora")
    assert "frozen base, adapter" in said
    run(prepared, "train", *flags, "--config.train.steps=3", workdir="lora")
    outs = {kind: prepared / f"lora_{kind}" for kind in ("merged", "separate")}
    for kind, out in outs.items():
        given = [*flags, "--config.train.steps=3", "--config.export.weights=raw", f"--config.export.lora={kind}"]
        run(prepared, "export", *given, f"--config.export.out={out}", workdir="lora")
    run(prepared, "eval", *flags, "--config.train.steps=3", workdir="lora")
    graphdef, base = load_pretrained(prepared / "model.pt")
    _, merged = load_pretrained(outs["merged"])
    adapter, alpha = load_lora(outs["separate"], nnx.merge(graphdef, base).config)
    assert alpha == 8.0 and all(np.abs(np.asarray(pair["b"])).max() > 0 for pair in adapter.values())
    assert _distance(merged, base) > 0
    assert _distance(merge_lora(base, adapter, alpha / 4), merged) < 1e-6


def test_check_names_what_is_wrong_and_looks_at_the_rest(prepared):
    wrong = ["--config.text_encoder.path=/nowhere", "--config.model.depth=3", "--config.reward.scorers=('nothing',)"]
    said = run(prepared, "check", *wrong, status=2, workdir="checked")
    failed = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in failed] == ["text", "network", "sidecar"]
    assert "/nowhere" in failed[0] and "config.model.depth=3" in failed[1] and "nothing" in failed[2]
    assert "3 to mend: text, network, sidecar" in said and not (prepared / "checked").exists()


def _distance(a, b):
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


def _diffusers_agrees(path, graphdef, params):
    """diffusers' own class, in a process of its own, loads the folder and computes the same."""
    rng = np.random.default_rng(0)
    inputs = {
        "x": rng.standard_normal((1, 16, 3, 4, 6)),
        "t": np.array([0.4]),
        "context": rng.standard_normal((1, 24, 192)),
        "condition_mask": np.zeros((1, 1, 3, 4, 6)),
        "padding_mask": np.zeros((1, 1, 32, 48)),
    }
    inputs = {name: value.astype(np.float32) for name, value in inputs.items()}
    np.savez(path.parent / "inputs.npz", **inputs)
    command = [sys.executable, "-c", TWIN, path, path.parent / "inputs.npz", path.parent / "theirs.npy"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = np.load(path.parent / "theirs.npy")
    ours = nnx.merge(graphdef, params)(*inputs.values())
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(1.0, np.abs(theirs).max()))
