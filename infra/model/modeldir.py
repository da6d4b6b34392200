"""A model directory without its weights: tokenizer, chat template, limits, end tokens, images, revision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from tokenizers import Tokenizer

from penstock import configs
from penstock.infra.model import defaults as generation_defaults
from penstock.infra.model import patch_grid, text_files
from penstock.infra.model.defaults import BadDefaults, GenerationDefaults, Length, of_text
from penstock.infra.model.patch_grid import BadGrid, BadTiles, PatchGrid, Tiles, tiles_of
from penstock.infra.model.text_files import UnreadableTemplate, special_tokens, template_sources, token_text
from penstock.infra.model.weight_files import (
    MISTRAL_PARAMS,
    broken_link,
    is_mistral_format,
    is_pointer,
    mistral_configuration,
    mistral_length,
    weight_files,
)
from penstock.infra.text.chat_template import ChatTemplate, TemplateError
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.encoder import PlainText, TextEncoder
from penstock.schemas.requests import Sampling

BUNDLED = ("demo", "demo-vision", "tiny")
MODELS = Path(configs.__file__).parent / "models"  # bundled models, loaded by name
DEMO = MODELS / "demo"  # trained to answer
TINY = MODELS / "tiny"  # random weights, long context, common words in few tokens: for the mock engine

_DECIDING = (
    *("config.json", "generation_config.json", "tokenizer.json"),
    *("preprocessor_config.json", "processor_config.json", "model_index.json"),
)
VIDEO_PROCESSOR = "video_preprocessor_config.json"
WHOLE_BYTES = 256 << 20  # weights up to this size are hashed as a whole
SAMPLES = 2048
SAMPLE_BYTES = 1 << 16


class ModelError(Exception):
    """A model directory cannot be used; the text names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Vision:
    """How prompts of this model represent images.

    Attributes:
        image_token: text that the chat template writes once per image.
        image_token_id: its id; the prompt contains it once per embedding.
        image_tokens: embeddings per image of any size; with ``tiles`` or ``patches`` no image has fewer.
        hidden: width of an embedding; 0: config.json leaves it to the architecture's default.
        tiles: None: all images take equally many, or ``patches`` says how many.
        patches: of a model that sees images at any resolution.
        video_token, video_token_id: likewise for a video; "": the model takes none.
    """

    image_token: str
    image_token_id: int
    image_tokens: int
    hidden: int
    tiles: Tiles | None = None
    patches: PatchGrid | None = None
    video_token: str = ""
    video_token_id: int = -1

    def tokens_of(self, height: int, width: int) -> int:
        """Embeddings of an image of this size in pixels.

        Raises:
            BadGrid: the model takes none of this shape.
        """
        if self.patches is not None:
            return self.patches.image(height, width).tokens
        return self.image_tokens if self.tiles is None else self.tiles.tokens(height, width)

    @property
    def placeholders(self) -> dict[int, str]:
        """Text by id of the tokens that media replace."""
        found = {self.image_token_id: self.image_token}
        return found | {self.video_token_id: self.video_token} if self.video_token else found


@dataclass(frozen=True, slots=True)
class ModelDir:
    """One model, as gateways and workers use it. Lengths are in tokens.

    Attributes:
        revision: digest of weights and configuration; equal wherever the directory has the same content.
        tokenizer_digest: digest of the tokenizer; with another one the same ids mean different text.
        max_model_len: prompt + output, unless a user asks for more.
        length: the same, what a user may ask for, and what says so.
        vocab_size: width of the logits; token ids of requests are below it.
        sampling: the model's defaults, from generation_config.json.
        defaults: the same, and what else that file sets.
        vision: None: the model takes no images.
        no_vision: why it takes none; "": it does.
        plain: keeps clients' text from becoming control tokens.
        added_tokens: id by text of the tokens beside the vocabulary's own, special or not.
    """

    path: Path
    name: str
    revision: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    encoder: TextEncoder
    detokenizer: Detokenizer
    template: ChatTemplate | None
    sampling: Sampling
    plain: PlainText
    vision: Vision | None = None
    no_vision: str = ""
    tokenizer_digest: str = ""
    length: Length = generation_defaults.NO_LENGTH
    defaults: GenerationDefaults = generation_defaults.NO_DEFAULTS
    added_tokens: Mapping[str, int] = field(default_factory=dict)


