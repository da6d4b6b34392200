"""Loads a model through transformers, and checks that its checkpoint is whole and that its attention can be paged.

transformers fills what is missing in a checkpoint with random numbers, and only logs it. An index decides which file
has a tensor. A tensor that is not there, or in another file too, is a sign of a download that was cut off or of two
versions in one directory: workers of one revision would answer differently.

The shape of the KV cache is not read from the configuration: a forward pass over one token records how each layer calls
the registered attention function. Then ``verify`` compares logits with transformers' own attention, because a model
that does more around its attention than the interface passes on would give wrong output without an error.
"""

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from penstock.infra.model import patch_grid, weight_files
from penstock.infra.model.defaults import BadDefaults, Length, context_length, ids, rope_type, ropes
from penstock.infra.model.weight_files import INDEX, key_mapping
from penstock.workers.engines.native.model import attention, quantize, vision
from penstock.workers.engines.native.model.model import MediaPositions, Model, UnsupportedModel, widen_logits
from penstock.workers.engines.native.model.parallel import CannotSplit, RankGroup, split
from penstock.workers.engines.native.model.pool import KvShape
from penstock.workers.engines.native.model.verify import reference, reference_attention, verify

SHOWN = 5  # names in an error
CONVERTED_ELEMENTS = 1 << 24  # of a tensor, at once: 32 MiB in bfloat16 beside what was read
# Of a configuration: what does not change what a model computes.
_INCIDENTAL = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
}
_FLOATS = {"F64", "F32", "F16", "BF16"}  # engines convert each into any other
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str] = {}


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_files(folder: Path) -> None:
    """Compare a directory's index with what its files have. Whatever is malformed is left to the loader.

    Raises:
        UnsupportedModel: a tensor is not in the file that the index names, or is in another one, too.
    """
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return
    files = set(index.values()) | {"model.safetensors"}  # transformers prefers the latter, if it is there
    held = {name: found for name in sorted(files) if (found := _tensors(folder / name)) is not None}
    lost = sorted(name for name, file in index.items() if file not in held or name not in held[file])
    if lost:
        _refuse(folder, f"the index assigns {_named(lost)} to {index[lost[0]]}, which does not have them")
    twice = [(name, file) for file, names in held.items() for name in names if index.get(name, file) != file]
    if twice:
        names = sorted(name for name, _ in twice)
        _refuse(folder, f"{twice[0][1]} has {_named(names)} too, which the index assigns to {index[twice[0][0]]}")


