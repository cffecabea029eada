"""`serve --config`, `score`, `bench`, and a scorer in a process of its own."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the sidecar's own environment has it; the test extra installs it")
pytest.importorskip("fastapi", reason="as above")
av = pytest.importorskip("av", reason="as above")

from PIL import Image  # noqa: E402

from ddrl_jax.sidecar import __main__ as cli  # noqa: E402
from ddrl_jax.sidecar import bench, scorer_process, settings  # noqa: E402
from ddrl_jax.sidecar import score as scoring  # noqa: E402
from ddrl_jax.sidecar.worker import score_in_fixed_batches  # noqa: E402

from .paths import ROOT  # noqa: E402

torch.set_num_threads(1)

# Its prompts tell it what to do: die (each time, or the first time), hang, refuse.
SCORER = """
import os
import time
from pathlib import Path


class Odd:
    name, batch_size, wants_infos = "odd", 2, True

    def load(self, weights, device, dtype="float32"):
        self.dtype = dtype
        self.folder = Path(weights or ".")
        if device == "nowhere":
            raise ValueError("device 'nowhere': cpu is needed")

    def score(self, videos, prompts, infos):
        print("a line on the standard output")
        for prompt in prompts:
            if prompt == "die" or (prompt == "die once" and not (self.folder / "died").exists()):
                (self.folder / "died").touch()
                os._exit(3)
            if prompt == "hang":
                time.sleep(60)
            if prompt == "refuse":
                raise ValueError(f"no score for {prompt!r}")
        return {"mean": videos.double().mean((1, 2, 3, 4)), "fps": [i.get("video_fps", -1.0) for i in infos]}
"""


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """The scorer's spec; its own process may be started again without a pause."""
    (tmp_path / "odd.py").write_text(SCORER)
    monkeypatch.setattr(scorer_process, "_STARTS_APART_S", 0.0)
    return f"{tmp_path}/odd.py:Odd"


def environment(**extra):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


# --- settings ---


def test_a_file_and_flags_over_it(tmp_path):
    config = tmp_path / "sidecar.toml"
    config.write_text(
        'port = 8080\nqueue_size = 9\ntoken_env = "T"\n[[scorer]]\nname = "ocr"\nenv = "own"\n'
        '[[scorer]]\nname = "a,b.py:Mine"\nbatch_size = 4\n'
    )
    s = settings.read(str(config), {"port": 9090})
    assert (s.port, s.queue_size, s.token_env, s.host) == (9090, 9, "T", "127.0.0.1")
    assert [(one.name, one.env, one.batch_size) for one in s.scorer] == [("ocr", "own", 0), ("a,b.py:Mine", "", 4)]
    s = settings.read(str(config), {"scorer": ["clip_score,device=cuda:1,weights=/a,b=c,dtype=bfloat16"]})
    assert [one.name for one in s.scorer] == ["clip_score"]  # a flag replaces the file's
    assert (s.scorer[0].device, s.scorer[0].weights, s.scorer[0].dtype) == ("cuda:1", "/a,b=c", "bfloat16")


