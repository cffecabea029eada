"""The study: its arms and their order, its processes, what it counts and gathers. Whole studies are real ones."""

import collections
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from ddrl_jax import build, study, update
from ddrl_jax import config as config_lib
from ddrl_jax.logbook import Logbook

from . import tiny
from .paths import ROOT

FLOW = {"name": "flow_sde"}


def config(**arms):
    """The tiny config with these arms, each a `set`."""
    c = tiny.config()
    with c.unlocked():
        entries = {name: {"label": name.upper(), "group": "main", "set": values} for name, values in arms.items()}
        c.study.arms = ConfigDict(entries, sort_keys=False)
    return c


def one(**values):
    """The resolved config of an arm that sets `values`."""
    c = config(a=values)
    (arm,) = study.read_arms(c)
    return study.arm_config(c, arm, 0, ROOT / "none", ROOT / "none/base")


# ---------------------------------------------------------------------------------------- network evaluations


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # 2 conditions of 4 rollouts, 4 steps and the last denoise, 2 trained: for each condition N (1 + |T|) = 12.
        ({}, {"rollout": 40, "policy": 16, "data": 8, "reference": 0}),
        # 2 N |T| = 16 for each condition.
        ({"objective": {"data_levels": "rollout"}}, {"rollout": 40, "policy": 16, "data": 16, "reference": 0}),
        ({"objective": {"data_draws": 3}}, {"rollout": 40, "policy": 16, "data": 24, "reference": 0}),
        ({"process": {"solver": "2mid"}}, {"rollout": 72, "policy": 32, "data": 8, "reference": 0}),
        (
            {"rollout": {"guidance": 2.0}, "train": {"guidance": 2.0}},
            {"rollout": 80, "policy": 32, "data": 8, "reference": 0},
        ),
        ({"train": {"updates_per_rollout": 2}}, {"rollout": 40, "policy": 16, "data": 8, "reference": 0}),
        (
            {"advantage": {"kind": "partition"}, "objective": {"reward_transform": "exp"}},
            {"rollout": 40, "policy": 16, "data": 8, "reference": 40},
        ),
        ({"objective": {"name": "sft"}}, {"rollout": 0, "policy": 0, "data": 8, "reference": 0}),
        ({"objective": {"name": "rft"}}, {"rollout": 40, "policy": 8, "data": 0, "reference": 0}),
        (
            {"objective": {"name": "nft", "kl_beta": 0.1}, "nft": {"draws": 2}},
            {"rollout": 40, "policy": 16, "data": 0, "reference": 32},
        ),
        (
            {"objective": {"name": "flow_grpo"}, "process": FLOW},
            {"rollout": 32, "policy": 16, "data": 0, "reference": 16},
        ),
        (  # 60 % of the first three steps
            {"objective": {"name": "dance_grpo"}, "process": {"name": "dance_sde"}, "rollout": {"steps": "random"}},
            {"rollout": 32, "policy": 16, "data": 0, "reference": 0},
        ),
        (
            {"objective": {"name": "dance_grpo"}, "process": FLOW, "rollout": {"steps": "window", "window": 3}},
            {"rollout": 32, "policy": 24, "data": 0, "reference": 0},
        ),
    ],
)
def test_network_evaluations_are_those_that_an_iteration_makes(values, expected):
    c = one(**values)
    counted = study.evaluations_per_iteration(c)
    assert counted == expected | {"total": sum(expected.values())}
    with jax.disable_jit():
        assert _evaluations_made(c) == expected


