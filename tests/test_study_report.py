"""The study's page: intervals, matched reward, claims that flip with the numbers, and a page whatever is missing."""

import json
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from ddrl_jax.report import study_plots
from ddrl_jax.report.study import write_study
from ddrl_jax.report.study_claims import (
    claims,
    disagreements,
    headline,
    kl_growth,
    listed,
    state,
    write_estimate,
    write_number,
)
from ddrl_jax.report.study_stats import (
    Estimate,
    Measure,
    at_reward,
    difference,
    estimate,
    matched_difference,
    matched_values,
    over_seeds,
    read_study,
    reward_levels,
    student_t,
)

from . import study_example as example

MAIN = {k: example.ARMS[k] for k in ("ddrl", "dance_grpo", "flow_grpo", "sft", "dance_slow")}


def read(tmp_path, contents):
    return read_study(example.write(tmp_path / "study", contents))


def arm(study, name):
    return next(a for a in study.arms if a.name == name)


def outcome(tmp_path, name, **changed):
    """The outcome of one claim when the numbers of some arms are others."""
    found = {c.name: c for c in claims(read(tmp_path, example.study(**changed)))}
    return found[name].outcome


def slim(contents, *names):
    """The same study with the reward, the held-out loss and `names` measured only: fewer charts to draw."""
    for entry in contents["arms"]:
        for run in entry["seeds"]:
            kept = [c for c in run["changes_from_base"] if c["name"] in ("reward", "heldout_loss", *names)]
            run["changes_from_base"] = run["summary"]["changes"] = kept
    return contents


def run_with(changes, seed=0, evals=None):
    """One seed of an arm with {name: (mean, low, high)}, and curves."""
    rows = [
        dict(name=n, label=n, kind=example.kind_of(n), mean=m, low=lo, high=hi, n=9,
             better="down" if n in ("frechet", "heldout_loss") else "up")
        for n, (m, lo, hi) in changes.items()
    ]  # fmt: skip
    return {"seed": seed, "status": "done", "summary": {"changes": rows}, "curves": {"eval": evals or {}, "ddrl": {}}}


def small(*arms):
    """A study of arms (name, settings, runs), all main."""
    return {
        "arms": [{"name": n, "label": n, "group": "main", "set": s, "seeds": runs} for n, s, runs in arms],
        "seeds": [0],
    }


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("degrees, expected", [(1, 12.7062), (2, 4.3027), (9, 2.2622), (30, 2.0423)])
def test_students_t_is_the_table(degrees, expected):
    assert student_t(degrees) == pytest.approx(expected, abs=1e-4)


def test_students_t_beyond_the_table_joins_it_and_falls_to_the_normal():
    # 31: 2.03951, 60: 2.00030, 120: 1.97993 (tables)
    for degrees, expected in ((31, 2.03951), (60, 2.00030), (120, 1.97993)):
        assert student_t(degrees) == pytest.approx(expected, abs=2e-5)
    assert student_t(10**9) == pytest.approx(1.959964, abs=1e-6)


def test_interval_over_three_seeds():
    # mean 2, std 1, t(2) = 4.30265: half width 4.30265 / sqrt(3) = 2.48414
    found = over_seeds([1.0, 2.0, 3.0])
    assert (found.mean, found.n, found.basis) == (2.0, 3, "seeds")
    assert found.low == pytest.approx(2 - 2.48414, abs=1e-5)
    assert found.high == pytest.approx(2 + 2.48414, abs=1e-5)


def test_interval_over_two_seeds():
    # std of (0, 2) is sqrt(2), / sqrt(2) = 1: half width is t(1)
    assert over_seeds([0.0, 2.0]).high == pytest.approx(1 + 12.7062, abs=1e-4)


def test_no_seed_and_one_seed():
    assert over_seeds([]) is None
    assert over_seeds([3.0]) == Estimate(3.0, None, None, 1, "none")


def test_one_seed_keeps_that_runs_bootstrap_interval(tmp_path):
    study = read(tmp_path, small(("ddrl", {}, [run_with({"reward": (1.0, 0.9, 1.2)})])))
    assert estimate(arm(study, "ddrl"), "reward") == Estimate(1.0, 0.9, 1.2, 1, "bootstrap")


