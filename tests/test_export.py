"""`--mode=export`: what it reads, what it writes, and what it leaves alone."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from ddrl_jax import build, export, state
from ddrl_jax import config as config_lib
from ddrl_jax.checkpoint import load_pretrained, save_pretrained
from ddrl_jax.checkpoint.lora_files import load_lora
from ddrl_jax.checkpoint.manager import Checkpoints
from ddrl_jax.models.lora import merge_lora
from ddrl_jax.parallel.mesh import fsdp_sharding

from . import tiny
from .test_weights import same_params


def numbered(tree, first):
    """Other numbers in every leaf, and other ones for another `first`."""
    leaves, treedef = jax.tree.flatten(tree)
    key = jax.random.key(first)
    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten([jax.random.normal(k, p.shape, p.dtype) for k, p in zip(keys, leaves, strict=True)])


def make_run(workdir, **changes):
    """A workdir with checkpoints of steps 1 and 3: (config, state of step 3)."""
    config = tiny.config()
    for field, value in changes.items():
        section, name = field.split("__")
        config[section][name] = value
    mesh = build.make_mesh(config)
    exponent = build.ema_exponent(config.train)
    base = build.abstract_params(config)
    params = numbered(jax.eval_shape(lambda p: build.trained_params(config, p), base), 1)
    params = jax.device_put(params, fsdp_sharding(mesh, params))
    s = state.init_state(params, build.optimizer(config.train), ema=exponent is not None)
    if exponent is not None:
        ema = numbered(params, 2)
        s = dataclasses.replace(s, ema=jax.device_put(ema, fsdp_sharding(mesh, ema)))
    workdir.mkdir()
    (workdir / "config.json").write_text(config_lib.to_json(config))
    with Checkpoints(workdir / "checkpoints/ddrl") as checkpoints:
        checkpoints.save(1, dataclasses.replace(s, params=jax.tree.map(jnp.zeros_like, params)))
        checkpoints.save(3, s)
    return config, s


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("export") / "run"
    return workdir, *make_run(workdir)


def exported(config, workdir, out, **options):
    config = config.copy_and_resolve_references()
    config.export.update({"out": str(out), "dtype": "float32", "weights": "raw", "format": "safetensors"} | options)
    assert export.run(config, workdir, arguments=["--mode=export"])
    return json.loads((out / "export.json").read_text())


def test_raw_and_ema_in_every_format(finished, tmp_path, capsys):
    workdir, config, s = finished
    before = sorted(str(f) for f in workdir.rglob("*"))
    for format, weights in (("safetensors", "raw"), ("safetensors", "ema"), ("diffusers", "ema")):
        out = tmp_path / f"{format}_{weights}"
        record = exported(config, workdir, out, format=format, weights=weights)
        assert str(out) in capsys.readouterr().out
        same_params(load_pretrained(out)[1], s.params if weights == "raw" else s.ema)
        assert (record["step"], record["weights"], record["format"]) == (3, weights, format)
        assert record["run"] == str(workdir) and record["dtype"] == "float32"
        assert record["command"] == "python -m ddrl_jax.main --mode=export"
        assert {f.name for f in out.iterdir()} == {*record["files"], "export.json"}
        for name, entry in record["files"].items():
            data = (out / name).read_bytes()
            assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert sorted(str(f) for f in workdir.rglob("*")) == before
    assert not list(tmp_path.glob(".*"))


def test_bfloat16_and_the_default_folder(finished):
    workdir, config, s = finished
    config = config.copy_and_resolve_references()
    config.export.update({"out": "", "dtype": "bfloat16", "weights": "ema", "format": "diffusers"})
    export.run(config, workdir)
    params = load_pretrained(workdir / "export/diffusers-ema-bfloat16-step3", dtype="bfloat16")[1]
    same_params(params, jax.tree.map(lambda p: p.astype(jnp.bfloat16), s.ema))
    assert json.loads((workdir / "export/diffusers-ema-bfloat16-step3/export.json").read_text())["dtype"] == "bfloat16"


def test_torch(finished, tmp_path):
    torch = pytest.importorskip("torch", reason="the sidecar's own environment has it; the test extra installs it")
    workdir, config, s = finished
    record = exported(config, workdir, tmp_path / "pt", format="pt")
    assert list(record["files"]) == ["model.pt"]
    tensors = torch.load(tmp_path / "pt/model.pt", weights_only=True)
    kernel = nnx.merge(build.graphdef(config), s.params).final.kernel[...]
    assert np.array_equal(tensors["net.final_layer.linear.weight"].numpy(), np.asarray(kernel).T)
    same_params(load_pretrained(tmp_path / "pt/model.pt")[1], s.params)
    # What that left beside it is no reason to refuse the next export.
    assert len(list((tmp_path / "pt").iterdir())) == 3
    exported(config, workdir, tmp_path / "pt", format="pt", weights="ema")
    same_params(load_pretrained(tmp_path / "pt/model.pt")[1], s.ema)


def test_without_torch_it_ends_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "read_weights", lambda *_: pytest.fail("read"))
    workdir = tmp_path / "run"
    config, _ = make_run(workdir, reward__env=str(tmp_path / "nowhere"))
    with pytest.raises(config_lib.ConfigError, match=r"config.export.format='pt': python=.*no such interpreter"):
        exported(config, workdir, tmp_path / "x", format="pt")


def test_only_what_is_exported_is_read(finished, monkeypatch):
    workdir, config, s = finished
    seen = {}
    restore = Checkpoints.restore

    def spy(self, like, step=None):
        seen["like"], seen["got"] = like, restore(self, like, step=step)
        return seen["got"]

    monkeypatch.setattr(Checkpoints, "restore", spy)
    step, params = export.read_weights(config, workdir, "ema")
    assert step == 3
    same_params(params, s.ema)
    _, got = seen["got"]
    for skipped in (got.params, got.opt_state):
        assert all(leaf is ... for leaf in jax.tree.leaves(skipped)) and jax.tree.leaves(skipped)
    kernel = nnx.merge(build.graphdef(config), params).final.kernel[...]
    assert not kernel.sharding.is_fully_replicated and len(kernel.sharding.device_set) == 8


def test_an_earlier_export_is_replaced_and_nothing_else(finished, tmp_path, monkeypatch):
    workdir, config, s = finished
    out = tmp_path / "out"
    out.mkdir()
    exported(config, workdir, out, format="diffusers")
    exported(config, workdir, out)  # other files: those of before are gone
    assert sorted(f.name for f in out.iterdir()) == ["export.json", "model.safetensors"]
    with monkeypatch.context() as m:
        m.setattr(export, "save_pretrained", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            exported(config, workdir, out, weights="ema")
    same_params(load_pretrained(out)[1], s.params)
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    (out / "thesis.tex").touch()
    with pytest.raises(config_lib.ConfigError, match=r"config.export.out='.*out': holds thesis.tex, which no export"):
        exported(config, workdir, out)
    (out / "thesis.tex").unlink()
    (out / "export.json").write_text("{}")
    with pytest.raises(config_lib.ConfigError, match="is no record of an export"):
        exported(config, workdir, out)
    (tmp_path / "file").touch()
    with pytest.raises(config_lib.ConfigError, match="must be a folder"):
        exported(config, workdir, tmp_path / "file")


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(config_lib.ConfigError, match="holds no run to export"):
        export.run(tiny.config(), tmp_path)
    config, _ = make_run(tmp_path / "run", train__ema_rate=0.0)
    with pytest.raises(config_lib.ConfigError, match=r"config.export.weights='ema': the run keeps none"):
        exported(config, tmp_path / "run", tmp_path / "x", weights="ema")
    exported(config, tmp_path / "run", tmp_path / "x")
    for folder in (tmp_path / "run/checkpoints/ddrl").iterdir():
        for file in folder.rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
    with (
        pytest.warns(RuntimeWarning, match="falling back"),
        pytest.raises(config_lib.ConfigError, match="none of the checkpoints"),
    ):
        exported(config, tmp_path / "run", tmp_path / "x")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="it must be one of CosmosDiT"):
        export.write(tmp_path / "y", *nnx.split(model), format="safetensors")
    with pytest.raises(ValueError, match="format='onnx': must be safetensors, pt or diffusers"):
        export.write(tmp_path / "y", *nnx.split(model), format="onnx")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run", "x"]


def test_the_file_of_one_tensor_that_changed_is_told_by_its_digest(finished, tmp_path):
    workdir, config, _ = finished
    one = exported(config, workdir, tmp_path / "a")["files"]["model.safetensors"]
    assert exported(config, workdir, tmp_path / "b")["files"]["model.safetensors"] == one
    assert exported(config, workdir, tmp_path / "b", weights="ema")["files"]["model.safetensors"] != one
    assert len(load_file(tmp_path / "a/model.safetensors")) == 29


def test_an_adapter_merged_or_by_itself(tmp_path):
    config = tiny.config()
    base = numbered(build.abstract_params(config), 7)
    save_pretrained(tmp_path / "base.safetensors", build.graphdef(config), base)
    changes = {"model__checkpoint": str(tmp_path / "base.safetensors"), "lora__rank": 2, "lora__alpha": 3.0}
    config, s = make_run(tmp_path / "run", **changes)
    assert sorted(s.params) == [f"blocks.self_attn.{layer}" for layer in ("k", "out", "q", "v")]
    record = exported(config, tmp_path / "run", tmp_path / "merged", weights="ema")
    assert (record["lora"], record["rank"], record["alpha"]) == ("merged", 2, 3.0)
    merged = load_pretrained(tmp_path / "merged")[1]
    want = jax.jit(merge_lora, static_argnums=2)(base, s.ema, 1.5)
    same_params(merged, want)
    assert not np.array_equal(*(p["blocks"]["self_attn"]["q"]["kernel"][...] for p in (merged, base)))
    for format in ("safetensors", "diffusers"):
        record = exported(config, tmp_path / "run", tmp_path / format, format=format, lora="separate")
        assert record["lora"] == "separate"
        lora, alpha = load_lora(tmp_path / format, nnx.merge(build.graphdef(config), base).config)
        assert alpha == 3.0
        jax.tree.map(np.testing.assert_array_equal, lora, dict(s.params))
    (tmp_path / "base.safetensors").unlink()
    with pytest.raises(config_lib.ConfigError, match=r"config.model.checkpoint='.*base.safetensors': .*does not exist"):
        exported(config, tmp_path / "run", tmp_path / "merged", lora="merged")
