"""Tiny pipelines with random weights that really run: Stable Diffusion (U-Net, CLIP) and Wan (video DiT, T5)."""

import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():  # of libraries about each other, at import
    warnings.simplefilter("ignore")
    import diffusers
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "cube", "wave", "boat", "on", "the", "sea", "blur"]


def tokenizer() -> Any:
    """A few words."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )


def image(folder: Path) -> Path:
    """Stable Diffusion for 32 x 32 pixels."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_hidden_layers=1,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    pipeline = diffusers.StableDiffusionPipeline(
        vae,
        text,
        tokenizer(),
        unet,
        diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        None,
        None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def video(folder: Path) -> Path:
    """Wan for 16 x 16 pixels and more, 1 + 4k frames."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=16,
        ffn_dim=16,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    text = transformers.UMT5EncoderModel(
        transformers.UMT5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipeline = diffusers.WanPipeline(tokenizer(), text, vae, scheduler, transformer=transformer)
    pipeline.save_pretrained(folder)
    return folder
