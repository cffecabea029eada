"""One DDRL iteration against the same work in Torch: `python benchmarks/ddrl_step.py [--rounds=3 --devices=2]`.

A Cosmos DiT of 16 M parameters on 2,048 tokens a sample, float32, on the CPU. Ours are the trainer's own jitted
functions (`Update.rollout`, `data`, `apply`); theirs is diffusers' `CosmosTransformer3DModel` with the same weights,
autograd, `torch.optim.AdamW` and `torch._foreach_lerp_`. An iteration is T + 1 evaluations of two rollouts, the
gradient of |T| of the T steps, the gradient of the data loss on one clip, and AdamW and EMA: as many evaluations of as
many samples here as there. Both are timed in turns in one run and after one iteration that is not counted (ours
compiles in it), and medians are compared: above 1 is faster than Torch. The peak is what a product of two float32
matrices of 2048 x 2048 reaches, in JAX and in Torch, measured in the same turns.

Ours runs as docs/scaling.md advises for a CPU: a device a core, a clip's tokens cut over them by the mesh's context,
one clip at a time. --devices=1 is one device whose operations use all cores.

Another program on the same cores disturbs both: look at the ratios of several rounds, and at the peak.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for name, value, what in (
    ("rounds", 3, "timed turns"),
    ("threads", 2, "of both"),
    ("devices", 2, "of ours, each with one thread where there are several; divides threads, heads and frames"),
    ("width", 384, "of the network"),
    ("heads", 6, "of the network"),
    ("depth", 6, "of the network"),
    ("frames", 8, "of a latent; a frame is 16 x 16 tokens"),
    ("text", 128, "tokens of the text"),
    ("steps", 4, "T, of the sampler"),
    ("trained", 2, "|T|, of them"),
):
    parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default: %(default)s)")
args = parser.parse_args()
# Before jax: XLA's pool has a thread a core of those it may run on.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
os.environ["JAX_NUM_CPU_DEVICES"] = str(args.devices)
if args.devices > 1:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from flax import nnx  # noqa: E402

from ddrl_jax import build  # noqa: E402
from ddrl_jax import config as config_lib  # noqa: E402
from ddrl_jax.checkpoint.weights import save_pretrained  # noqa: E402
from ddrl_jax.models.cosmos_dit import CosmosDiT, CosmosDiTConfig  # noqa: E402
from ddrl_jax.update import Rewarded, Update  # noqa: E402

CHANNELS, EDGE, TEXT_DIM, GROUP = 16, 32, 1024, 2
CLIP, LEARNING_RATE, EMA = 1e-4, 1e-5, 0.9


def settings() -> config_lib.ConfigDict:
    """The trainer's config: one condition, two rollouts of it."""
    c = config_lib.default()
    c.model.width, c.model.heads, c.model.depth = args.width, args.heads, args.depth
    c.model.adaln_rank, c.model.context_dim = 64, 256
    c.codec.factor = 4  # 16 latent channels
    c.text.length, c.text.dim = args.text, TEXT_DIM
    c.rollout.conditions, c.rollout.group_size = 1, GROUP
    c.train.micro_batch = c.rollout.micro_batch = 1
    c.rollout.num_steps, c.rollout.trained_steps = args.steps, tuple(range(args.trained))
    c.objective.data_levels, c.objective.clip_range = "training", CLIP
    c.train.learning_rate, c.train.warmup_steps = LEARNING_RATE, 0
    c.log.step_grad_norms = False
    return c


# --------------------------------------------------------------------------------------------------------------- ours


