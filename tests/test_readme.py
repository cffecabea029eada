"""What the README shows is run."""

import re
import subprocess
import sys

import pytest

from .paths import ROOT

README = (ROOT / "README.md").read_text()


def test_the_library_example_prints_what_it_says(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(program.splitlines()) <= 32
    (said,) = re.findall(r"# (mean .*)", program)
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    _numbers_agree(printed, said)
    exec(compile(program.replace("data_beta=0.3", "data_beta=0.0"), "README.md", "exec"), {})
    (runaway,) = re.findall(r"print a mean of ([0-9.]+)", README)
    _numbers_agree(capsys.readouterr().out.split(",")[0], f"mean {runaway}")


def _numbers_agree(printed, said):
    values = ([float(n) for n in re.findall(r"[0-9.]+", text)] for text in (printed, said))
    for a, b in zip(*values, strict=True):
        assert a == pytest.approx(b, abs=0.011)  # the last digit shown


def test_public_names_are_those_of_the_readme():
    import ddrl_jax

    listed = re.search(r"Public names: `(.*?)`", README, re.DOTALL).group(1).replace("\n", " ")
    assert sorted(n.strip() for n in listed.split(",")) == sorted(ddrl_jax.__all__)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)h#][^)#]*)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists(), link


def test_the_scripts_of_the_two_commands_are_valid_shell():
    for script in re.findall(r"^bash (launch/\S+\.sh)", README, re.MULTILINE):
        assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0


def test_mode_and_fields_that_the_readme_names_exist():
    from ddrl_jax import config, main

    known = config.flatten(config.default().to_dict())
    for field in re.findall(r"--config\.([a-z_.]+)=", README):
        assert field in known, field
    for mode in re.findall(r"--mode=(\w+)", README):
        assert mode in main.MODES
    assert sys.version_info >= (3, 11)
