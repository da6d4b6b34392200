"""As ``vllm.v1.structured_output.backend_guidance``: the check of a grammar before its request is added."""

from llguidance import LLMatcher, grammar_from
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams


def validate_guidance_grammar(sampling_params: SamplingParams, tokenizer: object = None) -> None:
    assert sampling_params.structured_outputs is not None
    text = grammar_from("grammar", sampling_params.structured_outputs.grammar)
    if error := LLMatcher.validate_grammar(text, tokenizer):
        raise VLLMValidationError(f"Grammar error: {error}")
