"""HTTP against shared memory on one host: `python benchmarks/reward_transport.py [--repeats 5]`.

A real server whose scorer does nothing, and the client that a run has. Milliseconds until the server has taken a batch
(sent, checked and queued), and until its scores are back (decoded, "scored" and pulled as well): medians of repeats
that alternate between the two ways, for one batch of latents of 93 frames of 720p (B,16,24,90,160; float32 and
bfloat16) and for one clip of decoded video (uint8). With shared memory there is one copy, into it; what the server does
with the array from there on is the same either way.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ddrl_jax.rewards import RewardClient, launch
from ddrl_jax.sidecar import shared

SCORER = """
class Nothing:
    name, batch_size = "nothing", 1

    def load(self, weights, device):
        pass

    def score(self, videos, prompts):
        return {"overall": [0.0]}
"""
# Name, shape, dtype, media type, what goes over the wire.
CASES = [
    ("latents float32", (4, 16, 24, 90, 160), np.float32, "latent", "float32"),
    ("latents bfloat16", (4, 16, 24, 90, 160), np.float32, "latent", "bfloat16"),
    ("video uint8", (1, 3, 45, 720, 1280), np.uint8, "video", "float32"),
]


def timed(client: RewardClient, array: np.ndarray) -> tuple[float, float]:
    """Seconds until the server has taken the batch, and until its scores are back."""
    taken, send = [], client._send

    def spy(*args: Any) -> Any:
        began = time.perf_counter()
        answer = send(*args)
        taken.append(time.perf_counter() - began)
        return answer

    client._send = spy  # type: ignore[method-assign]
    began = time.perf_counter()
    out = client.submit(array, ["a"] * len(array)).result()
    seconds = time.perf_counter() - began
    client._send = send  # type: ignore[method-assign]
    assert out.valid.all() and len(taken) == 1, out.reason
    return taken[0], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if not shared.available():
        sys.exit("this host has no /dev/shm to share memory in: arrays go over HTTP here")
    rng = np.random.default_rng(0)
    print(f"{'':<18}{'':>7}  until taken, ms{'':>14}until scored, ms")
    print(f"{'batch':<18}{'MB':>7}" + f"{'HTTP':>8}{'shared':>8}{'ratio':>7}   " * 2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "nothing.py")
        file.write_text(SCORER)
        with launch("this", [f"{file}:Nothing"]) as sidecar:
            for name, shape, dtype, media, wire in CASES:
                array = rng.integers(0, 256, shape, np.uint8) if dtype == np.uint8 else rng.random(shape, np.float32)
                options = {"media_type": media, "wire": wire, "poll_s": 0.001, "timeout_s": 600}
                clients = [
                    RewardClient(sidecar.url, sidecar.token, {"nothing": 1.0}, transport=way, **options)
                    for way in ("http", "auto")
                ]
                rows: list[list[tuple[float, float]]] = [[], []]
                for _ in range(args.repeats + 1):
                    for client, column in zip(clients, rows, strict=True):
                        column.append(timed(client, array))
                (http, http_all), (memory, memory_all) = (
                    [1000 * statistics.median(times) for times in zip(*column[1:], strict=True)]  # the first warms up
                    for column in rows
                )
                size = array.nbytes / 1e6 / (2 if wire == "bfloat16" else 1)
                print(
                    f"{name:<18}{size:>7.0f}{http:>8.0f}{memory:>8.0f}{http / memory:>7.2f}"
                    f"   {http_all:>8.0f}{memory_all:>8.0f}{http_all / memory_all:>7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