def _evaluations_made(c):
    """Counts them in the real functions of an iteration, unjitted, so that a loop's body is called each time.

    What is differentiated is the policy; other networks are told apart by their only parameter.
    """
    c.mesh.fsdp, c.mesh.context = 4, 2
    made = collections.Counter()

    def counting(phase):
        def denoise(params, x, sigma, cond):
            a = params["a"]
            other = not isinstance(a, jax.core.Tracer) and float(a) != 0.5
            made["reference" if other else phase] += x.shape[0]
            return a * x

        return denoise

    def method(phase):
        return update.Update(c, dataclasses.replace(build.build(c), denoise=counting(phase)))

    policy, reference = {"a": jnp.float32(0.5)}, {"a": jnp.float32(0.25)}
    m = method("policy")
    s = build.train_state(m.setup, policy, m.optimizer, m.exponent, old=m.needs_old)
    key, cond = jax.random.key(0), build.cond(jnp.zeros((2, 10, 8)))
    x0_BX = trajectory = rewarded = None
    if m.rolls_out:
        # DiffusionNFT's old policy is still the policy when it rolls out.
        x0_BX, trajectory = method("rollout").rollout(m.rollout_params(s), key, s.step, cond, keep_mean=m.keeps_mean)
        r = np.arange(8, dtype=np.float32)
        back = None
        if m.needs_reference_rollouts:
            method("reference").rollout(reference, key, s.step, cond, keep_mean=False, reference=True)
            back = r, np.ones(8, bool)
        rewarded = update.to_device(m.setup.mesh, r[None], np.ones(1, np.float32), np.ones(8, bool), back)
    if m.needs_old:
        s = dataclasses.replace(s, old={"a": jnp.float32(0.75)})
    for u in range(m.updates):
        data = None
        if m.has_data:
            x0_GX = jnp.zeros((2, *m.setup.latent_shape))
            data = method("data").data(
                policy, key, s.step, u, x0_GX, cond, trajectory if m.data_needs_rollout else None
            )
        m.apply(
            s, key, u, x0_BX, trajectory if m.on_steps else None, cond, rewarded, data,
            reference if m.needs_reference else None,
        )  # fmt: skip
    return {name: made[name] for name in ("rollout", "policy", "data", "reference")}


# -------------------------------------------------------------------------------------------------- the arms


def test_an_arm_is_the_config_with_its_own_fields(tmp_path):
    c = config(
        sft={"objective": {"name": "sft"}},
        next={
            "pretrain": {"from_run": "{arm:sft}", "from_stage": "ddrl"},
            "data": {"path": "{synthetic}"},
            "process": FLOW,
            "reward": {"weights": {"brightness/overall": 2.0}},
            "train": {"learning_rate": 3},
        },
    )
    c.objective.data_beta = 0.3
    sft, after = study.read_arms(c)
    assert (sft.needs, sft.synthetic, after.needs, after.synthetic) == ((), False, ("sft",), True)
    base = tmp_path / "elsewhere"
    first, second = (study.arm_config(c, a, 7, tmp_path, base) for a in (sft, after))
    assert first.pretrain.from_run == str(base)
    # With a name of its own, an arm has that method's values and not the common ones.
    assert first.objective.data_beta is None and second.objective.data_beta == 0.3
    assert second.process.name == "flow_sde" and second.process.sigma_max is None and c.process.sigma_max == 80.0
    assert second.pretrain.from_run == str(tmp_path / "arms/sft/seed7") and second.pretrain.from_stage == "ddrl"
    assert second.data.path == str(tmp_path / "synthetic")
    assert second.reward.weights.to_dict() == {"brightness/overall": 2.0}
    assert second.train.learning_rate == 3.0 and type(second.train.learning_rate) is float
    assert second.seed == 7 and not second.reward.launch and not second.study.arms
    assert after.flat["reward.weights"] == {"brightness/overall": 2.0}
    assert after.flat["pretrain.from_run"] == "{arm:sft}"


def test_runs_go_seed_by_seed_and_the_main_group_first(tmp_path):
    c = config(
        extra={"data": {"path": "{synthetic}"}},
        sft={"objective": {"name": "sft"}},
        ddrl={"pretrain": {"from_run": "{arm:sft}", "from_stage": "ddrl"}},
    )
    c.study.arms.extra.group = "ablation"
    c.study.seeds = (3, 1)
    runs = study.plan(c, study.read_arms(c), tmp_path)
    assert [r.name for r in runs] == [
        *("base", "synthetic", "sft/seed3", "ddrl/seed3", "extra/seed3", "sft/seed1", "ddrl/seed1", "extra/seed1"),
    ]
    assert [r.needs for r in runs[1:5]] == [("base",), ("base",), ("base", "sft/seed3"), ("base", "synthetic")]
    assert all(r.status == "waiting" for r in runs)
    assert runs[1].mode == "prepare" and runs[1].config.prepare.out == str(tmp_path / "synthetic")
    assert (runs[0].total, runs[2].total) == (4, 12)


