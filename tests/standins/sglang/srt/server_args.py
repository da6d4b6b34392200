"""As ``sglang.srt.server_args``: the arguments, of which the stand-in heeds the few that its engine has a use for."""

import ast
import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[2] / "sglang_signatures.json"


def _value(source: str) -> Any:
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):  # a constant of its module, or none
        return None


_DEFAULTS = {name: _value(source) for name, source in json.loads(RECORDED.read_text())["ServerArgs"].items()}


class ServerArgs:
    """A record: an unknown keyword is a TypeError."""

    __struct_fields__ = tuple(_DEFAULTS)

    def __init__(self, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in _DEFAULTS:
                raise TypeError(f"ServerArgs.__init__() got an unexpected keyword argument {name!r}")
        self.__dict__.update(_DEFAULTS | kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


__all__ = ["ServerArgs"]
