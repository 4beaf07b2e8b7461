"""A real browser without a window, driven through its debugging pipe."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds for any one answer


def chromium() -> str | None:
    """The program, where one is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a headless browser."""

    def __init__(self, program: str, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        # The browser reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *options, f"--user-data-dir={profile}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._numbers, self._unread, self._session = itertools.count(1), b"", ""
        self.complaints: list[str] = []  # errors on the console, and exceptions
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer; what the page complains of meanwhile is noted."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._note(answer)

    def open(self, address: str) -> None:
        """Load a page wholly."""
        self.call("Page.navigate", url=address)
        self.wait(f"location.href.startsWith({json.dumps(address)}) && document.readyState == 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"in vain: {condition}"
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser has ended"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(parameters["exceptionDetails"]["text"])
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.complaints.append(" ".join(str(argument.get("value", "")) for argument in parameters["args"]))
