"""The launchers: what shellcheck says, the JobSet, and each one for real on this machine's CPU.

Processes are told apart by a stand-in for Python where the launcher is what matters, and are real training where it is
the whole: `quickstart.sh` in environments of its own, the others in their local mode with two processes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ddrl_jax import main
from ddrl_jax.sidecar import __main__ as sidecar

from . import tiny
from .paths import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(p for p in (*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), ROOT / ".ci/run"))
SOURCED = {"python.sh", "local.sh"}
RUN = (sys.executable, LAUNCH / "gke_tpu.py")
LAUNCHERS = {
    "slurm": ["bash", "launch/slurm_h100.sbatch"],
    "tpu": ["bash", "launch/tpu_pod.sh", "train"],
}

# Stands in for `python -m ddrl_jax.main`: says what it was given, then does as its arguments tell it.
STAND_IN = f"""#!{sys.executable}
import json, os, signal, sys, time
if sys.argv[1] == "-c":
    os.execv({sys.executable!r}, ["python", *sys.argv[1:]])
names = [n for n in os.environ if n.startswith("JAX_")] + ["SLURM_PROCID", "DDRL_SIDECAR_TOKEN"]
said = {{"arguments": sys.argv[1:], "variables": {{n: os.environ.get(n, "") for n in names}}}}
index = os.environ.get("JAX_PROCESS_ID") or os.environ.get("SLURM_PROCID", "0")
def told(*_):
    sys.stdout.write("told to stop\\n")
    sys.stdout.flush()
    if "stubborn" not in sys.argv:
        time.sleep(0.3)
        sys.exit(0)
signal.signal(signal.SIGTERM, told)
sys.stdout.write(json.dumps(said) + "\\n")  # in one piece: others write there too
sys.stdout.flush()
if "fail" in sys.argv and index == "1":
    sys.exit(7)
if {{"fail", "wait", "stubborn"}} & set(sys.argv):
    while True:
        time.sleep(0.1)
