"""`sidecar build`: environments without a network, weights with the running interpreter."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddrl_jax.sidecar import __main__ as cli
from ddrl_jax.sidecar import build
from ddrl_jax.sidecar.scorers import BUILT_IN

ROOT = Path(__file__).parents[1]


def run(*args, python=sys.executable, path=str(ROOT)):
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "ddrl_jax.sidecar", *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_the_fallback_list_is_the_sidecar_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert list(build.FALLBACK) == extras["sidecar"]


def test_requirements_come_from_the_installed_package(monkeypatch):
    lines = [
        "jax>=0.10.2",
        'torch==2.13.0 ; extra == "sidecar"',
        "fastapi>=0.115; extra == 'sidecar'",
        'ddrl_jax[sidecar] ; extra == "test"',
    ]
    monkeypatch.setattr(build.importlib.metadata, "requires", lambda name: lines)
    assert build.requirements() == ("torch==2.13.0", "fastapi>=0.115")

    def missing(name):
        raise build.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.importlib.metadata, "requires", missing)
    assert build.requirements() == build.FALLBACK


def test_build_needs_the_standard_library_only(tmp_path):
    env = tmp_path / "bare"
    build.make_env(env, ())
    python = build.env_python(env)
    # Through the link alone, in an interpreter that has nothing.
    done = run("build", "--scorer", "digits", "--env", "this", python=python, path="")
    assert done.returncode == 0, done.stderr
    assert subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode == 1
    done = run("train", "--data", "x", "--out", tmp_path, python=python, path="")
    assert done.returncode == 2
    assert "lacks" in done.stderr and "torch" in done.stderr and f"--env {env}" in done.stderr


def test_a_link_to_another_copy_is_replaced(tmp_path):
    build.make_env(tmp_path, ())
    [link] = tmp_path.glob("lib/python*/site-packages/ddrl_jax")
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    build.make_env(tmp_path, ())
    assert link.resolve() == ROOT / "ddrl_jax"


def test_pip_failing_is_one_line(tmp_path):
    # What cannot be a requirement fails without a network.
    with pytest.raises(ValueError, match=r"^env: pip could not install ==nonsense== into "):
        build.make_env(tmp_path, ("==nonsense==",))


@pytest.mark.parametrize(
    "args, expected",
    [
        (["build", "--env", "this", "--data", "x"], "data, out: give both"),
        (["build", "--env", "this", "--data", "x", "--out", "y"], "there is no 'x'"),
        (["train", "--scorer", "brightness", "--data", "x", "--out", "y"], "brightness"),
    ],
)
def test_mistakes_are_one_line(args, expected, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "check_modules", lambda scorer: None)
    assert cli.main(args) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.slow
def test_build_trains_weights_that_serve_loads(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("fastapi")
    import numpy as np

    from ddrl_jax.data.digits import DigitClips, write_clips
    from ddrl_jax.rewards import launch

    write_clips(tmp_path / "clips", "scorer", 3000, seed=0)
    done = run("build", "--env", "this", "--data", tmp_path / "clips", "--out", tmp_path / "weights")
    assert done.returncode == 0, done.stderr
    assert "it tells digit" in done.stdout
    batch = DigitClips("heldout", seed=3).batch(range(48))
    with launch("this", {"digits/overall": 1.0}, tmp_path / "weights") as sidecar:
        client = sidecar.client({"digits": 1.0})
        client.ping()
        real = client.submit(batch["video"], batch["caption"]).result()
        noise = np.random.default_rng(0).uniform(-1, 1, batch["video"].shape).astype(np.float32)
        bad = client.submit(noise, batch["caption"]).result()
        one = client.submit(batch["video"][17:18], batch["caption"][17:18]).result()
    assert real.valid.all() and bad.valid.all()
    assert set(real.scores) == {f"digits/{n}" for n in
                                ("text_alignment", "visual_quality", "motion_quality", "overall")}  # fmt: skip
    assert np.abs(np.mean(real.scores["digits/overall"])) < 2
    assert bad.scores["digits/overall"].max() < real.scores["digits/overall"].min()
    for name, values in one.scores.items():  # alone or among 48: the very same
        assert values[0] == real.scores[name][17]


# --- what a scorer needs ---


@pytest.mark.parametrize("scorer", sorted(BUILT_IN))
def test_every_scorers_requirements_are_read_without_importing_it(scorer):
    from packaging.requirements import Requirement

    for line in build.scorer_requirements(scorer):
        Requirement(line)
    assert build.requirements(scorer)[-len(build.scorer_requirements(scorer)) or None :] == (
        build.scorer_requirements(scorer) or build.requirements(scorer)
    )


def test_the_ocr_scorers_share_an_environment_whose_packages_are_the_ocr_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert list(build.scorer_requirements("ocr")) == list(build.scorer_requirements("ocr_judge")) == extras["ocr"]


def test_requirements_of_a_users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import what_is_not_installed\n\nclass Mine:\n    requirements = ('a>=1', 'b')\n\n"
        "class Plain:\n    pass\n\n"
        "class Wrong:\n    requirements = ['a']\n\nclass Made:\n    requirements = tuple('ab')\n"
    )
    assert build.scorer_requirements(f"{file}:Mine") == ("a>=1", "b")
    assert build.scorer_requirements(f"{file}:Plain") == ()
    assert build.default_env(f"{file}:Mine").name == "mine"
    for spec, message in (
        (f"{file}:Wrong", r"Wrong\.requirements in .*: a plain tuple of texts is needed"),
        (f"{file}:Made", "a plain tuple of texts is needed"),
        (f"{file}:None", "has no class 'None'"),
        ("nothing", "'nothing' is none of aesthetic, .*and no FILE.py:Class"),
        (f"{tmp_path}/no.py:Mine", "is none of"),
    ):
        with pytest.raises(ValueError, match=message):
            build.scorer_requirements(spec)
    file.write_text("class Mine:\n  x = = 1\n")
    with pytest.raises(ValueError, match="is no Python: line 2"):
        build.scorer_requirements(f"{file}:Mine")


def test_a_mistake_in_a_scorers_name_makes_no_environment(tmp_path, capsys):
    assert cli.main(["build", "--scorer", "orc", "--env", str(tmp_path / "env")]) == 2
    assert "scorer: 'orc' is none of" in capsys.readouterr().err and not (tmp_path / "env").exists()


def test_a_scorer_runs_in_the_environment_that_build_made(tmp_path, monkeypatch):
    """A package that only that environment has, seen by the scorer and not by the server."""
    pytest.importorskip("torch")
    import torch

    from ddrl_jax.sidecar import scorer_process, settings

    env = tmp_path / "env"
    build.make_env(env, ())
    [site] = env.glob("lib/python*/site-packages")
    # In place of pip, which would need a network: what this interpreter has, and one package more.
    (site / "ours.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    (site / "only_there.py").write_text("ANSWER = 42.0")
    (tmp_path / "mine.py").write_text(
        "import sys, only_there\nclass Mine:\n    batch_size = 1\n    def load(self, weights, device): pass\n"
        "    def score(self, videos, prompts): return {'answer': [only_there.ANSWER], 'own': [sys.prefix == PREFIX]}\n"
        f"PREFIX = {str(env)!r}\n"
    )
    spec = {"name": f"{tmp_path}/mine.py:Mine"}
    with pytest.raises(ValueError, match="No module named 'only_there'"):
        scorer_process.open_scorer(settings.ScorerSettings(**spec), "", "cpu", 1)
    name, scorer = scorer_process.open_scorer(settings.ScorerSettings(**spec, env=str(env)), "", "cpu", 1)
    try:
        assert name == "mine"
        assert scorer.score(torch.zeros(1, 3, 1, 2, 2), ["x"]) == {"answer": [42.0], "own": [1.0]}
    finally:
        scorer.close()