def split_name(model: str) -> tuple[str, str]:
    """What ``NAME=FOLDER`` says; a name "" where there is only a folder, which may have an equals sign of its own. NAME
    may be several, with spaces between."""
    name, equals, folder = model.partition("=")
    if not equals or "/" in name.removeprefix("./")[:1] or Path(model).expanduser().is_dir():
        return "", model
    return name.strip(), folder.strip()


def on_hub(model: str) -> bool:
    """Whether this can only be a Hugging Face id: neither a directory, nor a bundled model, nor written as a path."""
    if not model or model in BUNDLED or Path(model).expanduser().is_dir():
        return False
    return not model.startswith((".", "/", "~")) and model.count("/") <= 1


def resolve(model: str, *, weights: bool = False) -> Path:
    """The directory of a model.

    Args:
        model: a directory, the name of a bundled model, or a Hugging Face id; "": the demo model.
        weights: fetch the weights of a Hugging Face model too, not only its configuration and tokenizer.
    Raises:
        ModelError: not a directory, and not available under that id.
    """
    if not model:
        return DEMO
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model in BUNDLED:
        return MODELS / model
    if not on_hub(model):
        raise ModelError(f"model {model!r} is not a directory; name a directory or a Hugging Face id 'owner/name'")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "tokenizer*", "tiktoken.model", "tokenization_*.py"] + (
        ["*.safetensors"] if weights else []
    )
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        raise ModelError(f"model {model!r} is not a directory, and {_not_fetched(model, error)}") from error