"""


def _executable(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def variables(tmp_path):
    """The environment of a launcher whose Python is the stand-in; `tmp_path/bin` is on the PATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "JAX_", "DDRL_"))}
    python = _executable(tmp_path / "python", STAND_IN)
    return kept | {"PYTHON": str(python), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def _start(command, variables, **given):
    return subprocess.Popen(
        command, cwd=ROOT, env=variables | given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _end(process, timeout=60):
    """(status, standard output, standard error)."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


def _said(out):
    """What the stand-ins said, by process."""
    lines = (line.partition(": ") for line in out.splitlines())
    return {int(mark): json.loads(text) for mark, _, text in lines if text.startswith("{")}


# ------------------------------------------------------------------------------------------------------- the text


def _shellcheck(*arguments, **more):
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), *arguments], cwd=ROOT, capture_output=True, text=True, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_finds_nothing(script):
    _shellcheck("--external-sources", script)


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.name not in SOURCED], ids=lambda p: p.name)
def test_scripts_stop_at_the_first_error(script):
    assert "\nset -euo pipefail\n" in script.read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_every_variable_that_a_script_describes_is_read(script):
    text = script.read_text()
    comment, _, code = text.partition("\nset -euo pipefail\n")
    described = re.findall(r"^#   ([A-Z_]{3,}(?:, [A-Z_]{3,})*)  ", comment, re.MULTILINE)
    sources = code + "".join((LAUNCH / name).read_text() for name in (*SOURCED, "gke_tpu.py") if name in code)
    for name in ", ".join(described).split(", ") if described else ():
        assert re.search(rf"\b{name}\b", sources), name


# ----------------------------------------------------------------------------------------------------- the JobSet


def _manifest(*arguments, **given):
    done = subprocess.run([*RUN, "manifest", *arguments], env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def _jobs(jobset):
    return {j["name"]: j for j in jobset["spec"]["replicatedJobs"]}


def _pods(job):
    return job["template"]["spec"]["template"]["spec"]


def _container(job):
    (container,) = _pods(job)["containers"]
    return container


def _check(service, jobset):
    """What the API server and the controllers would refuse, or silently not do."""
    assert service["apiVersion"] == "v1" and service["kind"] == "Service"
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and jobset["kind"] == "JobSet"
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    assert set(spec) <= {"network", "successPolicy", "failurePolicy", "replicatedJobs", "suspend", "coordinator"}
    jobs = _jobs(jobset)
    order = list(jobs)
    assert set(spec["successPolicy"]["targetReplicatedJobs"]) <= set(order)
    for rule in spec["failurePolicy"]["rules"]:
        assert set(rule) == {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"}
        assert set(rule["targetReplicatedJobs"]) <= set(order)
        assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    for place, (key, job) in enumerate(jobs.items()):
        assert set(job) <= {"name", "replicas", "dependsOn", "template", "groupName"}
        for needed in job.get("dependsOn", ()):
            assert needed["name"] in order[:place] and needed["status"] in ("Ready", "Complete")
        template = job["template"]["spec"]
        assert set(template) <= {
            *("completionMode", "parallelism", "completions", "backoffLimit", "podFailurePolicy", "template"),
            *("activeDeadlineSeconds", "ttlSecondsAfterFinished"),
        }
        assert template["completionMode"] == "Indexed" and template["parallelism"] == template["completions"]
        pods, container = _pods(job), _container(job)
        assert set(pods) <= {
            *("restartPolicy", "nodeSelector", "tolerations", "containers", "volumes"),
            *("terminationGracePeriodSeconds", "serviceAccountName"),
        }
        assert set(container) <= {
            *("name", "image", "command", "args", "env", "ports", "resources", "volumeMounts", "readinessProbe"),
        }
        assert all(isinstance(word, str) for word in (*container["command"], *container["args"]))
        # $(NAME) is Kubernetes' own; a shell's would be taken for it.
        assert not any("$(" in word for word in (*container["command"], *container["args"]))
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pods["volumes"]}
        for entry in container["env"]:
            assert isinstance(entry.get("value", ""), str) and ("value" in entry) != ("valueFrom" in entry)
        for rule in template.get("podFailurePolicy", {"rules": ()})["rules"]:
            assert pods["restartPolicy"] == "Never"  # the API's condition
            assert rule["onExitCodes"]["containerName"] == container["name"]
        assert len(f"{name}-{key}-0-{template['completions']}") <= 63  # a host's name
    # The one address leads to the servers, and the trainer asks it.
    assert service["spec"]["selector"] == {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/replicatedjob-name": "sidecar",
    }
    (port,) = service["spec"]["ports"]
    server, trainer = _container(jobs["sidecar"]), _container(jobs["trainer"])
    assert [p["containerPort"] for p in server["ports"]] == [port["targetPort"]]
    assert server["readinessProbe"]["httpGet"]["port"] == port["targetPort"]
    url = {e["name"]: e.get("value") for e in trainer["env"]}["REWARD_URL"]
    assert url == f"http://{service['metadata']['name']}:{port['port']}"
    assert service["spec"]["sessionAffinity"] == "ClientIP"
    # Both ends take the words that they are given.
    assert server["command"][:3] == ["python", "-m", "ddrl_jax.sidecar"]
    args = sidecar.parser().parse_args([*server["command"][3:], *server["args"]])
    assert args.command == "serve" and args.port == port["targetPort"] and args.host == "0.0.0.0"
    assert args.token_env in {e["name"] for e in server["env"]} & {e["name"] for e in trainer["env"]}
    script = trainer["command"][2]
    (flags,) = re.findall(r"python -m ddrl_jax.main \"\$@\" (.*) &", script)
    flags = flags.replace('"$REWARD_URL"', url).split()
    config, _, _, mode = main.read_flags(["main", *trainer["args"], *flags])
    assert config.reward.url == url and not config.reward.launch and mode == "train"
    assert config.reward.token_env == args.token_env


def test_the_jobset_is_what_it_should_be():
    documents = list(yaml.safe_load_all((LAUNCH / "gke_tpu.yaml").read_text()))
    _check(*documents)
    assert _manifest(IMAGE="ddrl-jax", SIDECAR_IMAGE="ddrl-jax-sidecar") == documents
    trainer = _jobs(documents[1])["trainer"]
    assert "alpha.jobset.sigs.k8s.io/exclusive-topology" in trainer["template"]["metadata"]["annotations"]
    _shellcheck("--shell=bash", "-", input=_container(trainer)["command"][2])


@pytest.mark.parametrize(
    ("kind", "topology", "chips", "hosts", "label"),
    [
        ("v5p", "4x4x8", "4", 32, "tpu-v5p-slice"),
        ("v6e", "16x16", "4", 64, "tpu-v6e-slice"),
        ("v6e", "2x4", "8", 1, "tpu-v6e-slice"),
        ("v5e", "8x16", "4", 32, "tpu-v5-lite-podslice"),
    ],
)
def test_variables_fill_in_the_jobset(kind, topology, chips, hosts, label):
    arguments = ["--config=configs/cosmos14b.py", "--workdir=/data/runs/a b", "--config.train.steps=3"]
    service, jobset = _manifest(
        *arguments,
        TPU=kind,
        TOPOLOGY=topology,
        CHIPS=chips,
        NAME="mine",
        IMAGE="trainer:1",
        SIDECAR_IMAGE="server:2",
        SIDECARS="3",
        SIDECAR_ARGS="--scorer brightness --codec 'wan:path=/data/my vae'",
        CLAIM="disk",
    )
    _check(service, jobset)
    trainer, server = _jobs(jobset)["trainer"], _jobs(jobset)["sidecar"]
    selector = _pods(trainer)["nodeSelector"]
    assert selector == {"cloud.google.com/gke-tpu-accelerator": label, "cloud.google.com/gke-tpu-topology": topology}
    assert trainer["template"]["spec"]["parallelism"] == hosts
    assert _container(trainer)["resources"]["limits"] == {"google.com/tpu": int(chips)}
    assert server["template"]["spec"]["parallelism"] == 3
    assert _container(trainer)["args"] == arguments
    assert _container(server)["args"][-1] == "wan:path=/data/my vae"
    assert [_container(j)["image"] for j in (trainer, server)] == ["trainer:1", "server:2"]
    for job in (trainer, server):
        assert _pods(job)["volumes"][0]["persistentVolumeClaim"]["claimName"] == "disk"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"TPU": "v4"}, "TPU='v4': must be one of v5p, v6e, v5e"),
        ({"TPU": "v6e", "TOPOLOGY": "4x4x4"}, "TOPOLOGY='4x4x4': must be 2 numbers for v6e"),
        ({"TOPOLOGY": "4x4"}, "TOPOLOGY='4x4': must be 3 numbers for v5p"),
        ({"CHIPS": "5"}, "CHIPS=5: must be 1, 4 or 8"),
        ({"TPU": "v6e", "TOPOLOGY": "2x2", "CHIPS": "8"}, "CHIPS=8: must divide the 4 chips"),
        ({"SIDECARS": "0"}, "SIDECARS='0': must be a whole number above 0"),
        ({"NAME": "Bad_Name"}, "NAME='Bad_Name': must be at most 40 of a-z, 0-9 and -"),
        ({"IMAGE": ""}, "IMAGE is not set: name an image"),
        ({"SIDECAR_IMAGE": ""}, "SIDECAR_IMAGE is not set: name an image"),
    ],
)
def test_a_jobset_that_cannot_be_is_refused(given, said):
    variables = os.environ | {"IMAGE": "trainer:1", "SIDECAR_IMAGE": "server:2"} | given
    done = subprocess.run([*RUN, "manifest"], env=variables, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {said}"), done.stderr


@pytest.mark.parametrize(
    ("script", "given", "said"),
    [
        ("slurm_h100.sbatch", {"REWARD_URLS": "/no/file"}, "REWARD_URLS='/no/file': must be a file"),
        ("slurm_h100.sbatch", {"PYTHON": "/no/python"}, "PYTHON='/no/python': there is no such program"),
        ("tpu_pod.sh", {"REWARD_URLS": "/dev/null"}, "REWARD_URLS='/dev/null': must be a file"),
        ("sidecar.sh", {"TOKEN_FILE": "/no/file"}, "TOKEN_FILE='/no/file': must be a file"),
        ("sidecar.sh", {"PORT": "abc"}, "PORT='abc': must be a whole number"),
        ("sidecar.sh", {"RESTARTS": "x"}, "RESTARTS='x': must be a whole number"),
        ("sidecar.sh", {"ADDRESSES": "/no/folder/a"}, "ADDRESSES='/no/folder/a': cannot be written"),
        ("gke_tpu.sh", {"LOCAL": "0"}, "LOCAL='0': must be a whole number above 0"),
        ("gke_tpu.sh", {"DATA": "/proc/x"}, "DATA='/proc/x': no folder can be made there"),
        ("gke_tpu.sh", {"SIDECAR_PYTHON": "/no/python"}, "SIDECAR_PYTHON='/no/python': there is no such program"),
    ],
)
def test_what_a_launcher_cannot_use_is_one_line(variables, tmp_path, script, given, said):
    token = {"DDRL_SIDECAR_TOKEN": "t"} if script == "sidecar.sh" else {}
    variables |= {"LOCAL": "1", "PYTHON": sys.executable, "DATA": str(tmp_path)} | token | given
    arguments = ["train"] if script == "tpu_pod.sh" else []
    done = subprocess.run(["bash", LAUNCH / script, *arguments], env=variables, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [line for line in done.stderr.splitlines() if line.startswith("error: ")][:1]
    assert said in done.stderr


def test_a_pod_that_is_taken_away_ends_so_that_the_jobset_starts_again(variables, tmp_path):
    """Status 75 of a trainer that saved and left, its own status otherwise."""
    jobset = yaml.safe_load((LAUNCH / "gke_tpu.yaml").read_text().partition("\n---\n")[2])
    command = _container(_jobs(jobset)["trainer"])["command"]
    _executable(tmp_path / "bin/python", STAND_IN)
    variables |= {"REWARD_URL": "http://rewards:8080", "JAX_PROCESS_ID": "1"}
    status, out, _ = _end(_start([*command, "--workdir=/data/a b"], variables))
    assert status == 0
    rewards = ["--config.reward.launch=False", "--config.reward.url=http://rewards:8080"]
    assert json.loads(out)["arguments"] == ["-m", "ddrl_jax.main", "--workdir=/data/a b", *rewards]
    assert _end(_start([*command, "fail"], variables))[0] == 7
    process = _start([*command, "wait"], variables)
    process.stdout.readline()
    process.terminate()  # the shell alone, as the kubelet does
    status, out, _ = _end(process)
    assert status == 75 and "told to stop" in out


# ------------------------------------------------------------------------------------- processes on this machine


@pytest.mark.parametrize("name", LAUNCHERS)
def test_local_processes_have_their_numbers_and_the_arguments_unchanged(name, variables, tmp_path):
    (tmp_path / "urls").write_text("http://a:1\nhttp://b:2\n")
    (tmp_path / "token").write_text("secret\n")
    words = ["--config=x.py", "--workdir=/runs/a b", 'it\'s $HOME "quoted"']
    given = {"REWARD_URLS": str(tmp_path / "urls"), "TOKEN_FILE": str(tmp_path / "token"), "DEVICES": "4"}
    status, out, err = _end(_start([*LAUNCHERS[name], *words], variables, LOCAL="3", **given))
    assert status == 0, err
    said = _said(out)
    assert sorted(said) == [0, 1, 2]
    for index, one in said.items():
        url = ("http://a:1", "http://b:2")[index % 2]
        rewards = ["--config.reward.launch=False", f"--config.reward.url={url}"]
        assert one["arguments"] == ["-m", "ddrl_jax.main", *words, *rewards]
        assert one["variables"]["JAX_PROCESS_ID"] == str(index) and one["variables"]["JAX_NUM_PROCESSES"] == "3"
        assert one["variables"]["JAX_NUM_CPU_DEVICES"] == "4" and one["variables"]["JAX_PLATFORMS"] == "cpu"
        assert one["variables"]["DDRL_SIDECAR_TOKEN"] == "secret"
    assert len({one["variables"]["JAX_COORDINATOR_ADDRESS"] for one in said.values()}) == 1


@pytest.mark.parametrize("name", LAUNCHERS)
def test_when_a_local_process_fails_the_others_end_and_its_status_is_everyones(name, variables):
    status, out, err = _end(_start([*LAUNCHERS[name], "fail"], variables, LOCAL="3"))
    assert status == 7 and "a process ended with status 7; the others are ended too" in err
    assert out.count("told to stop") <= 2  # or were not there yet


def test_a_local_process_that_does_not_listen_is_killed(variables):
    began = time.monotonic()
    status, *_ = _end(_start([*LAUNCHERS["slurm"], "fail", "stubborn"], variables, LOCAL="2", GRACE="1"))
    assert status == 7 and time.monotonic() - began < 20


def _ready(process, count):
    """Reads until so many processes have begun; returns what they said."""
    lines = []
    while len(_said("".join(lines))) < count:
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended"
    return "".join(lines)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_sigterm_goes_to_every_local_process(name, variables):
    process = _start([*LAUNCHERS[name], "wait"], variables, LOCAL="2")
    _ready(process, 2)
    process.terminate()
    status, out, _ = _end(process)
    assert status == 0 and sorted(re.findall(r"^(\d): told to stop", out, re.MULTILINE)) == ["0", "1"]


def test_a_second_signal_kills(variables):
    # Not SIGINT, which a shell in the background of another ignores.
    process = _start([*LAUNCHERS["slurm"], "stubborn"], variables, LOCAL="2")
    _ready(process, 2)
    process.send_signal(signal.SIGTERM)
    assert "told to stop" in process.stdout.readline()
    time.sleep(1)  # bash forgets a signal that comes while it still handles one like it
    process.send_signal(signal.SIGTERM)
    assert _end(process)[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_bad_numbers_of_processes_are_refused(value, variables):
    status, out, err = _end(_start([*LAUNCHERS["slurm"]], variables, LOCAL=value))
    assert (status, out) == (2, "") and err == f"error: LOCAL='{value}': must be a whole number above 0\n"


# ----------------------------------------------------------------------------------------- stand-ins for clusters

# srun: writes down its options, starts the tasks of all nodes here, hands on signals that scancel sends to them.
SRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
words = sys.argv[1:]
cut = words.index("bash")
options = dict(w.lstrip("-").partition("=")[::2] for w in words[:cut])
open(os.environ["SCRATCH"] + "/srun.json", "w").write(json.dumps(options))
tasks = [subprocess.Popen(words[cut:], env=os.environ | {{"SLURM_PROCID": str(i)}})
         for i in range(int(options["nodes"]) * int(options["ntasks-per-node"]))]
open(os.environ["SCRATCH"] + "/pids", "w").write(" ".join(str(t.pid) for t in tasks))
sys.exit(max(t.wait() for t in tasks))
"""
SCANCEL = '#!/bin/bash\n[ "$*" = "--signal=TERM 123" ] && kill -TERM $(cat "$SCRATCH/pids")\n'
SCONTROL = '#!/bin/bash\necho "$*" >"$SCRATCH/scontrol"\n'
JOB = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_SUBMIT_DIR": str(ROOT),
    "SLURM_GPUS_PER_NODE": "h100:4",
    "SLURM_CPUS_ON_NODE": "96",
}


@pytest.fixture
def slurm(variables, tmp_path):
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        _executable(tmp_path / "bin" / name, text)
    # As Slurm does, a copy of the script that lies elsewhere.
    shutil.copy(LAUNCH / "slurm_h100.sbatch", tmp_path / "slurm_script")
    return ["bash", str(tmp_path / "slurm_script")], variables | JOB | {"SCRATCH": str(tmp_path)}


@pytest.mark.parametrize(("per", "tasks", "cpus"), [("gpu", 4, "24"), ("node", 1, "96")])
def test_slurm_starts_a_process_a_gpu_or_a_node(slurm, tmp_path, per, tasks, cpus):
    command, variables = slurm
    (tmp_path / "urls").write_text("http://a:1\nhttp://b:2\nhttp://c:3\n")
    given = {"PROCESS_PER": per, "SRUN_ARGS": "--container-image=x --mpi=none", "REWARD_URLS": str(tmp_path / "urls")}
    status, out, err = _end(_start([*command, "--config=x.py"], variables, **given))
    assert status == 0, err
    options = json.loads((tmp_path / "srun.json").read_text())
    assert options["ntasks-per-node"] == str(tasks) and options["cpus-per-task"] == cpus
    assert options["gpus-per-node"] == "4" and options["nodes"] == "1" and "kill-on-bad-exit" in options
    assert options["container-image"] == "x" and options["mpi"] == "none"
    said = [json.loads(line) for line in out.splitlines()]
    urls = sorted(one["arguments"][-1].rpartition("=")[2] for one in said)
    assert urls == sorted(f"http://{'abc'[i % 3]}:{i % 3 + 1}" for i in range(tasks))
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.parametrize(("requeue", "queued"), [("1", True), ("0", False)])
def test_a_slurm_job_whose_time_is_up_saves_and_is_queued_again(slurm, tmp_path, requeue, queued):
    command, variables = slurm
    process = _start([*command, "wait"], variables, PROCESS_PER="node", REQUEUE=requeue)
    process.stdout.readline()
    process.terminate()
    status, out, err = _end(process)
    assert status == 0 and "told to stop" in out, err
    assert (tmp_path / "scontrol").exists() == queued
    if queued:
        assert (tmp_path / "scontrol").read_text() == "requeue 123\n"


def test_a_slurm_job_ends_with_the_status_of_its_processes(slurm, tmp_path):
    command, variables = slurm
    status, _, _ = _end(_start([*command, "fail"], variables | {"JAX_PROCESS_ID": "1"}, PROCESS_PER="node"))
    assert status == 7
    status, _, err = _end(_start(command, variables, PROCESS_PER="card"))
    assert status == 2 and "PROCESS_PER='card': must be gpu or node" in err
    status, _, err = _end(_start(command, {k: v for k, v in variables.items() if k != "SLURM_JOB_ID"}))
    assert status == 2 and "this is not a Slurm job" in err


# Stands in for the sidecar: answers nothing, but says where it would.
SERVER = f"""#!{sys.executable}
import json, os, signal, sys, time
options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
ready = {{"host": options["--host"], "port": 9000 + int(options["--device"][-1])}}
with open(options["--ready-file"], "w") as file:
    file.write(json.dumps(ready))
print(json.dumps(options), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(0.1)
"""


def test_slurm_starts_the_servers_of_every_node_and_collects_their_addresses(slurm, tmp_path):
    _, variables = slurm
    shutil.copy(LAUNCH / "sidecar.sh", tmp_path / "slurm_script")
    given = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "node7",
        "TORCH_DEVICES": "cuda:0 cuda:1",
        "PYTHON": str(_executable(tmp_path / "server", SERVER)),
        "ADDRESSES": str(tmp_path / "addresses"),
        "DDRL_SIDECAR_TOKEN": "secret",
    }
    process = _start(["bash", str(tmp_path / "slurm_script"), "--scorer", "x"], variables, **given)
    while not (tmp_path / "addresses").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    subprocess.run([tmp_path / "bin/scancel", "--signal=TERM", "123"], env=variables, check=True)
    status, _, err = _end(process)
    assert status == 0, err
    assert (tmp_path / "addresses").read_text() == "http://node7:9000\nhttp://node7:9001\n" * 2
    assert json.loads((tmp_path / "srun.json").read_text())["ntasks-per-node"] == "1"
    listening = [json.loads(line.partition(": ")[2]) for line in err.splitlines() if "{" in line]
    assert len(listening) == 4 and {one["--host"] for one in listening} == {"0.0.0.0"}
    assert not (tmp_path / "addresses.parts").exists()