def test_the_config_left_in_a_runs_folder_is_the_runs(tmp_path):
    c = config(a={"advantage": {"reward_clip": float("inf")}, "rollout": {"trained_steps": (1, 2)}})
    *_, run = study.plan(c, study.read_arms(c), tmp_path)
    (tmp_path / "config.py").write_text(study._config_file(run))
    loaded = config_lib.load(str(tmp_path / "config.py"))
    config_lib.validate(loaded)
    assert loaded.to_dict() == run.config.to_dict()


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ({}, "config.study.arms={}: must name at least one arm"),
        ({"a b": {}}, "config.study.arms.a b: an arm's name must be of letters, digits"),
        ({"a": {"sett": {}}}, "config.study.arms.a.sett: there is no such field; did you mean set?"),
        ({"a": {"label": 3}}, "config.study.arms.a.label=3: must be text"),
        ({"a": {"set": 3}}, "config.study.arms.a.set=3: must be a part of a config"),
        ({"a": {"set": {"data": {"path": "{bas}"}}}}, "config.study.arms.a.set.data.path='{bas}': {bas} stands for"),
        ({"a": {"set": {"data": {"path": "{arm:b}"}}}}, "config.study.arms.a.set.data.path='{arm:b}': {arm:b} stands"),
        (
            {
                "a": {"set": {"pretrain": {"from_run": "{arm:b}"}}},
                "b": {"set": {"pretrain": {"from_run": "{arm:a}"}}},
            },
            "config.study.arms.a: needs itself: a from b from a",
        ),
        (
            {"a": {"set": {"train": {"learning_rat": 1.0}}}},
            "config.study.arms.a.set.train.learning_rat=1.0: there is no such field; did you mean train.learning_rate?",
        ),
        (
            {"a": {"set": {"train": {"steps": "many"}}}},
            "config.study.arms.a.set.train.steps='many': Could not override field 'steps'",
        ),
        (
            {"a": {"set": {"train": {"steps": -1}}}},
            "config.study.arms.a.set.train.steps=-1: must be at least 0",
        ),
        (
            {"a": {"set": {"objective": {"clip_range": 0.0}}}},
            "config.study.arms.a.set.objective.clip_range=0.0: must be above 0",
        ),
        (
            {"a": {"set": {"objective": {"log_ratio": "square"}}}},
            "config.study.arms.a: config.objective: log_ratio='square': expected one of mean_square",
        ),
        (
            {"a": {"set": {"rollout": {"micro_batch": 3}}}},
            "config.study.arms.a.set.rollout.micro_batch=3: must be a multiple of rollout.group_size=4, or divide it",
        ),
        (  # the arm's mistake shows in a field that it did not set
            {"a": {"set": {"rollout": {"conditions": 3, "num_steps": 2}}}},
            "config.study.arms.a: config.rollout.trained_steps=(0, 2): 2 is outside the schedule",
        ),
        (
            {"a": {"set": {"eval": {"clips": 4}}}},
            "config.study.arms.a.set.eval.clips=4: is the same in all arms; set config.eval.clips outside study.arms",
        ),
        ({"a": {"set": {"seed": 4}}}, "config.study.arms.a.set.seed=4: is the same in all arms"),
        ({"a": {"set": {"pretrain": {"steps": 4}}}}, "config.study.arms.a.set.pretrain.steps=4: is the same in all"),
        ({"a": {"set": {"reward": {"launch": False}}}}, "config.study.arms.a.set.reward.launch=False: is the same in"),
    ],
)
def test_what_is_wrong_with_an_arm_is_one_line_that_names_it(tmp_path, arms, message):
    c = tiny.config()
    with c.unlocked():
        c.study.arms = ConfigDict(arms)
    config_lib.validate(c)
    with pytest.raises(config_lib.ConfigError) as error:
        study.plan(c, study.read_arms(c), tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("study.seeds", (), "config.study.seeds=(): must be distinct whole numbers"),
        ("study.seeds", (1, 1), "config.study.seeds=(1, 1): must be distinct"),
        ("study.seeds", (-1,), "config.study.seeds=(-1,): must be distinct whole numbers from 0"),
        ("study.base", "nowhere", "nowhere': holds no checkpoints/pretrain"),
        ("pretrain.from_run", "x", "config.pretrain.from_run='x': must be empty in a study, whose base is study.base"),
        ("pretrain.steps", 0, "config.pretrain.steps=0: must be at least 1, or study.base a finished base"),
    ],
)
def test_what_is_wrong_with_the_study_is_one_line(tmp_path, field, value, message):
    c = config(a={})
    section, _, name = field.rpartition(".")
    c[section][name] = value
    with pytest.raises(config_lib.ConfigError) as error:
        study.plan(c, study.read_arms(c), tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def _pretend_base(folder, c, **changed):
    """A folder that says it is a finished base of this config."""
    c = c.copy_and_resolve_references()
    for field, value in changed.items():
        section, _, name = field.replace("__", ".").rpartition(".")
        c[section][name] = value
    (folder / f"checkpoints/pretrain/{c.pretrain.steps}").mkdir(parents=True)
    (folder / "config.json").write_text(config_lib.to_json(c))
    (folder / "eval/000000").mkdir(parents=True)
    (folder / "eval/000000/eval.json").write_text("{}")
    return folder


def test_a_finished_base_is_taken_and_another_networks_is_refused(tmp_path):
    c = config(a={})
    _pretend_base(tmp_path / "base", c)
    c.train.learning_rate, c.objective.data_beta = 0.5, 0.7  # the arms' business
    runs = study.plan(c, study.read_arms(c), tmp_path)
    assert (runs[0].status, runs[1].status) == ("done", "waiting")
    c.pretrain.learning_rate = 0.5
    with pytest.raises(
        config_lib.ConfigError, match=r"config\.pretrain\.learning_rate=0\.5: the base in .* has 0\.001"
    ):
        study.plan(c, study.read_arms(c), tmp_path)
    c.study.base = str(tmp_path / "base")
    assert study.plan(c, study.read_arms(c), tmp_path)[0].status == "done"  # a base from elsewhere: its network counts
    c.study.base = str(_pretend_base(tmp_path / "wide", c, model__width=64))
    with pytest.raises(config_lib.ConfigError, match=r"config\.model\.width=32: the base in .* has 64; .*study\.base"):
        study.plan(c, study.read_arms(c), tmp_path)


def test_a_run_of_another_config_is_refused_once_it_has_begun(tmp_path):
    c = config(a={}, b={"train": {"learning_rate": 0.25}})
    _pretend_base(tmp_path / "base", c)
    arms = study.read_arms(c)
    *_, run = study.plan(c, arms, tmp_path)
    run.workdir.mkdir(parents=True)
    (run.workdir / "config.json").write_text(config_lib.to_json(run.config))
    c.study.arms.b.set.train.learning_rate = 0.5
    arms = study.read_arms(c)
    study.plan(c, arms, tmp_path)
    (run.workdir / "metrics.jsonl").write_text('{"stage": "eval", "step": 0}\n')
    with pytest.raises(
        config_lib.ConfigError, match=r"study\.arms\.b: config\.train\.learning_rate=0\.5: workdir=.*0\.25"
    ):
        study.plan(c, arms, tmp_path)


# ---------------------------------------------------------------------------------------------- the processes


def test_a_child_is_pinned_before_its_first_instruction():
    mine = sorted(os.sched_getaffinity(0))
    with study.pinned(mine[:1]):
        out = subprocess.run(
            [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], capture_output=True, text=True
        )
    assert out.stdout.strip() == str(mine[:1])
    assert sorted(os.sched_getaffinity(0)) == mine


def test_a_run_does_not_outlive_its_study(tmp_path):
    child = (
        "import os, sys, time\nfrom ddrl_jax import study\nstudy.end_with(int(sys.argv[1]))\n"
        f"open({str(tmp_path / 'pid.part')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'pid.part')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep(300)"
    )
    parent = (
        f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
        f"while not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.05)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    for _ in range(600):
        if not _alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("30 s after its study was killed, the run is still there")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class _Pool:
    """study.Pool with runs that are small scripts: name -> (needs, code)."""

    def __init__(self, monkeypatch, tmp_path, scripts, workers=2):
        c = config(a={})
        (arm,) = study.read_arms(c)
        self.asked, self.log = False, []
        self.runs = {
            name: study.Run(name, tmp_path / name, c, needs=tuple(needs), arm=None if name == "base" else arm)
            for name, (needs, _) in scripts.items()
        }

        def start(r, base, server, *, crowded):
            r.workdir.mkdir(exist_ok=True)
            self.log.append((r.name, r.cores, sorted(o.name for o in self.runs.values() if o.status == "running")))
            with (r.workdir / "console.log").open("wb") as log, study.pinned(r.cores):
                r.process = subprocess.Popen(
                    [sys.executable, "-c", scripts[r.name][1]], stdout=log, stderr=log, start_new_session=True
                )

        monkeypatch.setattr(study, "start", start)
        # A script that ends well has done all that a run does.
        monkeypatch.setattr(study, "is_finished", lambda r: r.process is not None and r.process.returncode == 0)
        self.book = Logbook(tmp_path, tensorboard=False)
        watch = study.Watch(self.book, list(self.runs.values()))
        self.pool = study.Pool(list(self.runs.values()), workers, watch, lambda: self.asked)

    def states(self):
        return {name: r.status for name, r in self.runs.items()}


def test_what_is_needed_comes_first_and_a_failure_stops_only_what_needs_it(monkeypatch, tmp_path):
    scripts = {
        "base": ([], ""),
        "c": (["base", "b"], ""),
        "bad": (["base"], "print('hello'); print('error: config.x=1: must be 2'); raise SystemExit(2)"),
        "after": (["bad"], ""),
        "b": (["base"], ""),
        "killed": (["base"], "import os; os.kill(os.getpid(), 9)"),
    }
    p = _Pool(monkeypatch, tmp_path, scripts)
    settled = []
    p.pool.work([p.runs["base"]])
    p.pool.work([r for n, r in p.runs.items() if n != "base"], None, lambda: settled.append(p.states()))
    started = [name for name, *_ in p.log]
    assert started[:3] == ["base", "bad", "b"] and set(started) == {"base", "bad", "b", "c", "killed"}
    assert p.states() == dict(base="done", c="done", bad="failed", after="failed", b="done", killed="failed")
    assert p.runs["bad"].error == "config.x=1: must be 2 (exit status 2)"
    assert p.runs["after"].error == "it needs bad, which failed"
    assert p.runs["killed"].error == "ended by SIGKILL"
    assert settled[-1] == p.states()


def test_workers_have_cores_of_their_own_and_are_never_more_than_that(monkeypatch, tmp_path):
    scripts = {"base": ([], "")} | {f"r{i}": (["base"], "import time; time.sleep(0.2)") for i in range(4)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7, 9})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    p = _Pool(monkeypatch, tmp_path, scripts, workers=2)
    p.pool.work([p.runs["base"]])
    p.pool.work([r for n, r in p.runs.items() if n != "base"])
    assert p.log[0][1] == (4, 5, 6, 7, 9)  # the base has all of them
    assert {cores for _, cores, _ in p.log[1:]} == {(4, 5), (6, 7, 9)}
    assert max(len(running) for _, _, running in p.log) == 1  # those that ran when another was started


def test_asked_to_stop_it_asks_its_runs_and_waits_for_them(monkeypatch, tmp_path):
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(300)"
    )
    scripts = {"base": ([], ""), "a": (["base"], polite), "b": (["base"], polite), "c": (["base"], "")}
    p = _Pool(monkeypatch, tmp_path, scripts)
    monkeypatch.setattr(study, "is_finished", lambda r: False)
    p.pool.work([p.runs["base"]])
    consoles = [tmp_path / n / "console.log" for n in "ab"]

    def asked():
        p.asked = p.asked or all(f.exists() and "ready" in f.read_text() for f in consoles)
        return p.asked

    p.pool._stop = asked
    p.pool.work([r for n, r in p.runs.items() if n != "base"])
    assert p.states() == dict(base="done", a="stopped", b="stopped", c="waiting")
    assert all("saved" in f.read_text() for f in consoles)