class Ours:
    """The trainer's jitted functions."""

    def __init__(self, config: config_lib.ConfigDict, graphdef: nnx.GraphDef, params: Any, inputs: dict[str, Any]):
        mesh = build.mesh_lib.make_mesh(1, 1, args.devices)
        params = jax.device_put(params, build.mesh_lib.fsdp_sharding(mesh, params))
        # The clips are not of a data set of ours.
        self.setup = dataclasses.replace(build.abstract_setup(config, mesh), latent_shape=inputs["x0"].shape[1:])
        self.method = Update(config, self.setup)
        self.state = build.train_state(self.setup, params, self.method.optimizer, self.method.exponent)
        self.x0, self.x, self.t = (jnp.asarray(inputs[k]) for k in ("x0", "x", "t"))
        self.cond = build.cond(jnp.asarray(inputs["text"]))
        valid = jnp.ones(GROUP, bool)
        rewarded = Rewarded(jnp.arange(GROUP, dtype=jnp.float32)[None], jnp.ones(1), valid)
        self.rewarded = jax.device_put(rewarded, build.mesh_lib.replicated(mesh))
        self.params, self.key, self.zero = params, jax.random.key(0), jnp.zeros((), jnp.int32)
        # Cut over the devices as an activation is.
        self.square = jax.device_put(inputs["square"], jax.NamedSharding(mesh, jax.P("context")))
        self.other = jax.device_put(inputs["square"], build.mesh_lib.replicated(mesh))
        self._product = jax.jit(jnp.matmul)

        def network(params: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, params)(x, self.t, self.cond["context"], mesh=mesh)

        self._network = jax.jit(network)
        self._gradient = jax.jit(jax.grad(lambda p, x: jnp.mean(jnp.square(network(p, x)))))

    def forward(self) -> Any:
        return jax.block_until_ready(self._network(self.params, self.x))

    def gradient(self) -> None:
        jax.block_until_ready(self._gradient(self.params, self.x))

    def product(self) -> None:
        jax.block_until_ready(self._product(self.square, self.other))

    def iteration(self) -> None:
        m, s = self.method, self.state
        x0, trajectory = m.rollout(s.params, self.key, s.step, self.cond, keep_mean=m.keeps_mean)
        data = m.data(s.params, self.key, s.step, self.zero, self.x0, self.cond, None)
        done = m.apply(s, self.key, self.zero, x0, trajectory, self.cond, self.rewarded, data, None)
        self.state = jax.block_until_ready(done)[0]


# ------------------------------------------------------------------------------------------------------------- theirs


def diffusers_model(folder: str) -> torch.nn.Module:
    """diffusers' network from the folder. It needs torchvision for a nearest-neighbour resize only."""
    import diffusers.models.transformers.transformer_cosmos as cosmos

    def resize(x: torch.Tensor, size: list[int], interpolation: int) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, size, mode="nearest")

    modes = types.SimpleNamespace(NEAREST=0)
    cosmos.transforms = types.SimpleNamespace(functional=types.SimpleNamespace(resize=resize), InterpolationMode=modes)
    model = cosmos.CosmosTransformer3DModel.from_pretrained(folder)
    for name, module in model.named_modules():
        if name.endswith(("norm_q", "norm_k")):
            module.eps = 1e-6  # diffusers builds these with 1e-5; the checkpoints mean 1e-6
    return model


class Theirs:
    """The same iteration with Torch: the sampler's and the losses' own arithmetic is a few passes over latents."""

    def __init__(self, folder: str, sigmas: np.ndarray, inputs: dict[str, Any]):
        self.model = diffusers_model(folder)
        self.parameters = list(self.model.parameters())
        self.ema = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=1e-4
        )
        self.sigmas = sigmas.astype(np.float32).tolist()
        self.x0, self.x, self.t, self.text, self.square = (
            torch.from_numpy(inputs[k]) for k in ("x0", "x", "t", "text", "square")
        )

    def network(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        B, _, T, H, W = x.shape
        masks = {"condition_mask": x.new_zeros(B, 1, T, H, W), "padding_mask": x.new_zeros(1, 1, H, W)}
        return self.model(x, t, self.text.expand(B, -1, -1), return_dict=False, **masks)[0]

    def denoise(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        s = sigma / (1 + sigma)
        return x / (1 + sigma) - s * self.network(x / (1 + sigma), x.new_full((len(x),), s))

    def forward(self) -> Any:
        with torch.no_grad():
            return self.network(self.x, self.t)

    def gradient(self) -> None:
        torch.autograd.grad(self.network(self.x, self.t).square().mean(), self.parameters)

    def product(self) -> None:
        torch.mm(self.square, self.square)

    def mean(self, x: torch.Tensor, i: int) -> torch.Tensor:
        ratio = self.sigmas[i + 1] / self.sigmas[i]
        return ratio * x + (1 - ratio) * self.denoise(x, self.sigmas[i])

    def iteration(self) -> None:
        steps, std = [], [0.3 * sigma for sigma in self.sigmas[1:]]
        with torch.no_grad():
            x = torch.randn(GROUP, *self.x.shape[1:]) * self.sigmas[0]
            for i in range(args.steps):
                later = self.mean(x, i)
                later = later + std[i] * torch.randn_like(x) if i + 1 < args.steps else later
                steps.append((x, later))
                x = later
            self.denoise(x, self.sigmas[-1])
        self.optimizer.zero_grad(set_to_none=True)
        noised = self.x0 + torch.randn_like(self.x0)
        (self.denoise(noised, 1.0) - self.x0).square().mean().backward()
        advantage = torch.tensor([-1.0, 1.0])
        for i in range(args.trained):
            x, later = steps[i]
            error = ((later - self.mean(x, i)) / std[i]).square().flatten(1).mean(1)
            ratio = torch.exp(0.5 * (error.detach() - error))
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            (torch.maximum(-advantage * ratio, -advantage * clipped).mean() / args.trained).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.parameters, 1 - EMA)


# ------------------------------------------------------------------------------------------------------------ in turns


def flops(c: CosmosDiTConfig) -> tuple[float, float]:
    """Multiplications and additions of matrix products, of a sample's evaluation forward: of all layers whose rows are
    tokens, and of attention. What has a row a sample or a text token is left out: under 2 % here."""
    D, L, cells = c.width, args.frames * (EDGE // 2) ** 2, int(np.prod(c.patch))
    block = 4 * D * D + 2 * D * D + 2 * D * c.mlp_width
    linear = 2 * L * (c.depth * block + (2 * c.in_channels + 2) * cells * D)
    return linear, 4 * L * (L + args.text) * D * c.depth


def in_turns(pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]]) -> dict[str, list[tuple[float, float]]]:
    """Seconds of (ours, theirs), a round each, every pair run once before."""
    for pair in pairs.values():
        for f in pair:
            f()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for _ in range(args.rounds):
        for name, pair in pairs.items():
            turn = []
            for f in pair:
                began = time.perf_counter()
                f()
                turn.append(time.perf_counter() - began)
            seconds[name].append((turn[0], turn[1]))
    return seconds