# gcloud: writes down what it was asked, runs a command as the hosts of a slice of two would.
GCLOUD = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
with open(os.environ["SCRATCH"] + "/gcloud", "a") as log:
    log.write(" ".join(words[:6]) + "\\n")
command = [w.partition("=")[2] for w in words if w.startswith("--command=")]
if not command:
    sys.exit(0)
homes = [os.path.join(os.environ["SCRATCH"], "w-" + n) for n in "01"]
for home in homes:
    os.makedirs(home, exist_ok=True)
hosts = [subprocess.Popen(["bash", "-c", command[0]], cwd=home,
                          env=os.environ | {{"HOSTNAME": "t1v-" + os.path.basename(home), "HOME": home}})
         for home in homes]
sys.exit(max(h.wait() for h in hosts))
"""


@pytest.fixture
def slice_of_two(variables, tmp_path):
    _executable(tmp_path / "bin/gcloud", GCLOUD)
    more = {"SCRATCH": str(tmp_path), "TPU": "mine", "ZONE": "z-a", "PROJECT": "p", "FOLDER": str(ROOT)}
    return variables | more


def test_a_tpu_slice_runs_the_same_on_every_host(slice_of_two, tmp_path):
    (tmp_path / "urls").write_text("http://a:1\nhttp://b:2\n")
    words = ["--config=x.py", "--workdir=/runs/a b"]
    status, out, err = _end(_start([*LAUNCHERS["tpu"], *words], slice_of_two, REWARD_URLS=str(tmp_path / "urls")))
    assert status == 0, err
    said = [json.loads(line)["arguments"] for line in out.splitlines()]
    assert [one[:4] for one in said] == [["-m", "ddrl_jax.main", *words]] * 2
    assert sorted(one[-1] for one in said) == ["--config.reward.url=http://a:1", "--config.reward.url=http://b:2"]
    assert (tmp_path / "gcloud").read_text() == "compute tpus tpu-vm ssh mine --zone=z-a\n"


def test_a_run_on_a_tpu_slice_is_stopped_from_here(slice_of_two):
    process = _start([*LAUNCHERS["tpu"], "wait"], slice_of_two)
    for _ in range(2):
        process.stdout.readline()
    process.terminate()
    status, out, err = _end(process)
    assert status == 0 and out.count("told to stop") == 2, err


def test_tpu_pod_says_what_it_lacks(variables):
    for words, said in ((["go"], "'go' is no action"), (["train"], "TPU and ZONE are needed")):
        status, _, err = _end(_start(["bash", "launch/tpu_pod.sh", *words], variables))
        assert status == 2 and said in err and len(err.splitlines()) == 1


# ------------------------------------------------------------------------------------------------- reward servers


@pytest.fixture
def servers(tmp_path):
    """Two real servers, in this environment; (process, their addresses, the token)."""
    pytest.importorskip("torch")
    token = tmp_path / "token"
    token.write_text("a-token-of-the-fleet\n")
    addresses = tmp_path / "addresses"
    variables = os.environ | {
        "PYTHON": sys.executable,
        "COUNT": "2",
        "TOKEN_FILE": str(token),
        "ADDRESSES": str(addresses),
        "PYTHONPATH": str(ROOT),
    }
    variables.pop("DDRL_SIDECAR_TOKEN", None)
    process = _start(["bash", "launch/sidecar.sh", "--scorer", "brightness"], variables)
    deadline = time.monotonic() + 120
    while not addresses.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    yield process, addresses.read_text().split(), token.read_text().strip()
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=60)


def _servers_of(token):
    """pid -> command line of the processes that hold the token in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # gone, or not ours
            continue
    return found


