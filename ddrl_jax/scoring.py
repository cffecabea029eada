"""From a config to rewards: the sidecar that a run launches or is told of, who sends which sample, and what advantages
are made of.

Knows what the sidecar has to be started with; what a reward is, is the sidecar's business. Of several processes the
first launches the sidecar and tells the others where it is; each sends the samples that it holds the first copy of, and
all know every score.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from ddrl_jax import build, rewards
from ddrl_jax.config import ConfigError
from ddrl_jax.data import digits
from ddrl_jax.logbook import Logbook
from ddrl_jax.parallel import distributed

SCORER_CLIPS = 12_000


def scorer_weights(config: ConfigDict, workdir: Path, book: Logbook) -> Path:
    """The folder the sidecar's scorers load from; the digits scorer's weights are trained into it, once per workdir.

    The sidecar knows nothing of our data: it reads clips of the "scorer" scans from a file.
    """
    folder = workdir / "scorer"
    if "digits" not in config.reward.scorers or (folder / "digits.json").exists():
        return folder
    shape = {"frames": config.data.frames, "size": config.data.size}
    clips = digits.write_clips(workdir / "clips", "scorer", SCORER_CLIPS, seed=config.eval.seed, **shape)
    title = f"scorer: training on {SCORER_CLIPS} clips of its own scans"
    with book.working(title), book.progress(title, 0) as advance:
        rewards.train_scorer(
            "digits",
            env=config.reward.env,
            data=clips,
            out=folder,
            log_path=workdir / "sidecar.log",
            progress=lambda done, total: advance(done=done, total=total),
        )
    return folder


@contextlib.contextmanager
def open_rewards(
    config: ConfigDict, text: build.Text | None, workdir: Path, book: Logbook, probe: dict[str, Any]
) -> Iterator[rewards.RewardClient]:
    """The reward client, with a sidecar launched beside it where the config says so; both end with the block. `text`
    that the sidecar embeds (text_encoder.where) is embedded by this one. `probe`: a clip to try the scorers on, its
    latent and its caption.

    Raises `ConfigError` for what the user has to change: no environment, no torch in it, port taken, wrong token.
    """
    reward = config.reward
    options: dict[str, Any] = {k: reward[k] for k in ("timeout_s", "retries", "fps", "wire")}
    options["gates"] = tuple(reward.gates)
    try:
        with contextlib.ExitStack() as stack:
            if reward.launch:
                client = _launched(config, workdir, book, options, stack)
            else:
                token = os.environ.get(reward.token_env, "")
                client = rewards.RewardClient(reward.url, token, reward.weights.to_dict(), **options)
            stack.callback(client.close)
            client.with_judges().ping()
            if isinstance(text, rewards.SidecarText):
                text.connect(client)
            known = _try_rewards(client.with_judges(), probe, reward.bounds)
            client.known = tuple(distributed.primary(lambda: known))
            book.say(f"rewards: the sidecar at {client.url} answers")
            if "brightness" in config.reward.scorers:
                book.say("rewards: brightness is a stand-in that rewards bright pictures; name scorers of your own")
            yield client
    except rewards.ConfigurationFault as error:
        raise ConfigError(str(error)) from error


def _launched(
    config: ConfigDict, workdir: Path, book: Logbook, options: dict[str, Any], stack: contextlib.ExitStack
) -> rewards.RewardClient:
    """The client of a sidecar that process 0 launches, which ends with `stack`."""
    reward, here = config.reward, socket.gethostname()
    host = distributed.primary(lambda: here)
    if host != here:
        raise ConfigError(
            f"config.reward.launch=True: the sidecar answers on {host} only, and a process of this run is on {here}; "
            "start one that all can reach (launch/sidecar.sh) and give it as --config.reward.launch=False "
            "--config.reward.url=http://HOST:PORT"
        )
    launched: list[rewards.Sidecar] = []

    def launch() -> tuple[str, str]:
        rewards.check_environment(reward.env, reward.scorers)
        sidecar = rewards.launch(
            env=reward.env,
            scorers=reward.scorers,
            weights_dir=weights if (weights := scorer_weights(config, workdir, book)).is_dir() else "",
            codec=sidecar_codec(config),
            device=reward.device,
            threads=reward.threads,
            port=reward.port,
            **sidecar_text(config),
            log_path=workdir / "sidecar.log",
            keep_port=jax.process_count() > 1,
        )
        launched.append(stack.enter_context(sidecar))
        return sidecar.url, sidecar.token

    url, token = distributed.primary(launch)  # by way of memory: the token is on no disk and in no log
    if launched:
        return launched[0].client(reward.weights.to_dict(), **options)
    return rewards.RewardClient(url, token, reward.weights.to_dict(), **options)


class Asked:
    """A batch on its way to the sidecar. Each process sends the samples that it holds the first copy of."""

    def __init__(
        self, client: rewards.RewardClient, x0: jax.Array, caption_of: Callable[[int], str], count: int
    ) -> None:
        """`x0`: latents (B, C, T, h, w), their first axis cut over the mesh, the others whole; `caption_of` a row;
        `count`: only so many rows are asked about, the others fill the batch up."""
        self._client, self._count = client, count
        self.rows, self.latents = distributed.first_copies(x0)
        self.rows, self.latents = self.rows[self.rows < count], self.latents[self.rows < count]
        captions = [caption_of(int(row)) for row in self.rows]
        # Of a sample that lies on several processes only one has the first copy: this one may have none.
        self._ticket = client.submit(self.latents, captions) if captions else None

    def done(self) -> bool:
        """Whether this process's samples are answered."""
        return self._ticket is None or self._ticket.done()

    @property
    def fault(self) -> BaseException | None:
        """What the user has to mend, such as a refused token."""
        return None if self._ticket is None else self._ticket.fault

    def result(self) -> rewards.Scores:
        """The scores of the whole batch, on every process. All call this together."""
        got = rewards.Scores({}, np.zeros(0, bool), "", 0.0, 0) if self._ticket is None else self._ticket.result()
        if jax.process_count() == 1:
            return got
        names = [n for n in self._client.known if n.partition("/")[0] in self._client.scorers]
        missing = np.full(len(self.rows), np.nan, np.float32)
        columns = [got.scores.get(name, missing) for name in names]
        table = distributed.share_rows(
            self.rows, np.column_stack([got.valid.astype(np.float32), *columns]), self._count
        )
        notes = distributed.share_notes(got.reason, got.seconds, float(got.attempts))
        answered = {name: column for name, column in zip(names, table.T[1:], strict=True)}
        if all(np.isnan(column).all() for column in answered.values()):
            answered = {}
        return rewards.Scores(
            scores=answered,
            valid=table[:, 0] == 1.0,
            reason="; ".join(dict.fromkeys(reason for reason, *_ in notes if reason)),
            seconds=max(seconds for _, seconds, _ in notes),
            attempts=int(max(attempts for *_, attempts in notes)),
        )


