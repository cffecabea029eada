"""A real Redis on a socket of its own, for the tests of the fleet's queue."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

redis = pytest.importorskip("redis")
BINARY = shutil.which("redis-server")
if BINARY is None and not os.environ.get("CI"):  # in CI it is an error: .ci/run installs it
    pytest.skip("redis-server is not installed", allow_module_level=True)


class Redis:
    """Keeps what it has when it is killed and started again."""

    def __init__(self):
        # Not pytest's folder: a socket's path has about 100 characters at most.
        self.folder = Path(tempfile.mkdtemp(prefix="redis_", dir="/tmp"))
        self.url = f"unix://{self.folder}/s"
        self.client = redis.Redis.from_url(self.url)
        self.start()

    def start(self):
        assert BINARY, "redis-server is needed: apt-get install redis-server"
        command = [BINARY, "--port", "0", "--unixsocket", str(self.folder / "s"), "--dir", str(self.folder),
                   "--save", "", "--appendonly", "yes", "--appendfsync", "always"]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert self.process.poll() is None
                time.sleep(0.02)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def remove(self):
        self.client.close()
        self.kill()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def server():
    started = Redis()
    yield started
    started.remove()
