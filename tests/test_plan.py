"""--mode=plan: what is counted, what is said of a config that does not fit, and what a plan refuses."""

import dataclasses
import functools
import json
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ddrl_jax import config as config_lib
from ddrl_jax import main as main_lib
from ddrl_jax import plan, plan_table
from ddrl_jax.parallel import hlo, topology
from ddrl_jax.parallel import mesh as mesh_lib

from . import tiny
from .paths import ROOT

FILE = f"--config={ROOT}/tests/tiny_config.py"
CARD = topology.Card("card", "cpu", memory=1_000_000_000, reserve=1_000_000)


def config():
    c = tiny.config()
    c.model.width, c.model.depth, c.model.context_dim = 192, 7, 32
    c.rollout.conditions, c.rollout.group_size, c.train.micro_batch = 2, 8, 8
    return c


@functools.cache
def result():
    return plan.make(config(), jax.devices(), CARD)


# ---- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluations_are_those_of_the_method():
    T, trained = 4, 2
    assert result()["evaluations_per_rollout"] == {"expected": T + 1 + trained + 1, "counted": T + 1 + trained + 1}
    by_function = {f["name"]: f["evaluations"] for f in result()["functions"] if f["runs"]}
    assert by_function == {
        "rollout": {"expected": T + 1, "counted": T + 1},
        "data gradient": {"expected": 1, "counted": 1},
        "policy gradient + optimizer": {"expected": trained, "counted": trained},
    }


@pytest.mark.slow
def test_flops_are_those_of_the_formula():
    rollout = result()["functions"][0]
    assert rollout["executed_over_model"] == pytest.approx(1, abs=0.03)
    for f in result()["functions"]:
        assert f["executed_flops"] == 0 if f["name"] == "optimizer alone" else f["executed_flops"] > 0
        assert f["floor"] is None, "plain attention has a plain backward pass"
        assert not f["uncounted"] and not f["unknown_loops"]


@pytest.mark.slow
def test_bytes_are_those_of_the_shardings():
    held, per = result()["held"], 4 / mesh_lib.batch_shards(mesh_lib.make_mesh())
    rollouts, latent = 16, 4 * 4 * 6 * 6
    assert held["rollouts"] == per * rollouts * latent
    # x, x_next and the history of two recorded steps, and a few numbers a step.
    assert held["trajectory"] == pytest.approx(3 * 2 * held["rollouts"], abs=100)
    assert held["EMA"] == held["parameters"] and held["optimizer"] == pytest.approx(2 * held["parameters"], abs=100)
    assert held["data gradient"] == pytest.approx(held["parameters"], abs=1000)
    for f in result()["functions"]:
        b = f["bytes"]
        parts = b["arguments"] + b["temporaries"] + b["outputs"] - b["aliased"] + b["resident"] + b["workspace"]
        assert b["peak"] == parts and b["host"] == 0
        assert b["peak"] >= held["parameters"] + held["EMA"] + held["optimizer"]
    assert result()["peak"] == max(f["bytes"]["peak"] for f in result()["functions"])


@pytest.mark.slow
def test_collectives_go_over_the_axes_that_are_cut():
    for f in result()["functions"]:
        assert {axis for c in f["collectives"] for axis in c["axes"]} <= {"fsdp"}, "the others have size 1"
        assert not f["stacked"], "no collective on the parameters of all blocks"
        assert {c["axes"][0] for c in f["blocks"]} == ({"fsdp"} if f["runs"] else set())
        times = {(c["kind"], tuple(c["axes"]), c["group"]): c["count"] for c in f["collectives"]}
        for c in f["blocks"]:
            assert c["count"] * 7 <= times[c["kind"], tuple(c["axes"]), c["group"]], "seven blocks"
    gathers = [c for c in result()["functions"][0]["collectives"] if c["kind"] == "all-gather"]
    assert gathers and all(c["bytes"] > c["sent"] > 0 for c in gathers)


def test_the_network_of_the_paper_costs_what_its_specification_says():
    for name, linear, attention, floor in (("cosmos2b", 0.28, 1.71, 1.143), ("cosmos14b", 2.28, 5.53, 1.118)):
        network = plan.Forward.of(config_lib.load(f"configs/{name}.py"), (16, 24, 90, 160))
        assert network.tokens == 86_400 and network.patch == 72
        assert (network.linear / 1e15, network.attention / 1e15) == pytest.approx((linear, attention), abs=0.015)
        least = 3 * network.linear + 3.5 * network.attention
        assert least / (3 * network.flops) == pytest.approx(floor, abs=5e-4)


