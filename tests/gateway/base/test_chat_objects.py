"""Objects in answers have every field that OpenAI's client requires of them."""

from typing import Any

import msgspec
import pytest
from openai.types import Batch, BatchRequestCounts, CompletionChoice, CompletionUsage, Embedding, FileObject, Model
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, chat_completion
from openai.types.responses import (
    Response,
    ResponseError,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseUsage,
)

from penstock.gateway.apis import embeddings
from penstock.gateway.apis.responses import objects
from penstock.gateway.base import chat_objects
from penstock.gateway.batches import batch


@pytest.mark.parametrize(
    ("ours", "theirs", "nullable"),
    [
        (chat_objects.ChatCompletionResponse, ChatCompletion, {"usage"}),
        (chat_objects.ChatChoice, chat_completion.Choice, {"logprobs"}),
        (chat_objects.AnswerMessage, ChatCompletionMessage, {"content", "refusal"}),
        (chat_objects.ChatCompletionChunk, ChatCompletionChunk, {"usage"}),
        (chat_objects.CompletionResponse, TextCompletion, {"usage"}),
        (chat_objects.TextChoice, CompletionChoice, {"logprobs"}),
        (chat_objects.UsageBody, CompletionUsage, {"prompt_tokens_details"}),
        (chat_objects.ModelCard, Model, {}),
        (embeddings.EmbeddingData, Embedding, {}),
        (batch.FileObject, FileObject, {"expires_at"}),
        (batch.BatchObject, Batch, {"request_counts", "output_file_id", "error_file_id", "completed_at", "metadata"}),
        (batch.RequestCounts, BatchRequestCounts, {}),
        (objects.Response, Response, {"completed_at", "error", "incomplete_details", "instructions", "metadata"}),
        (objects.MessageItem, ResponseOutputMessage, {}),
        (objects.OutputText, ResponseOutputText, {"logprobs"}),
        (objects.ReasoningItem, ResponseReasoningItem, {"content"}),
        (objects.FunctionCallItem, ResponseFunctionToolCall, {"id", "status"}),
        (objects.ResponseUsage, ResponseUsage, {}),
        (objects.ResponseError, ResponseError, {}),
    ],
)
def test_objects_have_what_the_client_requires_and_what_it_reads_as_null(ours: Any, theirs: Any, nullable: Any) -> None:
    """``nullable``: what OpenAI's schema always has, although the client takes an object without it."""
    tag = ours.__struct_config__.tag_field
    names = {field.encode_name for field in msgspec.structs.fields(ours)} | ({tag} if tag else set())
    required = {name for name, field in theirs.model_fields.items() if field.is_required()}
    assert required | set(nullable) <= names
    assert set(nullable) <= set(theirs.model_fields)
