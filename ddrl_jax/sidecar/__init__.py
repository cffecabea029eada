"""The reward sidecar: Torch scorers behind HTTP, in a process (and, if wished, an environment) of its own.

Nothing in here knows jax or any other part of ddrl_jax; the trainer knows nothing of it but `protocol`.
Importing this package imports nothing else, so that `sidecar build` runs where only the standard library is.
"""
