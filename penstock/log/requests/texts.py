"""The text of recorded tokens, with the model's own tokenizer."""

from penstock.schemas.done import Done
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.wire import unpack_tokens


class Texts:
    """
    Args:
        model_path: a directory, bundled model or Hugging Face id, for all models; "": each model's own name.
    """

    def __init__(self, model_path: str = "") -> None:
        self._path = model_path
        self._tokenizers: dict[str, object] = {}

    def prompt(self, request: GenerateRequest) -> str:
        """The prompt as the model got it, without special tokens.

        Raises:
            ValueError: the model's tokenizer is not to be found.
        """
        if request.diffusion is not None:
            return request.diffusion.prompt
        if request.embedding is not None and request.embedding.texts:
            return "\n".join(request.embedding.texts)
        return self._decode(request.model, request.prompt)

    def outputs(self, record: Done) -> list[str]:
        """What each choice generated, without special tokens.

        Raises:
            ValueError: the model's tokenizer is not to be found.
        """
        return [self._decode(record.model, choice.tokens) for choice in record.choices]

    def token_ids(self, packed: bytes) -> tuple[int, ...]:
        """Token ids as they were recorded."""
        return tuple(unpack_tokens(packed))

    def _decode(self, model: str, packed: bytes) -> str:
        if not packed:
            return ""
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            from penstock.infra.model.modeldir import ModelError, load_tokenizer, resolve  # 40 ms, only for texts

            try:
                tokenizer = self._tokenizers[model] = load_tokenizer(resolve(self._path or model))
            except ModelError as error:
                raise ValueError(
                    f"no tokenizer for model {model!r}: name its directory with --model-path ({error})"
                ) from error
        return str(tokenizer.decode(list(unpack_tokens(packed))))  # type: ignore[attr-defined]