def test_a_second_interrupt_leaves_no_process_behind(monkeypatch, tmp_path):
    scripts = {"base": ([], ""), "a": (["base"], "import time; time.sleep(300)")}
    p = _Pool(monkeypatch, tmp_path, scripts)
    p.pool.work([p.runs["base"]])

    class Ended(Exception):
        pass

    def stop():
        if p.runs["a"].process is not None:
            raise Ended
        return False

    p.pool._stop = stop
    with pytest.raises(Ended):
        p.pool.work([p.runs["a"]])
    assert p.runs["a"].process.returncode == -signal.SIGKILL and p.runs["a"].status == "stopped"


class _Server:
    """A sidecar that was lost once: a run that failed before that may try again."""

    url, token, generation = "", "", 1

    def keep(self):
        pass

    def changed_since(self, generation):
        self.generation, changed = 2, generation < 2
        return changed


def test_a_run_that_failed_with_the_sidecar_is_started_again_once_it_is_back(monkeypatch, tmp_path):
    once = "import os, sys; first = not os.path.exists({0!r}); open({0!r}, 'w'); sys.exit(first)"
    scripts = {
        "base": ([], ""),
        "a": (["base"], once.format(str(tmp_path / "been"))),
        "b": (["base"], "import sys; print('stopped: too few rewards'); sys.exit(1)"),
    }
    p = _Pool(monkeypatch, tmp_path, scripts, workers=1)
    p.pool.work([p.runs["base"]])
    p.pool.work([p.runs["a"], p.runs["b"]], _Server())
    assert p.states() == dict(base="done", a="done", b="failed")
    assert (p.runs["a"].restarts, p.runs["b"].restarts) == (1, 0)
    assert p.runs["b"].error == "too few rewards (exit status 1)"


