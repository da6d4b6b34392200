"""How long a step would take on a GPU: the polynomial model of NVIDIA Dynamo's engine simulator (``mocker``).

Fitted there to a vLLM-like engine; the coefficients agree with the results of ai-dynamo 1.6.1, request by request.
"""

from collections.abc import Iterable

from penstock.workers.engines.core.sequence import ScheduledSequence


def prefill_seconds(sequences: int, before: int, now: int) -> float:
    """The prefill part of a step.

    Args:
        sequences: that compute prompt tokens in this step.
        before: sum of their tokens computed earlier (or cached).
        now: sum of their prompt tokens computed in this step.
    """
    if not sequences:
        return 0.0
    tokens = sequences * ((before + now) // sequences - before // sequences)
    if tokens <= 0:
        return 0.0
    return (4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142) / 1e3


def decode_seconds(context: int, capacity: int) -> float:
    """The decode part of a step; it depends on how full the pool is, not on the batch size.

    Args:
        context: sum of the lengths of decoding sequences, tokens; 0: none decodes.
        capacity: of the KV pool, tokens.
    """
    if not context:
        return 0.0
    share = min(1.0, context / capacity)
    return max(1.0, -25.74 * share * share + 54.01 * share + 5.74) / 1e3


def step_seconds(plan: Iterable[ScheduledSequence], capacity: int) -> float:
    """The duration of one step.

    A sequence's first token comes from its prefill; generated tokens that are computed again cost only a decode.
    """
    sequences = before = now = context = 0
    for scheduled in plan:
        prompt, start, end = scheduled.sequence.prompt_len, scheduled.start, scheduled.start + scheduled.count
        if start < prompt:
            sequences += 1
            before += start
            now += min(end, prompt) - start
        if scheduled.samples and end > prompt:
            context += end
    return prefill_seconds(sequences, before, now) + decode_seconds(context, capacity)
