"""Names (digests) of KV blocks, under which the prefix cache finds them again. Pure."""

from array import array

from penstock.schemas.blocks import chain, extend, split
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.base import SequenceRequest
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.sequence import Sequence


def block_digests(request: SequenceRequest, prompt: "array[int]", tokens: list[int], size: int) -> list[bytes]:
    """Names of all full blocks of ``tokens``; the prompt's own are taken from the request if it has them."""
    digests = list(request.digests)
    if len(digests) != len(prompt) // size:  # none given, or of another block size
        digests = split(chain(pack_tokens(prompt), size, request.root, request.extra))
    if len(tokens) // size > len(digests):
        parent = digests[-1] if digests else request.root
        done = len(digests)  # the prompt's last block, not full, may end with a medium
        extra = {block - done: media for block, media in request.extra.items() if block >= done}
        digests += split(chain(pack_tokens(tokens[done * size :]), size, parent, extra))
    return digests


def name_blocks(blocks: BlockManager, sequence: Sequence, computed: int, size: int, *, leaving: bool = False) -> None:
    """Enter a sequence's complete blocks, those of ``computed`` leading tokens, into the prefix cache.

    Args:
        leaving: see ``BlockManager.name``.
    """
    full = computed // size
    if full <= sequence.named:
        return
    digests = sequence.digests
    while len(digests) < full:
        done = len(digests)
        parent = digests[-1] if digests else sequence.root
        tokens = pack_tokens(sequence.tokens[done * size : (done + 1) * size])
        digests.append(extend(parent, tokens, sequence.extra.get(done, b"")))
    sequence.named = blocks.name(sequence.blocks, digests, sequence.named, full, leaving=leaving)
