"""Shows differences as text, if the model's tokenizer is available."""

import contextlib
from collections.abc import Sequence

import msgspec

from penstock.infra.model.modeldir import ModelError, load_tokenizer, resolve
from penstock.log.replay.report import Report


def with_texts(report: Report, model: str = "") -> Report:
    """Add the texts around first differences to a report; without the tokenizer it stays unchanged."""
    differing = [each for each in report.comparisons if each.difference is not None]
    if not differing or not model:
        return report
    with contextlib.suppress(ModelError, OSError):
        tokenizer = load_tokenizer(resolve(model))

        def text(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

        texts = {}
        for each in differing:
            one = each.difference
            assert one is not None
            texts[each.id] = {
                "before": text(one.before),
                "recorded": text(one.recorded),
                "replayed": text(one.replayed),
            }
        return msgspec.structs.replace(report, texts=texts)
    return report
