#!/usr/bin/env bash
# One worker that does everything, behind a gateway. Settings: see common.sh.
#
#   AGG_ENGINE_ARGS  engine arguments  default: by MODALITY
#
#   MODALITY=multimodal ./aggregated.sh        LLaVA 1.6
#   MODALITY=video_diffusion MODEL_PATH=... ./aggregated.sh
#   ENGINE=native MODEL_PATH=demo ./aggregated.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case $MODALITY in
  text) DEFAULT_MODEL=meta-llama/Llama-3.1-8B-Instruct DEFAULT_ARGS=$RECIPES/llama3-agg.yaml ;;
  multimodal) DEFAULT_MODEL=llava-hf/llava-v1.6-mistral-7b-hf DEFAULT_ARGS=$RECIPES/llava16-agg.yaml ;;
  video_diffusion) DEFAULT_MODEL=Wan-AI/Wan2.1-T2V-1.3B-Diffusers DEFAULT_ARGS= ;;
  *) echo "MODALITY=$MODALITY is none of text, multimodal, video_diffusion" >&2 && exit 2 ;;
esac
export MODEL_PATH=${MODEL_PATH:-$DEFAULT_MODEL}
export SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-$MODEL_PATH}
if [[ $ENGINE != trtllm ]]; then
  DEFAULT_ARGS=  # the recipes named above are TensorRT-LLM's
fi
AGG_ENGINE_ARGS=${AGG_ENGINE_ARGS:-$DEFAULT_ARGS}

frontend
if [[ $MODALITY == video_diffusion ]]; then
  ENGINE=native worker diffusion
else
  worker aggregated "$AGG_ENGINE_ARGS"
fi
serve
