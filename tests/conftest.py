"""Test settings: eight CPU devices, so that every mesh is a real one; float32 unless a test asks for x64."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