def test_a_fleet_answers_outlives_its_servers_and_ends(servers):
    from ddrl_jax.rewards import RewardClient

    process, addresses, token = servers
    assert len(set(addresses)) == 2
    clients = [RewardClient(url, token, {"brightness": 1.0}) for url in addresses]
    for client in clients:
        client.ping()
    running = _servers_of(token)
    assert running and not any(token in word for words in running.values() for word in words)
    # One dies, and comes back where it was.
    pid = next(p for p, words in running.items() if "serve" in words and Path(words[0]).name.startswith("python"))
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while pid in (now := _servers_of(token)) or any(c.health()["status"] != "ok" for c in clients):
        assert time.monotonic() < deadline, now
        time.sleep(0.2)
    for client in clients:
        client.ping()
        client.close()
    process.terminate()
    status, out, err = _end(process)
    assert status == 0, err
    assert out.split() == addresses and "started again, 2 starts left" in err
    assert not _servers_of(token)


def test_a_fleet_with_bad_input_or_no_token_ends_in_a_line(variables):
    command = ["bash", "launch/sidecar.sh", "--scorer", "nonsense"]
    status, _, err = _end(_start(command, variables, PYTHON=sys.executable))
    assert (status, err) == (2, "error: no token; set TOKEN_FILE=FILE, or DDRL_SIDECAR_TOKEN\n")
    variables = variables | {"DDRL_SIDECAR_TOKEN": "x", "PYTHONPATH": str(ROOT)}
    status, _, err = _end(_start(command, variables, PYTHON=sys.executable, COUNT="2"))
    assert status == 2 and "scorer: 'nonsense' is none of" in err
    status, _, err = _end(_start(command, variables, PYTHON="/nowhere/python"))
    assert status == 2 and "PYTHON='/nowhere/python': there is no such interpreter" in err


