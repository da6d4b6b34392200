"""The engine of an encode worker: TensorRT-LLM's ``MultimodalEncoder``, whose embeddings go into a pool of ours.

Its own hand-over is a CUDA-IPC handle that one process of the same node can use once. Ours is the embedding pool of
``workers.engines.core``, which prefill workers on any node read over NIXL, as often as a picture is asked for: so each
handle is opened here, and its content copied into slots.
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

from configs.settings import WorkerSettings
from infra.engine_args.tree import BadArguments
from infra.model import modeldir
from schemas.errors import Code
from schemas.transfer import Memory
from workers.engines.base import EngineError, EngineInfo, RequestError
from workers.engines.core.engine import EncodeEngine
from workers.engines.external.engine import shut_down
from workers.engines.native import media
from workers.engines.native.pool import dtype_name, location, zeros
from workers.engines.trtllm import api as apis
from workers.engines.trtllm.args import encoder as needed
from workers.engines.trtllm.build import arguments, wanted_of

log = structlog.get_logger("engine")

DEFAULT_SLOTS = 256

Open = Callable[[Any], Tensor]


class TrtllmVisionEncoder:
    """Implements ``workers.engines.core.embeddings.VisionEncoder``.

    Args:
        encoder: has ``generate``.
        opened: from the handle of a shared tensor to a view of it.
        image_token: what stands for a picture in a text.

    Raises:
        EngineError: it does not embed a blank picture.
    """

    def __init__(self, encoder: Any, opened: Open, image_token: str, slots: int = 0) -> None:
        self.closing = contextlib.ExitStack()  # what ends with it
        self._encoder = encoder
        self._opened = opened
        self._text = image_token
        features = self._embed([Image.new("RGB", (64, 64))])[0]
        self.slots = slots or DEFAULT_SLOTS
        self.slot_tokens, self._hidden = (int(size) for size in features.shape)
        self._slot_bytes = features.numel() * features.dtype.itemsize
        self._device = features.device
        self.data = zeros((self.slots, self.slot_tokens, self._hidden), features.dtype, features.device)

    def _embed(self, pictures: Seq[Image.Image]) -> list[Tensor]:
        """One (tokens, hidden) each.

        Raises:
            EngineError: the encoder failed.
        """
        try:
            found = []
            for answer in self._encoder.generate(
                [{"prompt": self._text, "multi_modal_data": {"image": [picture]}} for picture in pictures],
                use_tqdm=False,
            ):
                handles = answer.outputs[0].disaggregated_params.multimodal_embedding_handles
                found.append(torch.cat([self._opened(handle) for handle in handles]))
        except Exception as error:
            raise EngineError(f"TensorRT-LLM's encoder failed: {error!r}") from error
        if any(rows.dim() != 2 for rows in found):
            raise EngineError("TensorRT-LLM's encoder made something else of a picture than (tokens, hidden)")
        return found

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium.

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        if kind in media.IMAGES:
            return media.picture(raw)
        if kind == media.EMBEDDING:
            return media.rows(raw, self._hidden, self.data.dtype)
        kinds = ", ".join(sorted(media.IMAGES))
        raise RequestError(Code.invalid_request, f"media of kind {kind!r} are not taken, only {kinds}")

    def tokens(self, prepared: object) -> int:
        return len(prepared.data) if isinstance(prepared, media.Rows) else self.slot_tokens

    def fill(self, batch: Seq[tuple[list[int], object]]) -> None:
        """Embed each medium into its slots.

        Raises:
            EngineError: the encoder failed.
        """
        pictures = [(slots, medium) for slots, medium in batch if isinstance(medium, Image.Image)]
        for slots, medium in batch:
            if isinstance(medium, media.Rows):
                self._write(slots, medium.data)
        if pictures:
            features = self._embed([medium for _, medium in pictures])
            for (slots, _), rows in zip(pictures, features, strict=True):
                if len(rows) > len(slots) * self.slot_tokens:
                    raise EngineError(f"a picture became {len(rows)} embeddings, a blank one {self.slot_tokens}")
                self._write(slots, rows)
        if self._device.type == "cuda":  # other processes read the pool
            torch.cuda.synchronize(self._device)

    def _write(self, slots: list[int], rows: Tensor) -> None:
        for number, slot in enumerate(slots):
            part = rows[number * self.slot_tokens : (number + 1) * self.slot_tokens]
            self.data[slot, : len(part)] = part

    def memory(self) -> Memory:
        kind, device = location(self._device)
        return Memory(
            base=self.data.data_ptr(),
            block_bytes=self._slot_bytes,
            blocks=self.slots,
            kind=kind,
            device=device,
            layout=f"{dtype_name(self.data.dtype)}({self.slot_tokens},{self._hidden})",
        )

    def close(self) -> None:
        self.closing.close()
        self.data = torch.empty(0)


def from_settings(settings: WorkerSettings, path: Path) -> EncodeEngine:
    """Load the encoder of the model in ``path``.

    Raises:
        modeldir.ModelError: the model takes no images.
        BadArguments: the engine's arguments are wrong.
        EngineError: TensorRT-LLM is not installed, has no encoder, or it did not start.
    """
    began = time.perf_counter()
    apis.set_log_level(settings.log_level)
    api = apis.load()
    model = modeldir.load(path)
    if model.vision is None:
        raise modeldir.ModelError(f"{path} needs no encode worker: {model.no_vision}")
    if api.encoder is None or api.shared_tensor is None:
        raise EngineError(f"tensorrt_llm {api.version} has no MultimodalEncoder; use 1.2.1: {apis.INSTALL}")
    shared = api.shared_tensor
    wanted = wanted_of(settings, model.max_model_len)
    tree = needed(arguments(settings, wanted, api, path).tree)
    with contextlib.ExitStack() as undo:
        try:
            encoder = api.encoder(model=str(path), **tree)
        except ValueError as error:
            raise BadArguments([f"TensorRT-LLM {api.version} refuses its arguments: {error}"]) from error
        except Exception as error:
            raise EngineError(f"TensorRT-LLM's encoder did not start: {error!r}") from error
        undo.callback(shut_down, encoder)
        encoder = TrtllmVisionEncoder(
            encoder,
            lambda handle: shared.from_dict(handle).get_local_view(),
            model.vision.image_token,
            settings.embed_slots,
        )
        encoder.closing = undo.pop_all()
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
