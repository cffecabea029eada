"""The tests' run, as a config file."""

from tests.tiny import config as get_config  # noqa: F401
