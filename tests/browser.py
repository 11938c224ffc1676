"""A headless Chromium, driven through its own pipe (the Chrome DevTools Protocol): no driver, no
package. `find` looks for one; Debian's is `apt-get install chromium-headless-shell`."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The browser of MEGACPP_BROWSER, else the first of the usual names on the PATH, or None."""
    return next(
        filter(None, map(shutil.which, [os.environ.get("MEGACPP_BROWSER", ""), *_NAMES])), None
    )


class Browser:
    """One page. events: (method, params) of all that the browser said."""

    def __init__(self, program: str, profile: Path) -> None:
        self.events, self._ids, self._session = [], itertools.count(1), None
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        self._buffer = b""
        self._child = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', program, "--headless",
             "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs_in, theirs_out):
            os.close(end)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params):
        """The result of one command. Raises RuntimeError with the browser's message."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, width: int, height: int, scheme: str, phone: bool) -> None:
        """Load a page in a window of this size, in pixels, for someone who prefers `scheme`."""
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=2 if phone else 1, mobile=phone)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.ask("Emulation.setEmulatedMedia", features=[feature])
        self.ask("Page.navigate", url=url)
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._read()

    def run(self, script: str):
        """The value of an expression in the page."""
        done = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            if not part:
                raise RuntimeError(f"the browser ended with status {self._child.wait()}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            self._session = None
            self.ask("Browser.close")
        for end in (self._out, self._in):
            os.close(end)
        self._child.kill()
        self._child.wait()
