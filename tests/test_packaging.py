"""What ships: the configs are in the wheel, tests are not, and the sidecar's extra has no jax."""

import subprocess
import sys
import tomllib
import zipfile

import pytest

from .paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.slow
def test_the_wheel_holds_the_configs(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("ddrl_jax-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for config in (ROOT / "configs").glob("*.py"):
        assert f"ddrl_jax/configs/{config.name}" in names
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"ddrl_jax"}


def test_the_sidecars_environment_has_torch_and_no_jax():
    needs = PROJECT["optional-dependencies"]["sidecar"]
    assert any(n.startswith("torch==") for n in needs)
    assert not any(n.startswith(("jax", "flax", "optax", "orbax", "ddrl_jax")) for n in needs)


def test_the_trainer_needs_no_torch():
    assert not any(n.startswith(("torch", "transformers[torch")) for n in PROJECT["dependencies"])
