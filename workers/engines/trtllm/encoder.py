"""The engine of an encode worker: TensorRT-LLM's ``MultimodalEncoder``, whose embeddings go into a pool of ours.

It returns embeddings as CUDA-IPC handles, which one process of the same node can open once. Prefill workers on any node
read our embedding pool (``penstock.workers.engines.core``) over NIXL, any number of times. So each handle is opened
here, and its content copied into slots.
"""

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import structlog
import torch
from PIL import Image
from torch import Tensor

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.schemas.transfer import Memory
from penstock.workers.engines.core.embeddings import EncodeEngine
from penstock.workers.engines.engine_protocol import EngineError, EngineInfo
from penstock.workers.engines.external.arguments import length_limit
from penstock.workers.engines.external.runtime import bounded, shut_down
from penstock.workers.engines.native.model import embedding_slots
from penstock.workers.engines.native.model.embedding_slots import DEFAULT_SLOTS, EmbeddingSlots
from penstock.workers.engines.trtllm.api import INSTALL, load_trtllm, set_log_level
from penstock.workers.engines.trtllm.args import TrtllmSettings, encoder_arguments
from penstock.workers.engines.trtllm.build import arguments

log = structlog.get_logger("engine")

EMBED_S = 120.0  # for a batch of images; its call has no limit of its own

Open = Callable[[Any], Tensor]


class TrtllmVisionEncoder:
    """Implements ``penstock.workers.engines.core.embeddings.VisionEncoder``.

    Args:
        encoder: TensorRT-LLM's ``MultimodalEncoder``.
        open_handle: from the handle of a shared tensor to a view of it.
        vision: of the model.

    Attributes:
        pool: the embeddings.

    Raises:
        EngineError: it does not embed a blank image.
    """

    needs_grid = False

    def __init__(self, encoder: Any, open_handle: Open, vision: modeldir.Vision, slots: int = 0) -> None:
        self.resources = contextlib.ExitStack()  # closed with it
        self.encoder = encoder
        self._open_handle = open_handle
        self._text = vision.image_token
        features = self._embed([Image.new("RGB", (64, 64))])[0]
        self.slots = slots or DEFAULT_SLOTS
        tokens, hidden = (int(size) for size in features.shape)
        self.slot_tokens = tokens if vision.tiles is None else vision.image_tokens
        self._device = features.device
        self.pool = EmbeddingSlots(self.slots, self.slot_tokens, hidden, features.dtype, features.device, vision.tiles)

    def _embed(self, images: Seq[Image.Image]) -> list[Tensor]:
        """One (tokens, hidden) each."""
        try:
            embeddings = []
            prompts = [{"prompt": self._text, "multi_modal_data": {"image": [image]}} for image in images]
            for answer in bounded(self.encoder.generate, prompts, use_tqdm=False, seconds=EMBED_S):
                embeddings.append(torch.cat([self._open_handle(handle) for handle in handles_of(answer)]))
        except Exception as error:
            raise EngineError(f"TensorRT-LLM's encoder failed: {error!r}") from error
        if any(rows.dim() != 2 for rows in embeddings):
            raise EngineError(
                "TensorRT-LLM's encoder returned an image's embeddings in another shape than (tokens, hidden)"
            )
        return embeddings

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium.

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        return self.pool.decode(raw, kind)

    def tokens(self, prepared: object) -> int:
        return self.pool.tokens(prepared)

    def fill(self, batch: Seq[tuple[list[int], object]]) -> None:
        """Embed each medium into its slots.

        Raises:
            EngineError: the encoder failed.
        """
        images = [(slots, medium) for slots, medium in batch if isinstance(medium, Image.Image)]
        for slots, medium in batch:
            if isinstance(medium, embedding_slots.Rows):
                self.pool.write(slots, medium.data)
        if images:
            features = self._embed([medium for _, medium in images])
            for (slots, _), rows in zip(images, features, strict=True):
                if len(rows) > len(slots) * self.slot_tokens:
                    raise EngineError(f"an image has {len(rows)} embeddings, a blank one {self.slot_tokens}")
                self.pool.write(slots, rows)
        if self._device.type == "cuda":  # other processes read the pool
            torch.cuda.synchronize(self._device)

    def memory(self) -> Memory:
        return self.pool.memory()

    def close(self) -> None:
        self.resources.close()
        self.pool.close()


def handles_of(answer: Any) -> Seq[Any]:
    """The handles of one request's embeddings.

    They stand on the request's result: its output was filled before they were known. Other releases may put them
    there, too.

    Raises:
        EngineError: the result has none.
    """
    places = (answer, *answer.outputs)
    for params in (getattr(place, "disaggregated_params", None) for place in places):
        if params is not None and params.multimodal_embedding_handles:
            found: Seq[Any] = params.multimodal_embedding_handles
            return found
    handle = getattr(answer, "mm_embedding_handle", None)
    if handle is None:
        raise EngineError("its result has no embedding handles, neither on the request nor on its output")
    return [handle]


def encoder_from_settings(settings: WorkerSettings, path: Path) -> EncodeEngine:
    """Load the encoder of the model in ``path``.

    Raises:
        modeldir.ModelError: the model takes no images.
        BadArguments: the engine's arguments are wrong.
        EngineError: TensorRT-LLM is not installed, has no encoder, or did not start.
    """
    began = time.perf_counter()
    set_log_level(settings.log_level)
    api = load_trtllm()
    model = modeldir.load(path)
    if model.vision is None:
        raise modeldir.ModelError(f"{path} needs no encode worker: {model.no_vision}")
    if model.vision.patches is not None:
        raise modeldir.ModelError(f"{path}: images of this model are taken by --engine native only")
    if api.encoder is None or api.shared_tensor is None:
        raise EngineError(f"tensorrt_llm {api.version} has no MultimodalEncoder; use 1.2.1: {INSTALL}")
    shared = api.shared_tensor
    wanted = TrtllmSettings(settings, length_limit(settings, model.length.limit(settings.max_model_len)))
    tree = encoder_arguments(arguments(settings, wanted, api, path).tree)
    with contextlib.ExitStack() as undo:
        try:
            encoder = api.encoder(model=str(path), **tree)
        except ValueError as error:
            raise BadArguments([f"TensorRT-LLM {api.version} refuses its arguments: {error}"]) from error
        except Exception as error:
            raise EngineError(f"TensorRT-LLM's encoder did not start: {error!r}") from error
        undo.callback(shut_down, encoder)
        encoder = TrtllmVisionEncoder(
            encoder, lambda handle: shared.from_dict(handle).get_local_view(), model.vision, settings.embed_slots
        )
        encoder.resources = undo.pop_all()
    info = EngineInfo(
        name="trtllm",
        block_size=settings.block_size,
        total_blocks=encoder.slots,
        slots=settings.max_running,
        max_model_len=wanted.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        kv_events=False,
        load_seconds=time.perf_counter() - began,
    )
    return EncodeEngine(info, encoder)
