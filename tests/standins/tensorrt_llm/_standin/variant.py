"""Which release is played, and how it behaves where the reference is not sure.

``TENSORRT_LLM_STANDIN`` is "1.2.1" (default) or "1.3"; it decides signatures, so it is read once, at import.
``QUIRKS`` may be changed at any time (``TENSORRT_LLM_STANDIN_QUIRKS``: JSON, for sub-processes). Each of them is a
question that the reference leaves open, so that an adapter has to be right with both answers.
"""

import json
import os
from dataclasses import dataclass

VARIANT = os.environ.get("TENSORRT_LLM_STANDIN", "1.2.1")
if VARIANT not in ("1.2.1", "1.3"):
    raise ImportError(f"TENSORRT_LLM_STANDIN is {VARIANT!r}; there are the variants 1.2.1 and 1.3")
LATER = VARIANT == "1.3"


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


QUIRKS = Quirks(**json.loads(os.environ.get("TENSORRT_LLM_STANDIN_QUIRKS", "{}")))
