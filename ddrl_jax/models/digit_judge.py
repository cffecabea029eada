"""An independent judge of generated digit clips, and the Fréchet distance in its features.

The judge reads the digit and the motion off a clip. The policy is never trained on it: it learns from scans of its
own (split "judge"), and it is a perceptron on all pixels at once where the reward model is a convolutional net, so that
a clip which fools the reward has no reason to fool the judge. It must not know where clips come from.

Shape legend: N clips, C channels, T frames, H rows, W columns, F features.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util

DIGITS, MOTIONS = 10, 9
_WIDTH, _FEATURES = 384, 32
_TRAIN_BATCH = 128
_CALL_BATCH = 256  # clips a call, padded: one compilation whatever the number of clips
# Augmentation, in units of the pixel range: generated clips are paler, softer and noisier than real ones.
_GAIN, _BLUR, _NOISE, _KEEP, _CLEAN = (0.6, 1.4), 0.3, 0.25, 0.9, 0.25
_LABEL_SMOOTHING = 0.05
_MOTION_WEIGHT = 0.5  # motion is the easy half
# The judge also estimates how strongly a clip was augmented. Without that its features, which learn to look past
# noise and blur, would leave the Fréchet distance blind to them.
_FLAWS, _FLAW_WEIGHT = 3, 3.0
# What numpy, zipfile, json and a look into the wrong file can raise.
_DAMAGED = (OSError, EOFError, LookupError, TypeError, AttributeError, ValueError, zipfile.BadZipFile, zlib.error)


class JudgeNet(nnx.Module):
    """Pixels of a whole clip -> digit logits (N,10), motion logits (N,9), flaws (N,3), features (N,F).

    Flaws are estimates of the change of gain, the blur and the noise, each in units of the most it is trained on.
    """

    def __init__(self, pixels: int, width: int, features: int, *, rngs: nnx.Rngs):
        self.linear_in = nnx.Linear(pixels, width, rngs=rngs)
        self.norm_in = nnx.LayerNorm(width, rngs=rngs)
        self.linear_mid = nnx.Linear(width, width // 2, rngs=rngs)
        self.norm_mid = nnx.LayerNorm(width // 2, rngs=rngs)
        self.features = nnx.Linear(width // 2, features, rngs=rngs)
        self.digit = nnx.Linear(features, DIGITS, rngs=rngs)
        self.motion = nnx.Linear(features, MOTIONS, rngs=rngs)
        self.flaws = nnx.Linear(features, _FLAWS, rngs=rngs)

    def __call__(self, x_NCTHW: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        h = x_NCTHW.reshape(x_NCTHW.shape[0], -1)
        h = nnx.gelu(self.norm_in(self.linear_in(h)))
        h = nnx.gelu(self.norm_mid(self.linear_mid(h)))
        f_NF = self.features(h)
        g_NF = nnx.gelu(f_NF)
        return self.digit(g_NF), self.motion(g_NF), self.flaws(g_NF), f_NF


@functools.partial(jax.jit, static_argnums=0)
def _apply(graphdef: Any, params: Any, x_NCTHW: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    digit, motion, _, features = nnx.merge(graphdef, params)(x_NCTHW)
    return jax.nn.softmax(digit), jax.nn.softmax(motion), features


@dataclass(frozen=True, eq=False)
class Judge:
    """A fitted judge of clips of one `shape` (C,T,H,W); make it with `fit_judge` or `Judge.load`."""

    graphdef: Any
    params: Any
    shape: tuple[int, int, int, int]

    def __call__(self, videos_NCTHW: np.ndarray) -> dict[str, np.ndarray]:
        """Judge clips.

        Args:
          videos_NCTHW: float (N,C,T,H,W) in [-1,1].

        Returns:
          digit_prob (N,10), direction_prob (N,9), features (N,F), all float32. A clip's values do not depend on
          its batch-mates.

        Raises:
          ValueError: clips of another shape than the judge was fitted on, or values that are not finite.
        """
        x = np.asarray(videos_NCTHW, np.float32)
        if x.ndim != 5 or x.shape[1:] != self.shape:
            raise ValueError(f"videos {x.shape}: this judge reads (N, {', '.join(map(str, self.shape))})")
        if not np.isfinite(x).all():
            raise ValueError(f"videos {x.shape}: values must be finite")
        chunks = max(1, -(-len(x) // _CALL_BATCH))
        padded = np.zeros((chunks * _CALL_BATCH, *self.shape), np.float32)
        padded[: len(x)] = x
        parts = [_apply(self.graphdef, self.params, part) for part in np.split(padded, chunks)]
        digit, motion, features = (np.concatenate([np.asarray(part[i]) for part in parts])[: len(x)] for i in range(3))
        return {"digit_prob": digit, "direction_prob": motion, "features": features}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz of float32 arrays (no pickled objects); the file appears only when it is complete."""
        path = os.path.abspath(path)
        flat = traverse_util.flatten_dict(nnx.to_pure_dict(self.params), sep="/")
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in flat.items()}
        arrays["shape"] = np.array(json.dumps(self.shape))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as f:
                np.savez(f, **arrays)
            os.chmod(partial, 0o644)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Judge:
        """Read what `save` wrote.

        Raises:
          ValueError: one line, when the file is missing, unreadable or holds something else.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                flat = {name: stored[name] for name in stored.files}
            c, t, h, w = (int(n) for n in json.loads(str(flat.pop("shape"))))
            shape = (c, t, h, w)
            net = _net(shape, flat["linear_in/kernel"].shape[1], flat["features/kernel"].shape[1])
            graphdef, params = nnx.split(net, nnx.Param)
            expected = traverse_util.flatten_dict(nnx.to_pure_dict(params), sep="/")
            if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in flat.items()}:
                raise KeyError("arrays")
        except _DAMAGED as error:
            raise ValueError(f"judge file {str(path)!r}: must be an .npz as Judge.save writes it") from error
        pure = traverse_util.unflatten_dict({k: jnp.asarray(v) for k, v in flat.items()}, sep="/")
        nnx.replace_by_pure_dict(params, pure)
        return cls(graphdef, params, shape)


def _net(shape: tuple[int, ...], width: int, features: int, seed: int = 0) -> JudgeNet:
    return JudgeNet(int(np.prod(shape)), width, features, rngs=nnx.Rngs(seed))


def _augment(rng: jax.Array, x_NCTHW: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Random gain, blur, noise and dropped pixels -> clips and the strengths of the first three (N,3).

    Each clip has its own strengths. A quarter of the clips stays as it is: real clips are to be recognised as such.
    """
    strength_key, noise_key, drop_key = jax.random.split(rng, 3)
    rows = x_NCTHW.shape[0]
    u_4N = jax.random.uniform(strength_key, (4, rows))
    flawed_N = u_4N[3] > _CLEAN
    gain_N = jnp.where(flawed_N, _GAIN[0] + (_GAIN[1] - _GAIN[0]) * u_4N[0], 1.0)
    blur_N, noise_N = flawed_N * u_4N[1] * _BLUR, flawed_N * u_4N[2] * _NOISE
    gain, blur, noise = (each.reshape(rows, 1, 1, 1, 1) for each in (gain_N, blur_N, noise_N))
    x = (x_NCTHW + 1) / 2 * gain
    for axis in (3, 4):
        x = (1 - blur) * x + blur / 2 * (jnp.roll(x, 1, axis) + jnp.roll(x, -1, axis))
    x = jnp.clip(x + noise * jax.random.normal(noise_key, x.shape), 0, 1) * 2 - 1
    # The same pixels in every frame, so that no single one is relied on.
    keep = jax.random.bernoulli(drop_key, _KEEP, (rows, 1, 1, *x.shape[3:]))
    strengths = jnp.stack([(gain_N - 1) / (1 - _GAIN[0]), blur_N / _BLUR, noise_N / _NOISE], -1)
    return x * keep, strengths


