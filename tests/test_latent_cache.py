"""The latent cache: what is added comes back, a kill loses little, and damage or another recipe is one line."""

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from ddrl_jax.data import latent_cache
from ddrl_jax.data.latent_cache import CacheWriter, LatentCache, decode_record, encode_record

from .paths import ROOT

MADE_WITH = {"codec": "wan_vae", "frames": 93, "fps": 16.0, "size": (720, 1280)}
WIDE, UPRIGHT = (4, 3, 6, 8), (4, 3, 8, 6)
# The library's smallest file is 64 KiB; clips of 2.3 KB keep the tests quick.


def latent(i, shape=WIDE):
    return np.random.default_rng(i).standard_normal(shape).astype(np.float32)


def name(i):
    return f"clip{i:03d}"


def shape_of(i):
    return UPRIGHT if i % 3 == 0 else WIDE


def fill(folder, indices, finish=True, shard_clips=4, **kwargs):
    with CacheWriter(folder, MADE_WITH, shard_clips, **kwargs) as cache:
        for i in indices:
            if name(i) not in cache.done:
                cache.add(name(i), latent(i, shape_of(i)), f"caption é {i}")
        if finish:
            cache.finish()
    return folder


def same(a, b):
    assert (a.names, a.captions, a.shapes) == (b.names, b.captions, b.shapes)
    for i in range(len(a)):
        np.testing.assert_array_equal(a.batch([i])["latent"], b.batch([i])["latent"])


def test_what_is_added_comes_back(tmp_path):
    cache = LatentCache(fill(tmp_path / "c", [5, 0, 3, 2, 1, 4, 9, 8, 7, 6]), MADE_WITH)
    assert len(cache) == 10 and cache.names == [name(i) for i in range(10)]
    assert cache.captions == [f"caption é {i}" for i in range(10)]
    assert cache.shapes == [shape_of(i) for i in range(10)]
    batch = cache.batch([7, 1, 7])
    assert batch.keys() == {"latent", "caption", "name"} and batch["name"] == [name(7), name(1), name(7)]
    assert batch["caption"] == ["caption é 7", "caption é 1", "caption é 7"]
    assert batch["latent"].dtype == np.float32
    np.testing.assert_array_equal(batch["latent"], np.stack([latent(7), latent(1), latent(7)]))
    cache.verify()


def test_buckets_hold_clips_of_one_shape(tmp_path):
    cache = LatentCache(fill(tmp_path / "c", range(10)))
    assert {shape: index.tolist() for shape, index in cache.buckets.items()} == {
        WIDE: [1, 2, 4, 5, 7, 8],
        UPRIGHT: [0, 3, 6, 9],
    }
    for shape, index in cache.buckets.items():
        assert cache.batch(index)["latent"].shape == (len(index), *shape)
    with pytest.raises(ValueError, match=r"clips have shapes .*: a batch must have one"):
        cache.batch([0, 1])
    with pytest.raises(IndexError, match=r"clip index must be in 0 \.\. 9"):
        cache.batch([10])


def test_latents_are_kept_in_float32(tmp_path):
    with CacheWriter(tmp_path / "c", {}) as writer:
        writer.add("a", latent(0).astype(np.float16), "one")
        writer.finish()
    got = LatentCache(tmp_path / "c").batch([0])["latent"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[0], latent(0).astype(np.float16).astype(np.float32))


def test_going_on_gives_the_same_cache(tmp_path):
    whole = LatentCache(fill(tmp_path / "whole", range(11)))
    fill(tmp_path / "parts", range(6), finish=False)  # leaving the context keeps the rest of a shard
    with CacheWriter(tmp_path / "parts", MADE_WITH, 4) as writer:
        assert writer.done == {name(i) for i in range(6)}
    with pytest.raises(
        ValueError, match=r"data\.path=.*: parts/ is unfinished \(index\.json\): run --mode=prepare again"
    ):
        LatentCache(tmp_path / "parts")
    same(LatentCache(fill(tmp_path / "parts", range(11))), whole)
    fill(tmp_path / "parts", range(11))  # nothing to do
    same(LatentCache(tmp_path / "parts"), whole)


