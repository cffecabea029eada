"""Batches of one shape from clips of several, and which conditions are given a frame: pure functions of (seed, n)."""

import itertools

import grain
import numpy as np
import pytest

from ddrl_jax.data.pipeline import bucketed_batches, image_to_video_mask


class Shapes:
    """Clips that are their own index, in buckets of given sizes, shuffled together."""

    def __init__(self, **sizes):
        index = np.random.default_rng(0).permutation(sum(sizes.values()))
        ends = np.cumsum(list(sizes.values()))
        self.buckets = {
            shape: np.sort(index[end - size : end]) for (shape, size), end in zip(sizes.items(), ends, strict=True)
        }

    def __len__(self):
        return sum(len(index) for index in self.buckets.values())

    def shape(self, indices):
        (found,) = [shape for shape, index in self.buckets.items() if set(indices) <= set(index)]
        return found

    def batch(self, indices):
        return {"index": np.asarray(indices), "shape": self.shape(np.asarray(indices).tolist())}


MIXED = {"wide": 30, "upright": 13, "square": 5}


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_any_process_count_reads_the_same_global_batch(processes):
    whole = bucketed_batches(Shapes(**MIXED), 8, 1)
    parts = [bucketed_batches(Shapes(**MIXED), 8, 1, rows) for rows in np.arange(8).reshape(processes, -1)]
    for n in (0, 1, 2, 3, 50, 51, 52, 100_003):
        rows = [part[n] for part in parts]
        assert {row["shape"] for row in rows} == {whole[n]["shape"]}
        np.testing.assert_array_equal(np.concatenate([row["index"] for row in rows]), whole[n]["index"])


def test_resuming_at_n_is_running_through():
    through = [
        b["index"] for b in itertools.islice(iter(bucketed_batches(Shapes(**MIXED), 4, 2).to_iter_dataset()), 20)
    ]
    for n in (0, 1, 13):
        ahead = bucketed_batches(Shapes(**MIXED), 4, 2)[n:].to_iter_dataset(
            grain.ReadOptions(num_threads=3, prefetch_buffer_size=4)
        )
        for a, b in zip(itertools.islice(ahead, 20 - n), through[n:], strict=True):
            np.testing.assert_array_equal(a["index"], b)
    backwards = [bucketed_batches(Shapes(**MIXED), 4, 2)[n]["index"] for n in reversed(range(20))][::-1]
    np.testing.assert_array_equal(backwards, through)


def test_another_seed_is_another_order():
    def first(seed):
        return [tuple(bucketed_batches(Shapes(**MIXED), 4, seed)[n]["index"]) for n in range(6)]

    assert first(0) == first(0) and first(0) != first(1)


@pytest.mark.parametrize(
    "sizes", [MIXED, {"a": 1, "b": 1}, {"a": 100, "b": 1}, {"a": 7}, {"a": 3, "b": 3, "c": 3, "d": 1}]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_buckets_take_turns_in_proportion_to_their_sizes(sizes, seed):
    batches = bucketed_batches(Shapes(**sizes), 2, seed)
    total = sum(sizes.values())
    shapes = [batches[n]["shape"] for n in range(3 * total)]
    # Over as many batches as there are clips, exactly in proportion, and never more than two away from it.
    for start in range(0, 3 * total, total):
        assert {s: shapes[start : start + total].count(s) for s in sizes} == sizes
    for shape, size in sizes.items():
        ahead = np.cumsum([s == shape for s in shapes]) - np.arange(1, len(shapes) + 1) * size / total
        assert np.abs(ahead).max() < 2


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_every_clip_once_a_pass_of_its_bucket(batch_size):
    source = Shapes(**MIXED)
    batches = bucketed_batches(source, batch_size, 3)
    seen = {shape: [] for shape in MIXED}
    for n in range(4 * len(source)):
        batch = batches[n]
        assert len(batch["index"]) == batch_size
        seen[batch["shape"]] += batch["index"].tolist()
    for shape, size in MIXED.items():
        passes = [seen[shape][i : i + size] for i in range(0, len(seen[shape]) - size + 1, size)]
        assert all(sorted(one) == source.buckets[shape].tolist() for one in passes)
        assert passes[0] != passes[1]


def test_a_bucket_of_fewer_clips_than_a_batch_repeats_them():
    batches = bucketed_batches(Shapes(few=3, many=20), 8, 0)
    few = next(batches[n] for n in range(10) if batches[n]["shape"] == "few")
    counts = np.unique(few["index"], return_counts=True)[1]
    assert sorted(counts) == [2, 3, 3]


def test_no_batch_is_beyond_reach():
    batches = bucketed_batches(Shapes(**MIXED), 4, 0)
    assert {batches[2**40 + n]["shape"] for n in range(20)} == set(MIXED)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((Shapes(a=3), 0, 0), "batch_size = 0"),
        ((Shapes(a=3), 6, 0, [0, 6]), r"rows = \[0, 6\]: must be in 0 \.\. 5"),
        ((Shapes(a=0), 6, 0), "source has 0 clips"),
    ],
)
def test_bad_arguments_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        bucketed_batches(*args)


# ---------------------------------------------------------------------------------------------- image to video


@pytest.mark.parametrize("batch_size", [2, 8, 16])
def test_half_of_an_even_batch_is_given_a_frame(batch_size):
    masks = np.stack([image_to_video_mask(5, n, batch_size) for n in range(400)])
    assert masks.dtype == bool and masks.shape == (400, batch_size)
    assert (masks.sum(1) == batch_size // 2).all()
    # Each row is given one as often as not: 5 standard errors of a mean of 400 coins.
    assert np.abs(masks.mean(0) - 0.5).max() < 5 * 0.5 / 20


def test_a_rest_is_drawn():
    counts = np.array([image_to_video_mask(0, n, 5, 0.3).sum() for n in range(1000)])
    assert set(counts) == {1, 2}
    assert abs(counts.mean() - 1.5) < 5 * 0.5 / 1000**0.5


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 0), (1.0, 6), (1 / 3, 2)])
def test_the_ends_are_exact(ratio, expected):
    assert {int(image_to_video_mask(1, n, 6, ratio).sum()) for n in range(50)} == {expected}


def test_a_mask_is_a_function_of_its_arguments():
    def masks(seed):
        return [image_to_video_mask(seed, n, 8).tolist() for n in range(10)]

    assert masks(0) == masks(0) and masks(0) != masks(1) and len({tuple(m) for m in masks(0)}) > 1


def test_bad_masks_are_refused():
    with pytest.raises(ValueError, match=r"ratio = 1\.5: must be in \[0,1\]"):
        image_to_video_mask(0, 0, 4, 1.5)
    with pytest.raises(ValueError, match="batch_size = 0"):
        image_to_video_mask(0, 0, 0)
