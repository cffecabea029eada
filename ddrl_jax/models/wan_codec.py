"""The Wan2.1 autoencoder as a codec of host arrays: what `Unshuffle` is to small videos, this is to real ones.

Each process works on its own clips with its own devices, without a word to the others. Knows nothing of configs and
files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class WanCodec:
    """Encodes and decodes with a `WanVAE`, chunked in time: a device holds one clip and the activations of 4 frames.

    A batch is spread over the process's devices, one clip each; a single clip runs on the first of them.

    Attributes:
      spatial: pixels a latent cell along H and along W.
      temporal: frames a latent frame, but for the first, which is one.
    """

    def __init__(self, graphdef: nnx.GraphDef, params: Any, *, tile: int = 0):
        """Takes the network from `load_pretrained`.

        Args:
          graphdef: of a `WanVAE`.
          params: its parameters, on one device or on a mesh; from a mesh they are copied whole to every device, which
            all of the mesh's processes must do together.
          tile: latent rows and columns of the squares that a frame is decoded in (`WanVAE.decode`); 0: whole frames.

        Raises:
          ValueError: tile is negative.
        """
        if tile < 0:
            raise ValueError(f"tile is {tile}; it must be 0 (whole frames) or a number of latent rows and columns")
        self.config = nnx.merge(graphdef, params).config
        self.spatial, self.temporal = self.config.spatial, self.config.temporal
        self._devices = Mesh(jax.local_devices(), ("clip",))
        self._params = _everywhere(self._devices, params)

        def encode(params, video):
            return nnx.merge(graphdef, params).encode(video, chunked=True)

        def decode(params, latent):
            return nnx.merge(graphdef, params).decode(latent, chunked=True, tile=tile)

        self._encode, self._decode = self._programs(encode), self._programs(decode)

    def latent_shape(self, video_CTHW: Sequence[int]) -> tuple[int, int, int, int]:
        """(3, T, H, W) of a clip -> (16, 1 + (T-1)/4, H/8, W/8) of its latent; ValueError if there is none."""
        return self.config.latent_shape(video_CTHW)

    def video_shape(self, latent_CTHW: Sequence[int]) -> tuple[int, int, int, int]:
        """The inverse of `latent_shape`."""
        return self.config.video_shape(latent_CTHW)

    def encode(self, video_BCTHW: np.ndarray) -> np.ndarray:
        """Video (B, 3, T, H, W) in [-1, 1] -> normalised latents (B, 16, t, h, w), float32.

        Raises:
          ValueError: T is not 4k+1, or H or W is not a multiple of 8.
        """
        return self._run(self._encode, video_BCTHW, self.latent_shape(video_BCTHW.shape[1:]))

    def decode(self, latent_BCTHW: np.ndarray) -> np.ndarray:
        """Normalised latents (B, 16, t, h, w) -> video (B, 3, T, H, W), float32, not clamped to [-1, 1].

        Raises:
          ValueError: the channels are not the autoencoder's.
        """
        return self._run(self._decode, latent_BCTHW, self.video_shape(latent_BCTHW.shape[1:]))

    def _programs(self, function: Callable[[Any, jax.Array], jax.Array]) -> tuple[Callable, Callable]:
        """The function on one device, and with a clip on each."""
        sharded = jax.shard_map(
            function, mesh=self._devices, in_specs=(P(), P("clip")), out_specs=P("clip"), check_vma=False
        )
        return jax.jit(function), jax.jit(sharded)

    def _run(self, programs: tuple[Callable, Callable], clips: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        one, each = programs
        size = self._devices.size
        out = np.empty((len(clips), *shape), np.float32)
        for start in range(0, len(clips), size):
            rows = np.arange(start, min(start + size, len(clips)))
            if len(rows) == 1:
                params = jax.tree.map(lambda leaf: leaf.addressable_data(0), self._params)
                out[rows] = one(params, jax.device_put(clips[rows], self._devices.devices[0]))
            else:
                full = clips[np.resize(rows, size)]  # the last group is filled up with copies
                batch = jax.device_put(full, NamedSharding(self._devices, P("clip")))
                out[rows] = np.asarray(each(self._params, batch))[: len(rows)]
        return out


def _everywhere(devices: Mesh, params: Any) -> Any:
    """Parameters whole on each of the process's devices, wherever they lie."""
    meshes = [x.sharding.mesh for x in jax.tree.leaves(params) if isinstance(x.sharding, NamedSharding)]
    if meshes:
        params = jax.jit(lambda x: x, out_shardings=NamedSharding(meshes[0], P()))(params)
    return jax.device_put(jax.tree.map(lambda x: x.addressable_data(0), params), NamedSharding(devices, P()))
