"""The output of ``penstock up``: a line per process while it starts, then how to use the deployment."""

import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from penstock.cli.figures import counted
from penstock.configs.logs import OutputStream
from penstock.launch.state import DeploymentState

_EVERYWHERE = {"timestamp", "level", "process", "logger"}  # in each line of a log


class Board:
    """One line per process with its state and the time it took; plain lines where there is no terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        # Its own: rich ends the process when the reader of its output has exited.
        self._console = console = Console(file=cast(IO[str], OutputStream(sys.stderr)))
        self._quiet = quiet
        self._live = console.is_terminal and not quiet
        self._began = time.monotonic()
        self._lines: dict[str, TaskID] = {}
        self._ready: set[str] = set()
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<12}"),
            TextColumn("{task.fields[state]:<28}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=8,
        )

    def __enter__(self) -> "Board":
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._progress.stop()

    def starting(self, name: str, state: str = "starting") -> None:
        if self._live:
            if name not in self._lines:
                self._lines[name] = self._progress.add_task(name, total=1, state=state)
            else:
                self._progress.update(self._lines[name], state=state)

    def print(self, text: str) -> None:
        """Print text for the user unchanged."""
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def ready(self, name: str, state: str = "ready") -> None:
        """Called once or often for the same process; shown once."""
        if name in self._ready:
            return
        self._ready.add(name)
        if self._live:
            self.starting(name)
            self._progress.update(self._lines[name], completed=1, state=state)
        elif not self._quiet:
            self._console.print(f"{name:<12} {state}  {time.monotonic() - self._began:.1f} s", highlight=False)


def readable(line: str) -> str:
    """A line of a child's log in readable form: of a JSON line the event and its cause."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "event" not in entry:
        return line
    cause = ": ".join(str(entry.pop(key)) for key in ("event", "error") if key in entry)
    trace = entry.pop("exception", "")
    more = ", ".join(f"{key}={value}" for key, value in entry.items() if key not in _EVERYWHERE)
    return cause + (f" ({more})" if more else "") + (f"\n{trace}" if trace else "")


def curl_line(http_url: str, model: str, makes: str = "text", *, key: bool = False) -> str:
    """A command that sends a request to the deployment. ``key``: with that of the shell's variable."""
    body: dict[str, object] = {"model": model}
    if makes == "text":
        path, options = "chat/completions", "-N "
        body |= {"messages": [{"role": "user", "content": "What is 347 + 586?"}], "max_tokens": 64, "stream": True}
    elif makes == "embedding":
        path, options = "embeddings", ""
        body |= {"input": ["How deep is the sea?", "How high is the mountain?"]}
    elif makes == "score":
        path, options = "rerank", ""
        body |= {"query": "How deep is the sea?", "documents": ["It is 11 km deep.", "The mountain is high."]}
    else:
        path, options = f"{makes}s/generations", ""
        body |= {"prompt": "a red boat on the sea"}
    quoted = json.dumps(body).replace("'", "'\\''")
    headers = '-H "authorization: Bearer $KEY" ' * key + "-H 'content-type: application/json'"
    return f"curl {options}{http_url}/v1/{path} {headers} -d '{quoted}'"


def sizes(state: DeploymentState) -> str:
    """How many processes of each role there are, and in how many cells."""
    counts = Counter(process.role for process in state.processes)
    parts = [counted(counts[role], role) for role in ("gateway", "router", "worker")]
    cells = state.active_cells or len(state.all_cells)
    return ", ".join(parts) + (f" in {cells} cells" if cells > 1 else "")


def welcome(state: DeploymentState, data_dir: Path, seconds: float, *, closed: bool = False) -> str:
    """What the user needs next. The only secret in it is the dashboard's token, which is read-only.

    Args:
        closed: requests need an API key.
    """
    flag = "" if data_dir.name == ".penstock" else f" --data-dir {data_dir}"
    key = f"\n  KEY=$({_command()} keys create{flag} --quiet)  # or one that you have" * closed
    return f"""
Penstock serves {", ".join(state.models) or state.model} on {state.http_url} (ready after {seconds:.1f} s)
{key}
  {curl_line(state.http_url, state.model, state.makes, key=closed)}

  OpenAI base URL   {state.http_url}/v1
  in the browser    {state.http_url}
  NATS              {state.nats_url.rpartition("@")[2]}, namespace {state.namespace}
  processes         {sizes(state)}
  dashboard         {state.dashboard_url or "none (--dashboard-port -1)"}
  logs              {data_dir / "logs"}
  state, passwords  {data_dir / "state.json"}
  what happened     {_command()} inspect{flag} REQUEST_ID
  stop              Ctrl-C
"""


def _command() -> str:
    """The command that calls ``penstock``: its name if it is on the PATH, else as this process was called."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "penstock" and not shutil.which("penstock") else "penstock"