def test_adding_after_the_end_opens_it_again(tmp_path):
    with CacheWriter(tmp_path / "c", {}) as writer:
        writer.add("a", latent(0), "x")
        writer.finish()
        assert LatentCache(tmp_path / "c").names == ["a"]
        writer.add("b", latent(1), "y")
    with pytest.raises(ValueError, match="is unfinished"):
        LatentCache(tmp_path / "c")


def test_an_error_keeps_what_was_added(tmp_path):
    with pytest.raises(RuntimeError, match="encoder"), CacheWriter(tmp_path / "c", MADE_WITH, 4) as writer:
        for i in range(6):
            writer.add(name(i), latent(i, shape_of(i)), "x")
        raise RuntimeError("encoder")
    assert CacheWriter(tmp_path / "c", MADE_WITH).done == {name(i) for i in range(6)}


KILLED = """
import os, signal, sys
from tests.test_latent_cache import MADE_WITH, CacheWriter, latent, name, shape_of
with CacheWriter(sys.argv[1], MADE_WITH, 4) as cache:
    for i in range(11):
        if name(i) not in cache.done:
            cache.add(name(i), latent(i, shape_of(i)), f"caption é {i}")
        if i == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("last", "kept"), [(1, 0), (3, 4), (5, 4), (9, 8)])
def test_a_killed_run_loses_the_shard_it_was_writing(tmp_path, last, kept):
    folder = tmp_path / "killed"
    child = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(last)], cwd=ROOT)
    assert child.returncode == -signal.SIGKILL
    if last % 4 != 3:
        assert list(folder.glob("*.partial"))
    writer = CacheWriter(folder, MADE_WITH, 4)
    assert writer.done == {name(i) for i in range(kept)}
    assert not list(folder.glob("*.partial"))
    fill(folder, range(11))
    cache = LatentCache(folder)
    cache.verify()
    same(cache, LatentCache(fill(tmp_path / "whole", range(11))))


@pytest.mark.parametrize("step", ["_sha256", "_write_atomically"])
def test_a_shard_counts_only_when_the_index_names_it(tmp_path, monkeypatch, step):
    """Stopped between any two of the steps that finish a shard."""
    original, calls = getattr(latent_cache, step), []

    def stop(*args):
        calls.append(args)
        if len(calls) == 1 + (step == "_write_atomically"):  # of that one, the index and not the table
            raise KeyboardInterrupt
        return original(*args)

    writer = CacheWriter(tmp_path / "c", MADE_WITH, 4)
    monkeypatch.setattr(latent_cache, step, stop)
    with pytest.raises(KeyboardInterrupt):
        for i in range(4):
            writer.add(name(i), latent(i), "x")
    assert list((tmp_path / "c").iterdir())
    monkeypatch.undo()
    assert CacheWriter(tmp_path / "c", MADE_WITH).done == set()
    assert not list((tmp_path / "c").iterdir())


def test_skipped_files_are_listed_and_tried_again(tmp_path):
    with CacheWriter(tmp_path / "c", {}) as writer:
        writer.skip("b", "no caption")
        writer.add("a", latent(0), "x")
        writer.skip("z", "too short")
        writer.finish()
    assert LatentCache(tmp_path / "c").skipped == [("b", "no caption"), ("z", "too short")]
    with CacheWriter(tmp_path / "c", {}) as writer:
        assert writer.done == {"a"}
        writer.skip("z", "damaged")
        writer.skip("b", "no caption")
        writer.add("b", latent(1), "y")  # repaired
        writer.finish()
    cache = LatentCache(tmp_path / "c")
    assert cache.skipped == [("z", "damaged")] and cache.names == ["a", "b"]


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_write_one_cache(tmp_path, processes):
    folder = tmp_path / "many"
    for p in range(processes):
        fill(folder, range(p, 11, processes), process_index=p, process_count=processes)
        if p < processes - 1:
            with pytest.raises(ValueError, match="is missing"):
                LatentCache(folder)
    same(LatentCache(folder, MADE_WITH), LatentCache(fill(tmp_path / "one", range(11))))
    # Every process knows what all of them have.
    writer = CacheWriter(folder, MADE_WITH, process_index=1, process_count=processes)
    assert writer.done == {name(i) for i in range(11)}
    with pytest.raises(ValueError, match=r"many/ holds index-00000-of-.*: it must be gone on with by as many"):
        CacheWriter(folder, MADE_WITH)


def without(key):
    return {k: v for k, v in MADE_WITH.items() if k != key}


def test_another_recipe_is_refused_by_its_first_field(tmp_path):
    folder = fill(tmp_path / "c", [1])
    LatentCache(folder, dict(reversed(MADE_WITH.items())))
    for other, message in [
        ({**MADE_WITH, "frames": 45, "size": (480, 832)}, "was prepared with frames=93, not frames=45"),
        ({**MADE_WITH, "size": (480, 832)}, r"was prepared with size=\[720, 1280\], not size=\[480, 832\]"),
        ({**MADE_WITH, "crop": True}, "was prepared with no crop, not crop=True"),
    ]:
        for call in (LatentCache, CacheWriter):
            with pytest.raises(ValueError, match=rf"^data\.path='{tmp_path}': c/ {message}") as caught:
                call(folder, other)
            assert "\n" not in str(caught.value)


def test_a_reader_asks_for_its_own_fields_and_a_writer_for_all(tmp_path):
    """Synthetic clips say too which weights made them."""
    folder = fill(tmp_path / "c", [1])
    assert LatentCache(folder, without("fps")).fingerprint == json.loads(json.dumps(MADE_WITH))
    LatentCache(folder, {})
    with pytest.raises(ValueError, match=r"c/ was prepared with fps=16\.0, not no fps: prepare into another folder"):
        CacheWriter(folder, without("fps"))
    with pytest.raises(ValueError, match="was prepared with no weights, not weights='a': prepare into another folder"):
        CacheWriter(folder, {**MADE_WITH, "weights": "a"})


def test_processes_of_several_recipes_are_no_cache(tmp_path):
    """Also in a field that no reader asks for."""
    for p, made in enumerate((MADE_WITH, {**MADE_WITH, "weights": "a"})):
        other = tmp_path / f"{p}"
        with CacheWriter(other, made, process_index=p, process_count=2) as writer:
            writer.add(name(p), latent(p), "x")
            writer.finish()
    for file in (tmp_path / "1").iterdir():
        file.rename(tmp_path / "0" / file.name)
    with pytest.raises(ValueError, match="was prepared with weights='a', not no weights as in index-00000-of-00002"):
        LatentCache(tmp_path / "0", MADE_WITH)


def test_a_clip_must_fit(tmp_path):
    writer = CacheWriter(tmp_path / "c", {})
    writer.add("a", latent(0), "x")
    bad = latent(1)
    bad[0, 0, 0, 0] = np.nan
    for args, message in [
        (("a", latent(1), "x"), "name = 'a': is in the cache already"),
        (("b", latent(1)[0], "x"), r"latent of 'b' = \(3, 6, 8\): must be \(C,T,h,w\)"),
        (("b", bad, "x"), "latent of 'b': has numbers that are not finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            writer.add(*args)
    for kwargs in ({"shard_clips": 0}, {"process_index": 1}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            CacheWriter(tmp_path / "d", {}, **kwargs)


def test_heldout_clips_depend_on_names_only(tmp_path):
    folder = fill(tmp_path / "c", range(20))
    cache = LatentCache(folder, heldout=5)
    train, heldout = cache.split("train"), cache.split("heldout")
    assert sorted(train.names + heldout.names) == cache.names and len(heldout) == 5
    assert train.names == sorted(train.names) and heldout.names != sorted(heldout.names)
    assert LatentCache(folder, heldout=3).split("heldout").names == heldout.names[:3]
    assert LatentCache(folder).split("train").names == cache.names
    for part in (train, heldout):
        for shape, index in part.buckets.items():
            batch = part.batch(index)
            assert batch["name"] == [part.names[i] for i in index]
            for n, row in zip(batch["name"], batch["latent"], strict=True):
                np.testing.assert_array_equal(row, latent(int(n[4:]), shape))
    # One more file pushes out one held-out clip at most.
    more = LatentCache(fill(folder, range(21)), heldout=5).split("heldout").names
    assert len(set(more) & set(heldout.names)) >= 4


def test_limits_are_nested_and_leave_the_heldout_clips_alone(tmp_path):
    cache = LatentCache(fill(tmp_path / "c", range(20)), heldout=5)
    names = [set(cache.split("train", limit).names) for limit in (1, 4, 9, 15)]
    assert [len(n) for n in names] == [1, 4, 9, 15] and all(a < b for a, b in itertools.pairwise(names))
    assert names[-1] == set(cache.split("train").names)
    for limit in (-1, 16):
        with pytest.raises(ValueError, match=rf"data\.limit={limit}: must be 0 \(all\) .* of which there are 15"):
            cache.split("train", limit)
    with pytest.raises(ValueError, match=r"eval\.heldout_clips=20: must be at least 0 and below the 20 clips"):
        LatentCache(tmp_path / "c", heldout=20)
    with pytest.raises(ValueError, match="split = 'test'"):
        cache.split("test")


def test_threads_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(latent_cache, "_OPEN_SHARDS", 2)  # fewer than there are shards
    cache = LatentCache(fill(tmp_path / "c", range(20), shard_clips=2))
    wrong = []

    def read(seed):
        for i in np.random.default_rng(seed).permutation(20).tolist():
            if not np.array_equal(cache.batch([i])["latent"][0], latent(i, shape_of(i))):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------------------------------------------- damage


def shard(folder, number=1):
    return folder / f"latents-00000-{number:05d}.array_record"


def overwrite(file, at, content):
    with file.open("rb+") as f:
        f.seek(at)
        f.write(content)


def test_a_changed_byte_is_found(tmp_path):
    folder = fill(tmp_path / "c", range(10))
    content = shard(folder).read_bytes()
    at = content.index(latent(5, shape_of(5)).tobytes()) + 100
    overwrite(shard(folder), at, bytes([content[at] ^ 1]))
    cache = LatentCache(folder)  # the size is still right
    message = rf"^data\.path='{tmp_path}': c/ latents-00000-00001\.array_record is damaged: its SHA-256"
    with pytest.raises(ValueError, match=message):
        cache.verify()
    cache.batch([4])
    with pytest.raises(ValueError, match=r"latents-00000-00001\.array_record, record 1, is damaged") as caught:
        cache.batch([5])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: shard(f).unlink(), r"latents-00000-00001\.array_record is missing"),
        (lambda f: os.truncate(shard(f), 70_000), r"00001\.array_record has 70000 bytes, the index says "),
        (lambda f: shard(f).with_suffix(".json").unlink(), r"latents-00000-00001\.json cannot be read: No such file"),
        (lambda f: overwrite(shard(f).with_suffix(".json"), 9, b"!"), r"00001\.json is damaged: its SHA-256"),
        (lambda f: (f / "index.json").unlink(), r"is not there or has no index\.json: --mode=prepare makes it"),
        (lambda f: os.truncate(f / "index.json", 50), r"index\.json is damaged"),
        (lambda f: (f / "index.json").write_text("{}"), r"index\.json is of format None, this program reads 1"),
        (lambda f: (f / "index.json").write_text("[]"), r"index\.json is of format None, this program reads 1"),
        (lambda f: edit(f, format=2), r"index\.json is of format 2, this program reads 1"),
        (lambda f: edit(f, shards=[{"file": "../x"}]), r"index\.json names a file outside the folder"),
        (lambda f: edit(f, shards=[{"file": "x"}]), r"index\.json is damaged"),
        (lambda f: edit(f, shards=[]), r"has no clips, 0 were skipped"),
        (lambda f: edit(f, finished=False), r"is unfinished \(index\.json\)"),
        (lambda f: (f / "index-00000-of-00002.json").write_bytes((f / "index.json").read_bytes()), r"of another run"),
    ],
)
def test_opening_finds_what_is_wrong(tmp_path, harm, message):
    folder = fill(tmp_path / "c", range(10))
    harm(folder)
    with pytest.raises(ValueError, match=rf"^data\.path='{tmp_path}': c/ .*{message}") as caught:
        LatentCache(folder)
    assert "\n" not in str(caught.value)


def edit(folder, **fields):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, **fields}))


def test_a_name_twice_is_refused(tmp_path):
    for p in range(2):
        fill(tmp_path / "c", [p], process_index=p, process_count=2, finish=False)
    a, b = (tmp_path / "c" / f"index-0000{p}-of-00002.json" for p in range(2))
    index = json.loads(a.read_text())
    for file in (a, b):
        file.write_text(json.dumps({**index, "finished": True}))
    with pytest.raises(ValueError, match="has the name 'clip000' twice"):
        LatentCache(tmp_path / "c")


def test_shards_of_another_cache_are_noticed(tmp_path):
    """Same sizes, other clips: what a copy of the wrong file would be."""
    one, two = fill(tmp_path / "a", range(4)), fill(tmp_path / "b", range(10, 14))
    assert shard_size(one) == shard_size(two)
    shard(one, 0).write_bytes(shard(two, 0).read_bytes())
    with pytest.raises(ValueError, match="record 1, is not the clip 'clip001' of its table"):
        LatentCache(one).batch([1])


def shard_size(folder):
    return shard(folder, 0).stat().st_size


def test_exists(tmp_path):
    assert not latent_cache.exists(tmp_path / "c")
    fill(tmp_path / "c", range(1), finish=False)
    assert latent_cache.exists(tmp_path / "c")


# ------------------------------------------------------------------------------------------------------ records


def test_a_record_by_hand():
    record = encode_record("n", np.full((1, 1, 1, 2), 1.5, np.float16), "é")
    (length,) = struct.unpack_from("<I", record)
    assert json.loads(record[4 : 4 + length]) == {
        "name": "n",
        "caption": "é",
        "latent": {"shape": [1, 1, 1, 2], "dtype": "float32"},
    }
    assert record[4 + length :] == bytes.fromhex("0000c03f0000c03f")


def record_of(header, body=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + body


GOOD = {"name": "n", "caption": "c", "latent": {"shape": [1, 1, 1, 2], "dtype": "float32"}}


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\1\0",
        struct.pack("<I", 2**31) + b"{}",
        struct.pack("<I", 0),
        record_of(b"{"),
        record_of(b"[]"),
        record_of(GOOD, b"\0" * 7),
        record_of(GOOD, b"\0" * 9),
        record_of({**GOOD, "latent": None}, b""),
        record_of({**GOOD, "latent": {"shape": [1, 2], "dtype": "float32"}}),
        record_of({**GOOD, "latent": {"shape": [1, 1, 1, -2], "dtype": "float32"}}),
        record_of({**GOOD, "latent": {"shape": [1, 1, 2**40, 2**40], "dtype": "float32"}}),
        record_of({**GOOD, "latent": {"shape": [1, 1, 1, 2], "dtype": "object"}}),
        record_of({**GOOD, "latent": {"shape": [1, 1, 1, 4], "dtype": "bfloat16"}}),
        record_of({**GOOD, "latent": {"shape": 3, "dtype": "float32"}}),
        record_of({**GOOD, "latent": {"shape": [1, 1, 1, 1.5], "dtype": "float32"}}),
        record_of({**GOOD, "name": 3}),
        record_of({k: v for k, v in GOOD.items() if k != "caption"}),
    ],
)
def test_a_record_that_is_none_is_refused(record):
    decode_record(record_of(GOOD))
    with pytest.raises(ValueError, match="record"):
        decode_record(record)
