"""As ``vllm.exceptions``: what of a request's errors is whose fault."""

from http import HTTPStatus
from typing import Any


class VLLMError(Exception):
    pass


class VLLMClientError(VLLMError):
    pass


class VLLMServerError(VLLMError):
    pass


class VLLMValidationError(VLLMClientError):
    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter, self.value = parameter, value


class GenerationError(VLLMServerError):
    def __init__(self, message: str = "Internal server error") -> None:
        super().__init__(message)
        self.status_code = HTTPStatus.INTERNAL_SERVER_ERROR


class GracefulHTTPError(VLLMError):
    pass
