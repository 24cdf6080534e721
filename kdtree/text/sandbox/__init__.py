"""A process in which chat templates are rendered: they come with checkpoints, and are programs.

jinja2's sandbox keeps a template from the interpreter's inside, but not from taking all memory or
running for ever; a process of its own does.
"""

import json
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Lock

from kdtree.errors import ConfigError

SECONDS = 10  # of processor time for a request
MEMORY = 1 << 30  # bytes of the process
CHARACTERS = 1 << 24  # of a rendered text


class Sandbox:
    """Renders templates; its process starts with the first and ends with this object."""

    def __init__(self):
        self._lock = Lock()  # one request at a time
        self._process: subprocess.Popen | None = None
        self._close = lambda: None

    def render(
        self, name: str, template: str, values: list[dict], marks: dict[str, str]
    ) -> list[str]:
        """The template's text with each of the values, all at one moment.

        name: of the template, for errors; values: plain JSON; marks: the characters that they
        stand for, see Environment in `__main__.py`
        Raises ConfigError where the template is at fault, ValueError where the values are.
        """
        reply = self._ask({"template": template, "marks": marks, "values": values})
        if "texts" in reply:
            return reply["texts"]
        error = ConfigError if reply["fault"] == "template" else ValueError
        raise error(f"the chat template {name} {reply['says']}")

    def _ask(self, request: dict) -> dict:
        line = json.dumps(request) + "\n"
        with self._lock:
            if self._process is None:
                self._start()
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
                reply = self._process.stdout.readline()
            except BrokenPipeError:
                reply = ""
            except BaseException:  # an interruption: the reply to come would be taken for the next
                self._stop()
                raise
            if not reply:
                return {"fault": "template", "says": self._stop()}
        return json.loads(reply)

    def _start(self) -> None:
        limits = map(str, (SECONDS, MEMORY, CHARACTERS))
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,  # an interruption from the terminal is not for it
        )
        self._close = weakref.finalize(self, _end, self._process)

    def _stop(self) -> str:
        """Ends the process; says why it had ended, if it had."""
        process, self._process = self._process, None
        self._close()
        if process.returncode == -signal.SIGPROF:
            return f"takes more than {SECONDS} s"
        return f"ended its process, with exit status {process.returncode}"


def _end(process: subprocess.Popen) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # closes the pipes and waits
        pass
