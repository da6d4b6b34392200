"""Pictures and videos on a GPU: run by hand on a machine with an NVIDIA GPU and diffusers.

python -m tests.gpu.diffusion

Small random pipelines: float32 pictures equal the CPU's within rounding, in bfloat16 they are made and repeated; a
picture too large for the memory fails alone, and the next one is made. A Stable-Diffusion-shaped pipeline is timed.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import diffusers
import numpy as np
import torch

from penstock.configs.settings import WorkerSettings
from penstock.schemas.requests import Diffusion
from penstock.workers.engines.diffusion.diffusers_engine import DiffusersEngine, from_settings
from penstock.workers.engines.engine_protocol import RequestError
from tests.workers.engines.diffusion import pipelines

SMALL = Diffusion("image", "a red cube on the sea", 32, 32, steps=4, format="png", seed=5)
CLIP = Diffusion("video", "a blue wave", 32, 32, steps=3, format="gif", frames=5, frame_rate=8.0, seed=5)


def made(folder: Path, ask: Diffusion, device: Literal["cpu", "cuda"], dtype: Literal["float32", "bfloat16"]) -> Any:
    engine = from_settings(WorkerSettings(role="diffusion", device=device, dtype=dtype), folder)
    one, two = (engine.generate(ask, lambda done, total: None)[0].frames for _ in range(2))
    assert np.array_equal(one, two), "the same request, another picture"
    engine.close()
    return one


def large(folder: Path) -> Path:
    """The U-Net of Stable Diffusion 1.5 (0.86 B parameters) with random weights, in the small pipeline's place."""
    unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=16, attention_head_dim=8)
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(pipelines.image(folder / "small"), unet=unet)
    pipeline.save_pretrained(folder / "large")
    return folder / "large"


def timed(engine: DiffusersEngine, ask: Diffusion) -> float:
    began = time.perf_counter()
    engine.generate(ask, lambda done, total: None)
    return time.perf_counter() - began


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, "diffusers", diffusers.__version__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ask, path in ((SMALL, pipelines.image(folder / "image")), (CLIP, pipelines.video(folder / "video"))):
            cpu, gpu = made(path, ask, "cpu", "float32"), made(path, ask, "cuda", "float32")
            apart = int(np.abs(cpu.astype(int) - gpu.astype(int)).max())
            half = made(path, ask, "cuda", "bfloat16")
            print(f"{ask.kind} {gpu.shape}: at most {apart} of 255 from the CPU's in float32; bfloat16 {half.shape}")
            assert apart <= 5  # TF32 convolutions
        engine = from_settings(WorkerSettings(role="diffusion", device="cuda"), large(folder))
        ask = Diffusion(
            "image", "a boat", 128, 128, steps=20, format="png"
        )  # latents as Stable Diffusion's for 512 x 512
        timed(engine, ask)
        seconds = min(timed(engine, ask) for _ in range(3))
        print(f"U-Net of 0.86 B parameters, {ask.steps} steps, latents of 64 x 64: {seconds:.2f} s")
        torch.cuda.set_per_process_memory_fraction(0.05)
        try:
            timed(engine, Diffusion("image", "a boat", 4096, 4096, steps=1, format="png"))
            raise AssertionError("it should not have fitted")
        except RequestError as error:
            print("too large:", error.code, error.message[:120])
        torch.cuda.set_per_process_memory_fraction(1.0)
        print(f"the next one: {timed(engine, ask):.2f} s")


if __name__ == "__main__":
    main()