def main() -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = settings()
    model_config = build._model_config(config)
    rng = np.random.default_rng(0)
    graphdef, params = nnx.split(CosmosDiT(model_config, rngs=nnx.Rngs(0)))
    # A new network predicts zero: not here, so that the two can be compared.
    params = jax.tree.map(lambda p: p if np.any(p) else jnp.asarray(rng.normal(0, 0.02, p.shape), p.dtype), params)
    shape = (CHANNELS, args.frames, EDGE, EDGE)
    inputs = {
        "x0": rng.standard_normal((1, *shape), np.float32),
        "x": rng.standard_normal((1, *shape), np.float32),
        "t": np.full(1, 0.6, np.float32),
        "text": rng.standard_normal((1, args.text, TEXT_DIM), np.float32),
        "square": rng.standard_normal((2048, 2048), np.float32),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(folder, graphdef, params, layout="diffusers")
        ours = Ours(config, graphdef, params, inputs)
        theirs = Theirs(folder, np.asarray(ours.setup.process.levels(args.steps)), inputs)
    count = sum(p.numel() for p in theirs.parameters)
    off = float(np.abs(np.asarray(ours.forward()) - theirs.forward().numpy()).max())
    tokens = args.frames * (EDGE // 2) ** 2
    print(
        f"{count / 1e6:.1f} M parameters, {tokens:,} tokens, float32; ours on {args.devices} devices and "
        f"{len(os.sched_getaffinity(0))} cores, Torch's {torch.get_num_threads()} threads; jax {jax.__version__}, "
        f"torch {torch.__version__}; outputs differ by {off:.1e} at most",
        flush=True,
    )
    names = ("product", "forward", "gradient", "iteration")
    seconds = in_turns({name: (getattr(ours, name), getattr(theirs, name)) for name in names})

    linear, attention = flops(model_config)
    forward, gradient = linear + attention, 3 * (linear + attention)
    iteration = GROUP * ((args.steps + 1) * forward + args.trained * gradient) + gradient
    work = dict(zip(names, (2 * 2048**3, forward, gradient, iteration), strict=True))
    rates = {n: [work[n] / statistics.median(column) for column in zip(*seconds[n], strict=True)] for n in names}
    print(f"{'':10} {'ours':>9} {'torch':>9} {'torch/ours':>11}  (each round)   of the peak: ours, torch")
    for name in names:
        a, b = (statistics.median(column) for column in zip(*seconds[name], strict=True))
        rounds = " ".join(f"{y / x:.2f}" for x, y in seconds[name])
        share = "  ".join(f"{r / peak:.0%}" for r, peak in zip(rates[name], rates["product"], strict=True))
        print(f"{name:10} {a:8.3f}s {b:8.3f}s {b / a:11.2f}  ({rounds})   {share}")
    print("compile time excluded; peak: " + ", ".join(f"{r / 1e9:.0f} GFLOP/s" for r in rates["product"]))


if __name__ == "__main__":
    main()