def fit_judge(
    videos_NCTHW: np.ndarray,
    digit_N: np.ndarray,
    direction_N: np.ndarray,
    *,
    seed: int = 0,
    steps: int = 2000,
) -> Judge:
    """Train a judge: AdamW on smoothed cross-entropy and the squared error of the flaws, 128 augmented clips a step.

    About 10 s on two CPU cores for 20,000 clips of 4x12x12 at the default number of steps.

    Args:
      videos_NCTHW: float (N,C,T,H,W) in [-1,1].
      digit_N: int (N,) in 0..9.
      direction_N: int (N,) in 0..8.
      seed: of the initialisation, the batches and the augmentation; same seed, same judge.
      steps: of training, at least 1.

    Raises:
      ValueError: shapes or labels that do not fit together.
    """
    x = np.asarray(videos_NCTHW, np.float32)
    if x.ndim != 5 or len(x) == 0:
        raise ValueError(f"videos {x.shape}: must be (N,C,T,H,W) with N at least 1")
    if steps < 1:
        raise ValueError(f"steps = {steps}: must be at least 1")
    labels = []
    for name, label, classes in (("digit", digit_N, DIGITS), ("direction", direction_N, MOTIONS)):
        label = np.asarray(label)
        if label.shape != x.shape[:1] or label.dtype.kind not in "iu":
            raise ValueError(f"{name} {label.dtype} {label.shape}: must be int ({len(x)},), one a video")
        if label.min() < 0 or label.max() >= classes:
            raise ValueError(f"{name} in {label.min()}..{label.max()}: must be in 0..{classes - 1}")
        labels.append(jax.nn.one_hot(label, classes))
    shape = (x.shape[1], x.shape[2], x.shape[3], x.shape[4])
    graphdef, params = nnx.split(_net(shape, _WIDTH, _FEATURES, seed), nnx.Param)
    params = _train(graphdef, params, jnp.asarray(x), *labels, jax.random.key(seed), steps)
    return Judge(graphdef, params, shape)


