"""From published files and a folder of videos to exported weights: the Cosmos recipe, nothing but its sizes changed.

Every stage is the command a user types, in a process of its own. The sidecar decodes latents with its Torch Wan VAE.
"""

import json
import os
import subprocess
import sys

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

    run(folder, "train", "--config.train.steps=3")
    assert [row["step"] for row in lines(folder, "ddrl")] == [0, 1, 2]
    assert lines(folder, "ddrl")[:2] == ddrl

    for weights in ("raw", "ema"):
        flags = ["--config.export.format=diffusers", f"--config.export.weights={weights}"]
        run(folder, "export", *flags, f"--config.export.out={folder / weights}", "--config.train.steps=3")
    run(folder, "export", "--config.export.format=pt", "--config.train.steps=3", f"--config.export.out={folder / 'pt'}")

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
        assert ("embedding captions" in said) == (where == "cached")
        (first[where],) = lines(prepared, "ddrl", where)
    for name in ("data_loss", "reward", "grad_norm"):
        assert first["cached"][name] == first["device"][name]
        assert first["sidecar"][name] == pytest.approx(first["device"][name], rel=0.05, abs=2e-3)


def test_evaluation_begins_with_the_frames_it_is_given_and_is_the_same_on_eight_devices(prepared):
    picture = tiny_cosmos.clip(5)[0]
    Image.fromarray(picture).save(prepared / "first.png")
    rows = [{"caption": "a red box moves right"}, {"caption": "a green box moves up", "image": "first.png"}] * 2
    (prepared / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [f"--config.eval.prompts={prepared / 'prompts.jsonl'}", "--config.model.dtype=float32"]
    flags += [
        "--config.eval.clips=8",
        "--config.eval.clips_during=8",
        "--config.eval.chunk=8",
        "--config.train.micro_batch=8",
    ]
    flags += ["--config.pretrain.batch_size=8"]
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
    config = WanCodec(*load_pretrained(prepared / "tokenizer.pth", compute_dtype="bfloat16"))
    pixels = np.moveaxis(picture.astype(np.float32) / 127.5 - 1, -1, 0)[None, :, None]
    back = np.clip(config.decode(config.encode(pixels))[0, :, 0], -1, 1)
    assert np.abs(np.moveaxis(back + 1, 0, -1) * 127.5 - first[1]).max() <= 4  # bfloat16


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
    import jax

    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def _diffusers_agrees(path, graphdef, params):
    """diffusers' own class loads the folder and computes the same."""
    import types

    import jax.numpy as jnp
    import torch
    from flax import nnx

    # Its forward asks for a nearest-neighbour resize of torchvision, which is not installed here.
    stub = types.ModuleType("torchvision.transforms")
    stub.functional = types.SimpleNamespace(
        resize=lambda x, size, interpolation=None: torch.nn.functional.interpolate(x, size, mode="nearest")
    )
    stub.InterpolationMode = types.SimpleNamespace(NEAREST="nearest")
    with pytest.MonkeyPatch.context() as patch:
        parent = types.ModuleType("torchvision")
        parent.transforms = stub
        patch.setitem(sys.modules, "torchvision", parent)
        patch.setitem(sys.modules, "torchvision.transforms", stub)
        patch.setattr("diffusers.utils.import_utils._torchvision_available", True)
        import diffusers.models.transformers.transformer_cosmos as module

        patch.setattr(module, "transforms", stub, raising=False)
        theirs = module.CosmosTransformer3DModel.from_pretrained(path).eval()
        for name, part in theirs.named_modules():
            if name.endswith(("norm_q", "norm_k")):
                part.eps = 1e-6  # diffusers' own is 1e-5; the checkpoints mean 1e-6
        rng = np.random.default_rng(0)
        x = rng.standard_normal((1, 16, 3, 4, 6)).astype(np.float32)
        context = rng.standard_normal((1, 24, 192)).astype(np.float32)
        with torch.no_grad():
            out = theirs(
                hidden_states=torch.from_numpy(x),
                timestep=torch.tensor([0.4]),
                encoder_hidden_states=torch.from_numpy(context),
                condition_mask=torch.zeros(1, 1, 3, 4, 6),
                padding_mask=torch.zeros(1, 1, 32, 48),
                return_dict=False,
            )[0].numpy()
    ours = nnx.merge(graphdef, params)(x, jnp.array([0.4]), context)
    np.testing.assert_allclose(ours, out, atol=3e-5 * max(1.0, np.abs(out).max()))
