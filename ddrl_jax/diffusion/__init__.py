"""Noise levels, corruption, policy kernels, the sampler and the diffusion loss. Pure functions: JAX and chex only."""
