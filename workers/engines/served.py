"""Which sampling options an external engine applies, and what becomes of requests for the others. Pure.

No option is dropped in silence. A request for one that shapes its text is refused; a seed, which every request has, is
announced as ignored, and the gateway names it in its answers.
"""

from typing import Literal, NamedTuple

from penstock.schemas.requests import Sampling


class Served(NamedTuple):
    """
    Attributes:
        penalties: repetition_penalty, presence_penalty and frequency_penalty.
        alternatives: log-probabilities of other tokens than the drawn one.
        min_tokens: what it counts: the output, or prompt and output together; "": it has no effect.
    """

    penalties: bool = True
    min_p: bool = True
    seed: bool = True
    alternatives: bool = True
    min_tokens: Literal["output", "all", ""] = "output"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options of clients that have no effect, and of which their answers say so."""
        return () if self.seed else ("seed",)


# As found on the releases that are known; a test asks their stand-ins.
ALL = Served()  # also of TensorRT-LLM from 1.3 on
TRTLLM_SAMPLER = Served(alternatives=False)
TORCH_SAMPLER_1_2 = Served(penalties=False, min_p=False, seed=False, min_tokens="all")

SAMPLER = "use sampler_type: TRTLLMSampler in the engine's arguments, or another engine"


def problem(sampling: Sampling, min_tokens: int, served: Served) -> str:
    """Which option of a request this engine would drop in silence; "": none. A seed is not among them.

    Args:
        min_tokens: that the engine would have to heed.
    """
    penalties = {
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": bool(sampling.presence_penalty),
        "frequency_penalty": bool(sampling.frequency_penalty),
    }
    asked = [name for name, given in penalties.items() if given and not served.penalties]
    if sampling.min_p > 0 and not served.min_p:
        asked.append("min_p")
    if asked:
        return f"this engine's sampler does not apply {', '.join(asked)}; {SAMPLER}"
    if sampling.logprobs and not served.alternatives:
        return (
            "this engine's sampler returns log-probabilities of the drawn tokens only: ask for top_logprobs 0, or use "
            "sampler_type: TorchSampler in the engine's arguments"
        )
    if min_tokens > 0 and not served.min_tokens:
        return f"this engine's sampler does not apply min_tokens; {SAMPLER}"
    return ""