# ----------------------------------------------------------------------------------------------- the real thing


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The environment of a launcher with the real Python; what one run compiles the next one finds, in data/xla."""
    pytest.importorskip("torch")
    data = tmp_path_factory.mktemp("machine") / "data"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "JAX_", "DDRL_"))}
    return kept | {
        "PYTHON": sys.executable,
        "SIDECAR_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "LOCAL": "2",
        "GRACE": "5",
        "DATA": str(data),
        "JAX_COMPILATION_CACHE_DIR": str(data / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Programs that run twice are not worth optimising.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }


SMALL = {
    "pretrain.steps": 0,
    "rollout.num_steps": 2,
    "rollout.trained_steps": "0,",
    "train.steps": 2,
    "eval.judge_steps": 1,
    "mesh.fsdp": 2,
}


def _training(workdir, **values):
    fields = SMALL | {name.replace("__", "."): value for name, value in values.items()}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["--config=tests/tiny_config.py", f"--workdir={workdir}", *flags]


def _check_training(workdir, done):
    status, out, err = done
    assert status == 0, out[-3000:] + err[-3000:]
    assert [m["step"] for m in tiny.lines(workdir, "ddrl")] == [0, 1]
    assert [m["step"] for m in tiny.lines(workdir, "eval")] == [0, 2]
    assert [m["valid_rate"] for m in tiny.lines(workdir, "ddrl")] == [1.0, 1.0]
    assert out.count(f"report: {workdir}/report/index.html") == 1
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_slurms_local_mode_trains_with_a_fleet(machine, servers, tmp_path):
    _, addresses, token = servers
    (tmp_path / "urls").write_text("\n".join(addresses) + "\n")
    given = {"REWARD_URLS": str(tmp_path / "urls"), "TOKEN_FILE": str(tmp_path / "token")}
    workdir = tmp_path / "run"
    command = [*LAUNCHERS["slurm"], *_training(workdir)]
    _check_training(workdir, _end(_start(command, machine, **given), timeout=600))
    from ddrl_jax.rewards import RewardClient

    # Each process has sent its own rows, to its own server.
    for url in addresses:
        client = RewardClient(url, token, {"brightness": 1.0})
        assert client.health()["scored"] > 0
        client.close()


@pytest.mark.slow
def test_tpu_pods_local_mode_trains_with_a_launched_sidecar(machine, tmp_path):
    workdir = tmp_path / "run"
    _check_training(workdir, _end(_start([*LAUNCHERS["tpu"], *_training(workdir)], machine), timeout=600))


@pytest.mark.slow
def test_the_jobsets_own_commands_train(machine, tmp_path):
    given = {"SIDECAR_ARGS": "--scorer brightness --codec unshuffle:factor=2,mean=-0.729,std=0.513"}
    workdir = tmp_path / "run"
    command = ["bash", "launch/gke_tpu.sh", *_training(workdir)]
    _check_training(workdir, _end(_start(command, machine, **given), timeout=600))


@pytest.mark.slow
def test_a_run_that_loses_a_process_ends(machine, tmp_path):
    workdir = tmp_path / "run"
    process = _start([*LAUNCHERS["slurm"], *_training(workdir, train__steps=100_000)], machine)
    deadline = time.monotonic() + 600
    while not (workdir / "metrics.jsonl").exists() or not tiny.lines(workdir, "ddrl"):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    workers = _with_workdir(workdir)
    (second,) = (pid for pid, variables in workers.items() if b"JAX_PROCESS_ID=1" in variables)
    assert len(workers) == 2
    os.kill(second, signal.SIGKILL)
    status, out, err = _end(process, timeout=120)
    assert status == 128 + signal.SIGKILL, out[-3000:] + err[-3000:]
    assert not _with_workdir(workdir)


def _with_workdir(workdir):
    """pid -> environment of a run's processes."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"ddrl_jax.main" in words and f"--workdir={workdir}".encode() in words:
                found[int(folder.name)] = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or not ours
            continue
    return found


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
