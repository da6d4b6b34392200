"""Prompt dictionaries, and the loader of media (main line of the 1.2 era)."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_embeddings: NotRequired[dict[str, Any]]
    query: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_embeddings: NotRequired[dict[str, Any]]
    query_token_ids: NotRequired[list[int]]


def prompt_inputs(inputs: Any) -> dict[str, Any]:
    """Any accepted form as a dictionary. An empty list raises IndexError, as in the real one."""
    if isinstance(inputs, str):
        return {"prompt": inputs}
    if isinstance(inputs, list) and isinstance(inputs[0], int):
        return {"prompt_token_ids": inputs}
    if isinstance(inputs, dict):
        return inputs
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")


def default_multimodal_input_loader(
    *,
    tokenizer: Any,
    model_dir: str,
    model_type: str,
    modality: str,
    prompts: list[str],
    media: Any = None,
    image_data_format: str = "pt",
    num_frames: int = 8,
    mm_embeddings: Any = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Chat-templated prompts with their images; files only (the real one would fetch any URL)."""
    if (media is None) == (mm_embeddings is None):
        raise ValueError("Exactly one of media and mm_embeddings must be given")
    if modality not in ("image", "multiple_image", "video", "audio", "image_audio", "mixture_text_image"):
        raise ValueError(f"Unsupported modality: {modality}")
    if mm_embeddings is not None and modality not in ("image", "multiple_image"):
        raise ValueError(f"Modality {modality} takes no embeddings")
    if modality not in ("image", "multiple_image"):
        raise NotImplementedError("this stand-in knows images only")
    from PIL import Image

    def many(given: Any) -> list[Any]:
        return list(given) if isinstance(given, list | tuple) else [given]

    found: list[dict[str, Any]] = []
    sources = media if media is not None else mm_embeddings
    for prompt, given in zip(prompts, sources, strict=True):
        items = many(given)
        content = "<image>\n" * len(items) + prompt
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        if media is not None:
            images = [item if isinstance(item, Image.Image) else Image.open(item).convert("RGB") for item in items]
            found.append({"prompt": text, "multi_modal_data": {"image": images}})
        else:
            found.append({"prompt": text, "multi_modal_embeddings": {"image": items}})
    return found


__all__ = ["TextPrompt", "TokensPrompt", "default_multimodal_input_loader", "prompt_inputs"]
