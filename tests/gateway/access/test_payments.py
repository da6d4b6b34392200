"""What requests are charged for, against the limits of their API keys."""

from gateway.access.payments import prompt_tokens
from schemas.requests import Embedding, GenerateRequest, Stop
from schemas.wire import pack_tokens


def test_texts_whose_tokens_only_a_worker_counts_are_charged_by_their_bytes() -> None:
    def asked(tokens: int, *texts: str) -> GenerateRequest:
        embedding = Embedding(8, texts=texts, lengths=(tokens,) if tokens else ())
        return GenerateRequest("r", "m", "g", pack_tokens([1] * tokens), Stop(1), 1, 2, embedding=embedding)

    assert prompt_tokens(asked(9)) == 9
    assert prompt_tokens(asked(0, "abcd", "abcde", "é☃")) == 1 + 2 + 2
