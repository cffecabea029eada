"""The Cosmos recipes against the reference's table (specs/cosmos.md, section 4), field by field."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest

from ddrl_jax import build, plan
from ddrl_jax import config as config_lib
from ddrl_jax.diffusion.process import EDMChurn
from ddrl_jax.models import cosmos_dit
from ddrl_jax.models.cosmos_dit import cosmos_2b, cosmos_14b
from ddrl_jax.parallel import attention
from ddrl_jax.parallel import mesh as mesh_lib

from .paths import ROOT

# The table's rows that both recipes share.
SHARED = {
    "rollout.conditions": 16,
    "rollout.group_size": 8,
    "rollout.num_steps": 20,
    "rollout.steps": "fixed",
    "rollout.trained_steps": (0, 2, 4, 6, 8, 10, 12, 14, 16, 18),
    "rollout.guidance": 0.0,
    "train.guidance": 0.0,
    "train.updates_per_rollout": 1,
    "train.b1": 0.9,
    "train.b2": 0.99,
    "train.eps": 1e-8,
    "train.weight_decay": 1e-4,
    "train.warmup_steps": 50,
    "train.grad_clip": 1.0,
    "train.ema_rate": 0.1,
    "advantage.kind": "group",
    "advantage.ddof": 1,
    "advantage.eps": 1e-4,
    "advantage.reward_clip": 5.0,
    "eval.num_steps": 35,
    "data.frames": 93,
    "data.size": 720,
    "data.long_size": 1280,
    "data.fps": 16.0,
    "data.image_to_video": 0.5,
    "text.length": 512,
    "text.dim": 100352,
    "text_encoder.strategy": "full_concat",
}
OWN = {
    "cosmos2b": {
        "train.learning_rate": 1e-5,
        "mesh.context": 2,
        "mesh.fsdp": 8,
        "eval.guidance": 7.0,
        "model.use_rf_ckpts": False,
    },
    "cosmos14b": {
        "train.learning_rate": 3e-6,
        "mesh.context": 8,
        "mesh.fsdp": 32,
        "eval.guidance": 3.0,
        "model.use_rf_ckpts": True,
    },
}
OBJECTIVE = {
    "data_beta": 0.01,
    "kl_beta": 0.0,
    "clip_range": 1e-4,
    "log_ratio": "mean_square",
    "reward_transform": "identity",
    "adv_clip": 5.0,
    "loss_scale": 10.0,
    "data_levels": "rollout",
    "cond_dropout": 0.2,
}
PROCESS = {
    "sigma_min": 0.01,
    "sigma_max": 200.0,
    "rho": 7.0,
    "solver": "2ab",
    "s_churn": 1.0,
    "s_noise": 1.0,
    "train_std": 1.2,
    "high_sigma_ratio": 0.05,
}


def recipe(name):
    config = config_lib.load(str(ROOT / "configs" / f"{name}.py"))
    config_lib.validate(config)
    return config


@pytest.mark.parametrize("name", OWN)
def test_fields_are_the_table_s(name):
    config = recipe(name)
    for field, value in (SHARED | OWN[name]).items():
        assert config_lib.get(config, field) == value, field


@pytest.mark.parametrize("name", OWN)
def test_what_the_fields_build_is_the_table_s(name):
    config = recipe(name)
    assert dataclasses.asdict(build.build_objective(config)).items() >= OBJECTIVE.items()
    process = build.build_process(config)
    assert isinstance(process, EDMChurn) and dataclasses.asdict(process).items() >= PROCESS.items()
    assert process.train_mean == pytest.approx(1.3862943611) and process.train_multiplier**2 == pytest.approx(24)
    assert build.latent_shape(config) == (16, 24, 90, 160)
    rollouts = config.rollout.conditions * config.rollout.group_size
    assert rollouts % config.train.micro_batch == 0


@pytest.mark.parametrize(
    ("name", "count", "sizes"), [("cosmos2b", 2_059_174_912, cosmos_2b()), ("cosmos14b", 14_368_047_104, cosmos_14b())]
)
def test_the_network_has_the_published_size(name, count, sizes):
    config = recipe(name)
    assert sum(x.size for x in jax.tree.leaves(build.abstract_params(config))) == count
    ours = dataclasses.asdict(build._model_config(config)) | {"dtype": "", "param_dtype": "", "remat": ""}
    assert ours == dataclasses.asdict(sizes) | {"dtype": "", "param_dtype": "", "remat": ""}


@pytest.mark.parametrize("name", OWN)
def test_each_recipe_says_what_it_needs_and_what_the_paper_reached(name):
    text = (ROOT / "configs" / f"{name}.py").read_text()
    doc = text.split('"""')[1]
    for word in ("eeds", "paper", "H100"):
        assert word in doc, f"{name}: {word}"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.frames": 92}, "config.data.frames=92: must be 4k+1"),
        ({"data.size": 712}, "config.data.size=712: must be a multiple of 16"),
        ({"data.long_size": 640}, "config.data.long_size=640: must be at least data.size=720"),
        ({"data.path": ""}, "config.data.path='': must be a folder"),
        ({"data.image_to_video": 1.5}, "config.data.image_to_video=1.5: must be between 0 and 1"),
        ({"data.frames": 1}, "config.data.image_to_video=0.5: must be 0 for data.frames=1"),
        ({"codec.path": ""}, "config.codec.path='': must name the weights"),
        ({"codec.name": "unshuffle"}, "config.codec.name='unshuffle': must be wan_vae for videos"),
        ({"codec.dtype": "float16"}, "config.codec.dtype='float16': must be float32 or bfloat16"),
        ({"text_encoder.where": "cloud"}, "config.text_encoder.where='cloud': must be device, sidecar or cached"),
        ({"text_encoder.strategy": "pool_every_0_layers_and_concat"}, "config.text_encoder.strategy="),
        ({"text_encoder.where": "cached", "text_encoder.dtype": "float32"}, "config.text_encoder.dtype='float32'"),
        ({"model.weights": "best"}, "config.model.weights='best': must be raw or ema"),
        ({"pretrain.steps": 5}, "config.pretrain.steps=5: must be 0 with model.checkpoint"),
        ({"pretrain.from_run": "x"}, "config.pretrain.from_run='x': must be '' with model.checkpoint="),
        ({"prepare.prompts": "p.txt"}, "config.prepare.out='': must be a folder"),
        ({"export.format": "gguf"}, "config.export.format='gguf'"),
        ({"export.lora": "separate"}, "config.export.lora='separate': needs lora.rank above 0"),
        ({"lora.rank": 4, "model.checkpoint": ""}, "config.lora.rank=4: needs model.checkpoint"),
        ({"lora.rank": 4, "lora.alpha": 0.0}, "config.lora.alpha=0.0: must be above 0"),
        ({"reward.device": "tpu"}, "config.reward.device='tpu': must be cpu, cuda or cuda:N"),
        ({"reward.wire": "int8"}, "config.reward.wire='int8': must be float32 or bfloat16"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_values_are_one_line(changes, says):
    config = recipe("cosmos2b")
    for field, value in changes.items():
        section, name = field.split(".")
        config[section][name] = value
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.validate(config)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, shape, micro_batch, platform",
    [
        ("cosmos2b", (16, 8, 2), None, "cuda"),
        ("cosmos2b", (16, 4, 4), 64, "cuda"),
        ("cosmos2b", (1, 2, 4), 2, "cuda"),
        ("cosmos2b", (1, 1, 1), 1, "cuda"),
        ("cosmos2b", (2, 8, 2), 16, "cuda"),
        ("cosmos2b", (8, 8, 2), 64, "tpu"),
        ("cosmos14b", (1, 32, 8), None, "cuda"),
        ("cosmos14b", (1, 1, 8), 1, "cuda"),
        ("cosmos14b", (4, 32, 8), 128, "cuda"),
        ("cosmos14b", (1, 16, 8), 16, "tpu"),
    ],
)
def test_the_documented_meshes_take_the_recipes(name, shape, micro_batch, platform):
    """docs/scaling.md: a micro-batch of a clip a data group; evaluations take the mesh as it is."""
    config = config_lib.load(str(ROOT / f"configs/{name}.py"))
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(
        shape=dict(zip(mesh_lib.AXES, shape, strict=True)), size=math.prod(shape), devices=np.array([device])
    )
    if micro_batch:
        config.train.micro_batch = config.rollout.micro_batch = micro_batch
    config_lib.validate(config)
    build.check_mesh(config, mesh)
    assert build.chunk(config, mesh) % (shape[0] * shape[1]) == 0
    config.model.attention = "splash" if platform == "cuda" else "cudnn"
    with pytest.raises(config_lib.ConfigError, match=r"config\.model\.attention='\w+': is for"):
        build.check_mesh(config, mesh)


def test_the_config_offers_what_the_network_knows():
    assert cosmos_dit.REMAT.keys() == set(config_lib.REMAT) and set(attention.KINDS) == set(config_lib.ATTENTION)
    assert plan._REMAT == ("none", "save-most", "save-qkv", "save-attention-mlp", "save-attention", "full")
