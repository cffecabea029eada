"""Advantages, ratios, objectives, losses and hacking signals. Pure functions: JAX and chex only."""
