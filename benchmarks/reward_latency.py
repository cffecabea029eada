"""How much of the rewards' latency a run sees: `python benchmarks/reward_latency.py [--delays 0 0.5 1 2 4]`.

Real runs of a small network on digits, with a scorer that answers each batch after a given delay and a data loss of
`--draws` levels, so that its gradient takes a while. For every delay, medians over iterations (the first is left out):
the latency from sending x0 to having its rewards, the time of the data gradient, what was waited for after it, and the
whole iteration. Latency up to the data gradient's time costs nothing: the last two columns stay where they are.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
from ddrl_jax.config import ConfigDict, default


def get_config():
    config = default()
    config.codec.mean, config.codec.std = -0.729, 0.513
    config.pretrain.steps, config.train.steps = 1, {steps}
    config.rollout.num_steps, config.rollout.trained_steps = 6, (0, 2, 4)
    config.rollout.conditions, config.rollout.group_size, config.train.micro_batch = 4, 8, 32
    config.objective.data_beta, config.objective.data_draws = 0.1, {draws}
    config.reward.scorers, config.reward.env = ({scorer!r},), "this"
    config.reward.weights = ConfigDict({{"slow": 1.0}})
    config.eval.every, config.eval.clips, config.eval.clips_during, config.eval.heldout_clips = 1000, 8, 8, 8
    config.eval.chunk, config.eval.num_steps, config.eval.judge_steps = 8, 4, 1
    config.log.tensorboard = False
    return config
"""
SCORER = """
import time


class Slow:
    name, batch_size = "slow", 64

    def load(self, weights, device):
        pass

    def score(self, videos, prompts):
        time.sleep({delay})
        return {{"overall": videos.double().mean(dim=(1, 2, 3, 4)).tolist()}}
"""


def run(folder: Path, delay: float, steps: int, draws: int) -> list[dict]:
    """The metrics of a run's iterations but the first."""
    scorer, config = folder / "slow.py", folder / "config.py"
    scorer.write_text(SCORER.format(delay=delay))
    config.write_text(CONFIG.format(steps=steps, draws=draws, scorer=f"{scorer}:Slow"))
    command = [sys.executable, "-m", "ddrl_jax.main", f"--config={config}", f"--workdir={folder / 'run'}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["stage"] == "ddrl"][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--draws", type=int, default=4)
    args = parser.parse_args()
    print(f"{'delay':>8}{'latency':>10}{'data gradient':>16}{'waited for':>13}{'iteration':>12}  seconds")
    for delay in args.delays:
        with tempfile.TemporaryDirectory() as folder:
            lines = run(Path(folder), delay, args.steps, args.draws)
        columns = ("reward_latency_seconds", "data_gradient_seconds", "seconds_reward_wait", "seconds")
        medians = [statistics.median(line.get(name, float("nan")) for line in lines) for name in columns]
        gradient = (
            "longer" if medians[1] != medians[1] else f"{medians[1]:.2f}"
        )  # it ended after the rewards were there
        print(f"{delay:>8.2f}{medians[0]:>10.2f}{gradient:>16}{medians[2]:>13.2f}{medians[3]:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
