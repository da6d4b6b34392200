#!/usr/bin/env bash
# Prefill and decode workers (and, with MODALITY=multimodal, an encode worker) behind a gateway. Settings: see common.sh.
#
#   PREFILL_ENGINE_ARGS, DECODE_ENGINE_ARGS, ENCODE_ENGINE_ARGS  engine arguments  default: by MODALITY
#   PREFILL_DEVICES, DECODE_DEVICES, ENCODE_DEVICES              GPUs of each      default: 0, 1, 2
#
#   MODEL_PATH=openai/gpt-oss-120b PREFILL_DEVICES=0,1,2,3 DECODE_DEVICES=4,5,6,7 \
#     PREFILL_ENGINE_ARGS=configs/recipes/gpt-oss-120b-prefill.yaml \
#     DECODE_ENGINE_ARGS=configs/recipes/gpt-oss-120b-decode.yaml ./disaggregated.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case $MODALITY in
  text) DEFAULT_MODEL=meta-llama/Llama-3.1-8B-Instruct SET=llama3 ;;
  multimodal) DEFAULT_MODEL=llava-hf/llava-v1.6-mistral-7b-hf SET=llava16 ;;
  *) echo "MODALITY=$MODALITY is none of text, multimodal" >&2 && exit 2 ;;
esac
export MODEL_PATH=${MODEL_PATH:-$DEFAULT_MODEL}
export SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-$MODEL_PATH}
recipe() { [[ $ENGINE != trtllm ]] || echo "$RECIPES/$SET-$1.yaml"; } # they are TensorRT-LLM's
PREFILL_ENGINE_ARGS=${PREFILL_ENGINE_ARGS:-$(recipe prefill)}
DECODE_ENGINE_ARGS=${DECODE_ENGINE_ARGS:-$(recipe decode)}
ENCODE_ENGINE_ARGS=${ENCODE_ENGINE_ARGS:-$(recipe encode)}

# What the two sides disagree about is found here, not by a dead-lock.
if [[ $ENGINE == trtllm ]]; then
  "$PENSTOCK" recipe check "prefill=$PREFILL_ENGINE_ARGS" "decode=$DECODE_ENGINE_ARGS"
fi

frontend
if [[ $MODALITY == multimodal ]]; then
  CUDA_VISIBLE_DEVICES=${ENCODE_DEVICES:-2} worker encode "$ENCODE_ENGINE_ARGS"
fi
CUDA_VISIBLE_DEVICES=${PREFILL_DEVICES:-0} worker prefill "$PREFILL_ENGINE_ARGS"
CUDA_VISIBLE_DEVICES=${DECODE_DEVICES:-1} worker decode "$DECODE_ENGINE_ARGS"
serve