def ask(
    client: rewards.RewardClient,
    mesh: Mesh,
    x0: jax.Array,
    caption_of: Callable[[int], str],
    count: int | None = None,
) -> Asked:
    """Sends latents (B, C, T, h, w), however they are cut, after gathering them over context; of them the first
    `count`, where that is given."""
    whole = distributed.placed(x0, build.rows_sharding(mesh, len(x0)))
    return Asked(client, whole, caption_of, len(x0) if count is None else count)


def check_sidecar(config: ConfigDict) -> None:
    """Raises ConfigError when the environment of a launched sidecar is not there. Starts nothing."""
    try:
        rewards.check_environment(config.reward.env, config.reward.scorers)
    except rewards.ConfigurationFault as error:
        raise ConfigError(f"config.{error}") from error


def sidecar_codec(config: ConfigDict) -> str:
    """How a launched sidecar makes video of latents (`serve --codec`)."""
    codec = config.codec
    if codec.name == "unshuffle":
        return f"unshuffle:factor={codec.factor},mean={codec.mean},std={codec.std}"
    return f"wan:dtype={codec.dtype},tile={codec.tile},path={Path(codec.path).absolute()}"


def sidecar_text(config: ConfigDict) -> dict[str, Any]:
    """What `rewards.launch` needs to have the sidecar embed captions."""
    text = config.text_encoder
    if text.where != "sidecar":
        return {}
    return {
        "text_encoder": str(Path(text.path).absolute()),
        "text_tokenizer": str(Path(text.tokenizer or text.path).absolute()),
        "text_length": config.text.length,
        "text_strategy": text.strategy,
        "text_dtype": text.dtype,
    }


def probe(config: ConfigDict, setup: build.Setup) -> dict[str, Any]:
    """A held-out clip to try the scorers on: its latent and its caption."""
    clip = build.data_set(config).heldout_clips(1)
    return {"latent": setup.latents(clip), "caption": clip["caption"]}


def _try_rewards(client: rewards.RewardClient, probe: dict[str, Any], bounds: Iterable[str]) -> list[str]:
    """One clip's latent through the scorers, before anything is trained: weights that name no score, and scorers
    that fail on our clips, are found now. Returns the sub-scores' names. Raises ConfigurationFault."""
    scores = client.submit(probe["latent"], probe["caption"]).result()
    if not scores.valid.all():
        raise rewards.ConfigurationFault(
            f"reward.weights, reward.gates, reward.scorers: a real clip got no reward: {scores.reason}"
        )
    for name in bounds:
        try:
            rewards.resolve_name(name, scores.scores)
        except KeyError as error:
            raise rewards.ConfigurationFault(f"reward.bounds: {error.args[0]}") from error
    return sorted(scores.scores)


def total_reward(scores: rewards.Scores, config: ConfigDict) -> tuple[np.ndarray, np.ndarray]:
    """(reward (B,) float32, valid (B,)) of a batch: the weighted sum; all invalid where nothing came back."""
    if not scores.scores:
        return np.full(len(scores.valid), np.nan, np.float32), scores.valid
    bounds = config.reward.bounds.to_dict()
    return rewards.total_reward(rewards.bounded(scores.scores, bounds), config.reward.weights.to_dict())


def training_rewards(
    scores: rewards.Scores, config: ConfigDict
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, float]]:
    """What advantages are made of: rewards (R, B) and their weights (R,) float32, valid (B,), metrics.

    One row with reward.mix "sum", one a weighted sub-score with "normalised"; after the gates: a sample that fails one
    counts as its group's worst.
    """
    total, valid = total_reward(scores, config)
    rows, weights = total[None], np.ones(1, np.float32)
    if config.reward.mix == "normalised":
        given = config.reward.weights.to_dict()
        names = rewards.weighted_names(given, scores.scores) if scores.scores else {n: w for n, w in given.items() if w}
        weights = np.array(list(names.values()), np.float32)
        known = rewards.bounded(scores.scores, config.reward.bounds.to_dict()) if scores.scores else {}
        rows = np.stack([known.get(n, np.full(len(valid), np.nan)) for n in names])
    metrics: dict[str, float] = {}
    if config.reward.gates and scores.scores:
        passed, there = rewards.passes_gates(scores.scores, config.reward.gates.to_dict())
        valid = valid & there
        rows = rewards.gated(rows, passed, valid, config.rollout.group_size)
        metrics["gate_rate"] = float(passed[valid].mean()) if valid.any() else float("nan")
    return np.asarray(rows, np.float32), weights, valid, metrics
