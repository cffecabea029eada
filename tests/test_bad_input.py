"""Bad input: one line that names the field, the value and what would be right, exit status 2, nothing lost."""

import json
import socket
import subprocess
import sys

import pytest

from ddrl_jax import build, rewards
from ddrl_jax import config as config_lib
from ddrl_jax import main as main_lib
from ddrl_jax.sidecar import build as building

from . import tiny
from .paths import ROOT

FILE = f"--config={ROOT}/tests/tiny_config.py"


def call(capsys, *arguments):
    """(exit status, the lines on stderr) of main in this process; enough for what fails before jax is imported."""
    status = main_lib.main(["main", *arguments])
    return status, capsys.readouterr().err.strip().splitlines()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.train.stepz=3", "config.train.stepz='3': there is no such field; did you mean config.train.steps?"),
        ("--config.nothing.like.it=3", "config.nothing.like.it='3': there is no such field"),
        ("--config.train.steps=abc", "config.train.steps='abc': must be a whole number"),
        ("--config.train.steps=1.5", "config.train.steps='1.5': must be a whole number"),
        ("--config.train.steps=-1", "config.train.steps=-1: must be at least 0"),
        ("--config.train.learning_rate=nan", "config.train.learning_rate=nan: must be a number"),
        (
            "--config.rollout.group_size=3",
            "config.train.micro_batch=4: must be a multiple of rollout.group_size=3, or divide it",
        ),
        ("--config.train.micro_batch=16", "config.train.micro_batch=16: must divide the batch, rollout.conditions"),
        ("--config.train.ema_rate=0.5", "config.train.ema_rate=0.5: must be below 0.288"),
        ("--config.seed=99999999999", "config.seed=99999999999: must be below 2**32"),
        ("--config.process.sigma_min=0.", "config.process.sigma_min=0.0: must be above 0 and below"),
        ("--config.advantage.reward_clip=-1.", "config.advantage.reward_clip=-1.0: must be above 0"),
        ("--config.pretrain.batch_size=18", "config.pretrain.batch_size=18: must be a multiple of train.micro_batch=4"),
        ("--config.objective.data_beta=-1.", "config.objective.data_beta=-1.0: must be at least 0"),
        ("--config.eval.clips_during=20", "config.eval.clips_during=20: must be at most eval.clips=8"),
        ("--config.process.train_std=nan", "config.process.train_std=nan: must be a number"),
        ("--config.eval.guidance=inf", "config.eval.guidance=inf: must be finite"),
        ("--config.reward.timeout_s=inf", "config.reward.timeout_s=inf: must be finite"),
        ("--config.reward.port=99999", "config.reward.port=99999: must be below 65536"),
        ("--config.reward.weights.brightness=nan", "config.reward.weights.brightness=nan: must be a finite number"),
        ("--config.model.mlp_ratio=0.", "config.model.mlp_ratio=0.0: must give the MLP"),
        ("config.train.steps=3", "'config.train.steps=3': is no flag; flags begin with --"),
        (
            "--config.rollout.micro_batch=3",
            "config.rollout.micro_batch=3: must be a multiple of rollout.group_size=4, or divide it",
        ),
        ("--config.rollout.micro_batch=16", "config.rollout.micro_batch=16: must divide the batch, rollout.conditions"),
        ("--config.model.remat=some", "config.model.remat='some': must be one of none, full, save-attention"),
        ("--config.model.attention=flash", "config.model.attention='flash': must be one of auto, xla, cudnn, splash"),
        ("--config.train.trajectory=disk", "config.train.trajectory='disk': must be device or host"),
        (
            "--config.train.updates_per_rollout=3",
            "config.train.updates_per_rollout=3: updates times train.micro_batch=4 must divide the 8 rollouts",
        ),
        (
            "--config.rollout.trained_steps=(0,3)",
            "config.rollout.trained_steps=(0, 3): 3 is outside the schedule: with rollout.num_steps=4 steps 0 to 2",
        ),
        ("--config.rollout.trained_steps=(1,1)", "config.rollout.trained_steps=(1, 1): must be distinct"),
        (
            "--config.process.sigma_min=90.",
            "config.process.sigma_min=90.0: must be above 0 and below process.sigma_max=80",
        ),
        ("--config.process.solver=3ab", "config.process.solver='3ab': must be 2ab, 1euler or 2mid"),
        ("--config.process.shift=3.", "config.process.shift=3.0: is not a field of edm_churn"),
        ("--config.objective.name=ppo", "config.objective.name='ppo': must be one of ddrl, dance_grpo"),
        ("--config.objective.clip_range=0.", "config.objective.clip_range=0.0: must be above 0"),
        ("--config.model.heads=5", "config.model.heads=5: must divide model.width=32"),
        ("--config.data.size=10", "config.data.size=10: must be a multiple of 2 * codec.factor = 4"),
        ("--config.reward.launch=False", "config.reward.url='': must be the sidecar's address when reward.launch is"),
        ("--mode=dance", "flag --mode=dance: value should be one of <train|eval|prepare|export|check|plan|study>"),
        ("--workdri=x", "Unknown command line flag 'workdri'"),
    ],
)
def test_flags_and_values(capsys, argument, message):
    status, lines = call(capsys, FILE, argument)
    assert status == 2 and len(lines) == 1
    assert lines[0].startswith("error: ") and message in lines[0]