def test_difference_is_paired_over_common_seeds(tmp_path):
    a = [run_with({"reward": (m, 0.0, 9.0)}, seed=s) for s, m in ((0, 5.0), (1, 7.0), (2, 9.0))]
    b = [run_with({"reward": (m, 0.0, 9.0)}, seed=s) for s, m in ((2, 7.9), (1, 6.0), (0, 3.9), (5, 100.0))]
    study = read(tmp_path, small(("a", {}, a), ("b", {"x": 1}, b)))
    # pairs: 1.1, 1.0, 1.1; mean 1.06667, std .057735, half 4.30265 * .057735 / sqrt(3) = .143422
    found = difference(arm(study, "a"), arm(study, "b"), "reward")
    assert found.n == 3
    assert found.mean == pytest.approx(1.0666667)
    assert found.high - found.mean == pytest.approx(0.1434217, abs=1e-6)


def test_difference_of_one_seed_combines_the_intervals(tmp_path):
    a, b = run_with({"reward": (5.0, 4.7, 5.3)}), run_with({"reward": (3.0, 2.6, 3.4)})
    study = read(tmp_path, small(("a", {}, [a]), ("b", {"x": 1}, [b])))
    found = difference(arm(study, "a"), arm(study, "b"), "reward")
    # hypot(.3, .4) = .5
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 1.5, 2.5))


# ---------------------------------------------------------------- matched reward


@pytest.mark.parametrize(
    "level, expected",
    [(0.0, 10.0), (0.5, 11.0), (1.0, 12.0), (1.75, 18.0), (2.0, 20.0), (2.1, None), (-0.1, None)],
)
def test_value_at_a_reward_is_linear_between_evaluations(level, expected):
    found = at_reward(np.array([0.0, 1.0, 2.0]), np.array([10.0, 12.0, 20.0]), level)
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_first_climb_through_a_level_counts():
    reward = np.array([0.0, 2.0, 1.0, 3.0])
    assert at_reward(reward, np.array([0.0, 4.0, 8.0, 9.0]), 1.5) == pytest.approx(3.0)


def test_evaluations_without_a_number_are_passed_over():
    reward, value = np.array([0.0, math.nan, 2.0]), np.array([0.0, 5.0, 4.0])
    assert at_reward(reward, value, 1.0) == pytest.approx(2.0)
    assert at_reward(np.array([math.nan]), np.array([1.0]), 0.0) is None


def _climb(seed, top, loss):
    evals = {"step": [0, 10], "reward": [-4.0, -4.0 + top], "heldout_loss": [0.2, 0.2 * (1 + loss)]}
    return run_with({"reward": (top, 0.0, 9.0), "heldout_loss": (loss, 0.0, 1.0)}, seed=seed, evals=evals)


def test_matched_values_are_changes_since_the_start(tmp_path):
    study = read(tmp_path, small(("ddrl", {}, [_climb(0, 2.0, 0.08), _climb(1, 0.5, 0.04)])))
    found = matched_values(study, arm(study, "ddrl"), "heldout_loss", 1.0)
    assert found == {0: pytest.approx(0.04)}  # seed 1 does not get there
    assert matched_values(study, arm(study, "ddrl"), "step", 1.0) == {0: pytest.approx(5.0)}


