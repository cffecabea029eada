"""A real Chromium, driven over its debugging pipe with the standard library: enough to look at a page and click."""

import json
import os
import shutil
import subprocess
import tempfile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A context manager with one page. `console` holds what the page complained about."""

    def __init__(self, width=1200, height=900, dark=False):
        self._profile = tempfile.TemporaryDirectory(prefix="ddrl_browser_", ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        # It reads from descriptor 3 and writes to descriptor 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, *flags, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=[theirs_in, theirs_out], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb", buffering=0), os.fdopen(ours_out, "wb", buffering=0)
        self._buffer, self._count, self._session, self._events = b"", 0, None, []
        self.console = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.resize(width, height)

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def _read(self):
        while b"\0" not in self._buffer:
            part = self._in.read(1 << 16)
            assert part, "the browser is gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(message)
        if message.get("method") == "Log.entryAdded":
            self.console.append(message["params"]["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(message["params"]["exceptionDetails"]))
        return message

    def call(self, method, **params):
        self._count += 1
        request = {"id": self._count, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        self._out.write(json.dumps(request).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
            self._events.append(message.get("method"))

    def _loaded(self):
        while "Page.loadEventFired" not in self._events:
            self._events.append(self._read().get("method"))

    def open(self, url):
        self._events.clear()
        self.call("Page.navigate", url=url)
        self._loaded()

    def submit(self, code):
        """Runs code that leads to another page, and waits for that."""
        self._events.clear()
        self.run(code)
        self._loaded()

    def run(self, code):
        """The value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def cookies(self):
        return self.call("Network.getCookies")["cookies"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()
        self._profile.cleanup()