@pytest.mark.parametrize(
    ("argument", "message"),
    [("--config=nowhere.py", "--config='nowhere.py': there is no such file"), ("--workdir=x", "--config: name a file")],
)
def test_no_config(capsys, argument, message):
    status, lines = call(capsys, argument)
    assert status == 2 and len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c.train.stepz = 3", "AttributeError"),
        ("c.train.steps = 'three'", "TypeError"),
        ("c.train.steps = = 3", "SyntaxError"),
        ("c = 3", "get_config() returned a int, not a ConfigDict"),
    ],
)
def test_a_config_file_with_a_mistake(capsys, tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(f"from tests.tiny import config\n\ndef get_config():\n    c = config()\n    {text}\n    return c\n")
    status, lines = call(capsys, f"--config={file}")
    assert status == 2 and len(lines) == 1
    assert f"--config='{file}'" in lines[0] and message in lines[0]


def test_a_file_without_get_config(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    status, lines = call(capsys, f"--config={tmp_path}/mine.py")
    assert status == 2 and len(lines) == 1 and "it has no get_config()" in lines[0]


def test_help_and_a_space_instead_of_the_equals_sign(capsys):
    assert main_lib.main(["main", "--help"]) == 0
    assert "--mode=eval" in capsys.readouterr().out
    status, lines = call(capsys, "--config", f"{ROOT}/tests/tiny_config.py", "--config.train.steps=-1")
    assert status == 2 and "config.train.steps=-1" in lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.train.__setitem__("steps", None), "config.train.steps=None: must not be None; its default is 100"),
        (lambda c: c.train.__delitem__("steps"), "config.train.steps: is missing; its default is 100"),
        (lambda c: c.train.__setitem__("stepz", 3), "config.train.stepz=3: there is no such field; did you mean"),
        (lambda c: c.__delitem__("eval"), "config.eval.chunk: is missing"),
        (lambda c: c.rollout.__setitem__("trained_steps", (True,)), "True is a bool, not an int"),
        (
            lambda c: c.reward.__setitem__("scorers", ("",)),
            "config.reward.scorers=('',): must be names or FILE.py:Class",
        ),
        (lambda c: c.reward.weights.__setitem__("brightness", "high"), "must be a finite number"),
    ],
)
def test_what_an_unlocked_config_can_still_get_wrong(change, message):
    config = tiny.config()
    with config.ignore_type(), config.unlocked():
        change(config)
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.validate(config)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("saved", ["[1]", "{", "directory"])
def test_a_damaged_config_json(tmp_path, saved):
    path = tmp_path / "config.json"
    path.mkdir() if saved == "directory" else path.write_text(saved)
    with pytest.raises(config_lib.ConfigError, match=r"its config\.json is not JSON"):
        config_lib.check_same_run(tiny.config(), tmp_path)