def _tensors(file: Path) -> Collection[str] | None:
    """Names of a safetensors file's tensors; None: it is not there, or no such file."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            return _header.decode(stream.read(min(size, 1 << 28))).keys()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def consolidated(folder: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a folder in Mistral's own format, under the names and in the order of transformers'.

    Args:
        config: as ``written`` returns it, of a folder that ``servable.problem`` admits.
    Returns: most of them are read from their files only when they are used.
    Raises:
        UnsupportedModel: a tensor is missing, unknown, of another size, or there twice.
    """
    wanted, found = weight_files.tensors(config), dict[str, Tensor]()
    unknown = []
    for file in weight_files.mistral_weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                described = wanted.get(name)
                if described is None:
                    unknown.append(name)
                    continue
                if described.name in found:
                    _refuse(folder, f"{file.name} has {name}, which another file has, too")
                tensor = opened.get_tensor(name)
                if tuple(tensor.shape) != described.shape:
                    sizes = f"{list(tensor.shape)}, and by {weight_files.MISTRAL_PARAMS} it has {list(described.shape)}"
                    _refuse(folder, f"{name} is of size {sizes}")
                found[described.name] = _halves(tensor, described.heads) if described.heads else tensor
    if unknown:
        _refuse(folder, f"by {weight_files.MISTRAL_PARAMS} the model has no {_named(sorted(unknown))}")
    if lost := sorted(name for name, each in wanted.items() if each.name not in found):
        _refuse(folder, f"it lacks {_named(lost)}; download it again")
    return found


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head: the even ones first, then the odd ones."""
    return tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def check_sizes(model: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """
    Args:
        mismatched: tensors whose size (second) is not the one that config.json gives them (third).
    Raises:
        UnsupportedModel: there are such.
    """
    found = sorted(mismatched)
    if found:
        name, here, wanted = found[0]
        others = f"; the same holds of {_named([each[0] for each in found[1:]])}" if found[1:] else ""
        _refuse(model, f"{name} is of size {list(here)}, and by config.json it has {list(wanted)}{others}")


def check_names(model: str, loaded: Any, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Compare the names of a checkpoint's tensors with those of its model, tied ones apart.

    Args:
        missing: of the model; the checkpoint does not have them.
        unexpected: of the checkpoint, and not of the model. Most are harmless, as those of an unused head.
    Raises:
        UnsupportedModel: a tensor is missing, or the checkpoint has more layers than the model.
    """
    lacking, extra = sorted(missing), sorted(unexpected)
    kind = type(loaded).__name__
    if lacking:
        prefix = next((name[: -len(lacking[0])] for name in extra if name.endswith("." + lacking[0])), "")
        hint = f"; its names begin with {prefix!r}: rename them without it" if prefix else "; download it again"
        _refuse(model, f"{kind} has {_named(lacking)}, which the checkpoint lacks{hint}")
    known, config = set(loaded.state_dict()), loaded.config.get_text_config()
    further = int(getattr(config, "num_nextn_predict_layers", 0) or 0)  # they predict more tokens at once, unused here
    layers = int(getattr(config, "num_hidden_layers", 0) or 0) + further
    beyond = [name for name in extra if _is_layer(name, layers, known)]
    if beyond:
        _refuse(
            model, f"config.json says {layers - further} layers, and the checkpoint has {_named(beyond)} beyond them"
        )


def _is_layer(name: str, layers: int, known: Collection[str]) -> bool:
    """Whether a tensor would belong to a further layer of the model's."""
    return any(
        int(match[0]) >= layers > 0 and name[: match.start()] + "0" + name[match.end() :] in known
        for match in _NUMBER.finditer(name)
    )


def check_values(model: str, tensors: Mapping[str, Tensor]) -> None:
    """
    Raises:
        UnsupportedModel: weights are not finite, or a matrix has nothing but zeros.
    """
    broken, empty = [], []
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        least, most = _range(tensor)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            broken.append(name)
        elif tensor.dim() > 1 and not name.endswith("bias") and not (least or most):
            empty.append(name)
    if broken:
        _refuse(model, f"there are NaN or infinite weights in {_named(broken)}")
    if empty:
        _refuse(model, f"all weights are zero in {_named(empty)}")


