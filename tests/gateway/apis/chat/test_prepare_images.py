"""Conversations with images become prompts with placeholders, against the bundled vision model."""

import json
from random import Random
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat.prepare_chat import (
    PendingMediaRequest,
    PreparedRequest,
    attach_media,
    prepare_chat,
    prepare_completion,
)
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.model.modeldir import DEMO, MODELS, ModelDir, load
from penstock.schemas.block_hashes import chain, media_extra, root
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Media, decode
from penstock.schemas.wire import encode, pack_tokens, unpack_tokens
from tests.demo_model import template, vision
from tests.demo_model.evaluate import messages_of
from tests.gateway.media.support import chat_body, image
from tests.properties import examples
from tests.workers.engines.native import qwen_vl

NOW = 1_700_000_000 * 10**9
URL = "https://example.org/a.png"
EMBEDS = {"type": "image_embeds", "image_embeds": {"url": URL}}
IMAGE_ID, PER_IMAGE = 1279, 64


@pytest.fixture(scope="module")
def vision_context() -> PrepareContext:
    return PrepareContext(load(MODELS / "demo-vision"), ("m",), "gw1", max_images=4)


def medium(number: int, tokens: int = PER_IMAGE) -> Media:
    return Media(blake3(b"%d" % number).digest(), "image/png", 10, tokens=tokens)


def pending(context: PrepareContext, *content: Any, **options: Any) -> PendingMediaRequest:
    found = prepare_chat(chat_body(*content, **options), context, now_ns=NOW, request_id="r")
    assert isinstance(found, PendingMediaRequest)
    return found


def whole(context: PrepareContext, *content: Any, media: list[Media] | None = None, **options: Any) -> PreparedRequest:
    made = pending(context, *content, **options)
    return attach_media(made, media or [medium(i) for i in range(len(made.prompt.media))], context)


def plain(context: PrepareContext, messages: Any, **options: Any) -> PreparedRequest:
    found = prepare_chat(
        json.dumps({"model": "m", "messages": messages, **options}).encode(), context, now_ns=NOW, request_id="r"
    )
    assert isinstance(found, PreparedRequest)
    return found


def ids(text: str, model: ModelDir) -> list[int]:
    found: list[int] = model.tokenizer.encode(text, add_special_tokens=False).ids
    return found


def refusal(call: Any, *args: Any, **options: Any) -> ServingError:
    with pytest.raises(ServingError) as caught:
        call(*args, **options)
    return caught.value


@pytest.mark.parametrize("task", [*vision.TASKS])
def test_a_prompt_is_the_one_that_the_model_was_trained_with(vision_context: PrepareContext, task: str) -> None:
    for sample in vision.cases(task, 5, 1):
        body = json.dumps({"model": "m", "messages": messages_of(sample)}).encode()
        made = prepare_chat(body, vision_context, now_ns=NOW, request_id="r")
        assert isinstance(made, PendingMediaRequest)
        done = attach_media(made, [medium(0)], vision_context)
        expected = ids(template.prompt(sample.messages), vision_context.model)
        assert list(unpack_tokens(done.request.prompt)) == expected
        assert done.prompt_tokens == len(expected)


