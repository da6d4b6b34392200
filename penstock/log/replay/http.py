"""Replays requests on an OpenAI-compatible server. Tokens are compared if it sends them, otherwise texts."""

import argparse
from collections.abc import Sequence

from penstock.log.export.recording import Run
from penstock.log.replay.changes import Changes, Target, as_new
from penstock.log.replay.comparison import compare, compare_texts
from penstock.log.replay.http_sender import HttpSender
from penstock.log.replay.nats_sender import MAX_OPEN, Planned
from penstock.log.replay.report import Replayed
from penstock.log.requests.texts import Texts
from penstock.schemas.blocks import DEFAULT_BLOCK_SIZE
from penstock.schemas.requests import GenerateRequest


async def replay_over_http(args: argparse.Namespace, runs: Sequence[Run], changes: Changes, speed: float) -> Replayed:
    """Run recorded requests on the server at ``args.target``.

    Raises:
        ValueError: the URL has no host, or texts are to be compared and the model's tokenizer is not to be found.
    """
    concurrency = MAX_OPEN if speed else max(1, args.concurrency)
    sender = HttpSender(args.target, args.api_key, concurrency=concurrency, timeout_s=args.timeout_s)
    first = runs[0].request
    assert first is not None
    began_ns = first.created_ns

    def planned(run: Run) -> Planned:
        request = run.request
        assert request is not None
        target = Target(changes.model or request.model, "", DEFAULT_BLOCK_SIZE, "")

        def make(name: str, now_ns: int) -> GenerateRequest:
            return as_new(request, name, "", now_ns, target, changes)

        return Planned(run.id, (request.created_ns - began_ns) / 1e9 / speed if speed else 0.0, make)

    sent = await sender.send([planned(run) for run in runs])
    texts = Texts(args.model_path)
    pairs, comparisons = [], []
    for run in runs:
        answer = sent.answers[run.id]
        again = answer.run(answer.name)
        assert run.done is not None
        pairs.append((run, again))
        if answer.exact or again.done is None or again.done.code:
            comparisons.append(compare(run, again))
        else:
            comparisons.append(compare_texts(run, again, _shown(run, texts), answer.texts))
    return Replayed(args.target, pairs, comparisons, sent.seconds)


def _shown(run: Run, texts: Texts) -> list[str]:
    """The texts as clients got them: without the stop string that ended them, unless the request included it."""
    assert run.done is not None
    assert run.request is not None
    outputs = texts.outputs(run.done)
    for index, choice in enumerate(run.done.choices):
        if isinstance(choice.stop, str) and not run.request.stops_shown:
            outputs[index] = outputs[index][: outputs[index].rfind(choice.stop)]
    return outputs
