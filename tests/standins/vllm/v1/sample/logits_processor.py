"""As ``vllm.v1.sample.logits_processor``: the base of processors that edit one request each."""

import inspect
from functools import partial
from typing import Any

from torch import Tensor, device


class AdapterLogitsProcessor:
    def __init__(self, vllm_config: Any, device: device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Any] = {}

    def is_argmax_invariant(self) -> bool:
        raise NotImplementedError

    def new_req_logits_processor(self, params: Any) -> Any:
        raise NotImplementedError

    def _new_state(self, params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> "partial[Tensor] | None":
        """The output is the list itself, which grows."""
        if edit := self.new_req_logits_processor(params):
            arguments = [prompt_ids, output_ids] if len(inspect.signature(edit).parameters) == 3 else [output_ids]
            return partial(edit, *arguments)
        return None
