"""Grain pipelines: batch n is a pure function of (seed, n), whatever reads it."""

import itertools

import grain
import numpy as np
import pytest

from ddrl_jax.data import digits, pipeline
from ddrl_jax.data.digits import DigitClips


def same(a, b):
    return a.keys() == b.keys() and all(
        a[k] == b[k] if isinstance(a[k], list) else np.array_equal(a[k], b[k]) for k in a
    )


def joined(parts):
    return {
        k: list(itertools.chain(*(p[k] for p in parts)))
        if isinstance(parts[0][k], list)
        else np.concatenate([p[k] for p in parts])
        for k in parts[0]
    }


class Numbers:
    """A source of a given length whose clips are their own index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def batch(self, indices):
        return {"video": np.asarray(indices)}


def make(seed, rows=None):
    return pipeline.clip_batches(DigitClips("train"), 24, seed, rows)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_any_process_count_reads_the_same_global_batch(processes):
    whole = make(1)
    shards = [make(1, rows) for rows in np.arange(24).reshape(processes, -1)]
    for n in (0, 5, 46, 100_003):
        assert same(joined([s[n] for s in shards]), whole[n])


def test_rows_may_lie_apart():
    whole, apart = pipeline.clip_batches(Numbers(9), 6, 4), pipeline.clip_batches(Numbers(9), 6, 4, [0, 3, 4])
    for n in (0, 7):
        np.testing.assert_array_equal(apart[n]["video"], whole[n]["video"][[0, 3, 4]])


def test_resuming_at_n_is_running_through():
    through = list(itertools.islice(iter(make(2).to_iter_dataset()), 12))
    for n in (0, 1, 7):
        resumed = make(2)[n:].to_iter_dataset(grain.ReadOptions(num_threads=3, prefetch_buffer_size=4))
        for a, b in zip(itertools.islice(resumed, 12 - n), through[n:], strict=True):
            assert same(a, b)


def test_batches_may_be_read_in_any_order():
    first, second = make(3), make(3)
    forwards = [first[n] for n in range(6)]
    backwards = [second[n] for n in reversed(range(6))][::-1]
    assert all(same(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not same(forwards[0], forwards[1])


def test_another_seed_is_another_order():
    assert not same(make(0)[0], make(1)[0])


@pytest.mark.parametrize("length", [7, 24, 100])
def test_every_clip_once_a_pass_and_none_is_dropped(length):
    # 3 passes of 7 in batches of 4 straddle the seam between passes.
    batches = pipeline.clip_batches(Numbers(length), 4, seed=5)
    seen = np.concatenate([batches[n]["video"] for n in range(-(-3 * length // 4))])
    passes = [seen[i * length : (i + 1) * length] for i in range(3)]
    for one in passes:
        assert sorted(one.tolist()) == list(range(length))
    assert not np.array_equal(passes[0], passes[1])


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_batch_of_more_clips_than_there_are_repeats_them(length):
    batches = pipeline.clip_batches(pipeline.limited(DigitClips("train"), length), 8, seed=3)
    captions = DigitClips("train").batch(range(length))["caption"]
    seen = [c for n in range(5) for c in batches[n]["caption"]]
    assert batches[0]["video"].shape == (8, 1, 4, 12, 12)
    # 40 rows are 40 // length whole passes and a rest, so that no clip is seen twice as often as another.
    for start in range(0, 40 - length + 1, length):
        assert sorted(seen[start : start + length]) == sorted(captions)
    assert same(batches[4], pipeline.clip_batches(pipeline.limited(DigitClips("train"), length), 8, seed=3)[4])


def test_a_limit_takes_the_first_clips_of_any_source(tmp_path):
    first = DigitClips("train", seed=5).batch(range(4))
    digits.write_clips(tmp_path, "train", 9, seed=5)
    for source in (DigitClips("train", seed=5), digits.load_clips(tmp_path)):
        few = pipeline.limited(source, 4)
        assert len(few) == 4 and same(
            few.batch([3, 0]), joined([{k: v[i : i + 1] for k, v in first.items()} for i in (3, 0)])
        )
        with pytest.raises(IndexError, match=r"clip index must be in 0 \.\. 3"):
            few.batch([4])
        assert pipeline.limited(source, 0) is source
    stored = digits.load_clips(tmp_path)
    assert len(pipeline.limited(stored, 9)) == 9


def test_more_processes_than_clips_read_the_same_global_batch():
    def limited(rows=None):
        return pipeline.clip_batches(pipeline.limited(DigitClips("train"), 3), 8, 1, rows)

    assert same(joined([limited(rows)[7] for rows in np.arange(8).reshape(4, 2)]), limited()[7])


def test_stored_clips_feed_the_same_pipeline(tmp_path):
    digits.write_clips(tmp_path, "train", 20)
    batches = pipeline.clip_batches(digits.load_clips(tmp_path), 10, seed=0)
    both = joined([batches[0], batches[1]])
    assert sorted(both["caption"]) == sorted(DigitClips("train").batch(range(20))["caption"])


def test_no_training_clip_has_an_evaluation_prompt():
    asked = set(pipeline.evaluation_prompts(270)["caption"])
    trained = set(DigitClips("train").batch(range(20_000))["caption"])
    assert len(asked) == 270 and len(trained) == 450 and not asked & trained


def test_evaluation_prompts_are_fixed_and_balanced():
    prompts = pipeline.evaluation_prompts(256)
    assert same(pipeline.evaluation_prompts(256), prompts)
    assert prompts["caption"][:40] == pipeline.evaluation_prompts(40)["caption"]
    counts = np.unique(pipeline.evaluation_prompts(600)["caption"], return_counts=True)[1]
    assert len(counts) == 270 and counts.min() == 2 and counts.max() == 3
    assert len(set(pipeline.evaluation_prompts(20)["digit"].tolist())) > 5


def test_heldout_clips_are_fixed():
    clips = pipeline.heldout_clips(50)
    assert same(clips, pipeline.heldout_clips(50))
    np.testing.assert_array_equal(clips["video"], DigitClips("heldout").batch(range(50))["video"])
    assert pipeline.heldout_clips(3, frames=5, size=14)["video"].shape == (3, 1, 5, 14, 14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pipeline.clip_batches(Numbers(9), 0, 0), "batch_size = 0: must be at least 1"),
        (lambda: pipeline.clip_batches(Numbers(9), 6, 0, [0, 6]), r"rows = \[0, 6\]: must be in 0 \.\. 5"),
        (lambda: pipeline.clip_batches(Numbers(9), 6, 0, [-1]), r"rows = \[-1\]: must be in 0 \.\. 5"),
        (lambda: pipeline.clip_batches(Numbers(0), 6, 0), "source has 0 clips"),
        (lambda: pipeline.limited(Numbers(9), 10), r"data\.limit=10: must be 0 \(all\) or .* of which there are 9"),
        (lambda: pipeline.limited(DigitClips("train"), -1), r"data\.limit=-1: must be 0"),
        (lambda: pipeline.evaluation_prompts(0), "count = 0"),
        (lambda: pipeline.heldout_clips(0), "count = 0"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
