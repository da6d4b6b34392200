from vllm.exceptions import VLLMServerError


class EngineGenerateError(VLLMServerError):
    """Raised when AsyncLLM.generate() fails. Recoverable."""


class EngineDeadError(VLLMServerError):
    """Raised when the EngineCore dies. Unrecoverable."""

    def __init__(self, *args: object, suppress_context: bool = False) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.", *args)
        self.__suppress_context__ = suppress_context