def test_levels_are_round_and_end_where_a_comparison_ends(tmp_path):
    dance = {"objective.name": "dance_grpo"}
    study = read(tmp_path, small(("ddrl", {}, [_climb(0, 1.1, 0.02)]), ("dance", dance, [_climb(0, 3.0, 0.5)]),
                                 ("other", {"objective.name": "nft"}, [_climb(0, 1.6, 0.1)])))  # fmt: skip
    assert reward_levels(study, study.arms) == (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
    assert reward_levels(study, study.arms[:1]) == ()


def test_matched_difference_takes_the_highest_common_level(tmp_path):
    dance = {"objective.name": "dance_grpo"}
    study = read(
        tmp_path,
        small(("ddrl", {}, [_climb(0, 1.1, 0.022), _climb(1, 1.2, 0.012)]),
              ("dance", dance, [_climb(0, 2.0, 0.2), _climb(1, 2.0, 0.3)])),
    )  # fmt: skip
    level, found = matched_difference(study, arm(study, "ddrl"), arm(study, "dance"), "heldout_loss")
    assert level == 1.0
    # .022/1.1 - .1 = -.08, and .012/1.2 - .15 = -.14
    assert found.mean == pytest.approx(-0.11)
    assert found.n == 2


# ---------------------------------------------------------------- the parts arms play


def test_parts_are_found_by_what_arms_set(tmp_path):
    study = read(tmp_path, example.study())
    assert study.reference.name == "ddrl"
    assert study.full.name == "ddrl_full"
    assert study.synthetic.name == "ddrl_synthetic"
    assert [a.name for a in study.baselines] == ["dance_grpo", "dance_grpo_edm", "flow_grpo"]
    assert [a.name for a in study.with_kl] == ["flow_grpo", "mix_grpo"]
    without, with_sft = study.by_data()
    assert [a.name for a in without] == ["ddrl_64", "ddrl_512", "ddrl"]
    assert [a.name for a in with_sft] == ["sft_ddrl_64", "sft_ddrl_512", "sft_ddrl"]


def test_an_arm_after_sft_counts_from_the_base(tmp_path):
    contents = example.study()
    entry = next(a for a in contents["arms"] if a["name"] == "sft_ddrl")
    for run in entry["seeds"]:
        del run["changes_from_base"]
        run["summary"]["changes"][0]["mean"] = 0.01  # since SFT; "after" is 1.1 above the base
    study = read(tmp_path, contents)
    after = [r["summary"]["after"]["reward"] for r in entry["seeds"]]
    expected = np.mean(after) - example.BEFORE["reward"]
    assert estimate(arm(study, "sft_ddrl"), "reward").mean == pytest.approx(expected)


def test_kl_growth():
    assert kl_growth(np.array([0, 0, 0, 0, 2.0, 2.0, 0, 0, 3.0, 5.0])) == pytest.approx(2.0)
    assert kl_growth(np.full(10, np.nan)) is None
    assert kl_growth(None) is None


# ---------------------------------------------------------------- states and claims


def _state(tmp_path, **changes):
    run = run_with({"reward": (1.0, 0.9, 1.1), **changes})
    study = read(tmp_path, small(("ddrl", {}, [run])))
    return state(study, arm(study, "ddrl"))


def test_states(tmp_path):
    good = (0.02, 0.01, 0.03)
    assert _state(tmp_path, heldout_loss=good) == "clean"
    assert _state(tmp_path, heldout_loss=(0.2, 0.15, 0.25)) == "hacked"
    assert _state(tmp_path, heldout_loss=(0.1, 0.05, 0.15)) == "unclear"
    assert _state(tmp_path, heldout_loss=good, judge_digit=(-0.1, -0.2, -0.05)) == "hacked"
    assert _state(tmp_path, heldout_loss=good, judge_digit=(-0.1, -0.2, 0.05)) == "clean"
    assert _state(tmp_path, heldout_loss=good, frechet=(0.5, 0.1, 0.9)) == "hacked"
    assert _state(tmp_path, heldout_loss=good, frechet=(-0.5, -0.9, -0.1)) == "clean"
    assert _state(tmp_path) == "unclear"
    assert _state(tmp_path, reward=(0.1, -0.1, 0.3), heldout_loss=(0.2, 0.15, 0.25)) == "no gain"
    assert _state(tmp_path, reward=(0.1, None, None)) == "not measured"


def test_all_claims_hold_on_the_papers_side(tmp_path):
    found = claims(read(tmp_path, example.study()))
    assert {c.name: c.outcome for c in found} == dict.fromkeys((c.name for c in found), "reproduced")
    assert len(found) == 9
    assert disagreements(found) == []


SUBS, DIGIT, DIRECTION, FRECHET, LOSS = example.DDRL
BASELINES = ("dance_grpo", "dance_grpo_edm", "flow_grpo")
CLEAN_DANCE = ((1.5, 1.3, 0.2), 0.07, 0.03, 0.01, 0.03)
HACKED_DDRL = (SUBS, DIGIT, DIRECTION, FRECHET, 0.4)


@pytest.mark.parametrize(
    "claim, changed, expected",
    [
        ("ddrl_clean", {"ddrl": HACKED_DDRL}, "not reproduced"),
        ("ddrl_clean", {"ddrl": (SUBS, DIGIT, DIRECTION, FRECHET, 0.1)}, "unclear"),
        ("ddrl_clean", {"ddrl": (SUBS, -0.05, DIRECTION, FRECHET, LOSS)}, "not reproduced"),
        ("ddrl_clean", {"ddrl": None}, "not measured"),
        ("sub_scores", {"ddrl": ((0.9, 0.35, -0.2), DIGIT, DIRECTION, FRECHET, LOSS)}, "not reproduced"),
        ("sub_scores", {"ddrl": ((0.9, 0.35, 0.01), DIGIT, DIRECTION, FRECHET, LOSS)}, "unclear"),
        ("leave_data", {"dance_grpo": CLEAN_DANCE}, "in part"),
        ("leave_data", dict.fromkeys(BASELINES, CLEAN_DANCE), "not reproduced"),
        ("leave_data", {"flow_grpo": ((1.1, 0.8, 0.1), 0, 0, 0, 0.1)}, "unclear"),
        ("judges_fall", {"dance_grpo": CLEAN_DANCE}, "in part"),
        ("judges_fall", dict.fromkeys(BASELINES, ((1.5, 1.3, 0.2), 0.07, 0.0, 0.0, 0.5)), "not reproduced"),
        ("judges_fall", dict.fromkeys(BASELINES, ((1.5, 1.3, 0.2), 0.0, 0.0, 0.9, 0.5)), "unclear"),
        ("matched", {"ddrl": HACKED_DDRL}, "not reproduced"),
        ("matched", {"dance_slow": ((0.5, 0.36, 0.08), 0.02, 0.001, 0.09, -0.05)}, "in part"),
        ("kl_blind", {"flow_grpo": CLEAN_DANCE, "mix_grpo": CLEAN_DANCE}, "not reproduced"),
        ("no_sft", {"sft_ddrl_64": ((1.5, 0.9, 0.3), 0.018, 0.001, 0.22, 0.1)}, "in part"),
        ("no_sft", dict.fromkeys(("sft_ddrl", "sft_ddrl_64", "sft_ddrl_512")), "not measured"),
        ("reduced", {"ddrl_full": ((1.5, 0.9, 0.3), DIGIT, DIRECTION, FRECHET, LOSS)}, "not reproduced"),
        ("reduced", {"ddrl_full": (SUBS, DIGIT, DIRECTION, FRECHET, -0.05)}, "not reproduced"),
        (
            "synthetic",
            {"ddrl": ((0.0, 0.0, 0.0), 0, 0, 0, 0), "ddrl_synthetic": ((0.0, 0.0, 0.0), 0, 0, 0, 0)},
            "unclear",
        ),
        ("synthetic", {"ddrl_synthetic": ((0.2, 0.1, 0.1), DIGIT, DIRECTION, FRECHET, LOSS)}, "not reproduced"),
        ("synthetic", {"ddrl_synthetic": ((0.9, 0.8, 0.3), DIGIT, DIRECTION, FRECHET, LOSS)}, "reproduced"),
    ],
)
def test_claims_flip_with_the_numbers(tmp_path, claim, changed, expected):
    assert outcome(tmp_path, claim, **changed) == expected


def test_reduced_that_costs_as_much_is_not_reproduced(tmp_path):
    contents = example.study()
    for run in next(a for a in contents["arms"] if a["name"] == "ddrl")["seeds"]:
        run["evaluations_per_iteration"]["data"] = 600
    found = {c.name: c for c in claims(read(tmp_path, contents))}
    assert found["reduced"].outcome == "not reproduced"
    assert "97 %" in " ".join(found["reduced"].measured)  # (640 + 600) / (640 + 640)


def test_a_kl_that_grows_sees_the_rot(tmp_path):
    contents = example.study(mix_grpo=None)
    for run in next(a for a in contents["arms"] if a["name"] == "flow_grpo")["seeds"]:
        run["curves"]["ddrl"]["kl_loss"] = [1e-3 * k for k in range(example.UPDATES)]
        # middle fifth: mean of 80..119 is 99.5; last: of 160..199 is 179.5
    found = {c.name: c for c in claims(read(tmp_path, contents))}
    assert "1.80 times" in found["kl_blind"].measured[0]
    assert found["kl_blind"].outcome == "not reproduced"


def test_headline_names_who_hacked(tmp_path):
    lead, details = headline(read(tmp_path, example.study(MAIN)))
    assert lead == "DDRL raised the reward and stayed clean; DanceGRPO and FlowGRPO hacked it."
    assert "2.7 times DDRL’s" in details[1]
    assert re.search(r"At the same reward \(\+1\) DDRL’s held-out loss is \d\.\d points lower\.", details[1])
    lead, _ = headline(read(tmp_path, example.study(MAIN, ddrl=HACKED_DDRL, dance_grpo=CLEAN_DANCE)))
    assert lead == "DDRL hacked its reward; FlowGRPO also hacked it, DanceGRPO did not."
    lead, _ = headline(read(tmp_path, example.study(MAIN, ddrl=None)))
    assert "has not finished" in lead


# ---------------------------------------------------------------- words


def test_numbers_as_text():
    loss, share, plain = (
        Measure("l", "l", "loss", "down", 100, " %"),
        Measure("j", "j", "judge", "up", 100, " pt"),
        None,
    )
    plain = Measure("r", "r", "reward", "up")
    assert write_estimate(loss, Estimate(0.016, 0.014, 0.018, 3, "seeds")) == ("+1.6 %", "[+1.4, +1.8]")
    assert write_estimate(plain, Estimate(-1.1, -1.2, -1.0, 3, "seeds")) == ("\u22121.10", "[\u22121.20, \u22121.00]")
    # An interval that leaves 0 out never reads as if it touched it.
    assert write_estimate(share, Estimate(0.004, 0.0002, 0.0078, 3, "seeds")) == ("+0.40 pt", "[+0.02, +0.78]")
    assert write_estimate(plain, None) == ("–", "")
    assert write_number(loss, 0.0) == "0.0 %"
    assert loss.apart.unit == " pt"


def test_listing():
    assert [listed(w) for w in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert listed(["a, b", "c"]) == "a, b; c"


def test_labels_at_line_ends_keep_apart():
    places = study_plots._spread([0.1, 0.11, 0.12, 0.9], 0.1)
    assert places == pytest.approx([0.01, 0.11, 0.21, 0.9])
    crowded = study_plots._spread([0.99, 0.995, 1.0], 0.2)
    assert crowded == pytest.approx([0.6, 0.8, 1.0])
    many = study_plots._spread([0.5] * 11, 0.3)
    assert many == pytest.approx(np.linspace(0, 1, 11))


def test_a_path_ends_on_the_frame():
    x, y = study_plots._until(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 5.0]), 3.0, 3.0)
    assert (x.tolist(), y.tolist()) == ([0.0, 1.0, 1.5], [0.0, 1.0, 3.0])