def test_a_prompt_is_that_of_the_models_own_processor(vision_context: PrepareContext) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    parts = [
        {"type": "text", "text": "Look at "},
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "image"},
    ]
    earlier = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]
    messages = [*earlier, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": parts}]
    processor = AutoProcessor.from_pretrained(MODELS / "demo-vision")
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    images = [Image.new("RGB", (50, 60)), Image.new("RGB", (200, 90))]
    expected = list(processor(text=text, images=images)["input_ids"][0])
    asked = [*messages[:-1], {"role": "user", "content": [image(URL) if p["type"] == "image" else p for p in parts]}]
    made = prepare_chat(
        json.dumps({"model": "m", "messages": asked}).encode(), vision_context, now_ns=NOW, request_id="r"
    )
    assert isinstance(made, PendingMediaRequest)
    done = attach_media(made, [medium(0), medium(1)], vision_context)
    assert list(unpack_tokens(done.request.prompt)) == expected
    assert expected.count(IMAGE_ID) == 2 * PER_IMAGE


def test_media_are_part_of_the_digests_of_the_blocks_that_they_lie_in(vision_context: PrepareContext) -> None:
    done = whole(vision_context, "What is ", image(URL), " and ", image(URL + "2"), "?", cache_salt="s")
    request = done.request
    prompt = unpack_tokens(request.prompt)
    assert [m.digest for m in request.media] == [medium(0).digest, medium(1).digest]
    covered = [p for m in request.media for p in range(m.position, m.position + m.tokens)]
    assert covered == [p for p, token in enumerate(prompt) if token == IMAGE_ID]
    assert len(covered) == 2 * PER_IMAGE
    extra = media_extra(((m.position, m.tokens, m.digest) for m in request.media), 32)
    start = root(vision_context.model.revision, salt="s")
    assert request.digests == chain(request.prompt, 32, start, extra)
    assert request.digests != chain(request.prompt, 32, start)
    assert decode(encode(request)) == request


def test_the_same_words_with_another_image_share_no_block_from_the_image_on(vision_context: PrepareContext) -> None:
    words = "word " * 200
    one = whole(vision_context, words, image(URL), media=[medium(1)]).request
    two = whole(vision_context, words, image(URL), media=[medium(2)]).request
    assert one.prompt == two.prompt
    same = [a == b for a, b in zip(one.digests, two.digests, strict=True)]
    first = one.media[0].position // 32 * 16
    assert all(same[:first])
    assert first > 0
    assert not any(one.digests[i : i + 16] == two.digests[i : i + 16] for i in range(first, len(same), 16))


def test_embeddings_take_as_many_placeholders_as_they_are(vision_context: PrepareContext) -> None:
    made = pending(vision_context, EMBEDS, image(URL))
    assert [part.embedding for part in made.prompt.media] == [True, False]
    done = attach_media(made, [medium(0, tokens=7), medium(1)], vision_context)
    assert [(m.tokens) for m in done.request.media] == [7, PER_IMAGE]
    assert list(unpack_tokens(done.request.prompt)).count(IMAGE_ID) == 7 + PER_IMAGE
    assert done.request.media[1].position == done.request.media[0].position + 7 + 1


@pytest.mark.parametrize(
    "part",
    [
        image(URL),
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image_embeds", "image_embeds": URL},
    ],
)
def test_every_form_of_a_part_is_taken(vision_context: PrepareContext, part: dict[str, Any]) -> None:
    made = pending(vision_context, "a", part)
    assert made.prompt.media[0].url == URL
    assert (
        made.prompt.media[0].field
        == f"messages[0].content[1].{'image_embeds' if 'image_embeds' in part else 'image_url'}"
    )


REFUSED: list[tuple[dict[str, Any], Code, str]] = [
    ({"type": "image_url"}, Code.invalid_request, "messages[0].content[0].image_url"),
    ({"type": "image_embeds", "image_url": URL}, Code.invalid_request, "messages[0].content[0].image_embeds"),
    ({"type": "image_url", "image_url": {}}, Code.invalid_request, "messages[0].content[0].image_url"),
    ({"type": "image_url", "image_url": 5}, Code.invalid_request, "messages[0].content[0].image_url"),
    (
        {"type": "image_url", "image_url": {"url": URL, "detail": "ultra"}},
        Code.invalid_request,
        "messages[0].content[0].image_url.detail",
    ),
    *(
        ({"type": kind, kind: {"url": URL}}, Code.unsupported, "messages[0].content[0].type")
        for kind in ("input_audio", "audio_url", "file", "image", "x" * 1000)
    ),
    ({"type": "video_url", "video_url": {"url": URL}}, Code.unsupported, "messages[0].content[0].video_url"),
    ({"type": "video_url"}, Code.invalid_request, "messages[0].content[0].video_url"),
]


@pytest.mark.parametrize(("part", "code", "field"), REFUSED)
def test_other_parts_are_refused_by_name(
    vision_context: PrepareContext, part: dict[str, Any], code: Code, field: str
) -> None:
    error = refusal(prepare_chat, chat_body(part), vision_context, now_ns=NOW, request_id="r")
    assert (error.code, error.param) == (code, field)
    assert len(error.message) < 500


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_only_users_and_tools_give_images(vision_context: PrepareContext, role: str) -> None:
    messages = [{"role": role, "content": [image(URL)]}, {"role": "user", "content": "x"}]
    error = refusal(plain, vision_context, messages)
    assert (error.code, error.param) == (Code.unsupported, "messages[0].content[0].image_url")
    messages[0]["role"] = "tool"
    made = prepare_chat(
        json.dumps({"model": "m", "messages": messages}).encode(), vision_context, now_ns=NOW, request_id="r"
    )
    assert isinstance(made, PendingMediaRequest)


def test_a_model_without_vision_refuses_images(vision_context: PrepareContext) -> None:
    blind = vision_context._replace(model=load(DEMO))
    error = refusal(pending, blind, image(URL))
    assert (error.code, error.param) == (Code.unsupported, "messages[0].content[0].image_url")
    assert "'llama' takes no images" in error.message


def test_a_model_without_vision_reads_that_it_cannot_see_the_image_in_a_tools_result(
    vision_context: PrepareContext,
) -> None:
    blind = vision_context._replace(model=load(DEMO))
    messages = [{"role": "user", "content": "Look."}, {"role": "tool", "content": [image(URL)]}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    made = prepare_chat(body, blind, now_ns=NOW, request_id="r")
    assert isinstance(made, PreparedRequest)
    text = blind.model.tokenizer.decode(list(unpack_tokens(made.request.prompt)))
    assert "[The image cannot be shown to this model.]" in text
    assert URL not in text


def test_too_many_images_are_refused_with_the_limit(vision_context: PrepareContext) -> None:
    assert len(pending(vision_context, *[image(URL)] * 4).prompt.media) == 4
    error = refusal(pending, vision_context, *[image(URL)] * 5)
    assert "5 images; the limit is 4 (--max-images)" in error.message
    assert error.param == "messages[0].content[4].image_url"


def test_expanded_prompts_keep_the_models_limit_before_anything_is_fetched(vision_context: PrepareContext) -> None:
    small = vision_context._replace(worker_max_model_len=100)
    assert whole(small, image(URL)).request.stop.max_tokens < 30
    for content in ([image(URL), image(URL)], [image(URL), "word " * 100]):
        assert refusal(pending, small, *content).code is Code.context_length_exceeded
    error = refusal(pending, small, image(URL), max_tokens=50)
    assert (error.code, error.param) == (Code.context_length_exceeded, "max_tokens")
    made = pending(small, EMBEDS)
    assert refusal(attach_media, made, [medium(0, tokens=10**12)], small).code is Code.context_length_exceeded


ANYWHERE: list[tuple[str, Any, dict[str, Any]]] = [
    ("user text", [{"role": "user", "content": "a <image> b<image>"}], {}),
    ("user parts", [{"role": "user", "content": [{"type": "text", "text": "<image>"}]}], {}),
    ("system", [{"role": "system", "content": "<image>"}, {"role": "user", "content": "x"}], {}),
    ("assistant", [{"role": "assistant", "content": "<image>"}, {"role": "user", "content": "x"}], {}),
    (
        "tool call",
        [
            {"role": "assistant", "tool_calls": [{"function": {"name": "<image>", "arguments": '{"<image>": 1}'}}]},
            {"role": "user", "content": "x"},
        ],
        {},
    ),
    (
        "tools",
        [{"role": "user", "content": "x"}],
        {"tools": [{"function": {"name": "f", "<image>": [{"a": "<image>"}]}}]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("where", "messages", "options"), ANYWHERE, ids=[case[0] for case in ANYWHERE])
def test_an_image_token_that_a_client_writes_stays_text(
    vision_context: PrepareContext, where: str, messages: Any, options: dict[str, Any]
) -> None:
    done = plain(vision_context, messages, **options)
    prompt = list(unpack_tokens(done.request.prompt))
    assert IMAGE_ID not in prompt
    text = vision_context.model.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text.count("<image>") == json.dumps([messages, options]).count("<image>")
    with_image = [*messages, {"role": "user", "content": [{"type": "text", "text": "<image>"}, image(URL)]}]
    made = prepare_chat(
        json.dumps({"model": "m", "messages": with_image, **options}).encode(),
        vision_context,
        now_ns=NOW,
        request_id="r",
    )
    assert isinstance(made, PendingMediaRequest)
    assert made.prompt.tokens.count(IMAGE_ID) == 1
    assert (
        made.prompt.tokens.index(IMAGE_ID)
        == len(made.prompt.tokens) - 1 - made.prompt.tokens[::-1].index(IMAGE_ID)
        > len(prompt) - 8
    )


def test_text_without_the_image_token_is_tokenised_as_ever(vision_context: PrepareContext) -> None:
    words = "Tell me of <imag and image> and <images>!"
    expected = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
    done = plain(vision_context, [{"role": "user", "content": words}])
    assert list(unpack_tokens(done.request.prompt)) == ids(expected, vision_context.model)
    assert done.request.media == ()


@examples(150)
@given(st.lists(st.sampled_from(["<image>", "<im", "age>", "<", "word ", "\n", "<|im_end|>", "é", 1, 1]), max_size=8))
def test_there_is_one_placeholder_per_image_in_their_order_whatever_the_text(
    vision_context: PrepareContext, pieces: list[Any]
) -> None:
    images = pieces.count(1)
    if not 0 < images <= 4:
        return
    together = "".join(" " if piece == 1 else piece for piece in pieces)
    if together.count("<image>") > pieces.count("<image>"):  # two parts of text are one to the template
        error = refusal(whole, vision_context, *(image(URL) if piece == 1 else piece for piece in pieces))
        assert "image placeholders" in error.message
        return
    done = whole(vision_context, *(image(URL) if piece == 1 else piece for piece in pieces))
    prompt = unpack_tokens(done.request.prompt)
    assert len(done.request.media) == images
    assert [p for p, token in enumerate(prompt) if token == IMAGE_ID] == [
        p for m in done.request.media for p in range(m.position, m.position + m.tokens)
    ]
    assert [m.digest for m in done.request.media] == [medium(i).digest for i in range(images)]


def test_thousands_of_written_image_tokens_are_refused_in_short_time(vision_context: PrepareContext) -> None:
    import time

    began = time.thread_time()
    error = refusal(plain, vision_context, [{"role": "user", "content": "<image>" * 500_000}])
    assert error.code is Code.context_length_exceeded
    assert time.thread_time() - began < 2


def test_a_template_without_a_place_for_images_is_a_clear_error(vision_context: PrepareContext) -> None:
    import dataclasses

    from penstock.infra.text.chat_template import ChatTemplate

    for source in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # the list as Python writes it
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content if m.content is string else '<image><image>' }}{% endfor %}",
    ):
        model = dataclasses.replace(vision_context.model, template=ChatTemplate(source, {}))
        error = refusal(pending, vision_context._replace(model=model), image(URL), "<image>")
        assert error.code is Code.invalid_request
        assert "placeholders for 1 images" in error.message
        assert error.param == "messages[0].content[0].image_url"


def test_completions_take_no_image_tokens(vision_context: PrepareContext) -> None:
    for prompt in ("a <image> b", [5, IMAGE_ID]):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        error = refusal(prepare_completion, body, vision_context, now_ns=NOW, request_id="r")
        assert (error.code, error.param) == (Code.invalid_request, "prompt")
        assert "/v1/chat/completions" in error.message
    assert (
        prepare_completion(
            json.dumps({"model": "m", "prompt": "a"}).encode(), vision_context, now_ns=NOW, request_id="r"
        ).prompt_tokens
        == 1
    )


def test_a_pending_request_keeps_what_the_request_needs(vision_context: PrepareContext) -> None:
    options = {
        "max_completion_tokens": 7,
        "seed": 3,
        "stream": True,
        "timeout_s": 9,
        "logprobs": True,
        "top_logprobs": 2,
    }
    made = prepare_chat(chat_body(image(URL), **options), vision_context, now_ns=NOW, request_id="id")
    assert isinstance(made, PendingMediaRequest)
    assert made.deadline_s == 9
    done = attach_media(made, [medium(0)], vision_context)
    request = done.request
    assert (request.id, request.created_ns, request.deadline_ns) == ("id", NOW, NOW + 9 * 10**9)
    assert (request.stop.max_tokens, request.sampling.seed, request.sampling.logprobs) == (7, 3, 2)
    assert (done.stream, request.endpoint) == (True, "chat")
    assert request.prompt == pack_tokens(unpack_tokens(request.prompt))


def test_a_body_as_large_as_allowed_is_parsed_in_little_time(vision_context: PrepareContext) -> None:
    import time

    rng = Random(1)
    body = chat_body(image("data:image/png;base64," + "".join(rng.choices("ABCD", k=1000)) * 15_000), "x")
    began = time.thread_time()
    made = prepare_chat(body, vision_context, now_ns=NOW, request_id="r")
    assert isinstance(made, PendingMediaRequest)
    assert time.thread_time() - began < 0.5


# -- any resolution, and videos ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> PrepareContext:
    model = load(qwen_vl.write(tmp_path_factory.mktemp("qwen-vl")))
    return PrepareContext(model, ("m",), "gw1", max_images=4, max_videos=2)


VIDEO = {"type": "video_url", "video_url": {"url": URL}}


def test_images_and_videos_have_placeholders_of_their_own_in_order(qwen: PrepareContext) -> None:
    seen = [medium(0, 6), msgspec.structs.replace(medium(1, 8), kind="video/webm"), medium(2, 4)]
    made = whole(qwen, "a", image(URL), VIDEO, "b", image(URL), media=seen)
    tokens, vision = list(unpack_tokens(made.request.prompt)), qwen.model.vision
    assert vision is not None
    places = [token for token in tokens if token in vision.placeholders]
    assert places == [vision.image_token_id] * 6 + [vision.video_token_id] * 8 + [vision.image_token_id] * 4
    for each, token in zip(made.request.media, (vision.image_token_id, vision.video_token_id), strict=False):
        assert tokens[each.position : each.position + each.tokens] == [token] * each.tokens
        assert tokens[each.position - 1] == qwen.model.tokenizer.token_to_id("<|vision_start|>")


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ([VIDEO] * 3, Code.invalid_request, "has 3 videos; the limit is 2 (--max-videos)"),
        ([image(URL)] * 5, Code.invalid_request, "has 5 images; the limit is 4 (--max-images)"),
        ([EMBEDS], Code.unsupported, "embedding files are not supported by this model"),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], Code.unsupported, "takes audio; use"),
        ([{"type": "audio_url", "audio_url": {"url": URL}}], Code.unsupported, "'image_embeds' or 'video_url'"),
    ],
)
def test_what_the_model_does_not_take_is_refused_with_what_it_takes(
    qwen: PrepareContext, content: list[dict[str, Any]], code: Code, words: str
) -> None:
    error = refusal(prepare_chat, chat_body(*content), qwen, now_ns=NOW, request_id="r")
    assert error.code == code
    assert words in error.message


@pytest.mark.parametrize("text", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|><|video_pad|><|vision_end|>"])
def test_no_text_becomes_the_place_of_a_medium(qwen: PrepareContext, text: str) -> None:
    for context in (qwen, qwen._replace(special_tokens_as_text=False)):
        made = whole(context, text, VIDEO, media=[msgspec.structs.replace(medium(1, 5), kind="video/mp4")])
        assert sum(token in (1282, 1283) for token in unpack_tokens(made.request.prompt)) == 5


def test_completions_take_no_video_tokens(qwen: PrepareContext) -> None:
    for prompt in ("<|video_pad|>", [1283]):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        error = refusal(prepare_completion, body, qwen, now_ns=NOW, request_id="r")
        assert "contains the video token '<|video_pad|>'; send videos to" in error.message
