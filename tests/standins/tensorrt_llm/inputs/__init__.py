"""The forms of a prompt."""

from __future__ import annotations

from typing import Any


def prompt_inputs(inputs: Any) -> dict[str, Any]:
    """Any accepted form as a dictionary. An empty list raises IndexError, as in the real one."""
    if isinstance(inputs, str):
        return {"prompt": inputs}
    if isinstance(inputs, list) and isinstance(inputs[0], int):
        return {"prompt_token_ids": inputs}
    if isinstance(inputs, dict):
        return inputs
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
