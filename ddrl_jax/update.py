"""The jitted parts of an iteration, for every method: the rollout, the data-loss gradient, the update.

One class of pure functions of (parameters or state, key, step, arrays); what differs between methods is decided here
and nowhere in the loop. Networks are held only where a method needs them: a reference for a KL to it or for Z of
Eq. 8, an old policy for DiffusionNFT.

Dims: B rollouts, G conditions, N rollouts a condition (B = G N), K trained steps, R rewards, U updates an iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from ddrl_jax import build, state
from ddrl_jax.config import RATIO_OBJECTIVES
from ddrl_jax.diffusion.guidance import Denoiser, guided
from ddrl_jax.diffusion.sampler import Trajectory, sample
from ddrl_jax.gradients import (
    PER_ROLLOUT,
    data_gradient,
    in_parts,
    micro_batches,
    nft_gradient,
    policy_gradient,
    replay_gap,
)
from ddrl_jax.parallel import mesh as mesh_lib
from ddrl_jax.rl.advantages import log_partition, mixed_advantages, partition_advantages
from ddrl_jax.rl.selection import best_of_group, best_of_weights
from ddrl_jax.rl.steps import random_steps, window_steps

# Streams of random numbers, all from the config's seed (INIT and PRETRAIN are the pre-training's).
INIT, PRETRAIN, ROLLOUT, DATA, STEPS, REFERENCE, NFT = range(7)


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """What came back for a rollout, on the device: rewards (R,B), their weights (R,), valid (B,); of the reference's
    rollouts of the same conditions (B,) and their validity, or None."""

    rewards_RB: jax.Array
    weights_R: jax.Array
    valid_B: jax.Array
    reference_B: jax.Array | None = None
    reference_valid_B: jax.Array | None = None


jax.tree_util.register_dataclass(
    Rewarded, ["rewards_RB", "weights_R", "valid_B", "reference_B", "reference_valid_B"], []
)


class Update:
    """The method of a config as jitted functions.

    Attributes:
      rolls_out: it trains on rollouts and rewards (all but plain SFT).
      on_steps: it trains on recorded steps through their likelihood ratio.
      needs_reference, needs_old: networks that it holds beside the policy.
      data_needs_rollout: the data loss is taken at the rollout's levels with its start noise.
    """

    def __init__(self, config: ConfigDict, setup: build.Setup, base: Any = None) -> None:
        """`base`: the network that an adapter is trained of (lora.rank), else None."""
        self.config, self.setup = config, setup
        self.objective, name = setup.objective, config.objective.name
        self.updates = config.train.updates_per_rollout
        self.group = config.rollout.group_size
        self.batch = config.rollout.conditions * self.group
        self.rolls_out = name != "sft"
        self.on_steps = name in RATIO_OBJECTIVES
        self.needs_old = name == "nft"
        self.needs_reference_rollouts = config.advantage.kind == "partition"
        self.needs_reference = self.needs_reference_rollouts or (
            self.objective.kl_beta > 0 and (self.on_steps or name == "nft")
        )
        self.has_data = self.objective.data_beta > 0
        self.data_needs_rollout = self.has_data and self.objective.data_levels == "rollout"
        self.on_host = config.train.trajectory == "host"
        # The rollout's own means are needed where the trained policy is, or becomes, another one.
        self.keeps_mean = self.updates > 1 or config.rollout.ema
        self.optimizer, self.exponent = build.optimizer(config.train), build.ema_exponent(config.train)
        static = ("latent_shape", "keep_mean", "reference")
        # The base is an argument: what a compiled function closes over is copied into it.
        self.rollout = functools.partial(jax.jit(self._rollout, static_argnames=static), base)
        self.data = functools.partial(jax.jit(self._data), base)
        # The state and the data loss's gradient are used up: what comes out lies where they lay.
        self.apply = functools.partial(jax.jit(self._apply, donate_argnames=("s", "data")), base)
        self.replay_gap = functools.partial(jax.jit(self._replay_gap), base)
        merge = jax.jit(lambda base, params: self._over(base).network(params))
        # The network's parameters from the trained ones.
        self.network = setup.network if base is None else functools.partial(merge, base)

    def networks(self) -> list[str]:
        """The copies of the network in memory, in words."""
        held = ["policy"] if self.config.lora.rank == 0 else ["frozen base", "adapter"]
        held += ["EMA"] if self.exponent is not None else []
        held += ["reference"] if self.needs_reference else []
        return held + (["old policy"] if self.needs_old else [])

    def rollout_params(self, s: state.TrainState) -> Any:
        """The weights that roll out."""
        if self.needs_old:
            return s.old
        # At step 0 the EMA is the policy already; its first update copies the weights, then it is an average.
        return s.ema if self.config.rollout.ema else s.params

    def _over(self, base: Any) -> build.Setup:
        return build.with_base(self.config, self.setup, base)

    def _replay_gap(self, base: Any, params: Any, trajectory: Trajectory, cond: dict[str, Any]) -> jax.Array:
        setup = self._over(base)
        denoise, cond = self._rollout_denoiser(setup, setup.network(params), cond)
        return replay_gap(params, trajectory, cond, setup, denoise)

    # ------------------------------------------------------------------------------------------ rollout

    def _rollout(
        self,
        base: Any,
        params: Any,
        key: jax.Array,
        step: jax.Array,
        cond: dict[str, Any],
        *,
        keep_mean: bool,
        reference: bool = False,
        latent_shape: tuple[int, ...] | None = None,
    ) -> tuple[jax.Array, Trajectory | None]:
        """x0 (B, C, T, h, w) and the recorded steps, None where nothing trains on them. `reference`: other noise, no
        record. `latent_shape`: (C, T, h, w) where it is not the config's (portrait clips)."""
        ro, setup = self.config.rollout, self._over(base)
        params = params if reference else setup.network(params)
        latent_shape = latent_shape or setup.latent_shape
        key = jax.random.fold_in(jax.random.fold_in(key, REFERENCE if reference else ROLLOUT), step)
        shape = (self.batch, *latent_shape)
        record, stochastic = self._trained_steps(key, step)
        if reference or not (self.on_steps or self.data_needs_rollout):
            record = ()
        noise = None
        if ro.same_noise:
            # The key that `sample` draws the start noise with where it is not given.
            unit_GX = jax.random.normal(jax.random.split(key)[0], (ro.conditions, *latent_shape))
            noise = (jnp.repeat(unit_GX, self.group, axis=0), None)
        denoise, cond = self._rollout_denoiser(setup, params, cond)
        x0, trajectory = sample(
            params,
            key,
            cond,
            denoise=denoise,
            process=setup.process,
            shape=shape,
            num_steps=ro.num_steps,
            record=record,
            noise=noise,
            stochastic=stochastic,
            keep_mean=keep_mean,
            keep_at=functools.partial(mesh_lib.on_host, setup.mesh) if self.on_host and record != () else None,
        )
        x0 = mesh_lib.pin_latents(setup.mesh, x0)
        if isinstance(record, tuple) and not record:
            return x0, None
        records: dict[str, Any] = {}
        if not self.on_host:
            cut = mesh_lib.latent_sharding(setup.mesh, trajectory.x.shape, lead=1)
            known = {f: getattr(trajectory, f) for f in PER_ROLLOUT if getattr(trajectory, f) is not None}
            records = {f: jax.lax.with_sharding_constraint(x, cut) for f, x in known.items()}
        unit = trajectory.init_noise
        unit = mesh_lib.pin_latents(setup.mesh, unit) if unit is not None and self.data_needs_rollout else None
        return x0, dataclasses.replace(trajectory, **records, init_noise=unit)

    def _rollout_denoiser(self, setup: build.Setup, params: Any, cond: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What rolls out: the network under rollout.guidance, rollout.micro_batch rollouts at a time, and its condition
        with the text projected: once, and not at every step."""
        ro = self.config.rollout
        denoise: Denoiser = setup.denoise
        cond = setup.projected(params, cond)
        if ro.guidance:
            denoise = guided(denoise, ro.guidance, setup.projected(params, setup.null_cond))
        return in_parts(denoise, ro.micro_batch, setup.mesh) if ro.micro_batch else denoise, cond

    def _trained_steps(self, key: jax.Array, step: jax.Array) -> tuple[Any, Any]:
        """(record, stochastic) for `sample`: the trained steps, and where the sampler is stochastic (None: all)."""
        ro = self.config.rollout
        if ro.steps == "fixed":
            return tuple(ro.trained_steps), None
        if ro.steps == "random":
            candidates = build.trainable_steps(self.config)
            count = build.trained_step_count(self.config)
            return random_steps(jax.random.fold_in(key, STEPS), candidates, count), None
        record_K = window_steps(step, len(build.trainable_steps(self.config)), window=ro.window, every=ro.window_every)
        return record_K, jnp.zeros(ro.num_steps, bool).at[record_K].set(True)

    # --------------------------------------------------------------------------------------------- data

    def _data(
        self,
        base: Any,
        params: Any,
        key: jax.Array,
        step: jax.Array,
        u: jax.Array,
        x0_GX: jax.Array,
        cond: dict[str, Any],
        trajectory: Trajectory | None,
    ) -> tuple[jax.Array, dict, Any]:
        """Loss, metrics and gradient of the data loss on update u's share of the conditions."""
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, DATA), step), u)
        return data_gradient(
            params,
            rng,
            self._share(x0_GX, u, 1),
            self._share_conditions(cond, u),
            self._share_trajectory(trajectory, u),
            setup=self._over(base),
            objective=self.objective,
            group=self.group,
            micro_batch=self.config.train.micro_batch,
        )

    def _share(self, x: jax.Array, u: jax.Array, size: int) -> jax.Array:
        """Update u's share of the conditions, `size` rows each."""
        if self.updates == 1:
            return x
        return jax.lax.dynamic_index_in_dim(micro_batches(x, self.updates, size), u, 0, False)

    def _share_conditions(self, cond: dict[str, Any], u: jax.Array) -> dict[str, Any]:
        return jax.tree.map(lambda x: self._share(x, u, 1), cond)

    def _share_trajectory(self, t: Trajectory | None, u: jax.Array) -> Trajectory | None:
        if t is None or self.updates == 1:
            return t
        pick = jax.vmap(lambda x: self._share(x, u, self.group))
        changed: dict[str, Any] = {f: pick(getattr(t, f)) for f in PER_ROLLOUT if getattr(t, f) is not None}
        noise = None if t.init_noise is None else self._share(t.init_noise, u, self.group)
        return dataclasses.replace(t, **changed, init_noise=noise)

    # ------------------------------------------------------------------------------------------- update

    def _apply(
        self,
        base: Any,
        s: state.TrainState,
        key: jax.Array,
        u: jax.Array,
        x0_BX: jax.Array | None,
        trajectory: Trajectory | None,
        cond: dict[str, Any],
        rewarded: Rewarded | None,
        data: tuple[jax.Array, dict, Any] | None,
        ref_params: Any,
    ) -> tuple[state.TrainState, dict[str, jax.Array], Any]:
        """Advantages of the whole rollout, the gradient of update u's share of it, and one optimizer step.

        Also returns the whole gradient where there was one of data: so it is summed in the memory that came with that,
        which as a result nobody reads costs nothing."""
        config = self.config
        loss, metrics, grads = jnp.zeros(()), {}, None
        if data is not None:
            loss, data_metrics, grads = data
            metrics["data_loss"] = data_metrics["data_loss"]
        if rewarded is not None:
            assert x0_BX is not None, "rewards are of rollouts"
            key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, NFT), s.step), u)
            adv_B, weight_B, valid_B = self._advantages(rewarded)
            adv_B, weight_B = self._share(adv_B, u, self.group), self._share(weight_B, u, self.group)
            shared, x0 = self._share_conditions(cond, u), self._share(x0_BX, u, self.group)
            setup = self._over(base)
            common: dict[str, Any] = {"setup": setup, "micro_batch": config.train.micro_batch, "others": grads}
            if self.on_steps:
                t = self._share_trajectory(trajectory, u)
                assert t is not None, "a policy gradient needs recorded steps"
                part = policy_gradient(
                    s.params, t, adv_B, weight_B, shared,
                    ref_params=ref_params, step_norms=config.log.step_grad_norms, **common,
                )  # fmt: skip
                metrics["trained_steps"] = t.step
            elif self.needs_old:
                nft = {k: config.nft[k] for k in ("beta", "adv_clip", "draws")}
                part = nft_gradient(
                    s.params, key, x0, adv_B, weight_B, shared,
                    old_params=setup.network(s.old), ref_params=ref_params, **nft, **common,
                )  # fmt: skip
            else:
                valid_B = self._share(valid_B, u, self.group)
                part = self._best_of_n(s.params, key, x0, adv_B, valid_B, shared, setup, grads)
            loss, grads = loss + part[0], part[2]
            metrics |= {k: v for k, v in part[1].items() if k not in ("loss", "data_loss", "live")}
        s, step_metrics = self.optimizer_step(s, grads, loss, u)
        metrics |= step_metrics | {"loss": loss, "skipped_in_a_row": s.skipped_in_a_row}
        return s, metrics, None if data is None else grads

    def optimizer_step(
        self, s: state.TrainState, grads: Any, loss: jax.Array, u: jax.Array
    ) -> tuple[state.TrainState, dict[str, jax.Array]]:
        """What update u does with its gradient: see `state.apply_gradients`."""
        nft = self.config.nft
        s, metrics = state.apply_gradients(
            s,
            grads,
            loss,
            self.optimizer,
            ema_exponent=self.exponent,
            advance=u == self.updates - 1,
            old_decay=(nft.decay_rate, nft.decay_max),
        )
        # It stays as it is cut, whatever the compiler would like: another cut would be another program next time.
        return jax.lax.with_sharding_constraint(s, mesh_lib.fsdp_sharding(self.setup.mesh, s)), metrics

    def _advantages(self, rewarded: Rewarded) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Advantages (B,), sample weights (B,) and validity (B,) of a rollout."""
        adv = self.config.advantage
        valid_B = rewarded.valid_B & jnp.isfinite(rewarded.rewards_RB).all(axis=0)
        # Groups with fewer than two valid members say nothing about their order.
        alive_B = valid_B & jnp.repeat(valid_B.reshape(-1, self.group).sum(1) >= 2, self.group)
        if adv.kind == "partition":
            z_G = log_partition(rewarded.reference_B, self.group, adv.beta, rewarded.reference_valid_B)
            # No order within the group is needed, so one valid member is enough.
            alive_B = valid_B & jnp.repeat(jnp.isfinite(z_G), self.group)
            z_G = jnp.where(jnp.isfinite(z_G), z_G, 0.0)
            adv_B = partition_advantages(rewarded.rewards_RB[0], z_G, self.group, adv.beta, alive_B)
        else:
            options = {k: adv[k] for k in ("std", "ddof", "eps", "reward_clip")}
            adv_B = mixed_advantages(rewarded.rewards_RB, rewarded.weights_R, self.group, valid_B, **options)
        weight_B = alive_B.astype(adv_B.dtype)
        if adv.best_of:
            weight_B = best_of_weights(adv_B, self.group, adv.best_of, alive_B).astype(adv_B.dtype)
        return adv_B, weight_B, valid_B

    def _best_of_n(
        self,
        params: Any,
        key: jax.Array,
        x0_BX: jax.Array,
        adv_B: jax.Array,
        valid_B: jax.Array,
        cond: dict[str, Any],
        setup: build.Setup,
        others: Any = None,
    ) -> tuple[jax.Array, dict, Any]:
        """Rejection fine-tuning: the diffusion loss on each group's best rollout (RAFT, arXiv 2304.06767)."""
        best_G, alive_G = best_of_group(adv_B, self.group, valid_B)
        x0_GX = jnp.where(alive_G.reshape(-1, *[1] * (x0_BX.ndim - 1)), x0_BX[best_G], 0.0)
        loss, metrics, grads = data_gradient(
            params,
            key,
            x0_GX,
            cond,
            None,
            setup=setup,
            objective=dataclasses.replace(self.objective, data_beta=1.0, kl_beta=0.0, data_levels="training"),
            group=self.group,
            micro_batch=self.config.train.micro_batch,
            alive_G=alive_G,
            others=others,
        )
        return loss, {"policy_loss": metrics["data_loss"]}, grads


def to_device(mesh: Mesh, rewards_RB: Any, weights_R: Any, valid_B: Any, reference: Any = None) -> Rewarded:
    """`Rewarded` from this process's numpy arrays; rewards are cut over devices along B."""
    columns = [build.to_global(mesh, row) for row in rewards_RB]
    other = [None, None] if reference is None else [build.to_global(mesh, x) for x in reference]
    return Rewarded(jnp.stack(columns), jnp.asarray(weights_R), build.to_global(mesh, valid_B), *other)
