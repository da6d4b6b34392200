"""Loads a model through transformers, and checks that its attention can be paged.

The shape of the KV cache is not read from the configuration: a forward pass over one token records how each layer
calls the registered attention function. Then ``verify`` compares logits with transformers' own attention, because a
model that does more around its attention than the interface passes on would give wrong output without an error.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from penstock.infra.model import mistral_format
from penstock.infra.model.defaults import ids
from penstock.infra.model.lengths import Length, length, rope_type, ropes
from penstock.infra.model.weight_files import key_mapping
from penstock.workers.engines.native.model import attention, checkpoint, mxfp4, vision
from penstock.workers.engines.native.model.model import Model, ModelError
from penstock.workers.engines.native.model.pool import KvShape
from penstock.workers.engines.native.model.verify import reference, reference_attention, verify

PAGED_LAYERS = {"full_attention", "sliding_attention"}
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # transformers picks their factors by the longest position in the batch


class _Probe:
    """``Paged`` that only records the arguments of each layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int]] = {}  # index -> (kv heads, head dim)
        self.windows: dict[int, int | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: attention.AttentionParams
    ) -> Tensor:
        if layer in self.layers:
            raise attention.Unsupported("a layer that attends twice")
        self.layers[layer] = (key.shape[1], key.shape[2])
        self.windows[layer] = params.window
        return torch.zeros_like(query)


def load(model: str, *, device: torch.device, dtype: str = "auto") -> Model:
    """Load a directory or Hugging Face id.

    Args:
        dtype: "auto": float32 on a CPU, else what the checkpoint was saved in.
    Raises:
        ModelError: files are missing, or the architecture is not a decoder with paged attention.
    """
    attention.register()
    config = _config(model)
    multimodal = config.model_type in vision.KINDS
    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    paged = {"text_config": attention.NAME} if multimodal else attention.NAME  # the tower keeps transformers' own
    loaded = weights(loader, model, config, device=device, dtype=dtype, attn_implementation=paged)
    return describe(loaded, multimodal, written(model))


def describe(loaded: Any, multimodal: bool = False, files: Mapping[str, Any] = MappingProxyType({})) -> Model:
    """Describe a transformers model whose attention is ``attention.NAME``.

    Args:
        files: of ``written``.
    Raises:
        ModelError: its attention cannot be paged.
    """
    attention.register()
    shape, windows, vocab_size = _inspect(loaded, loaded.device)
    text = loaded.config.get_text_config()
    longest = positions(loaded.config, files)
    model = Model(
        forward=loaded,
        shape=shape,
        dtype=loaded.dtype,
        device=loaded.device,
        vocab_size=vocab_size,
        max_positions=longest.tokens,
        most_positions=longest.most,
        eos_token_ids=end_tokens(loaded),
        heads=text.num_attention_heads,
        multimodal=multimodal,
        windows=windows,
    )
    verify(model, reference(model), reference_attention)
    return model


