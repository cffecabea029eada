"""Reads launch/gke_tpu.yaml for launch/gke_tpu.sh, which says what the variables mean.

manifest [ARGUMENT...]: the documents with what the environment's variables say, as YAML for kubectl.
command JOB DATA [NAME=VALUE...] -- [ARGUMENT...]: what a pod of that replicated job runs, as NUL-ended words to exec
here: its environment by `env`, with secrets from the variables of the same name and the volume at the folder DATA.
"""

import math
import os
import re
import shlex
import sys
from pathlib import Path

import yaml

FILE = Path(__file__).with_suffix(".yaml")
# Dimensions of a topology, and what GKE calls the slice.
SLICES = {"v5p": (3, "tpu-v5p-slice"), "v6e": (2, "tpu-v6e-slice"), "v5e": (2, "tpu-v5-lite-podslice")}


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def documents():
    """(Service, JobSet)."""
    service, jobset = yaml.safe_load_all(FILE.read_text())
    return service, jobset


def job(jobset, name):
    """The Job of a replicated job, and the only container of its pods."""
    (found,) = (j for j in jobset["spec"]["replicatedJobs"] if j["name"] == name)
    spec = found["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    return spec, container


def manifest(arguments, variables):
    service, jobset = documents()
    trainer, container = job(jobset, "trainer")
    sidecar, server = job(jobset, "sidecar")
    for image in ("IMAGE", "SIDECAR_IMAGE"):
        if image not in variables:
            fail(f"{image} is not set: name an image; launch/gke_tpu.sh says what is in it")
    name = variables.get("NAME", jobset["metadata"]["name"])
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        fail(f"NAME={name!r}: must be at most 40 of a-z, 0-9 and -, with a letter first and no - last")
    jobset["metadata"]["name"] = name
    service["metadata"]["name"] = f"{name}-rewards"
    service["spec"]["selector"]["jobset.sigs.k8s.io/jobset-name"] = name
    for entry in container["env"]:
        if entry["name"] == "REWARD_URL":
            entry["value"] = f"http://{name}-rewards:8080"
    container["image"] = variables.get("IMAGE", container["image"])
    server["image"] = variables.get("SIDECAR_IMAGE", server["image"])
    server["args"] = shlex.split(variables.get("SIDECAR_ARGS", shlex.join(server["args"])))
    container["args"] = arguments or container["args"]
    for pods in (trainer, sidecar):
        (volume,) = pods["template"]["spec"]["volumes"]
        claim = volume["persistentVolumeClaim"]
        claim["claimName"] = variables.get("CLAIM", claim["claimName"])
    count = number(variables, "SIDECARS", sidecar["parallelism"])
    sidecar["parallelism"] = sidecar["completions"] = count
    hosts(trainer, container, variables)
    return yaml.safe_dump_all([service, jobset], sort_keys=False, width=1000)


def hosts(trainer, container, variables):
    """The slice: its kind, its topology, and so many pods as it has hosts."""
    selector = trainer["template"]["spec"]["nodeSelector"]
    kind = variables.get("TPU", "v5p")
    if kind not in SLICES:
        fail(f"TPU={kind!r}: must be one of {', '.join(SLICES)}")
    dimensions, selector["cloud.google.com/gke-tpu-accelerator"] = SLICES[kind]
    topology = variables.get("TOPOLOGY", selector["cloud.google.com/gke-tpu-topology"])
    if not re.fullmatch("x".join([r"[1-9]\d*"] * dimensions), topology):
        fail(f"TOPOLOGY={topology!r}: must be {dimensions} numbers for {kind}, such as {'x'.join(['4'] * dimensions)}")
    selector["cloud.google.com/gke-tpu-topology"] = topology
    limits = container["resources"]["limits"]
    limits["google.com/tpu"] = chips = number(variables, "CHIPS", limits["google.com/tpu"])
    total = math.prod(map(int, topology.split("x")))
    if chips not in (1, 4, 8):
        fail(f"CHIPS={chips}: must be 1, 4 or 8, which hosts have")
    if total % chips:
        fail(f"CHIPS={chips}: must divide the {total} chips of TOPOLOGY={topology}")
    trainer["parallelism"] = trainer["completions"] = total // chips


def number(variables, name, default):
    text = variables.get(name, str(default))
    if not re.fullmatch(r"[1-9]\d*", text):
        fail(f"{name}={text!r}: must be a whole number above 0")
    return int(text)


def command(name, data, given, arguments, variables):
    """The words of a pod's command. given: NAME -> value in place of the file's."""
    _, jobset = documents()
    _, container = job(jobset, name)
    (mount,) = container["volumeMounts"]

    def here(text):
        return re.sub(rf"(^|(?<==)){re.escape(mount['mountPath'])}(?=/|$)", data, text)

    words = ["env"]
    for entry in container["env"]:
        if entry["name"] in given:
            value = given.pop(entry["name"])
        elif "value" in entry:
            value = here(entry["value"])
        else:
            value = variables.get(entry["name"]) or fail(f"{entry['name']} is not set: in the cluster it is a secret")
        words.append(f"{entry['name']}={value}")
    if given:
        fail(f"{FILE.name}: the container {name} has no variable {', '.join(given)}")
    args = [here(word) for word in container["args"]] if arguments is None else arguments
    return [*words, *container["command"], *args]


def main(action: str, *rest: str) -> None:
    variables = {k: v for k, v in os.environ.items() if v}
    if action == "manifest":
        sys.stdout.write(manifest(list(rest), variables))
        return
    name, data, *words = rest
    cut = words.index("--")
    given = dict(word.split("=", 1) for word in words[:cut])
    for word in command(name, data, given, words[cut + 1 :] or None, variables):
        sys.stdout.write(word + "\0")


if __name__ == "__main__":
    main(*sys.argv[1:])