def _range(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest value; NaN, if there is one."""
    portions = [torch.aminmax(portion) for portion in _portions(tensor)]
    return torch.stack([each.min for each in portions]).amin(), torch.stack([each.max for each in portions]).amax()


def _portions(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or copies of its parts where its data type has no arithmetic (fp8)."""
    if tensor.dtype.itemsize > 1:
        yield tensor
        return
    flat = tensor.flatten()
    for start in range(0, flat.numel(), CONVERTED_ELEMENTS):
        yield flat[start : start + CONVERTED_ELEMENTS].to(torch.bfloat16)


def check_alike(served: Path, folder: Path) -> None:
    """Check that weights can be loaded in the place of others, for engines that do not check it themselves.

    Args:
        served: folder of the weights that the engine was started with.
    Raises:
        UnsupportedModel: the configuration differs, tensors have other names or sizes, or unusable values.
    """
    old, new = configuration(str(served)), configuration(str(folder))
    changed = differences(old, new)
    if not changed and named_end_tokens(served, old) != named_end_tokens(folder, new):
        changed = ["end tokens"]
    if changed:
        raise UnsupportedModel(
            f"{folder} is of another model: {', '.join(changed)} differ; weights are replaced by those of the same "
            "configuration only"
        )
    check_files(folder)
    wanted, found = _described(served), _described(folder)
    tied = {"lm_head.weight"} if new.get_text_config().tie_word_embeddings else set()
    if lacking := sorted(wanted.keys() - found.keys() - tied):
        _refuse(folder, f"it lacks {_named(lacking)}")
    if extra := sorted(found.keys() - wanted.keys() - tied):
        _refuse(folder, f"the model has no {_named(extra)}")
    both = [(name, found[name], wanted[name]) for name in wanted.keys() & found.keys()]
    check_sizes(str(folder), [(name, one[0], other[0]) for name, one, other in both if one[0] != other[0]])
    if unlike := sorted(name for name, one, other in both if one[1] != other[1] and not {one[1], other[1]} <= _FLOATS):
        _refuse(folder, f"the model has another data type for {_named(unlike)}")
    for file in _safetensors(folder):
        with safe_open(file, framework="pt") as opened:
            check_values(str(folder), {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118


def _safetensors(folder: Path) -> list[Path]:
    """
    Raises:
        UnsupportedModel: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{folder} has no *.safetensors; weights are replaced by such files only")
    return files


def _described(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Size and data type of each tensor."""
    found = {}
    for file in _safetensors(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                found[name] = part.get_shape(), part.get_dtype()
    return found


def _named(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown}{more})"


def _refuse(model: object, reason: str) -> NoReturn:
    raise UnsupportedModel(f"the checkpoint {str(model)!r} is not whole: {reason}")


PAGED_LAYERS = {"full_attention", "sliding_attention"}
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # transformers picks their factors by the longest position in the batch


class _Probe:
    """``Paged`` that only records the arguments of each layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}  # index -> (kv heads, head dim, latent)
        self.windows: dict[int, int | None] = {}
        self.heads = 0
        self.expanded = (0, 0)  # sizes of a head's key and value that are made of latents

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: attention.AttentionParams
    ) -> Tensor:
        if layer in self.layers:
            raise attention.UnsupportedAttention("a layer that attends twice")
        self.windows[layer] = params.window
        self.heads = query.shape[1]
        if params.expansion is None:
            self.layers[layer] = (key.shape[1], key.shape[2], 0)
            return torch.zeros_like(query)
        self.layers[layer] = (1, key.shape[2] + value.shape[2], key.shape[2])
        self.expanded = (query.shape[2], params.expansion.values.shape[1])
        return query.new_zeros((*query.shape[:2], self.expanded[1]))


def load(model: str, *, device: torch.device, dtype: str = "auto", group: RankGroup | None = None) -> Model:
    """Load a directory or Hugging Face id.

    Args:
        dtype: "auto": float32 on a CPU, else what the checkpoint was saved in.
        group: of which this process loads one rank's part; None: the whole model.
    Raises:
        UnsupportedModel: files are missing, or the architecture is not a decoder with paged attention.
        EngineError: another rank is not there.
    """
    attention.register()
    config = _config(model)
    multimodal = config.model_type in vision.KINDS
    if group is not None and multimodal:
        raise UnsupportedModel(f"{config.model_type} takes images, and is not split; leave out --tensor-parallel-size")
    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    paged = {"text_config": attention.NAME} if multimodal else attention.NAME  # the tower keeps transformers' own
    loaded = weights(loader, model, config, device=device, dtype=dtype, group=group, attn_implementation=paged)
    if group is not None:
        group.connect(device)
    return describe(loaded, multimodal, written(model), group)


def describe(
    loaded: Any,
    multimodal: bool = False,
    files: Mapping[str, Any] = MappingProxyType({}),
    group: RankGroup | None = None,
) -> Model:
    """Describe a transformers model whose attention is ``attention.NAME``.

    Args:
        files: of ``written``.
        group: over which it is split; the other ranks do the same.
    Raises:
        UnsupportedModel: its attention cannot be paged.
    """
    attention.register()
    attention.cache_latents(loaded)
    widen_logits(loaded)
    shape, probe, vocab_size = _inspect(loaded, loaded.device)
    if group is not None:
        first, every = group.kv_heads
        shape = replace(shape, first_head=first, all_heads=every)
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
        heads=probe.heads,
        multimodal=multimodal,
        media_positions=_media_positions(loaded.config),
        windows=tuple(probe.windows[layer] for layer in range(shape.layers)),
        expanded=probe.expanded,
        group=group,
    )
    verify(model, reference(model), reference_attention)
    return model


def _media_positions(config: Any) -> MediaPositions | None:
    if config.model_type not in patch_grid.MODEL_TYPES:
        return None
    return MediaPositions(getattr(config.vision_config, "tokens_per_second", None))


def weights(
    loader: Any,
    model: str,
    config: Any,
    *,
    device: torch.device,
    dtype: str,
    unused: tuple[str, ...] = (),
    group: RankGroup | None = None,
    **options: Any,
) -> Any:
    """A model by one of transformers' classes, ready to compute.

    Args:
        unused: tensors whose names begin with one of these may be missing.
        group: of which only one rank's part reaches the device.
    Raises:
        UnsupportedModel: files or tensors are missing, do not match, or have no usable values.
    """
    kind = "float32" if dtype == "auto" and device.type == "cpu" else dtype
    check_files(Path(model))
    if names := key_mapping(Path(model)):
        options["key_mapping"] = dict(names)
    folder: str | None = model
    if weight_files.is_mistral_format(Path(model)):
        folder, options["state_dict"] = None, consolidated(Path(model), written(model))
        loader = loader._model_mapping[type(config)]  # the automatic ones need a folder with a config.json
    try:
        with _quiet(), quantize.as_stored(config) as plain:
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
        raise UnsupportedModel(f"cannot load {model!r}: {first_line(error)}") from error
    check_sizes(model, names["mismatched_keys"])
    missing = (name for name in names["missing_keys"] if not name.startswith(unused))
    check_names(model, loaded, missing, names["unexpected_keys"])
    if group is not None:
        try:
            split(loaded, group)
        except CannotSplit as error:
            raise UnsupportedModel(str(error)) from None
    loaded = loaded.to(device).eval().requires_grad_(False)
    check_values(model, dict(loaded.named_parameters()))
    return loaded


def vision_encoder(model: str, loaded: Any, slots: int) -> vision.TorchVisionEncoder:
    """The vision encoder of a loaded model.

    Args:
        slots: of the embedding pool; 0: the default.
    Raises:
        UnsupportedModel: its image processor or tower cannot be used.
        EngineError: there is no memory for the pool.
    """
    try:
        patches = vision.patches_of(model, loaded.config)
        return vision.TorchVisionEncoder(loaded, vision.processor(model), slots, patches)
    except vision.VisionUnsupported as error:
        raise UnsupportedModel(f"the vision encoder of {model!r} cannot be used: {first_line(error)}") from error


def configuration(model: str) -> Any:
    """The content of config.json, or what params.json stands for in Mistral's own format.

    Raises:
        UnsupportedModel: it is missing or malformed.
    """
    own = weight_files.is_mistral_format(Path(model))
    if own and (reason := weight_files.mistral_problem(Path(model))):
        raise UnsupportedModel(reason)
    try:
        if own:
            return AutoConfig.for_model(**written(model))
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # of any kind, also of values that do not fit each other
        if (Path(model) / "config.json").is_file():
            raise UnsupportedModel(f"{Path(model) / 'config.json'} cannot be used: {first_line(error)}") from error
        raise UnsupportedModel(
            f"no usable config.json for {model!r}: name a directory with config.json and *.safetensors, or a "
            f"Hugging Face id that is in the local cache or can be downloaded ({first_line(error)})"
        ) from error


def _config(model: str) -> Any:
    """The configuration, checked before gigabytes of weights are read."""
    config = configuration(model)
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{kind} is an encoder-decoder; the native engine serves decoder-only models")
    multimodal = kind in vision.KINDS
    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    architecture = loader._model_mapping.get(type(config), None)
    reason = vision.refusal(config)
    if reason and (multimodal or (architecture is None and type(config) in AutoModelForImageTextToText._model_mapping)):
        raise UnsupportedModel(f"{reason}; choose another model or engine")
    if architecture is None:
        raise UnsupportedModel(
            f"transformers has no causal language model for {kind}; choose a decoder-only checkpoint"
        )
    if not architecture.is_backend_compatible():
        raise UnsupportedModel(
            f"{architecture.__name__} does not use transformers' attention interface; choose another model, "
            "or an engine that brings its own model code (--engine)"
        )
    unsupported = set(getattr(config.get_text_config(), "layer_types", None) or ()) - PAGED_LAYERS
    if unsupported:
        raise UnsupportedModel(
            f"{kind} has {', '.join(sorted(unsupported))} layers; the native engine pages attention only"
        )
    return config


def _inspect(model: Any, device: torch.device) -> tuple[KvShape, _Probe, int]:
    """Shape of the cache, what the layers attend by, and size of the vocabulary, from one token."""
    name = type(model).__name__
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{name}.forward has no logits_to_keep; choose another model")
    try:
        with torch.inference_mode():
            output = model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1, paged=probe)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{name} cannot be paged: {first_line(error)}; choose another model or engine"
        ) from error
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(layers)):
        raise UnsupportedModel(
            f"{name} computes only {len(probe.layers)} of {layers} layers through the attention interface "
            "(state-space or linear attention elsewhere); choose another model or engine"
        )
    shapes = set(probe.layers.values())
    if len(shapes) != 1:
        raise UnsupportedModel(
            f"{name} has layers of different (KV heads, head size), or none: {sorted(shapes)}; choose another"
        )
    kv_heads, head_dim, latent = shapes.pop()
    return KvShape(layers, kv_heads, head_dim, latent=latent), probe, int(output.logits.shape[-1])


def written(model: str) -> Mapping[str, Any]:
    """The content of config.json as it is: transformers' configuration no longer tells what was left out.

    Returns: nothing for a Hugging Face id; what params.json stands for of a folder in Mistral's own format.
    """
    try:
        if weight_files.is_mistral_format(Path(model)):
            return weight_files.mistral_configuration(weight_files.read(Path(model)))
        return msgspec.json.decode((Path(model) / "config.json").read_bytes(), type=dict[str, Any])
    except (weight_files.BadParams, OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def positions(config: Any, files: Mapping[str, Any]) -> Length:
    """The longest sequence; where RoPE depends on the other sequences of a batch, only as far as it does not.

    Args:
        files: of ``written``.
    """
    text = config.get_text_config()
    named = int(getattr(text, "max_position_embeddings", 0) or 0)
    found = context_length({"max_position_embeddings": named, **(files or config.to_dict())})
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


def named_end_tokens(folder: Path, config: Any) -> tuple[int, ...]:
    """Of a folder: as ``end_tokens`` of the loaded model."""
    try:
        generation = msgspec.json.decode((folder / "generation_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        generation = {}
    for value in (generation.get("eos_token_id"), config.eos_token_id, config.get_text_config().eos_token_id):
        with suppress(BadDefaults):
            if found := ids("eos_token_id", value):
                return found
    return ()


def differences(before: Any, after: Any) -> list[str]:
    """What decides how weights are used and is not equal in two configurations."""
    old, new = before.to_dict(), after.to_dict()
    return sorted(key for key in old.keys() | new.keys() if key not in _INCIDENTAL and old.get(key) != new.get(key))


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
