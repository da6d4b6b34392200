"""The messages of a conversation."""

import stat
from pathlib import Path

import pytest

from penstock.chat.client import IMAGE_BYTES, Conversation, StreamedAnswer, StreamedToolCall, image_url, load, save


def answered(text: str, *calls: StreamedToolCall) -> StreamedAnswer:
    answer = StreamedAnswer()
    answer.text, answer.calls = text, list(calls)
    return answer


def test_questions_answers_and_tool_results_are_messages_of_the_api() -> None:
    conversation = Conversation(model="m")
    conversation.set_system("Be brief.")
    conversation.ask("Which city?", ["https://x/a.png"])
    conversation.answer(answered("", StreamedToolCall("c1", "find", "{}")))
    conversation.tool_result("c1", "Oslo")
    conversation.answer(answered("Oslo."))
    image, text = conversation.messages[1]["content"]
    assert (image["image_url"]["url"], text["text"]) == ("https://x/a.png", "Which city?")
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation.messages[2]["tool_calls"][0]["function"] == {"name": "find", "arguments": "{}"}


def test_a_question_is_taken_back_with_all_that_followed() -> None:
    conversation = Conversation()
    conversation.ask("a", [])
    conversation.answer(answered("b"))
    conversation.ask("c", [])
    assert conversation.take_back()
    assert [message["content"] for message in conversation.messages] == ["a", "b"]
    assert conversation.take_back()
    assert not conversation.take_back()


def test_a_new_conversation_keeps_the_system_message() -> None:
    conversation = Conversation()
    conversation.set_system("x")
    conversation.set_system("y")
    conversation.ask("a", [])
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "y"}]
    conversation.set_system("")
    assert conversation.messages == []


def test_a_saved_conversation_is_the_owners_and_comes_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "talk.json"
    conversation = Conversation(model="m")
    conversation.ask("a", [])
    save(conversation, file)
    assert load(file) == conversation
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("[]")
    with pytest.raises(ValueError, match="is not a saved conversation"):
        load(file)


def test_an_image_is_a_url_or_a_file_of_a_size_that_is_sent(tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"\x89PNG")
    assert image_url(str(image)) == "data:image/png;base64,iVBORw=="
    assert image_url("https://x/a") == "https://x/a"
    with image.open("wb") as large:
        large.truncate(IMAGE_BYTES + 1)
    with pytest.raises(ValueError, match="the limit is"):
        image_url(str(image))
    with pytest.raises(ValueError, match="is not an image or video: its name should end in"):
        image_url("notes.txt")


def test_a_video_goes_with_a_question_by_its_name(tmp_path: Path) -> None:
    film = tmp_path / "a.MOV"
    film.write_bytes(b"moov")
    conversation = Conversation(model="m")
    conversation.ask("What?", [image_url(str(film)), "https://x/b.webm?c=d", "https://x/b.png"])
    first, second, third, _ = conversation.messages[-1]["content"]
    assert first == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,bW9vdg=="}}
    assert (second["type"], third["type"]) == ("video_url", "image_url")
