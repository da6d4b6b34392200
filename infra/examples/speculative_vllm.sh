#!/usr/bin/env bash
# Quick start: one vLLM worker whose EAGLE-3 draft proposes tokens, behind a gateway. Settings: see common.sh.
#
#   AGG_ENGINE_ARGS  vLLM's arguments, speculative_config among them  default: the recipe llama3-eagle3-vllm
#
#   pip install 'penstock[vllm]' && ./speculative_vllm.sh
export ENGINE=${ENGINE:-vllm}
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ $ENGINE != vllm ]]; then
  echo "ENGINE=$ENGINE: this quick start is vLLM's; see aggregated.sh" >&2
  exit 2
fi
export MODEL_PATH=${MODEL_PATH:-meta-llama/Llama-3.1-8B-Instruct}
export SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-$MODEL_PATH}
AGG_ENGINE_ARGS=${AGG_ENGINE_ARGS:-$RECIPES/llama3-eagle3-vllm.yaml}

frontend
worker aggregated "$AGG_ENGINE_ARGS"
serve