# ---------------------------------------------------------------- the page


class Page(HTMLParser):
    """Tags closed in order, ids unique, and what refers to anything."""

    VOID = ("meta", "input", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.references, self.text, self.labels = [], [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.references += [v for k, v in attrs.items() if k in ("href", "src")]
        if tag == "svg" or attrs.get("role") == "img":
            self.labels.append(attrs.get("aria-label", "") or attrs.get("aria-hidden", ""))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    contents = example.study(MAIN | {k: example.ARMS[k] for k in ("ddrl_full", "ddrl_64")})
    slim(contents, "judge_digit", *example.SUBS)
    example.write(folder, contents)
    example.write_clips(folder, contents)
    page, markdown = write_study(folder)
    return SimpleNamespace(folder=folder, page=page.read_text(), markdown=markdown.read_text())


def test_page_is_whole_and_needs_nothing_else(whole):
    page = Page(whole.page)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    local = {"#" + i for i in page.ids}
    assert set(page.references) <= local
    assert "<script" not in whole.page
    assert not re.search(r"url\((?!#|data:)", whole.page)
    assert page.labels and all(page.labels)


def test_page_says_what_was_measured(whole):
    text = Page(whole.page).text
    for words in ("Where this small study disagrees with the paper", "+53.5 %", "hacked 3/3", "not reached",
                  "Updates to get there", "--mode=study", "55 %", "DDRL, 64 clips", "a 0 moves left"):  # fmt: skip
        assert words in text, words


def test_markdown_links_pictures_that_are_there(whole):
    links = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", whole.markdown)
    assert len(links) > 10
    for alt, link in links:
        assert len(alt) > 15, link
        assert (whole.folder / link).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    files = {f"figures/{p.name}" for p in (whole.folder / "figures").iterdir()}
    assert files == {link for _, link in links}
    rows = re.findall(r"^\|.*\|$", whole.markdown, re.MULTILINE)
    assert rows and not any("<" in row.replace("\\<", "") for row in rows)


def test_page_is_the_same_when_written_again(tmp_path):
    example.write(tmp_path, slim(example.study({"flow_grpo": MAIN["flow_grpo"]}, seeds=(0,)), *example.SUBS))
    first = [p.read_bytes() for p in write_study(tmp_path)]
    pictures = {p.name: p.read_bytes() for p in (tmp_path / "figures").iterdir()}
    assert [p.read_bytes() for p in write_study(tmp_path)] == first
    assert {p.name: p.read_bytes() for p in (tmp_path / "figures").iterdir()} == pictures


def test_disagreement_is_prominent(tmp_path):
    contents = example.study({k: MAIN[k] for k in ("ddrl", "dance_grpo")}, dance_grpo=CLEAN_DANCE, seeds=(0, 1))
    page, markdown = write_study(example.write(tmp_path, slim(contents)))
    first = markdown.read_text().split("\n## ")[1]
    assert first.startswith("Where this small study disagrees with the paper")
    assert "**Not reproduced**: The GRPO baselines hack" in first
    html = page.read_text()
    assert html.index("not reproduced") < html.index('id="arms"')


def test_a_study_under_way_and_one_that_failed(tmp_path):
    contents = slim(example.study({k: MAIN[k] for k in ("ddrl", "dance_grpo", "flow_grpo", "sft")}, seeds=(0, 1)))
    ddrl, dance, flow, sft = contents["arms"]
    ddrl["seeds"][1] |= {"status": "failed", "error": "loss <b>was</b> nan", "summary": {}, "changes_from_base": []}
    dance["seeds"] = []
    for run in flow["seeds"]:
        run |= {"status": "waiting", "summary": {}, "changes_from_base": [], "curves": {"eval": {}, "ddrl": {}}}
    for run in sft["seeds"]:
        run["curves"] = None
        run["evaluations_per_iteration"] = {"total": None}
        run["seconds"] = None
        run["summary"]["changes"][1]["low"] = None
    page, markdown = write_study(example.write(tmp_path, contents))
    text = Page(page.read_text()).text
    assert "DDRL, seed 1, failed: loss <b>was</b> nan" in text
    assert "Not finished: DanceGRPO (seed 0 and 1) and FlowGRPO (seed 0 and 1)." in text
    assert "pending" in text and "1 seed" in text
    assert "One seed only" in markdown.read_text()


def test_a_sweep_alone(tmp_path):
    contents = example.study(example.SWEEP, seeds=(0,))
    page, markdown = write_study(example.write(tmp_path, slim(contents)))
    first = markdown.read_text().split("\n## ")[0]
    assert "A sweep of 9 settings: 4 of 9 finished ones hacked their reward." in first
    # Held-out loss 5e3 * 5e-5 / (1 + 5 * .4) = 8 %; with KL .04 it is 21 %.
    assert "most rewarded among them: FlowGRPO 5e-05, KL 0.4" in first
    assert "disagrees with the paper: no claim can be tested yet." in first
    assert 'id="sweep"' in page.read_text() and 'id="paper"' not in page.read_text()


@pytest.mark.parametrize("contents", [{}, {"arms": []}, {"arms": [{}]}, {"arms": [{"seeds": [{}, None, 3]}, "x"]},
                                      {"title": None, "arms": None, "seeds": [None], "base": 3}])  # fmt: skip
def test_next_to_nothing_still_makes_a_page(tmp_path, contents):
    page, markdown = write_study(example.write(tmp_path, contents))
    assert Page(page.read_text()).open == []
    assert "Nothing has been measured yet" in markdown.read_text()


def test_hostile_labels_stay_text(tmp_path):
    contents = slim(example.study({"ddrl": MAIN["ddrl"]}, seeds=(0,)))
    contents["arms"][0]["label"] = "\"'><script>alert(1)</script> $\\frac{$ | `x`"
    page, markdown = write_study(example.write(tmp_path, contents))
    assert "<script" not in page.read_text()
    assert Page(page.read_text()).open == []
    assert "<script" not in markdown.read_text().replace("\\<", "")


def test_where_there_is_no_study(tmp_path):
    with pytest.raises(ValueError, match=r"holds no study\.json"):
        write_study(tmp_path)
    (tmp_path / "study.json").write_text("[1")
    with pytest.raises(ValueError, match="could not be read"):
        write_study(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="must hold a JSON object, and holds a list"):
        write_study(tmp_path)