def collective(kind, axes, group, size):
    return hlo.Collective(kind, axes, group, ((size,),), size, (), "", "")


def test_a_collective_takes_the_time_of_its_slowest_link():
    # Two hosts of four: fsdp within a host, replica between two.
    hosts = np.array([[SimpleNamespace(process_index=h) for _ in range(4)] for h in (0, 1)]).reshape(2, 4, 1)
    mesh = SimpleNamespace(devices=hosts, axis_names=mesh_lib.AXES)
    card = dataclasses.replace(CARD, link=100.0, network=10.0)
    seconds = functools.partial(plan._seconds_of, mesh=mesh, card=card)
    assert seconds(collective("all-gather", ("fsdp",), 4, 1000)) == 1000 * 3 / 4 / 100
    assert seconds(collective("all-reduce", ("replica",), 2, 1000)) == 1000 * 1 / 2 * 2 / 10
    # Over both the bytes cross once, over the adapters of all four.
    assert seconds(collective("all-gather", ("replica", "fsdp"), 8, 1000)) == 1000 * 7 / 8 / (10 * 4)
    # Everyone has something for everyone: half of it is on the other host.
    assert seconds(collective("all-to-all", ("replica", "fsdp"), 8, 1000)) == 1000 / 2 / 10
    assert plan._seconds_of(collective("all-gather", ("fsdp",), 4, 1000), mesh, CARD) == 0
    torus = dataclasses.replace(CARD, link=100.0)
    assert plan._seconds_of(collective("all-to-all", ("replica",), 2, 1000), mesh, torus) == 1000 / 2 / 100


# ---- the verdict -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_whole_parameters_on_every_device_do_not_fit(monkeypatch):
    peak = result()["peak"]
    assert result()["fits"]
    card = dataclasses.replace(CARD, memory=int(1.5 * peak) + CARD.reserve)
    monkeypatch.setattr(
        mesh_lib, "fsdp_sharding", lambda mesh, tree: jax.tree.map(lambda _: mesh_lib.replicated(mesh), tree)
    )
    broken = plan.make(config(), jax.devices(), card)
    assert not broken["fits"] and broken["peak"] > 1.5 * peak
    assert broken["held"]["parameters"] > 6 * result()["held"]["parameters"]
    line = plan_table.verdict(broken)
    assert line.startswith("does not fit: ") and "; try, until it fits: " in line


def suggestions(**changes):
    c = config()
    c.model.remat, c.model.heads, c.rollout.conditions, c.train.micro_batch = "none", 4, 16, 32
    for field, value in changes.items():
        with c.unlocked():
            config_lib.get(c, field.rpartition("__")[0].replace("__", "."))[field.rpartition("__")[2]] = value
    function = {"name": changes.pop("name", "data gradient"), "bytes": {"peak": 2000, "temporaries": 1800}}
    found = {
        "functions": [function],
        "held": {"parameters": 60, "optimizer": 120, "EMA": 60, "trajectory": 300},
        "card": {"usable": 1000},
        "too_large": "",
        "rollouts": 32,
    }
    return plan._suggest(c, found, mesh_lib.make_mesh(2, 4, 1))


def test_what_to_try_follows_from_what_is_large():
    tries = suggestions()
    assert "rollout.micro_batch=8 and train.micro_batch=8" in tries
    assert any("model.remat=save-most, down to full" in t for t in tries)
    assert any("mesh.context=2 with mesh.replica=1" in t for t in tries)
    assert any("mesh.fsdp=8 with mesh.replica=1" in t for t in tries)
    assert tries[-1].startswith("more devices")
    assert not any("model.remat" in t for t in suggestions(model__remat="full"))
    assert not any("mesh.context" in t for t in suggestions(model__heads=3))
    assert not any("train.micro_batch" in t for t in suggestions(train__micro_batch=8))


