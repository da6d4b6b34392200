"""As ``sglang.srt.plugins``: what other packages load into the engine. Ours is read from its project file."""

import importlib
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[5] / "pyproject.toml"


def load_plugins() -> None:
    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    for place in declared.values():
        module, _, name = place.partition(":")
        getattr(importlib.import_module(module), name)()