@functools.partial(jax.jit, static_argnums=(0, 6))
def _train(graphdef, params, videos, digit, motion, key, steps: int):
    """The whole training in one scan: one compilation, no host round trips."""
    warmup = min(50, steps // 10)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup, steps), weight_decay=0.05)

    def loss(params, rng):
        rows_key, augment_key = jax.random.split(rng)
        rows = jax.random.randint(rows_key, (_TRAIN_BATCH,), 0, videos.shape[0])
        x, strengths = _augment(augment_key, videos[rows])
        digit_logit, motion_logit, flaws, _ = nnx.merge(graphdef, params)(x)

        def entropy(logit, label):
            label = optax.smooth_labels(label[rows], _LABEL_SMOOTHING)
            return optax.softmax_cross_entropy(logit, label).mean()

        reading = entropy(digit_logit, digit) + _MOTION_WEIGHT * entropy(motion_logit, motion)
        return reading + _FLAW_WEIGHT * ((flaws - strengths) ** 2).mean()

    def step(carry, n):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, jax.random.fold_in(key, n)), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))[0][0]


def _covariance_root(x_NF: np.ndarray) -> np.ndarray:
    """R with R'R the unbiased covariance of the rows."""
    centred = (x_NF - x_NF.mean(0)) / np.sqrt(len(x_NF) - 1)
    return np.asarray(np.linalg.qr(centred, mode="r"))


def frechet_distance(features_a: np.ndarray, features_b: np.ndarray) -> float:
    """Fréchet distance of two sets of features, each taken as a Gaussian.

    |m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)): Dowson and Landau 1982; Heusel et al. 2017, Eq. 6.
    It is the squared distance, as is usual; float64. It is biased upwards for few samples: compare equal counts.

    Args:
      features_a: (N,F); features_b: (M,F); N and M at least 2.

    Raises:
      ValueError: shapes that do not fit, or values that are not finite.
    """
    a, b = np.asarray(features_a, np.float64), np.asarray(features_b, np.float64)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ValueError(f"features {a.shape} and {b.shape}: must be (N,F) and (M,F), N and M at least 2")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError(f"features {a.shape} and {b.shape}: values must be finite")
    # With S = R'R the trace of (S_a S_b)^(1/2) is the sum of the singular values of R_a R_b': no matrix is
    # squared, so singular covariances lose no digits.
    root_a, root_b = _covariance_root(a), _covariance_root(b)
    cross = np.linalg.svd(root_a @ root_b.T, full_matrices=False, compute_uv=False).sum()
    value = ((a.mean(0) - b.mean(0)) ** 2).sum() + (root_a**2).sum() + (root_b**2).sum() - 2 * cross
    return max(0.0, float(value))