def test_the_steps_of_a_run_are_those_of_its_own_stage(tmp_path):
    c = config(a={})
    *_, run = study.plan(c, study.read_arms(c), tmp_path)
    assert study._steps_on_disk(run) == 0
    run.workdir.mkdir(parents=True)
    lines = [{"stage": "ddrl", "step": i, "padding": "x" * 2000} for i in range(20)]
    text = "".join(json.dumps(m) + "\n" for m in [*lines, {"stage": "eval", "step": 20}])
    (run.workdir / "metrics.jsonl").write_text(text + '{"stage": "ddrl", "st')
    assert study._steps_on_disk(run) == 20


# --------------------------------------------------------------------------------------------------- study.json


def test_what_is_gathered_is_plain_and_says_what_is_missing(tmp_path):
    c = config(sft={"objective": {"name": "sft"}}, ddrl={"train": {"updates_per_rollout": 2}})
    c.study.seeds = (0, 5)
    arms = study.read_arms(c)
    runs = study.plan(c, arms, tmp_path)
    _, sft0, ddrl0, _sft5, ddrl5 = runs
    for r in (sft0, ddrl0):
        (r.workdir / "eval/000000").mkdir(parents=True)
        (r.workdir / "eval/000000/eval.json").write_text('{"metrics": {"reward": 0.5, "frechet": null}}')
    rows = [
        {"stage": "eval", "step": 0, "reward": 0.5, "frechet": 3.0, "seconds": 1.0},
        {"stage": "ddrl", "step": 0, "reward": 0.25, "seconds": 2.5},
        {"stage": "ddrl", "step": 1, "reward": None, "kl_loss": 0.125, "seconds": 2.5},
        {"stage": "eval", "step": 2, "reward": 0.75},
    ]
    (ddrl0.workdir / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in rows))
    (ddrl0.workdir / "summary.json").write_text('{"run": {"steps": 12}, "before": {"a": 1}, "after": {"a": NaN}}')
    ddrl0.status = "done"
    (sft0.workdir / "metrics.jsonl").write_text('{"stage": "ddrl", "step": 0, "data_loss": 1.5}\n')
    ddrl5.status, ddrl5.error = "failed", "of old age"
    study.collect(tmp_path, arms, runs, title="T", command="C")
    record = json.loads((tmp_path / "study.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (record["title"], record["command"], record["seeds"]) == ("T", "C", [0, 5])
    assert record["base"]["metrics"] == {"reward": 0.5, "frechet": None}
    sft, ddrl = record["arms"]
    assert (sft["name"], sft["label"], sft["group"], sft["set"]) == ("sft", "SFT", "main", {"objective.name": "sft"})
    assert [s["status"] for s in sft["seeds"]] == ["stopped", "waiting"]
    assert [s["status"] for s in ddrl["seeds"]] == ["done", "failed"]
    done = ddrl["seeds"][0]
    assert done["workdir"] == "arms/ddrl/seed0"
    assert done["curves"]["eval"] == {
        "step": [0, 2],
        "reward": [0.5, 0.75],
        "frechet": [3.0, None],
        "seconds": [1.0, None],
    }
    assert done["curves"]["ddrl"]["reward"] == [0.25, None] and done["curves"]["ddrl"]["kl_loss"] == [None, 0.125]
    assert (done["seconds"], done["iterations"], done["updates"], done["rollouts"]) == (6.0, 2, 4, 16)
    assert done["evaluations_per_iteration"]["total"] == 64
    assert done["summary"] == {"before": {"a": 1}, "after": {"a": None}} and done["verdict"] == "no change"
    assert sft["seeds"][0]["rollouts"] == 0 and sft["seeds"][0]["summary"] == {}
    assert ddrl["seeds"][1]["error"] == "of old age"


# ------------------------------------------------------------------------------------------------ whole studies

STUDY = """
from ml_collections import ConfigDict
from tests import tiny

def get_config():
    c = tiny.config()
    c.train.steps, c.study.seeds = 4, (0, 1)
    c.reward.timeout_s, c.reward.retries = 300.0, 200  # a loaded machine takes its time to start a sidecar again
    arms = {
        "ddrl": {"label": "DDRL", "group": "main", "set": {}},
        "sft": {"label": "SFT", "group": "control", "set": {"objective": {"name": "sft"}}},
    }
    if FAILING:
        arms["broken"] = {"label": "Broken", "group": "main", "set": {"reward": {"weights": {"brightness/blue": 1.0}}}}
        c.study.seeds = (0,)
    with c.unlocked():
        c.study.arms = ConfigDict(arms, sort_keys=False)
    return c
"""


def _study_file(folder, failing=False):
    file = folder / f"study{int(failing)}.py"
    file.write_text(STUDY.replace("FAILING", str(failing)))
    return str(file)


def _numbers(workdir):
    """study.json without what no two runs have in common: seconds, and the command."""

    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if "seconds" not in k and k != "command"}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(json.loads((workdir / "study.json").read_text()))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One study that nothing happened to."""
    folder = tmp_path_factory.mktemp("study")
    process = tiny.main(folder / "run", "--mode=study", config_file=_study_file(folder), timeout=900)
    assert process.returncode == 0, process.err + process.out
    return folder


@pytest.mark.slow
def test_a_study_leaves_its_numbers_and_its_page(straight):
    record = _numbers(straight / "run")
    assert [a["name"] for a in record["arms"]] == ["ddrl", "sft"] and record["seeds"] == [0, 1]
    for arm in record["arms"]:
        for seed in arm["seeds"]:
            assert seed["status"] == "done" and seed["iterations"] == 4
            assert seed["curves"]["ddrl"]["step"] == [0, 1, 2, 3] and seed["curves"]["eval"]["step"] == [0, 3, 4]
            assert {c["name"] for c in seed["summary"]["changes"]} >= {"reward", "judge_digit", "heldout_loss"}
    first = [s["curves"]["eval"]["reward"][0] for a in record["arms"] for s in a["seeds"]]
    assert len(set(first)) == 1  # all from one base, looked at with the same noise
    last = [s["curves"]["eval"]["reward"][-1] for a in record["arms"] for s in a["seeds"]]
    assert len(set(last)) == 4
    assert (straight / "run/study.html").stat().st_size > 10_000 and (straight / "run/study.md").exists()
    assert "judge: fitting" not in (straight / "run/arms/ddrl/seed0/console.log").read_text()


@pytest.mark.slow
def test_a_finished_study_is_only_written_again(straight):
    before = _numbers(straight / "run")
    log = straight / "run/arms/ddrl/seed0/console.log"
    said = log.read_bytes()
    process = tiny.main(straight / "run", "--mode=study", config_file=_study_file(straight))
    assert process.returncode == 0, process.err
    assert _numbers(straight / "run") == before and log.read_bytes() == said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_and_resumed_it_comes_to_the_same_numbers(straight, tmp_path, number):
    workdir, file = tmp_path / "run", _study_file(straight)
    with (tmp_path / "log.txt").open("w") as log:
        process = tiny.start(workdir, "--mode=study", config_file=file, stdout=log, stderr=log)
    lines = workdir / "arms/ddrl/seed0/metrics.jsonl"
    while not (lines.exists() and '"ddrl"' in lines.read_text()):
        assert process.poll() is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(300)
    if number == signal.SIGTERM:
        assert process.returncode == 0
        assert "of 4 runs are finished; the same command goes on from there" in (tmp_path / "log.txt").read_text()
    process = tiny.main(workdir, "--mode=study", config_file=file, timeout=900)
    assert process.returncode == 0, process.err + process.out
    assert _numbers(workdir) == _numbers(straight / "run")


@pytest.mark.slow
def test_a_killed_sidecar_costs_no_batch(straight, tmp_path):
    workdir, file = tmp_path / "run", _study_file(straight)
    with (tmp_path / "log.txt").open("w") as log:
        process = tiny.start(workdir, "--mode=study", config_file=file, stdout=log, stderr=log)
    lines = workdir / "arms/ddrl/seed0/metrics.jsonl"
    while not (lines.exists() and '"ddrl"' in lines.read_text()):
        assert process.poll() is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.02)
    ready = [json.loads(x) for x in (workdir / "sidecar.log").read_text().splitlines() if x.startswith("{")]
    os.kill(ready[0]["pid"], signal.SIGKILL)
    assert process.wait(900) == 0, (tmp_path / "log.txt").read_text()
    assert "the sidecar was relaunched" in (tmp_path / "log.txt").read_text()
    assert _numbers(workdir) == _numbers(straight / "run")


@pytest.mark.slow
def test_a_failing_arm_is_named_and_the_others_are_finished(straight, tmp_path):
    workdir = tmp_path / "run"
    file = _study_file(tmp_path, failing=True)
    process = tiny.main(
        workdir, "--mode=study", f"--config.study.base={straight}/run/base", config_file=file, timeout=900
    )
    assert process.returncode == 1
    assert "stopped: 1 of 3 runs failed" in process.err and "broken/seed0: reward.weights" in process.err
    record = _numbers(workdir)
    assert [a["seeds"][0]["status"] for a in record["arms"]] == ["done", "done", "failed"]
    assert "brightness/blue" in record["arms"][2]["seeds"][0]["error"]
    assert "Broken" in (workdir / "study.md").read_text()


def test_the_documented_study_is_a_study(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/study.md").read_text(), re.DOTALL)
    (tmp_path / "my_study.py").write_text(code)
    config = config_lib.load(str(tmp_path / "my_study.py"))
    config_lib.validate(config)
    runs = study.plan(config, study.read_arms(config), tmp_path / "run")
    assert [r.name for r in runs[1:6]] == ["ddrl/seed0", "dance/seed0", "sft/seed0", "sft_ddrl/seed0", "ddrl/seed1"]
    assert len(runs) == 1 + 3 * 3 + 1  # base, three arms with three seeds, one with one
