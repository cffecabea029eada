"""`bash launch/quickstart.sh` for real, in environments of its own, with the sizes overridden."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from .paths import ROOT


@pytest.mark.slow
def test_the_quick_start_script_makes_its_environments_and_ends_with_the_reports_path(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    small = {
        "pretrain.steps": 30,
        "rollout.conditions": 4,
        "train.steps": 2,
        "eval.clips": 24,
        "eval.clips_during": 12,
        "eval.heldout_clips": 24,
        "eval.chunk": 12,
        "eval.judge_steps": 20,
    }
    variables = {
        **os.environ,
        "HOME": str(home),  # the scorer's environment goes to its cache folder
        "VENV": str(tmp_path / "venv"),
        "WORKDIR": str(tmp_path / "run"),
        "JAX_PLATFORMS": "cpu",
    }
    variables.pop("PYTHONPATH", None)
    command = ["bash", str(ROOT / "launch/quickstart.sh"), *(f"--config.{k}={v}" for k, v in small.items())]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    report = Path(re.fullmatch(r"report: (.+)", last).group(1))
    assert report == tmp_path / "run/report/index.html" and report.is_file()

    def modules(python, *names):
        code = f"import importlib.util as u; print(*[u.find_spec(n) is not None for n in {names!r}])"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path).stdout.split()

    assert modules(tmp_path / "venv/bin/python", "ddrl_jax", "jax", "torch") == ["True", "True", "False"]
    sidecar = home / ".cache/ddrl_jax/sidecar/digits/bin/python"
    assert modules(sidecar, "ddrl_jax", "jax", "torch") == ["True", "False", "True"]
