"""Logits processors in CUDA streams: run by hand on a machine with an NVIDIA GPU.

python -m tests.gpu.logits

TensorRT-LLM names the stream that computes the logits; a processor that ran in another would edit values that are
written afterwards. Shown with a stream that is held up, once rightly and once in the wrong stream on purpose. Then the
native engine with a forced text, on the GPU and on the CPU.
"""

import argparse
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.requests import LogitsProcessor, Sampling, Stop
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.logits.registry import Chain, ErrorCounter
from penstock.workers.engines.native import from_settings
from penstock.workers.engines.trtllm.logits_processors import TrtllmProcessor

BUSY_CYCLES = 400_000_000  # about a fifth of a second
VOCABULARY = 1280


def only_seven(input_ids: Sequence[int], logits: Tensor) -> None:
    """Copies nothing from the host, which would wait for the device."""
    logits.fill_(float("-inf"))
    logits[7].fill_(0.0)


def drawn(in_its_stream: bool) -> int:
    """The best token after a processor that allows only token 7, of logits whose best is token 3."""
    engine = torch.cuda.Stream()
    logits = torch.zeros(1, 1, VOCABULARY, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(engine):
        torch.cuda._sleep(BUSY_CYCLES)
        logits[0, 0, 3].fill_(10.0)  # written late: the edit has to come after it
        logits[0, 0, 7].fill_(5.0)
    processor = TrtllmProcessor(Chain(("only seven",), (only_seven,), ErrorCounter()))
    processor(1, logits, [[1, 2]], engine.cuda_stream if in_its_stream else None)
    torch.cuda.synchronize()
    return int(logits.argmax())


def native(device: Literal["cpu", "cuda"]) -> list[int]:
    made = from_settings(WorkerSettings(model="demo", device=device, kv_blocks=64), modeldir.DEMO)
    forced = LogitsProcessor("forced_text", b'{"text": "Penstock runs."}')
    sampling = Sampling(temperature=0.0, logits_processors=(forced,))
    made.submit(SequenceRequest("key", list(range(20, 60)), sampling, Stop(24)))
    tokens = []
    while made.has_work():
        tokens += [output.token for output in made.step().outputs]
    made.close()
    return tokens


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    drawn(in_its_stream=True)  # loads the kernels, which waits for the device
    right, wrong = drawn(in_its_stream=True), drawn(in_its_stream=False)
    assert (right, wrong) == (7, 3), (right, wrong)
    print(f"{torch.cuda.get_device_name()}: edited after the engine's own writes in its stream; not in another")
    gpu, cpu = native("cuda"), native("cpu")
    text = modeldir.load(modeldir.DEMO).tokenizer.decode(gpu)
    assert gpu == cpu, (gpu, cpu)
    print(f"native engine, forced text, cuda as cpu: {text!r}")


if __name__ == "__main__":
    main()
