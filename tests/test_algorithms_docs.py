"""docs/algorithms.md: the settings that it names exist, and so do its own sections."""

import re

import pytest

from ddrl_jax import config, dance_grpo, ddrl, flow_grpo

from .paths import ROOT

TEXT = (ROOT / "docs" / "algorithms.md").read_text()
SECTIONS = "rollout|advantage|objective|train|eval|reward|nft|process|pretrain|data"


def test_every_field_it_names_is_a_field():
    known = config.flatten(config.default().to_dict())
    named = set(re.findall(rf"(?<![\w/.])((?:{SECTIONS})\.[a-z_]+)(?![\w(])", TEXT))
    assert len(named) > 30
    for field in named:
        assert field in known or any(k.startswith(field + ".") for k in known), field


def test_every_objective_is_explained():
    for name in config.OBJECTIVES:
        assert f'objective.name="{name}"' in TEXT, name
    for name in config.PROCESS_FIELDS:
        assert f"`{name}`" in TEXT or f'process.name="{name}"' in TEXT, name


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"\]\(#([^)]*)\)", TEXT))))
def test_anchors_lead_to_a_section(anchor):
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


def test_the_presets_are_as_it_says():
    assert (ddrl().data_beta, ddrl().loss_scale, ddrl().clip_range, ddrl().adv_clip) == (0.01, 10.0, 1e-4, 5.0)
    assert (ddrl().log_ratio, ddrl().cond_dropout) == ("mean_square", 0.2)
    assert (dance_grpo().log_ratio, dance_grpo().kl_beta) == ("gaussian", 0.0)
    assert (flow_grpo().log_ratio, flow_grpo().kl, flow_grpo().kl_beta) == ("gaussian", "flow_grpo", 0.04)
