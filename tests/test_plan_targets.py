"""The published networks planned for cards that are not here: what fits, what is computed, what is sent.

Needs the compilers of the targets: `bash launch/plan_cuda.sh` makes an environment with CUDA's and runs these;
libtpu comes with the test extra.
"""

import functools
import importlib.util
import json
import tempfile
from pathlib import Path

import pytest

from . import tiny
from .paths import ROOT

CUDA = importlib.util.find_spec("jax_cuda12_plugin") is not None
TPU = importlib.util.find_spec("libtpu") is not None
cuda = [pytest.mark.cuda_plan, pytest.mark.slow, pytest.mark.skipif(not CUDA, reason="needs the extra plan-cuda")]
tpu = [pytest.mark.slow, pytest.mark.skipif(not TPU, reason="needs libtpu, of the extra tpu")]
GB = 1e9


@functools.cache
def planned(config, target, **fields):
    """The plan of a shipped config, by the command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        flags = [f"--config.{field.replace('__', '.')}={value}" for field, value in fields.items()]
        flags += ["--mode=plan", f"--config.plan.target={target}", f"--config.plan.json={file}"]
        done = tiny.main(folder, *flags, config_file=str(ROOT / f"configs/{config}.py"), timeout=1500)
        assert file.exists(), done.out[-2000:] + done.err[-2000:]
        result = json.loads(file.read_text())
    assert done.returncode == (0 if result["fits"] else 1)
    return result


def mesh(replica, fsdp, context):
    return {"mesh__replica": replica, "mesh__fsdp": fsdp, "mesh__context": context}


def rollouts(conditions, group, micro_batch):
    """One sample a data group."""
    return {
        "rollout__conditions": conditions,
        "rollout__group_size": group,
        "train__micro_batch": micro_batch,
        "rollout__micro_batch": micro_batch,
    }


# (config, cards, fields, GB, executed over model FLOPs of the gradients)
BOUNDS = {
    "2B on 256": ("cosmos2b", 256, mesh(16, 8, 2) | {"model__remat": "save-attention-mlp"}, 27, 1.18),
    "2B on 256, context 4": (
        "cosmos2b",
        256,
        mesh(16, 4, 4) | rollouts(8, 8, 64) | {"model__remat": "save-most"},
        45,
        1.15,
    ),
    "2B on 8": ("cosmos2b", 8, mesh(1, 2, 4) | rollouts(1, 2, 2) | {"model__remat": "save-most"}, 45, 1.15),
    "2B on 2": ("cosmos2b", 2, mesh(1, 1, 2) | rollouts(1, 2, 1) | {"model__remat": "save-attention-mlp"}, 50, 1.18),
    "2B on 1": (
        "cosmos2b",
        1,
        mesh(1, 1, 1)
        | rollouts(1, 2, 1)
        | {"model__remat": "full", "train__trajectory": "host"}
        | {"text_encoder__where": "cached", "log__step_grad_norms": False},
        76,
        1.48,
    ),
    "14B on 256": ("cosmos14b", 256, mesh(1, 32, 8) | rollouts(4, 8, 32) | {"model__remat": "save-qkv"}, 35, 1.17),
    "14B on 256, most": (
        "cosmos14b",
        256,
        mesh(1, 32, 8) | rollouts(4, 8, 32) | {"model__remat": "save-most"},
        60,
        1.12,
    ),
    "14B on 16": ("cosmos14b", 16, mesh(1, 2, 8) | rollouts(1, 2, 2) | {"model__remat": "save-qkv"}, 55, 1.17),
    "14B on 8": (
        "cosmos14b",
        8,
        mesh(1, 1, 8) | rollouts(1, 2, 1) | {"model__remat": "save-attention", "log__step_grad_norms": False},
        60,
        1.22,
    ),
    "14B on 1024": ("cosmos14b", 1024, mesh(4, 32, 8) | rollouts(16, 8, 128) | {"model__remat": "save-qkv"}, 35, 1.17),
}


def gradients(result):
    return [f for f in result["functions"] if "gradient" in f["name"]]


@pytest.mark.parametrize("case", [pytest.param(name, marks=cuda) for name in BOUNDS])
def test_bounds_on_h100(case):
    config, cards, fields, limit, ratio = BOUNDS[case]
    result = planned(config, f"h100:{cards}", **fields)
    assert result["fits"], result["try"]
    held = result["held"]
    beside = sum(held.get(kind, 0) for kind in ("codec", "text tower", "next batch"))
    beside += held["trajectory"] * (cards <= 16)
    for f in gradients(result):
        b = f["bytes"]
        assert (b["peak"] - b["workspace"] - beside) / GB <= limit, f["name"]
        assert f["executed_over_model"] <= ratio
        assert f["floor"] == pytest.approx(1.143 if config == "cosmos2b" else 1.118, abs=1e-3)
    assert result["functions"][0]["executed_over_model"] <= 1.01, "the rollout computes nothing twice"
    evaluations = result["evaluations_per_rollout"]
    assert evaluations["counted"] == pytest.approx(evaluations["expected"], abs=1e-9)
    for f in result["functions"]:
        # The compiler wants to stay under three quarters of a card; on a single one the plan has more of it.
        warnings = [w for w in f["warnings"] if cards > 1 or "reduce memory" not in w]
        assert not warnings and not f["uncounted"] and not f["unknown_loops"]


@pytest.mark.parametrize("case", [pytest.param("data_levels", marks=cuda)])
def test_the_reduced_data_loss_costs_one_evaluation(case):
    result = planned("cosmos2b", "h100:256", objective__data_levels="training", model__remat="full")
    assert result["evaluations_per_rollout"] == {"expected": 20 + 1 + 10 + 1, "counted": 20 + 1 + 10 + 1}


@pytest.mark.parametrize("case", [pytest.param("replica", marks=cuda)])
def test_more_cards_hold_and_send_the_same(case):
    small, large = (
        planned("cosmos2b", f"h100:{16 * n}", model__remat="full", **mesh(n, 8, 2), **rollouts(n, 8, 8 * n))
        for n in (4, 64)
    )
    assert large["peak"] == pytest.approx(small["peak"], rel=0.01)
    for a, b in zip(small["functions"], large["functions"], strict=True):
        sent = [sum(c["bytes"] for c in f["collectives"]) for f in (a, b)]
        assert sent[1] == pytest.approx(sent[0], rel=0.01), a["name"]


@pytest.mark.parametrize("target", [pytest.param(t, marks=cuda) for t in ("h200:8", "b200:8")])
def test_other_cards(target):
    result = planned("cosmos2b", target, model__remat="full", **mesh(1, 4, 2), **rollouts(1, 4, 4))
    assert result["fits"] and all(f["floor"] for f in gradients(result)), "attention is fused"


@pytest.mark.parametrize("case", [pytest.param("v5p", marks=tpu)])
def test_bounds_on_a_tpu_pod(case):
    result = planned("cosmos2b", "v5p:4x4x8", **mesh(8, 8, 2), **rollouts(8, 8, 64), model__remat="save-attention")
    assert result["fits"]
    for f in gradients(result):
        assert f["bytes"]["temporaries"] / GB <= 30 and f["floor"], f["name"]
    evaluations = result["evaluations_per_rollout"]
    assert evaluations["counted"] == pytest.approx(evaluations["expected"], abs=1e-9)
