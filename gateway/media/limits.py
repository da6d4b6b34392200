"""Limits on the media of requests, and the error for a medium that exceeds or violates one."""

from typing import NamedTuple

from penstock.configs.settings import GatewaySettings
from penstock.schemas.errors import Code, ServingError

_MAX_MESSAGE = 600  # characters; a message may quote the client's URL


class MediaLimits(NamedTuple):
    """
    Attributes:
        max_bytes: of one image or embedding file.
        max_pixels: of one image, width x height.
        timeout_s: for fetching one medium.
        root: folder whose files may be named; "": none.
        private: fetch from any address and port, not only from public ones at 80 and 443.
    """

    max_bytes: int
    max_pixels: int
    timeout_s: float
    root: str = ""
    private: bool = False

    @classmethod
    def of(cls, settings: GatewaySettings) -> "MediaLimits":
        return cls(
            settings.max_media_bytes,
            settings.max_image_pixels,
            settings.media_timeout_s,
            settings.allowed_local_media_path,
            settings.allow_private_media_addresses,
        )


class MediaRejected(ValueError):
    """A medium cannot be used. The text follows the name of its field: "is larger than ..."."""

    def __init__(self, text: str, code: Code = Code.invalid_request) -> None:
        super().__init__(text)
        self.code = code

    def to_error(self, field: str) -> ServingError:
        return ServingError(self.code, f"{field} {self}"[:_MAX_MESSAGE], param=field)


def too_large(max_bytes: int) -> MediaRejected:
    return MediaRejected(f"is larger than {max_bytes} bytes (--max-media-bytes)", Code.body_too_large)