# ---- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_plans_prints_and_writes(tmp_path):
    file = tmp_path / "new" / "plan.json"
    flags = ["--mode=plan", "--config.plan.target=cpu:4", f"--config.plan.json={file}", "--config.mesh.context=2"]
    done = tiny.main(tmp_path / "run", *flags, "--config.data.frames=4", env={"JAX_PLATFORMS": ""})
    assert done.returncode == 0, done.err
    assert "4 x CPU: replica 1 x fsdp 2 x context 2" in done.out
    assert "network evaluations a rollout: 8 in the programs, 8 by the method" in done.out
    assert done.out.splitlines()[-1].startswith("fits: at most ")
    assert not (tmp_path / "run").exists() and os.listdir(file.parent) == ["plan.json"]
    written = json.loads(file.read_text())
    assert written["mesh"] == {"replica": 1, "fsdp": 2, "context": 2} and written["devices"] == 4
    assert written.keys() == {
        *("target", "card", "devices", "mesh", "rollouts", "rollouts_per_data_group", "held", "functions"),
        *("iteration", "evaluations_per_rollout", "peak", "too_large", "fits", "seconds", "try"),
    }
    for f in written["functions"]:
        assert f.keys() == {
            *("name", "runs", "compile_seconds", "bytes", "model_flops", "executed_flops", "executed_over_model"),
            *("floor", "evaluations", "collectives", "blocks", "stacked", "seconds", "warnings", "uncounted"),
            "unknown_loops",
        }
        assert not f["warnings"]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "must be h100:N, h200:N, b200:N, v5e:AxB, v5p:AxBxC, v6e:AxB or cpu:N"),
        ("h100", "must be h100:N"),
        ("h100:0", "must be h100:N"),
        ("h100:8x8", "must be h100:N"),
        ("a100:8", "must be h100:N"),
        ("v5p:4x4", "must be h100:N"),
        ("v6e:4x4x4", "must be h100:N"),
        ("cpu:two", "must be h100:N"),
        ("cpu:999999999", "must be at most 1,024 devices"),
        ("h100:1000000", "must be at most 65,536 devices"),
        ("h100:12", "must be whole hosts of 8 above 8, such as h100:16"),
        ("h100:16", "needs its compiler; install it with pip install 'ddrl_jax[plan-cuda]'"),
        ("v5e:4x4", "needs its compiler; install it with pip install 'ddrl_jax[tpu]'"),
    ],
)
def test_a_target_that_cannot_be_is_one_line(capsys, monkeypatch, target, message):
    monkeypatch.setattr(topology, "_is_installed", lambda module: False)
    status = main_lib.main(["main", FILE, "--mode=plan", f"--config.plan.target={target}"])
    [line] = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and line.startswith(f"error: config.plan.target={target!r}: ") and message in line


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "mesh.context",
            3,
            "config.mesh: replica=1, fsdp=-1, context=3 does not give 8 devices: replica * context = 3",
        ),
        ("mesh.fsdp", 16, "config.mesh: replica=1, fsdp=16, context=1 does not give 8 devices: the product is 16"),
        ("train.micro_batch", 4, "config.train.micro_batch=4: must be a multiple of the mesh's replica * fsdp = 8"),
    ],
)
def test_a_config_that_does_not_go_on_the_target_is_one_line(field, value, message):
    c = config()
    section, name = field.split(".")
    c[section][name] = value
    with pytest.raises(config_lib.ConfigError) as error:
        plan.make(c, jax.devices(), CARD)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(config_lib.ConfigError, match=r"config\.plan\.json='.*': cannot be written"):
        (tmp_path / "file").write_text("")
        plan.write({}, tmp_path / "file" / "plan.json")


def test_an_earlier_plan_stays_where_there_is_no_new_one(tmp_path, monkeypatch):
    c, file = config(), tmp_path / "plan.json"
    c.plan.json = str(file)
    file.write_text("old")

    def refuses(*_, **__):
        raise config_lib.ConfigError("no")

    monkeypatch.setattr(plan, "make", refuses)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # a plan turns the cache of compiled programs off
    with pytest.raises(config_lib.ConfigError, match="no"):
        plan.run(c, topology.parse("cpu:8"))
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]
    c.plan.json = str(tmp_path)
    with pytest.raises(config_lib.ConfigError, match=r"^config\.plan\.json=.*: cannot be written"):
        plan.run(c, topology.parse("cpu:8"))


def test_the_environment_of_a_target_is_set_before_jax_is_imported(monkeypatch):
    monkeypatch.setattr(topology, "_is_installed", lambda module: True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    assert topology.environment(topology.parse("cpu:64")) == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "64"}
    cuda = topology.environment(topology.parse("h100:256"))
    assert cuda["XLA_FLAGS"].startswith("--xla_mine=1 --xla_gpu_") and cuda["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
    assert topology.environment(topology.parse("v5p:4x4x8"))["TPU_SKIP_MDS_QUERY"] == "1"
    assert topology.parse("v5p:4x4x8").count == 128 and topology.parse("h200:4").count == 4
