# What the launch scripts share; sourced, not run. Every setting is an environment variable with a default.
#
#   MODEL_PATH         model directory or Hugging Face id     default: set by the script
#   SERVED_MODEL_NAME  name that clients use                  default: MODEL_PATH
#   ENGINE             trtllm, vllm, sglang, native, mock     default: trtllm
#   MODALITY           text, multimodal, video_diffusion      default: text
#   HTTP_PORT          of the gateway                         default: 8000
#   DATA_DIR           store and secrets of the broker        default: .penstock-example
#   PENSTOCK_NATS_URL  a broker that runs already, with credentials; default: one is started here
#   OTLP_ENDPOINT      OTLP URL to which traces of all requests are sent, such as http://127.0.0.1:4318/v1/traces; default: none
#   PENSTOCK           the command                            default: penstock
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RECIPES=${RECIPES:-$HERE/../../configs/recipes}
PENSTOCK=${PENSTOCK:-penstock}
ENGINE=${ENGINE:-trtllm}
MODALITY=${MODALITY:-text}
HTTP_PORT=${HTTP_PORT:-8000}
DATA_DIR=${DATA_DIR:-.penstock-example}
NATS_PORT=${NATS_PORT:-4222}
BLOCK_SIZE=${BLOCK_SIZE:-32}
OTLP_ENDPOINT=${OTLP_ENDPOINT:-}
STARTED=()

# The first of our processes that ends takes the others with it; so does Ctrl-C.
finish() {
  trap - EXIT INT TERM
  if ((${#STARTED[@]})); then
    kill -TERM "${STARTED[@]}" 2>/dev/null || true
    wait "${STARTED[@]}" 2>/dev/null || true
  fi
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() {
  "$@" &
  STARTED+=("$!")
}

# The URL of a role on our own broker. The password goes by environment: others can read command lines.
url() {
  python3 -c 'import json, sys; print("nats://{0}:{1}@127.0.0.1:{2}".format(sys.argv[1], json.load(open(sys.argv[2]))[sys.argv[1]], sys.argv[3]))' \
    "$1" "$DATA_DIR/secrets.json" "$NATS_PORT"
}

# as ROLE COMMAND...: start a process of that role in the pipeline.
as() {
  local role=$1
  shift
  start env PENSTOCK_NATS_URL="${PENSTOCK_NATS_URL:-$(url "$role")}" "$@"
}

# Broker (if none is named), streams, router, gateway.
frontend() {
  if [[ -z ${PENSTOCK_NATS_URL:-} ]]; then
    start "$PENSTOCK" nats --data-dir "$DATA_DIR" --nats-port "$NATS_PORT"
    for _ in $(seq 100); do
      [[ -s $DATA_DIR/secrets.json ]] && (exec 3<>"/dev/tcp/127.0.0.1/$NATS_PORT") 2>/dev/null && break
      sleep 0.1
    done
  fi
  PENSTOCK_NATS_URL="${PENSTOCK_NATS_URL:-$(url operator)}" "$PENSTOCK" streams apply
  as router "$PENSTOCK" router --mode "${ROUTER_MODE:-kv}"
  local traced=()
  if [[ -n $OTLP_ENDPOINT ]]; then
    traced=(--tracing all)
    as operator "$PENSTOCK" trace --otlp-endpoint "$OTLP_ENDPOINT"
  fi
  as gateway "$PENSTOCK" gateway --model "$MODEL_PATH" --served-model-name "$SERVED_MODEL_NAME" \
    --http-port "$HTTP_PORT" --block-size "$BLOCK_SIZE" ${traced[@]+"${traced[@]}"}
}

# worker ROLE [ENGINE_ARGS] [FLAG...]: one worker; only TensorRT-LLM and vLLM read the file.
worker() {
  local role=$1 file=${2:-}
  shift $(($# > 1 ? 2 : 1))
  local flags=(--engine "$ENGINE" --role "$role" --model "$MODEL_PATH" --served-model-name "$SERVED_MODEL_NAME")
  flags+=(--block-size "$BLOCK_SIZE" "$@")
  if [[ ($ENGINE == trtllm || $ENGINE == vllm || $ENGINE == sglang) && -n $file ]]; then
    flags+=(--extra-engine-args "$file")
  fi
  if [[ ($ENGINE == trtllm || $ENGINE == vllm || $ENGINE == sglang) && $role != diffusion && -n $OTLP_ENDPOINT ]]; then
    # the engine's own spans; engines take the URL for gRPC unless told otherwise
    export OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=${OTEL_EXPORTER_OTLP_TRACES_PROTOCOL:-http/protobuf}
    flags+=(--otlp-endpoint "$OTLP_ENDPOINT")
  fi
  as worker "$PENSTOCK" worker "${flags[@]}"
}

# Wait until one of our processes ends: that is a failure, whichever it is.
serve() {
  echo "serving $SERVED_MODEL_NAME at http://127.0.0.1:$HTTP_PORT/v1 (Ctrl-C ends it)"
  wait -n "${STARTED[@]}" || return
}
