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

    def resolved_dict(self) -> dict[str, Any]:
        """What the engine uses. The record itself keeps what it was given."""
        found = self.__dict__ | {"enable_dp_attention": False}
        if self.attention_backend == "flashmla":
            found["page_size"] = 64
        if self.speculative_algorithm and self.speculative_num_steps is None:
            draft = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
            found |= draft
        return found

    @property
    def drafts(self) -> bool:
        return str(self.speculative_algorithm).upper() in ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")

    def reserved_tokens(self) -> int:
        """``compute_num_reserved_tokens`` of the real one: tokens of a draft, in the context of each request."""
        found = self.resolved_dict()
        steps, branches = found["speculative_num_steps"], found["speculative_eagle_topk"]
        return max(steps * branches, found["speculative_num_draft_tokens"]) if self.drafts else 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


__all__ = ["ServerArgs"]
