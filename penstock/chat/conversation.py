"""The messages of a conversation, as a chat completion takes them, and as a file keeps them. Pure but for reading."""

import base64
import mimetypes
from pathlib import Path
from typing import Any

import msgspec

from penstock.chat.answer import Answer
from penstock.infra.broker.datadir import write_private

IMAGE_BYTES = 20 << 20  # of one image file
Message = dict[str, Any]


class Conversation(msgspec.Struct):
    """
    Attributes:
        model: "": the server's first.
    """

    messages: list[Message] = []
    model: str = ""

    @property
    def system(self) -> str:
        first = self.messages[0] if self.messages else {}
        return str(first.get("content", "")) if first.get("role") == "system" else ""

    def set_system(self, text: str) -> None:
        """Replace the system message; "": remove it."""
        if self.system:
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def ask(self, text: str, images: list[str]) -> None:
        """Add a question.

        Args:
            images: URLs, data URLs among them.
        """
        content: Any = text
        if images:
            pictures = [{"type": "image_url", "image_url": {"url": url}} for url in images]
            content = [*pictures, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})

    def answer(self, answer: Answer) -> None:
        """Add what the model has said."""
        message: Message = {"role": "assistant", "content": answer.text}
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        self.messages.append(message)

    def tool_result(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def take_back(self) -> bool:
        """Remove the last question and all that followed; False: there is none."""
        asked = [at for at, message in enumerate(self.messages) if message.get("role") == "user"]
        if not asked:
            return False
        del self.messages[asked[-1] :]
        return True

    def clear(self) -> None:
        """Keep the system message only."""
        self.messages = self.messages[:1] if self.system else []


def save(conversation: Conversation, file: Path) -> None:
    """Write a conversation, readable by its owner only.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, msgspec.json.format(msgspec.json.encode(conversation), indent=2).decode() + "\n")


def load(file: Path) -> Conversation:
    """Read a saved conversation.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Conversation)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is no saved conversation: {error}") from error


def image_url(source: str) -> str:
    """An image for ``ask``: a URL as it is, a file as a data URL.

    Raises:
        ValueError: the file cannot be read, is too large, or no image by its name.
    """
    if source.startswith(("http://", "https://", "data:")):
        return source
    file = Path(source).expanduser()
    kind, _ = mimetypes.guess_type(file.name)
    if kind is None or not kind.startswith("image/"):
        raise ValueError(f"{source} is no image: its name should end in .png, .jpg, .webp or .gif")
    try:
        size = file.stat().st_size
        if size > IMAGE_BYTES:
            raise ValueError(f"{source} has {size:,} bytes; the limit is {IMAGE_BYTES:,}")
        return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
    except OSError as error:
        raise ValueError(f"image {source}: {error.strerror or error}") from error
