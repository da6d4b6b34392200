"""Errors about a chat that was made of another API's body: under the names that its client used. Pure."""

from collections.abc import Mapping

from penstock.schemas.errors import ServingError


def rename(field: str, places: Mapping[str, str]) -> str:
    """A field of the chat as the client wrote it: by the longest beginning that ``places`` has."""
    for end in range(len(field), 0, -1):
        if (end == len(field) or field[end] in ".[") and (place := places.get(field[:end])) is not None:
            return place + field[end:]
    return field


def renamed(error: ServingError, places: Mapping[str, str]) -> ServingError:
    """The error with the client's name for the field, in its text too."""
    if error.param is None:
        return error
    param = rename(error.param, places)
    if param == error.param:
        return error
    message = error.message.replace(error.param, param)
    return ServingError(error.code, message, param=param, retry_after=error.retry_after)