def test_a_workdir_that_cannot_be_made_or_is_in_use(tmp_path):
    (tmp_path / "file").touch()
    for workdir in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(config_lib.ConfigError, match="cannot be made or written"):
            build.own_workdir(workdir)
    held, in_use = build.own_workdir(tmp_path / "run"), pytest.raises(config_lib.ConfigError, match="is using it")
    with held, in_use:
        build.own_workdir(tmp_path / "run")
    build.own_workdir(tmp_path / "run").close()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("process.s_churn", 0.0, "config.rollout.trained_steps=(0, 2): step 0 has no noise with this process"),
        ("process.s_noise", -1.0, "config.process: s_noise=-1.0: expected at least 0"),
        ("objective.log_ratio", "foo", "config.objective: "),
        ("objective.data_draws", 0, "config.objective: "),
        ("objective.cond_dropout", 1.5, "config.objective: "),
        ("model.heads", 16, "config.model: width/heads is 2"),
    ],
)
def test_what_the_objects_of_a_run_refuse_is_one_line(field, value, message):
    config = tiny.config()
    config.mesh.fsdp, config.mesh.context = 4, 2
    section, name = field.split(".")
    config[section][name] = value
    with pytest.raises(config_lib.ConfigError) as error:
        build.build(config)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_bad_flags_do_not_wait_for_jax():
    code = (
        "import sys; from ddrl_jax import main; "
        f"status = main.main(['main', {FILE!r}, '--config.train.steps=-1']); "
        "assert 'jax' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr


def test_shipped_configs_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argument = config_lib.locate("--config=configs/quickstart.py")
    assert (ROOT / "configs/quickstart.py").samefile(argument.removeprefix("--config="))
    assert config_lib.locate("--config=configs/none.py") == "--config=configs/none.py"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.py").touch()
    assert config_lib.locate("--config=configs/quickstart.py") == "--config=configs/quickstart.py"


@pytest.mark.parametrize("name", [p.name for p in sorted((ROOT / "configs").glob("*.py"))])
def test_shipped_configs_are_valid(name):
    config_lib.validate(config_lib.load(str(ROOT / "configs" / name)))


def bad_run(tmp_path, *arguments, **options):
    """A run in a process of its own that must end with status 2 and one line on stderr. Returns the line."""
    process = tiny.main(tmp_path / "run", *arguments, timeout=120, **options)
    errors = [line for line in process.err.strip().splitlines() if line.startswith("error: ")]
    assert process.returncode == 2, process.err
    assert len(errors) == 1 and "Traceback" not in process.err
    return errors[0]


@pytest.mark.slow
def test_what_only_the_run_can_find(tmp_path):
    line = bad_run(tmp_path, "--config.mesh.fsdp=3")
    assert "config.mesh: replica=1, fsdp=3, context=1 does not give 1 devices" in line

    line = bad_run(tmp_path, f"--config.data.path={tmp_path}/empty")
    assert f"config.data.path = '{tmp_path}/empty'" in line and "clips.npz" in line

    line = bad_run(tmp_path, f"--config.reward.env={tmp_path}/no_env")
    assert f"python -m ddrl_jax.sidecar build --scorer brightness --env {tmp_path}/no_env" in line

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = bad_run(tmp_path, f"--config.reward.port={port}")
        assert str(port) in line and "port" in line

    empty = tmp_path / "env_without_torch"
    building.make_env(empty, ())
    line = bad_run(tmp_path, f"--config.reward.env={empty}")
    assert "lacks" in line and "torch" in line and f"sidecar build --scorer digits --env {empty}" in line

    with rewards.launch("this", ("brightness",), codec="unshuffle:factor=2,mean=0,std=1") as sidecar:
        given = ("--config.reward.launch=False", f"--config.reward.url={sidecar.url}")
        line = bad_run(tmp_path, *given, env={"DDRL_SIDECAR_TOKEN": "not it"})
        assert "reward.token" in line and "refuses it (401)" in line
        wrong = tmp_path / "wrong_weight.py"
        wrong.write_text(
            "from tests import tiny\n\ndef get_config():\n    c = tiny.config()\n    with c.unlocked():\n"
            "        c.reward.weights = {'brightness/nothing': 1.0}\n    return c\n"
        )
        line = bad_run(tmp_path, config_file=str(wrong))
        assert "a real clip got no reward" in line and "brightness/nothing" in line
        assert not (tmp_path / "run/config.json").exists()
    line = bad_run(tmp_path, "--config.reward.launch=False", f"--config.reward.url={sidecar.url}")
    assert "reward.url: no reward server at" in line

    line = bad_run(tmp_path, f"--config.pretrain.from_run={tmp_path}/nowhere")
    assert f"config.pretrain.from_run='{tmp_path}/nowhere': holds no checkpoints/pretrain; make it with" in line


@pytest.mark.slow
def test_a_workdir_of_another_config_is_refused_and_left_alone(tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    saved = tiny.config()
    saved.train.learning_rate = 0.5
    (workdir / "config.json").write_text(config_lib.to_json(saved))
    before = (workdir / "config.json").read_bytes()
    line = bad_run(tmp_path)
    assert "config.train.learning_rate=0.001" in line and "holds a run with 0.5" in line
    assert (workdir / "config.json").read_bytes() == before
    assert [p.name for p in workdir.iterdir()] == ["config.json"]


def test_what_may_differ_is_said_and_what_may_not_is_refused(tmp_path):
    saved, now = tiny.config(), tiny.config()
    (tmp_path / "config.json").write_text(config_lib.to_json(saved))
    assert config_lib.check_same_run(now, tmp_path) == []
    now.train.steps, now.checkpoint.keep, now.reward.url = 9, 5, "http://x"
    lines = config_lib.check_same_run(now, tmp_path)
    assert len(lines) == 3 and "config.train.steps: 12 when the run was started, 9 now" in lines
    now.rollout.num_steps = 5
    with pytest.raises(config_lib.ConfigError, match=r"config\.rollout\.num_steps=5"):
        config_lib.check_same_run(now, tmp_path)


def test_every_field_of_the_schema_is_read_somewhere():
    """A config field that nothing reads is a defect."""
    source = "\n".join(p.read_text() for p in (ROOT / "ddrl_jax").rglob("*.py") if p.name != "config.py")
    expanded = {"model", "advantage", "log", "objective", "process"}  # passed on whole
    for field in config_lib.flatten(config_lib.default().to_dict()):
        parts = field.split(".")
        if parts[0] in expanded or parts[:2] == ["reward", "weights"] or parts[-1] == "name":
            continue
        assert f".{parts[-1]}" in source or f'"{parts[-1]}"' in source, f"config.{field} is read by nothing"


def test_config_json_round_trips(tmp_path):
    config = tiny.config()
    assert config_lib.differences(config, json.loads(config_lib.to_json(config))) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout.steps": "window"}, "config.rollout.steps='window': needs a flow process"),
        ({"rollout.steps": "some"}, "config.rollout.steps='some': must be fixed, random or window"),
        (
            {"rollout.steps": "random", "rollout.num_steps": 1},
            "config.rollout.num_steps=1: must be at least 2 for rollout.steps=random",
        ),
        ({"rollout.random_fraction": 0.0}, "config.rollout.random_fraction=0.0: must be in (0, 1]"),
        ({"advantage.best_of": 3}, "config.advantage.best_of=3: must be even and at most rollout.group_size=4"),
        ({"advantage.best_of": 2, "objective.name": "rft"}, "config.advantage.best_of=2: must be 0 for rft"),
        ({"advantage.kind": "partition", "objective.name": "nft"}, "config.advantage.kind='partition': must be group"),
        ({"advantage.kind": "partition", "objective.name": "ddlr"}, "config.objective.name='ddlr': must be one of"),
        ({"objective.name": "rft", "objective.kl_beta": 0.1}, "config.objective.kl_beta=0.1: is not read by rft"),
        ({"objective.name": "nft", "objective.log_ratio": "gaussian"}, "config.objective.log_ratio='gaussian': is not"),
        ({"objective.name": "sft", "train.guidance": 1.0}, "config.train.guidance=1.0: must be 0 for sft"),
        ({"rollout.ema": True, "train.ema_rate": 0.0}, "config.rollout.ema=True: needs an EMA"),
        (
            {"rollout.guidance": 2.0, "train.updates_per_rollout": 2},
            "config.train.guidance=0.0: must be rollout.guidance=2",
        ),
        ({"reward.mix": "mean"}, "config.reward.mix='mean': must be sum or normalised"),
        ({"monitor.on_hacking": "pray"}, "config.monitor.on_hacking='pray': must be warn, stop or rollback"),
        ({"pretrain.from_stage": "ddrl"}, "config.pretrain.from_stage='ddrl': needs pretrain.from_run"),
        ({"eval.process.sigma_max": 9.0}, "config.eval.process.sigma_max=9.0: needs eval.process.name"),
        ({"eval.process.name": "flow_sde", "eval.process.eta": 0.1}, "config.eval.process.eta=0.1: is not a field of"),
    ],
)
def test_choices_of_methods_that_cannot_be(fields, message):
    c = tiny.config()
    for field, value in fields.items():
        section, name = field.rsplit(".", 1)
        config_lib.get(c, section)[name] = value
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.validate(c)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 1.0), (1.0,), 3.0, ("a", "b"), (float("nan"), 1.0)])
def test_bounds_of_a_sub_score_are_two_numbers_in_order(bounds):
    c = tiny.config()
    with c.unlocked():
        c.reward.bounds = config_lib.ConfigDict({"brightness": bounds})
    with pytest.raises(config_lib.ConfigError, match=r"^config\.reward\.bounds\.brightness=.*: must be \(low, high\)"):
        config_lib.validate(c)


def test_a_gate_added_to_a_run_is_one_difference(tmp_path):
    c = tiny.config()
    (tmp_path / "config.json").write_text(config_lib.to_json(c))
    with c.unlocked():
        c.reward.gates = config_lib.ConfigDict({"brightness": 0.1})
    with pytest.raises(config_lib.ConfigError, match=r"^config\.reward\.gates\.brightness=0\.1: workdir="):
        config_lib.check_same_run(c, tmp_path)


def test_a_run_of_an_older_version_has_the_defaults_of_fields_it_does_not_know(tmp_path):
    c = tiny.config()
    saved = json.loads(config_lib.to_json(c))
    del saved["nft"], saved["reward"]["mix"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert config_lib.check_same_run(c, tmp_path) == []
    c.reward.mix = "normalised"
    with pytest.raises(config_lib.ConfigError, match=r"^config\.reward\.mix='normalised'"):
        config_lib.check_same_run(c, tmp_path)
