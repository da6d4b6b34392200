"""What SGLang loads into its own processes (entry point ``sglang.srt.plugins``).

SGLang begins each request at the beginning of its grammar. An answer that another worker began is part of the prompt
here, so its grammar is moved after those tokens. They are named in a comment before the grammar's text: without this
plugin the engine begins at the beginning, and the worker, which follows the tokens, fails the request.
"""

import functools
import importlib
import os
from collections.abc import Sequence as Seq
from typing import Any

ACTIVE = "PENSTOCK_SGLANG_PLUGIN"  # set for the engine's processes; elsewhere SGLang is left as it is
_MARK = "// penstock: behind "


def behind(grammar: str, earlier: Seq[int]) -> str:
    """A grammar's text for an answer that continues ``earlier``."""
    return f"{_MARK}{','.join(map(str, earlier))}\n{grammar}" if earlier else grammar


def split(text: str) -> tuple[str, list[int]]:
    """A grammar's text and the tokens it continues."""
    if not text.startswith(_MARK):
        return text, []
    first, _, grammar = text.partition("\n")
    return grammar, [int(token) for token in first.removeprefix(_MARK).split(",")]


def register() -> None:
    """Called by SGLang once in each of its processes."""
    if not os.environ.get(ACTIVE):
        return
    module = importlib.import_module("sglang.srt.constrained.llguidance_backend")
    dispatch = module.GuidanceBackend.dispatch_ebnf
    if getattr(dispatch, ACTIVE, False):
        return

    @functools.wraps(dispatch)
    def dispatch_behind(backend: Any, key_string: str) -> Any:
        text, earlier = split(key_string)
        grammar = dispatch(backend, text)
        if earlier and not isinstance(grammar, module.InvalidGrammarObject):
            try:
                for token in earlier:
                    grammar.accept_token(token)
            except ValueError as error:
                return module.InvalidGrammarObject(f"the tokens so far do not match the constraint: {error}")
        return grammar

    setattr(dispatch_behind, ACTIVE, True)
    module.GuidanceBackend.dispatch_ebnf = dispatch_behind
