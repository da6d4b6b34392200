"""Which release is played, and how it behaves.

``TENSORRT_LLM_STANDIN`` is "1.2.1" (default), "1.3" or "1.4"; it decides signatures, so it is read once, at import.
``QUIRKS`` may be changed at any time (``TENSORRT_LLM_STANDIN_QUIRKS``: JSON, for sub-processes). The first group is a
question each that the reference leaves open, so that an adapter has to be right with both answers. The second group is
how the source of the release behaves, on by default; a test switches one off to show what depends on it.
"""

import json
import os
from dataclasses import dataclass

VARIANT = os.environ.get("TENSORRT_LLM_STANDIN", "1.2.1")
if VARIANT not in ("1.2.1", "1.3", "1.4"):
    raise ImportError(f"TENSORRT_LLM_STANDIN is {VARIANT!r}; there are the variants 1.2.1, 1.3 and 1.4")
LATER = VARIANT != "1.2.1"  # what 1.3 brought
LATEST = VARIANT == "1.4"


@dataclass
class Quirks:
    gpus: int = 1  # visible in this process
    eos_in_token_ids: bool = True  # the end id is among ``token_ids``
    decode_repeats_first: bool = True  # a generation_only answer begins with the tokens that prefill made
    abort_answers: bool = True  # a cancelled request gets a last response
    mm_keys: str = "full"  # "full", "empty", "absent": of stored blocks
    rank_when_single: bool = False  # ``attention_dp_rank`` also without attention DP
    shutdown_answers: bool = False  # requests that run at shutdown get an error; else they wait for ever
    stops_heed_min_tokens: bool = False  # stop ids do not count before ``min_tokens``; else only the end id is barred
    stats_see_ends: bool = True  # statistics of an iteration are taken after what ended in it was freed
    stats_after_transfer: bool = False  # events of fetched KV come at once; else the next iteration with work does it
    partial_blocks: bool = True  # blocks that are not full are stored, too

    # As the source of the release does.
    polls_block_s: float = (
        0.1  # an asynchronous poll of an empty queue blocks its caller that long, whatever its timeout
    )
    sampler_ignores: bool = not LATER  # TorchSampler reads temperature, top_k and top_p; one generator serves all
    min_tokens_count_prompt: bool = not LATER  # TorchSampler compares min_tokens with prompt and output together
    processors_lag: bool = True  # with the overlap scheduler, logits processors have not seen the last token yet
    finished_after_error: bool = False  # ``finished`` of a result that ended in an error
    null_diffs_break: bool = True  # an "updated" event with an unset difference loses its batch in the serializer


QUIRKS = Quirks(**json.loads(os.environ.get("TENSORRT_LLM_STANDIN_QUIRKS", "{}")))
