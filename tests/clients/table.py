"""The page ``docs/clients.md``, from the results of the last full run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.clients.catalogue import CLIENTS, FEATURES, RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_HEAD = """# Clients

<!-- Written by `python -m tests.clients table` from tests/clients/results.json. -->

Each client below, in its newest version, was run unchanged against one deployment of the demo model on the native
engine, for which every request needs an API key ({date}, `make test-clients`).

✓: every check of this feature passed. ✗: at least one did not; the reason is below. An empty cell: the client has no
such feature, or it was not tried.

"""
_NOTES = """
## What differs between servers

Code that was written for another server meets these here:

- Reasoning is in `reasoning_content` and `reasoning` of a message, and in `reasoning_content` of stream chunks; null
  where there is none. Both are taken in the history ([HTTP API](http.md#tool-calls-and-reasoning)).
- Stop strings end the content, and neither a thought nor a call, so evaluation harnesses can send them with every
  request.
- `model` may be missing, `/v1` may lack in the base URL, and `--served-model-name a claude-b` gives a model several
  names.
- vLLM's `return_token_ids`, `return_tokens_as_token_ids`, `include_reasoning`, `continuous_usage_stats`, and SGLang's
  `separate_reasoning`, are served; `echo` can be streamed.
- Idle streams have comments, which clients of server-sent events ignore. Those of Ollama's API have lines without text.
"""
_AGENTS = """
## Coding agents

The demo model itself answered in these runs. It has a context of 8,192 tokens and knows few tools, so the agents got
one tool from an MCP server, and their own instructions and tools were turned off: with them, the first request of Codex
0.169.0 has 17,435 tokens of this model, and is refused for that length alone. After its tool's result, Codex got an
answer that makes no sense: the demo model cannot read the form in which Codex reports results.

On the mock engine, agents need `--mock-answer-tokens 20-200`: they set no `max_tokens`, so an answer of the mock runs
until it fills the context, and Codex ends a turn with an error, or tries again, when an answer is incomplete.

Claude Code needs two variables, Codex a provider in `~/.codex/config.toml`, and both a model with room for their
instructions.

```sh
ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_API_KEY=$KEY claude --model MODEL
```

```toml
model = "MODEL"
model_provider = "penstock"

[model_providers.penstock]
name = "Penstock"
base_url = "http://127.0.0.1:8000/v1"
wire_api = "responses"
env_key = "KEY"
```
"""


def page(results: dict[str, Any]) -> str:
    """The page as Markdown."""
    found = results["clients"]
    rows = [client for client in CLIENTS if client.name in found]
    used = [each for each in FEATURES if any(_of(found[row.name], each) for row in rows)]
    titles = [FEATURES[each] for each in used]
    lines = [f"| client | version | {' | '.join(titles)} |", "|---|---|" + "---|" * len(used)]
    for row in rows:
        cells = [_cell(_of(found[row.name], each)) for each in used]
        lines.append(f"| {row.title} | {_versions(found[row.name])} | {' | '.join(cells)} |")
    problems = [line for row in rows for line in _problems(row.title, found[row.name])]
    below = "\n## What does not work\n\n" + "\n".join(problems) + "\n" if problems else ""
    checked = [line for row in rows for line in _checks(row.title, found[row.name])]
    checks = "\n## What was checked\n\n" + "\n".join(checked) + "\n"
    return _HEAD.format(date=results["date"]) + "\n".join(lines) + "\n" + below + _NOTES + _AGENTS + checks


def write() -> None:
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


def _of(client: dict[str, Any], feature: str) -> list[dict[str, str]]:
    return [check for check in client["checks"] if check["feature"] == feature]


def _cell(checks: Iterable[dict[str, str]]) -> str:
    outcomes = [not check["problem"] for check in checks]
    return "" if not outcomes else "✓" if all(outcomes) else "✗"


def _versions(client: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(client["versions"].values()))


def _problems(title: str, client: dict[str, Any]) -> list[str]:
    lines = [f"- {title}: {_plain(client['problem'])}"] if client.get("problem") else []
    failed = [check for check in client["checks"] if check["problem"]]
    return lines + [f"- {title}, {_plain(check['what'])}: {_plain(check['problem'])}" for check in failed]


def _checks(title: str, client: dict[str, Any]) -> list[str]:
    by_feature = [
        f"{FEATURES[feature]} ({'; '.join(_plain(check['what']) for check in checks)})"
        for feature in FEATURES
        if (checks := _of(client, feature))
    ]
    return [f"- {title}: {', '.join(by_feature)}."]


def _plain(text: str) -> str:
    """In one line, without what Markdown or HTML would read."""
    one_line = " ".join(text.split())
    for mark in "\\`*_<>[]|":
        one_line = one_line.replace(mark, "\\" + mark)
    return one_line
