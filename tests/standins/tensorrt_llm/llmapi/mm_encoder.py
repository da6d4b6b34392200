"""``MultimodalEncoder``: images to embeddings that another engine of this node takes over by handle."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
from tensorrt_llm.executor.result import ErrorResponse, Response
from tensorrt_llm.inputs import prompt_inputs
from tensorrt_llm.llmapi.llm import BaseLLM, RequestOutput, _ids, image_hash, words_of
from tensorrt_llm.sampling_params import SamplingParams


class MultimodalEncoder(BaseLLM):
    def __init__(
        self,
        model: str | Path,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("max_num_tokens", 16384)
        super().__init__(
            model,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            mm_encoder_only=True,
            **kwargs,
        )
        if not self._model.sees:
            self.shutdown()
            raise ValueError("this model has no multimodal encoder")

    def generate_async(self, inputs: Any, sampling_params: SamplingParams | None = None) -> RequestOutput:
        self._check_alive()
        params = self._prepare(sampling_params)
        given = prompt_inputs(inputs)
        data = given.get("multi_modal_data")
        if not data or "image" not in data:
            raise ValueError("the encoder takes multi_modal_data with images")
        if given.get("mm_processor_kwargs", {}) is None:
            raise TypeError("argument after ** must be a mapping, not NoneType")
        images = data["image"] if isinstance(data["image"], list) else [data["image"]]
        result = RequestOutput(next(_ids), given.get("prompt"), given.get("prompt_token_ids") or [], params, None)

        def compute() -> None:
            try:
                handle = SharedTensorContainer.from_tensor(torch.cat(self._model.embed(images))).dump_to_dict()
                hashes = [words_of(image_hash(images))]
                answer: object = Response(
                    0,
                    [],
                    None,
                    None,
                    None,
                    "length",
                    None,
                    [],
                    0,
                    1,
                    None,
                    None,
                    embedding_handle=handle,
                    hashes=hashes,
                )
            except Exception as error:
                answer = ErrorResponse(str(error))
            result._inbox.put(answer)

        threading.Thread(target=compute, name="trtllm-standin-encoder", daemon=True).start()
        return result

    def generate(self, inputs: Any, use_tqdm: bool = True) -> Any:  # type: ignore[override]
        """Blocks: call it in a thread."""
        single = not isinstance(inputs, list)
        results = [self.generate_async(each) for each in ([inputs] if single else inputs)]
        done = [result.result() for result in results]
        return done[0] if single else done