def test_every_flag_of_serve_is_a_setting_and_the_reverse():
    flags = vars(cli.parser().parse_args(["serve"]))
    assert set(flags) == {"command", "config"}  # what is not given overrides nothing
    serve = next(a for a in cli.parser()._actions if a.dest == "command").choices["serve"]
    names = {action.dest for action in serve._actions} - {"help", "config"}
    assert names == set(settings.Settings.model_fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "prot: no such setting; did you mean port?"),
        ('port = "x"', "port: 'x'; input should be a valid integer"),
        ("threads = 0", "threads: 0; must be at least 1"),
        ("queue_size = -1", "queue-size: -1; must be at least 1"),
        ("[[scorer]]\nbatch_size = 2", "scorer.0.name: field required"),
        ('[[scorer]]\nname = "ocr"\ndtyp = "x"', "scorer.0.dtyp: no such setting; did you mean dtype?"),
        ('scorer = ["ocr,dtype=int8"]', "scorer.0.dtype: 'int8'; input should be 'float32'"),
        ('scorer = ["ocr,devise=cpu"]', "scorer.0: 'devise=cpu' is no option of a scorer; it has weights, device"),
        ("port = ", "is no TOML"),
    ],
)
def test_mistakes_in_a_file_are_one_line(text, message, tmp_path, capsys):
    (tmp_path / "s.toml").write_text(text)
    assert cli.main(["serve", "--config", str(tmp_path / "s.toml"), "--scorer", "brightness", "--threads", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "s.toml" in error


def test_a_file_that_is_not_there(capsys):
    assert cli.main(["serve", "--config", "nowhere.toml"]) == 2
    assert "config: 'nowhere.toml' cannot be read (No such file" in capsys.readouterr().err


# --- a scorer in a process of its own ---


def open_odd(spec, tmp_path, **options):
    fields = {"name": spec, "env": "this", **options}
    return scorer_process.open_scorer(settings.ScorerSettings(**fields), str(tmp_path), "cpu", 1)[1]


def ask(scorer, prompts, infos=None):
    video = np.linspace(-1, 1, len(prompts) * 3 * 2 * 4 * 4, dtype=np.float32).reshape(len(prompts), 3, 2, 4, 4)
    return video, score_in_fixed_batches(scorer, video, prompts, infos)


def test_it_scores_as_in_this_process(odd, tmp_path):
    apart = open_odd(odd, tmp_path)
    try:
        here = scorer_process.open_scorer(settings.ScorerSettings(name=odd), str(tmp_path), "cpu", 1)[1]
        assert (apart.name, apart.batch_size, apart.wants_infos, apart.state) == ("odd", 2, True, "ready")
        infos = [{"video_fps": float(i)} for i in range(3)]
        assert ask(apart, ["a", "b", "c"], infos)[1] == ask(here, ["a", "b", "c"], infos)[1]
        assert ask(apart, ["a"], infos[:1])[1]["fps"] == [0.0]
        with pytest.raises(ValueError, match="no score for 'refuse'"):
            ask(apart, ["refuse"])
        assert apart.starts == 1  # it refused, it did not die
    finally:
        apart.close()


def test_it_is_started_again_when_it_dies_and_the_batch_is_asked_once_more(odd, tmp_path):
    scorer = open_odd(odd, tmp_path)
    try:
        video, scores = ask(scorer, ["die once", "well"])
        expected = pytest.approx(video.mean((1, 2, 3, 4), np.float64).tolist())
        assert scores["mean"] == expected and scorer.starts == 2
        with pytest.raises(scorer_process.ScorerDiedError, match=r"died \(exit status 3\)"):
            ask(scorer, ["die"])
        end = time.monotonic() + 60
        while scorer.state != "ready":  # for the next one it is started without being asked
            assert time.monotonic() < end
            time.sleep(0.05)
        assert scorer.starts == 4 and ask(scorer, ["well"])[1]["fps"] == [-1.0] and scorer.starts == 4
    finally:
        scorer.close()


def test_one_that_hangs_is_killed(odd, tmp_path):
    scorer = open_odd(odd, tmp_path, timeout_s=30)
    try:
        scorer._timeout_s = 0.5
        pid = scorer._process.pid
        with pytest.raises(scorer_process.ScorerDiedError, match=r"did not answer within 0\.5 s"):
            ask(scorer, ["hang"])
        assert not Path(f"/proc/{pid}").exists()
    finally:
        scorer.close()


def test_what_is_wrong_at_the_start_is_one_line(odd, tmp_path):
    with pytest.raises(ValueError, match=r"^scorer odd: device 'nowhere': cpu is needed$"):
        open_odd(odd, tmp_path, device="nowhere")
    with pytest.raises(ValueError, match=f"no environment in {tmp_path}/env; make it with: python -m ddrl_jax"):
        open_odd(odd, tmp_path, env=f"{tmp_path}/env")
    with pytest.raises(ValueError, match="scorer brightness: dtype 'bfloat16'"):
        scorer_process.open_scorer(settings.ScorerSettings(name="brightness", dtype="bfloat16"), "", "cpu", 1)
    with pytest.raises(ValueError, match="two are named 'brightness'"):
        scorer_process.open_scorers([settings.ScorerSettings(name="brightness")] * 2, "", "cpu", 1)


def test_it_goes_when_its_parent_is_killed(odd, tmp_path):
    code = (
        "import sys; from ddrl_jax.sidecar import scorer_process, settings\n"
        f"s = settings.ScorerSettings(name={odd!r}, env='this')\n"
        f"scorer = scorer_process.open_scorer(s, {str(tmp_path)!r}, 'cpu', 1)[1]\n"
        "print(scorer._process.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 20
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < end, "the scorer outlives its server"
        time.sleep(0.05)


# --- score ---


def write_video(path, frames, fps=8):
    """Frames of one grey each, (T,) of 0..255."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.options = 32, 16, "yuv420p", {"qp": "0"}
        for grey in frames:
            picture = np.full((16, 32, 3), grey, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "clips"
    inside.mkdir()
    for i, grey in enumerate((51, 102, 204)):
        Image.fromarray(np.full((6, 4, 3), grey, np.uint8)).save(inside / f"p{i + 9}.png")
        (inside / f"p{i + 9}.txt").write_text(f"grey\n {grey}\n")
    write_video(inside / "v.mp4", range(40, 140, 10))
    (inside / "v.txt").write_text('a, "film"')
    (inside / "broken.mp4").write_bytes(b"no film")
    (inside / "broken.txt").write_text("x")
    Image.new("RGB", (4, 4)).save(inside / "alone.jpg")
    (inside / "notes.md").write_text("no picture")
    return inside


def rows(path):
    with open(path, newline="") as stream:
        return {Path(row["file"]).name: row for row in csv.DictReader(stream)}


def test_score_rates_a_folder_into_a_csv(folder, tmp_path, capsys, odd):
    out = tmp_path / "scores.csv"
    command = ["score", "--scorer", "brightness", "--scorer", odd, str(folder), "--out", str(out)]
    assert cli.main([*command, "--weights", str(tmp_path)]) == 1  # some could not be rated
    assert "rated 4 of 6 files, scores in " in capsys.readouterr().err
    found = rows(out)
    assert list(found) == ["alone.jpg", "broken.mp4", "p9.png", "p10.png", "p11.png", "v.mp4"]
    for name, grey in (("p9.png", 51), ("p10.png", 102), ("p11.png", 204)):
        assert float(found[name]["brightness/overall"]) == pytest.approx(grey / 127.5 - 1)
        assert found[name]["prompt"] == f"grey {grey}" and found[name]["error"] == ""
        assert float(found[name]["odd/fps"]) == 0.0
    assert found["v.mp4"]["prompt"] == 'a, "film"' and float(found["v.mp4"]["odd/fps"]) == 8.0
    assert float(found["v.mp4"]["odd/mean"]) == pytest.approx(85 / 127.5 - 1, abs=0.02)
    assert found["alone.jpg"]["error"] == "no prompt" and found["alone.jpg"]["odd/mean"] == ""
    assert "cannot be read as a video" in found["broken.mp4"]["error"]


def test_only_the_sample_to_blame_has_an_error(folder, tmp_path, odd):
    prompts, out = tmp_path / "prompts.csv", tmp_path / "scores.csv"
    prompts.write_text("file,prompt\np9.png,fine\nclips/p10.png,refuse\np11.png,fine\n")
    files = [str(folder / f"p{i}.png") for i in (9, 10, 11)]
    command = ["score", "--scorer", odd, "--scorer", "brightness", *files, "--prompts", str(prompts)]
    assert cli.main([*command, "--out", str(out), "--weights", str(tmp_path)]) == 1
    found = rows(out)
    assert [found[f"p{i}.png"]["error"] for i in (9, 10, 11)] == ["", "odd: no score for 'refuse'", ""]
    assert found["p10.png"]["odd/mean"] == "" and found["p10.png"]["brightness/overall"] != ""
    assert found["p11.png"]["odd/mean"] != ""


def test_frames_are_chosen_evenly(folder):
    every, fps = scoring.read_video(folder / "v.mp4")
    some, slower = scoring.read_video(folder / "v.mp4", 4)
    assert every.shape == (3, 10, 16, 32) and every.dtype == np.uint8 and fps == 8
    np.testing.assert_array_equal(some, every[:, [0, 3, 6, 9]])
    assert slower == pytest.approx(8 * 4 / 10)
    assert np.all(np.diff(every[0, :, 0, 0].astype(int)) > 5)


def test_score_to_the_standard_output_without_prompts(folder, capsys):
    assert cli.main(["score", "--scorer", "brightness", str(folder / "p9.png"), "--prompts", "none", "--out", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("file,prompt,brightness/overall,error\n") and captured.out.count("\n") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere", "--out", "x.csv"], "files: there is no 'nowhere'"),
        ([".", "--out", "x.csv"], "files: no picture or video in '.'"),
        (["a.png", "--out", "x.csv"], "prompts: 'beside' has none for any of the 1 files"),
        (["a.png", "--out", "x.csv", "--prompts", "p.csv"], "prompts: 'p.csv' cannot be read"),
        (["a.png", "--out", "x.csv", "--prompts", "a.csv"], "needs a first line with the columns file and prompt"),
        (["a.png", "--out", "no/x.csv", "--prompts", "none"], "out: 'no/x.csv' cannot be written"),
        (["a.png", "--out", "x.csv", "--prompts", "none", "--frames", "-1"], "frames, threads: -1, 1"),
    ],
)
def test_mistakes_of_score_are_one_line(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if args[0] == "a.png":
        Image.new("RGB", (4, 4)).save("a.png")
        Path("a.csv").write_text("name,text\na.png,x\n")
    assert cli.main(["score", "--scorer", "brightness", *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not Path("x.csv").exists()


# --- bench, against a server in an environment of its own ---


@pytest.fixture
def server(odd, tmp_path):
    config, ready = tmp_path / "sidecar.toml", tmp_path / "ready.json"
    config.write_text(
        f'token_env = "SECRET"\nweights = "{tmp_path}"\nready_file = "{ready}"\nreplica_id = "r-1"\n'
        f'scorer = ["brightness", "{odd},env=this"]\n'
    )
    log = open(tmp_path / "log.jsonl", "w")  # noqa: SIM115
    command = [sys.executable, "-m", "ddrl_jax.sidecar", "serve", "--config", str(config)]
    process = subprocess.Popen(command, env=environment(SECRET="s3cret"), stdout=subprocess.DEVNULL, stderr=log)
    end = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < end, (tmp_path / "log.jsonl").read_text()
        time.sleep(0.05)
    yield f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
    process.terminate()
    assert process.wait(20) == 0
    log.close()
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        assert line == "a line on the standard output" or json.loads(line)["logger"], line


def test_bench_measures_a_running_server(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("T", "s3cret")
    out = tmp_path / "figures.json"
    command = ["bench", "--url", server, "--token-env", "T", "--requests", "12", "--json", str(out)]
    assert cli.main([*command, "--scorer", "brightness", "--scorer", "odd", "--shape", "3,3,2,8,8"]) == 0
    assert "throughput" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["ok"] == 12 and figures["outcomes"] == {"ok": 12} and figures["shape"] == [3, 3, 2, 8, 8]
    assert 0 < figures["enqueue_p50_seconds"] <= figures["total_p50_seconds"] <= figures["total_p95_seconds"]
    assert figures["samples_per_second"] == pytest.approx(3 * figures["requests_per_second"])
    monkeypatch.setenv("T", "wrong")
    assert cli.main(command) == 2
    assert "the first request failed: enqueue 401" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "url: no reward server at 'http://127.0.0.1:1'"),
        (["--url", "nonsense"], "url: no reward server at 'nonsense'"),
        (["--url", "http://127.0.0.1:1", "--shape", "1,2"], "shape: '1,2'; 5 whole numbers above 0"),
        (["--url", "http://127.0.0.1:1", "--requests", "0"], "requests: 0; must be above 0"),
        (["--url", "http://127.0.0.1:1", "--token-env", "NOT_SET"], "the variable NOT_SET is empty"),
    ],
)
def test_mistakes_of_bench_are_one_line(args, message, capsys):
    assert cli.main(["bench", *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_bench_sends_is_within_the_protocol():
    from ddrl_jax.sidecar.protocol import decode_request

    for media, shape in (("latent", (2, 16, 1, 4, 4)), ("video", (2, 3, 2, 4, 4)), ("image", (2, 4, 4, 3))):
        for body in bench.bodies(shape, media, ["a", "b"]):
            header, array = decode_request(body)
            assert array.shape == shape and header.media_type == media and list(header.reward_fn) == ["a", "b"]