def _not_fetched(model: str, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"the Hugging Face hub gives it on request only: ask at https://huggingface.co/{model}, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the Hugging Face hub has no model of that name, or it is private: correct the name, or set HF_TOKEN"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the Hugging Face hub was not reached, and its cache here has no copy: name a folder, or set HF_ENDPOINT"
    return f"it could not be fetched from the Hugging Face hub: {' '.join(str(error).split())[:300]}"


def source_of(model: str, path: Path) -> str:
    """What ``resolve`` finds the same model by, also in another process and another working directory.

    Args:
        model: as it was given to ``resolve``, and what it found.
    """
    if path.parent == MODELS:
        return path.name
    return str(path.absolute()) if Path(model).expanduser().is_dir() else model


def load(path: Path, *, name: str = "", chat_template: str = "") -> ModelDir:
    """Read a model directory.

    Args:
        name: the model's name; default: the directory's ("owner/name" for a Hugging Face snapshot).
        chat_template: a Jinja file that replaces the model's own template.
    Raises:
        ModelError: a file is missing or malformed, or the chat template cannot be used.
    """
    if reason := broken_link(path):
        raise ModelError(reason)
    own = is_mistral_format(path)
    params = read_json(path / MISTRAL_PARAMS) if own else {}
    config = mistral_configuration(params) if own else read_json(path / "config.json", needed=True)
    generation = read_json(path / "generation_config.json")
    special = {**text_files.named(path), **read_json(path / "tokenizer_config.json")}
    tokenizer = load_tokenizer(path)
    length = mistral_length(params) if own else generation_defaults.context_length(config, special)
    try:
        defaults = generation_defaults.defaults(generation)
        ends = _eos(config, generation, special, tokenizer)
    except BadDefaults as error:
        raise ModelError(f"{path / 'generation_config.json'}: {error}") from error
    vision, no_vision = None, ""
    try:
        vision = _vision(path, config, special, tokenizer)
    except _NoVision as reason:
        no_vision = str(reason)
    return ModelDir(
        path=path,
        name=name or name_of(path),
        revision=revision(path),
        max_model_len=length.tokens,
        length=length,
        vocab_size=int(of_text(config, "vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True)),
        eos_token_ids=ends,
        tokenizer=tokenizer,
        encoder=TextEncoder(tokenizer),
        detokenizer=Detokenizer(tokenizer),
        template=_template(path, special, chat_template),
        sampling=defaults.sampling,
        defaults=defaults,
        plain=PlainText(tokenizer, vision.placeholders.values() if vision is not None else ()),
        vision=vision,
        no_vision=no_vision,
        tokenizer_digest=tokenizer_digest(path),
        added_tokens={entry.content: token for token, entry in tokenizer.get_added_tokens_decoder().items()},
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """The fast tokenizer, without truncation or padding.

    Raises:
        ModelError: there is no file of one, or it is malformed.
    """
    file = text_files.file_of(path) or path / text_files.FAST
    try:
        tokenizer = text_files.read(path)
    except text_files.BadTokenizer as error:
        raise ModelError(str(error)) from error
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} cannot be read: {_pointer(file) or error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def revision(path: Path) -> str:
    """A digest of everything that decides a model's output: a Hugging Face snapshot's commit, else blake3 over
    configuration, tokenizer and weights.

    Of weights beyond ``WHOLE_BYTES`` it reads evenly spread samples: further training changes nearly all of them.
    """
    real = path.resolve()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        return real.name
    digest = blake3()
    videos = [VIDEO_PROCESSOR] if (path / VIDEO_PROCESSOR).is_file() else []
    for part in (*_DECIDING, *([MISTRAL_PARAMS] if is_mistral_format(path) else []), *videos):
        data = (path / part).read_bytes() if (path / part).is_file() else b""
        digest.update(len(data).to_bytes(8, "little") + data)
    tokenizer = text_files.file_of(path)
    if tokenizer is not None and tokenizer.name != text_files.FAST:
        digest.update(tokenizer.read_bytes())
    weights = weight_files(path)
    total = sum(file.stat().st_size for file in weights)
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        _add_content(digest, file, size, SAMPLES * size // total if total > WHOLE_BYTES else 0)
    return digest.hexdigest(length=16)


def _add_content(digest: Any, file: Path, size: int, samples: int) -> None:
    """Hash a file. ``samples``: how many parts to read, the first and the last included; 0: the whole file."""
    with file.open("rb", buffering=0) as opened:
        if not samples:
            while part := opened.read(SAMPLE_BYTES):
                digest.update(part)
            return
        last = max(0, size - SAMPLE_BYTES)
        for number in range(max(2, samples)):
            opened.seek(number * last // (max(2, samples) - 1))
            digest.update(opened.read(SAMPLE_BYTES))


def tokenizer_digest(path: Path) -> str:
    """blake3 over everything that decides how text becomes token ids: equal digests mean equal ids.

    Raises:
        ModelError: tokenizer.json is malformed.
    """
    file = text_files.file_of(path)
    if file is not None and file.name != text_files.FAST:
        return blake3(file.read_bytes()).hexdigest(length=16)
    described = read_json(path / "tokenizer.json", needed=True)
    for part in ("truncation", "padding"):  # never used here
        described.pop(part, None)
    return blake3(msgspec.json.encode(described, order="sorted")).hexdigest(length=16)


def name_of(path: Path) -> str:
    """The directory's name; "owner/name" for ``models--owner--name/snapshots/<commit>`` of the hub's cache."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def read_json(file: Path, *, needed: bool = False) -> dict[str, Any]:
    """An object in a file of a model; empty if there is no file.

    Raises:
        ModelError: it is needed and missing, or malformed.
    """
    if not file.is_file():
        if needed:
            raise ModelError(f"{file} is missing; is {file.parent} a model directory?")
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {_pointer(file) or error}") from error


def _pointer(file: Path) -> str:
    try:
        return "it is a Git LFS pointer; run `git lfs pull` in the folder" if is_pointer(file) else ""
    except OSError:
        return ""


def _eos(
    config: Mapping[str, Any], generation: Mapping[str, Any], special: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """End tokens: from generation_config.json, else config.json; and always the tokenizer's own."""
    named = generation_defaults.ids("eos_token_id", generation.get("eos_token_id"))
    named = named or generation_defaults.ids("eos_token_id", of_text(config, "eos_token_id"))
    text = token_text(special.get("eos_token"))
    own = tokenizer.token_to_id(text) if text else None
    return tuple(dict.fromkeys([*named, *([] if own is None else [own])]))


def _template(path: Path, special: Mapping[str, Any], override: str) -> ChatTemplate | None:
    try:
        sources = template_sources(path, special, override, read_json)
    except UnreadableTemplate as error:
        raise ModelError(str(error)) from error
    if sources.default is None:
        return None
    try:
        return ChatTemplate(sources.default, special_tokens(path, special, read_json), sources.named)
    except TemplateError as error:
        raise ModelError(f"chat template {sources.file} cannot be used: {error}") from error


class _NoVision(Exception):
    """The model takes no images; the text says why."""


def _vision(path: Path, config: Mapping[str, Any], special: Mapping[str, Any], tokenizer: Tokenizer) -> Vision:
    """The images of LLaVA and LLaVA-NeXT models, which become embeddings without tokens around them; those of
    ``patch_grid.MODEL_TYPES``, and their videos."""
    kind, tower = config.get("model_type"), config.get("vision_config")
    if kind not in ("llava", "llava_next", *patch_grid.MODEL_TYPES):
        description = (
            "is a vision model that Penstock does not support" if tower or "vision" in str(kind) else "takes no images"
        )
        raise _NoVision(f"model type {kind!r} {description}")
    if not isinstance(tower, dict):
        raise _NoVision("config.json has no vision_config")
    processor = read_json(path / "processor_config.json")
    if kind in patch_grid.MODEL_TYPES:
        return _any_resolution(path, config, processor, tokenizer)
    tokens = _image_tokens(path, config, tower, processor)
    token_id = next((i for key in ("image_token_id", "image_token_index") if isinstance(i := config.get(key), int)), -1)
    text = next((token_text(t) for source in (processor, special) if (t := source.get("image_token"))), None)
    text = text or (tokenizer.id_to_token(token_id) if token_id >= 0 else None)
    if text is None or tokenizer.token_to_id(text) != token_id:
        raise _NoVision(f"image token {text!r} and its id {token_id} in config.json do not match tokenizer.json")
    hidden = int(of_text(config, "hidden_size") or 0)
    return Vision(text, token_id, tokens, hidden, _tiles(path, config, tokens) if kind == "llava_next" else None)


def _any_resolution(
    path: Path, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: Tokenizer
) -> Vision:
    try:
        patches = patch_grid.patch_grid(config, *processor_settings(path))
    except BadGrid as error:
        raise _NoVision(str(error)) from None
    found = [(config.get(key), key) for key in ("image_token_id", "video_token_id")]
    texts = [tokenizer.id_to_token(token) or "" if isinstance(token, int) else "" for token, _ in found]
    for (token, key), text in zip(found, texts, strict=True):
        if not text:
            raise _NoVision(f"config.json has {key} {token}, which is not in tokenizer.json")
    (image, video), hidden = (int(token or 0) for token, _ in found), int(of_text(config, "hidden_size") or 0)
    return Vision(texts[0], image, patches.least_tokens, hidden, None, patches, texts[1], video)


def processor_settings(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a model's image processor, and of its video processor, as far as its folder has them.

    Raises:
        ModelError: a file is malformed.
    """
    both = read_json(path / "processor_config.json")
    images = read_json(path / "preprocessor_config.json") or both.get("image_processor") or {}
    return images, read_json(path / VIDEO_PROCESSOR) or both.get("video_processor") or {}


def _tiles(path: Path, config: Mapping[str, Any], base: int) -> Tiles:
    try:
        tiles = tiles_of(config, base)
    except BadTiles as error:
        raise _NoVision(str(error)) from None
    cut = read_json(path / "preprocessor_config.json").get("image_grid_pinpoints")
    if cut is not None and {tuple(each) for each in cut} != set(tiles.canvases):
        raise _NoVision("config.json and preprocessor_config.json have different image_grid_pinpoints")
    return tiles


def _image_tokens(path: Path, config: Mapping[str, Any], tower: Mapping[str, Any], processor: Mapping[str, Any]) -> int:
    """Embeddings per image: the vision tower's patches, and its class token if that is kept."""
    side, patch = tower.get("image_size"), tower.get("patch_size")
    if not isinstance(side, int) or not isinstance(patch, int) or not 0 < patch <= side:
        raise _NoVision(f"config.json has vision_config with image_size {side} and patch_size {patch}")
    images = read_json(path / "preprocessor_config.json") or processor.get("image_processor") or {}
    size = images.get("crop_size") if images.get("do_center_crop", True) else images.get("size")
    size = {"height": size, "width": size} if isinstance(size, int) else size
    if isinstance(size, dict) and (size.get("height", side), size.get("width", side)) != (side, side):
        raise _NoVision(f"preprocessor_config.json makes images of {size}, the vision tower takes {side} pixels")
    # Only CLIP's towers have a class token. The "default" strategy drops the first embedding, which should be that one.
    extra = processor.get("num_additional_image_tokens", int(tower.get("model_type") == "clip_vision_model"))
    first = int(config.get("vision_feature_select_strategy", "default") == "default")
    tokens = (side // patch) ** 2 + extra - first
    configured = config.get("image_seq_length", tokens)
    if configured != tokens:
        raise _NoVision(f"config.json has image_seq_length {configured}, its vision tower makes {tokens} embeddings")
    return int(tokens)