def weights(
    loader: Any,
    model: str,
    config: Any,
    *,
    device: torch.device,
    dtype: str,
    unused: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """A model by one of transformers' classes, ready to compute.

    Args:
        unused: tensors whose names begin with one of these may be missing.
    Raises:
        ModelError: files or tensors are missing, do not match, or have no usable values.
    """
    kind = "float32" if dtype == "auto" and device.type == "cpu" else dtype
    checkpoint.check_files(Path(model))
    if names := key_mapping(Path(model)):
        options["key_mapping"] = dict(names)
    folder: str | None = model
    if mistral_format.is_own(Path(model)):
        folder, options["state_dict"] = None, checkpoint.consolidated(Path(model), written(model))
        loader = loader._model_mapping[type(config)]  # the automatic ones need a folder with a config.json
    try:
        with _quiet(), mxfp4.as_stored(config) as plain:
            loaded, names = loader.from_pretrained(
                folder,
                config=plain,
                dtype=kind,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of transformers' and its helpers, of any kind
        raise ModelError(f"cannot load {model!r}: {first_line(error)}") from error
    checkpoint.check_sizes(model, names["mismatched_keys"])
    missing = (name for name in names["missing_keys"] if not name.startswith(unused))
    checkpoint.check_names(model, loaded, missing, names["unexpected_keys"])
    loaded = loaded.to(device).eval().requires_grad_(False)
    checkpoint.check_values(model, loaded)
    return loaded


def vision_encoder(model: str, loaded: Any, slots: int) -> vision.TorchVisionEncoder:
    """The vision encoder of a loaded model.

    Args:
        slots: of the embedding pool; 0: the default.
    Raises:
        ModelError: its image processor or tower cannot be used.
        EngineError: there is no memory for the pool.
    """
    try:
        return vision.TorchVisionEncoder(loaded, vision.processor(model), slots)
    except vision.VisionUnsupported as error:
        raise ModelError(f"the vision encoder of {model!r} cannot be used: {first_line(error)}") from error


def configuration(model: str) -> Any:
    """The content of config.json, or what params.json stands for in Mistral's own format.

    Raises:
        ModelError: it is missing or malformed.
    """
    own = mistral_format.is_own(Path(model))
    if own and (reason := mistral_format.problem(Path(model))):
        raise ModelError(reason)
    try:
        if own:
            return AutoConfig.for_model(**written(model))
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # of any kind, also of values that do not fit each other
        if (Path(model) / "config.json").is_file():
            raise ModelError(f"{Path(model) / 'config.json'} cannot be used: {first_line(error)}") from error
        raise ModelError(
            f"no usable config.json for {model!r}: name a directory with config.json and *.safetensors, or a "
            f"Hugging Face id that is in the local cache or can be downloaded ({first_line(error)})"
        ) from error


def _config(model: str) -> Any:
    """The configuration, checked before gigabytes of weights are read."""
    config = configuration(model)
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} is an encoder-decoder; the native engine serves decoder-only models")
    multimodal = kind in vision.KINDS
    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    architecture = loader._model_mapping.get(type(config), None)
    reason = vision.refusal(config)
    if reason and (multimodal or (architecture is None and type(config) in AutoModelForImageTextToText._model_mapping)):
        raise ModelError(f"{reason}; choose another model or engine")
    if architecture is None:
        raise ModelError(f"transformers has no causal language model for {kind}; choose a decoder-only checkpoint")
    if not architecture.is_backend_compatible():
        raise ModelError(
            f"{architecture.__name__} does not use transformers' attention interface; choose another model, "
            "or an engine that brings its own model code (--engine)"
        )
    unsupported = set(getattr(config.get_text_config(), "layer_types", None) or ()) - PAGED_LAYERS
    if unsupported:
        raise ModelError(f"{kind} has {', '.join(sorted(unsupported))} layers; the native engine pages attention only")
    return config


def _inspect(model: Any, device: torch.device) -> tuple[KvShape, tuple[int | None, ...], int]:
    """Shape of the cache, windows of the layers, and size of the vocabulary, from a forward pass over one token."""
    name = type(model).__name__
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name}.forward has no logits_to_keep; choose another model")
    try:
        with torch.inference_mode():
            output = model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1, paged=probe)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ModelError(f"{name} cannot be paged: {first_line(error)}; choose another model or engine") from error
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(layers)):
        raise ModelError(
            f"{name} computes only {len(probe.layers)} of {layers} layers through the attention interface "
            "(state-space or linear attention elsewhere); choose another model or engine"
        )
    shapes = set(probe.layers.values())
    if len(shapes) != 1:
        raise ModelError(
            f"{name} has layers of different (KV heads, head size), or none: {sorted(shapes)}; choose another"
        )
    kv_heads, head_dim = shapes.pop()
    windows = tuple(probe.windows[layer] for layer in range(layers))
    return KvShape(layers, kv_heads, head_dim), windows, int(output.logits.shape[-1])


def written(model: str) -> Mapping[str, Any]:
    """The content of config.json as it is: transformers' configuration no longer tells what was left out.

    Returns: nothing for a Hugging Face id; what params.json stands for of a folder in Mistral's own format.
    """
    try:
        if mistral_format.is_own(Path(model)):
            return mistral_format.configuration(mistral_format.read(Path(model)))
        return msgspec.json.decode((Path(model) / "config.json").read_bytes(), type=dict[str, Any])
    except (mistral_format.BadParams, OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def positions(config: Any, files: Mapping[str, Any]) -> Length:
    """The longest sequence; where RoPE depends on the other sequences of a batch, only as far as it does not.

    Args:
        files: of ``written``.
    """
    text = config.get_text_config()
    named = int(getattr(text, "max_position_embeddings", 0) or 0)
    found = length({"max_position_embeddings": named, **(files or config.to_dict())})
    for rope in ropes(config.to_dict()):
        if rope_type(rope) in BATCH_DEPENDENT_ROPE:
            original = int(rope.get("original_max_position_embeddings") or named or found.tokens)
            least = min(found.tokens, original)
            return Length(least, least, found.source)
    return found


def end_tokens(model: Any) -> tuple[int, ...]:
    for source in (model.generation_config, model.config, model.config.get_text_config()):
        if found := ids("eos_token_id", getattr(source, "eos_token_id", None)):
            return found
    return ()


def first_line(error: BaseException) -> str:
    """What an error says, in one line; with its kind, where that says more than the text."""
    head, *more = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    text = f"{head} {more[0]}" if more and head.endswith(":") else head
    plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    return text if plain or text == type(error).__name__ else f"{type(error).__name__}: {text}"


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars in a worker's log."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
