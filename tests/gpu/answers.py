"""The bundled models on a GPU answer as on the CPU: run by hand on a machine with an NVIDIA GPU.

python -m tests.gpu.answers
"""

import argparse
from random import Random

from penstock.infra.model import modeldir
from penstock.schemas.requests import Sampling, Stop
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import MediaSpan, SequenceRequest
from penstock.workers.engines.native.build import build
from penstock.workers.engines.native.model.options import NativeOptions
from tests.demo_model import vision

QUESTIONS = ("What is 347 + 586?", "Spell the word harbour.", "How do I start a worker?")


def answer(made: ScheduledEngine, model: modeldir.ModelDir, question: str, picture: bytes | None = None) -> str:
    content = question if picture is None else f"{model.vision.image_token * model.vision.image_tokens}\n{question}"  # type: ignore[union-attr]
    assert model.template is not None
    text = model.template.render([{"role": "user", "content": content}], None)
    tokens = model.tokenizer.encode(text, add_special_tokens=False).ids
    media, slots = [], None
    if picture is not None:
        assert model.vision is not None
        slots = made.vision.reserve([(picture[:32], model.vision.image_tokens)])
        assert slots is not None
        made.vision.encode(slots, {0: made.vision.prepare(picture, "image/png")})
        at = tokens.index(model.vision.image_token_id)
        media = [MediaSpan(at, model.vision.image_tokens, picture[:32], slots.slots[0])]
    made.submit(SequenceRequest("key", tokens, Sampling(temperature=0.0), Stop(40), media=media))
    ids = []
    while made.has_work():
        ids += [output.token for output in made.step().outputs]
    if slots is not None:
        made.vision.release(slots)
    return str(model.tokenizer.decode(ids))


def scores(made: ScheduledEngine, prompt: list[int]) -> list[float]:
    """Log-probabilities of a prompt's tokens, from the second on."""
    made.submit(SequenceRequest("key", prompt, Sampling(temperature=0.0, prompt_logprobs=0), Stop(1), score=1))
    found: list[float] = []
    while made.has_work():
        found += [value.logprob for told in made.step().scored for value in told.logprobs]
    return found


def demo(device: str, kv_dtype: str = "auto") -> ScheduledEngine:
    return build(
        str(modeldir.DEMO), NativeOptions(device=device, kv_blocks=200, dtype="float32", kv_dtype=kv_dtype, warm=True)
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    prompt = [(7 * i) % 1000 + 20 for i in range(700)]  # scored in two steps
    here, there = (scores(demo(device), prompt) for device in ("cpu", "cuda"))
    apart = max(abs(one - other) for one, other in zip(here, there, strict=True))
    print(f"scores of {len(there) + 1} prompt tokens: at most {apart:.2g} from the CPU's")
    assert apart < 1e-3
    model = modeldir.load(modeldir.DEMO)
    for kv_dtype in ("bfloat16", "fp8"):
        made = [demo(device, kv_dtype) for device in ("cpu", "cuda")]
        for question in QUESTIONS:
            cpu, gpu = (answer(each, model, question) for each in made)
            print(f"KV as {kv_dtype}: {question} -> {gpu}" + ("" if cpu == gpu else f"   (CPU: {cpu})"))
    for name in ("demo", "demo-vision"):
        path = modeldir.resolve(name)
        model = modeldir.load(path)
        engines = [build(str(path), NativeOptions(device=device, kv_blocks=200)) for device in ("cpu", "cuda")]
        pictures = [vision.looking(Random(seed), True) for seed in range(6)] if model.vision else []
        asked = [(question, None) for question in QUESTIONS]
        asked += [(each.messages[0][1].rpartition("\n")[2], vision.png(each.scene)) for each in pictures]
        for question, picture in asked:
            here, there = (answer(made, model, question, picture) for made in engines)
            print(f"{name}: {question} -> {there}" + ("" if here == there else f"   (CPU: {here})"))


if __name__ == "__main__":
    main()
