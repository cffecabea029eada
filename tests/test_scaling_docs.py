"""docs/scaling.md: what it names exists, and its meshes are ones that can be."""

import math
import re

import pytest

from ddrl_jax import config, main

from .paths import ROOT

TEXT = (ROOT / "docs/scaling.md").read_text()
FIELDS = set(config.flatten(config.default().to_dict()))
RECIPES = [config.load(str(ROOT / f"configs/cosmos{size}.py")) for size in ("2b", "14b")]


def test_fields_flags_and_modes_exist():
    sections = set(config.default())
    named = set(re.findall(r"--config\.([a-z_.]+)=", TEXT))
    named |= {n for n in re.findall(r"`([a-z_]+\.[a-z_]+)[=`]", TEXT) if n.partition(".")[0] in sections}
    assert len(named) > 10 and not named - FIELDS
    assert set(re.findall(r"--mode=(\w+)", TEXT)) <= set(main.MODES)
    policies = set(re.findall(r"^\| `([a-z-]+)` \|", TEXT, re.MULTILINE))
    assert policies == set(config.REMAT)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)h#][^)#]*)\)", TEXT))))
def test_links_lead_somewhere(link):
    assert (ROOT / "docs" / link).exists()


@pytest.mark.parametrize("script", sorted(set(re.findall(r"launch/[\w.]+", TEXT))))
def test_scripts_exist(script):
    assert (ROOT / script).is_file()


def test_meshes_have_so_many_devices_and_cut_what_they_can():
    rows = re.findall(r"^\|\s*(\d+|TPU[^(|]*\((\d+)[^|]*)[^|]*\|([^|]+)\|([^|]+)\|$", TEXT, re.MULTILINE)
    seen = 0
    for first, of_slice, *cells in rows:
        for cell, recipe in zip(cells, RECIPES, strict=True):
            rollouts = recipe.rollout.conditions * recipe.rollout.group_size
            for replica, fsdp, context in re.findall(r"(\d+), (\d+), (\d+)", cell):
                mesh = tuple(map(int, (replica, fsdp, context)))
                assert math.prod(mesh) == int(of_slice or first), cell
                assert recipe.model.heads % mesh[2] == 0 and 24 % mesh[2] == 0, cell
                assert rollouts % (mesh[0] * mesh[1]) == 0, cell
                seen += 1
    assert seen == 13


@pytest.mark.parametrize(("recipe", "billions"), zip(RECIPES, (2.06, 14.37), strict=True), ids=["2b", "14b"])
def test_numbers_of_the_memory_table(recipe, billions):
    model, tokens = recipe.model, 24 * 45 * 80
    assert f"{billions:.2f}" in TEXT and f"{tokens:,}" in TEXT
    kept = model.depth * tokens * model.width * 2 / 1e9
    assert f"{kept:.1f} GB / context" in TEXT
    recorded = len(recipe.rollout.trained_steps)
    latent = 16 * 24 * 90 * 160 * 4
    assert f"{latent / 1e6:.1f} MB / context" in TEXT
    assert f"{(3 * recorded + 1) * latent / 1e9:.2f} GB / context".lstrip("0") in TEXT
    steps = recipe.rollout.num_steps
    assert f"{steps + 1} + {6 * recorded} = {steps + 1 + 6 * recorded} forwards" in TEXT
