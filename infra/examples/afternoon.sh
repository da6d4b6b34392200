#!/usr/bin/env bash
# A user's afternoon: start deployments, measure and compare them, find the one that meets an SLA, let a planner scale it, render Helm
# values for it, and look at its dashboards. About ten minutes on two cores, with mock engines that have the step times of a GPU.
#
#   FOLDER      results, plots and pictures               default: afternoon
#   PENSTOCK    the command                               default: penstock
#   PYTHON      that has penstock, for the pictures       default: python3
#   ENGINE      mock, native, vllm, trtllm                default: mock
#   MODEL       model directory or Hugging Face id        default: that of `penstock up`
#   WORKERS     of the aggregated deployment, and of the other one prefill and decode together; at least 2; default: 2
#   LEVELS      requests under way                        default: 1,4,16,32
#   ISL, OSL    tokens per prompt and answer              default: 2000, 64
#   TTFT, ITL   the SLA, ms                               default: 300, 15
#   HTTP_PORT   first of three ports                      default: 8000
#
# The same commands on a machine with two GPUs:  ENGINE=vllm MODEL=Qwen/Qwen3-8B LEVELS=1,8,32,128 ./afternoon.sh
set -euo pipefail

FOLDER=${FOLDER:-afternoon} PENSTOCK=${PENSTOCK:-penstock} PYTHON=${PYTHON:-python3} ENGINE=${ENGINE:-mock} MODEL=${MODEL:-}
WORKERS=${WORKERS:-2} LEVELS=${LEVELS:-1,4,16,32} ISL=${ISL:-2000} OSL=${OSL:-64} TTFT=${TTFT:-300} ITL=${ITL:-15}
HTTP_PORT=${HTTP_PORT:-8000}
PREFILL=$(((WORKERS + 1) / 2)) DECODE=$((WORKERS / 2))
export PENSTOCK_DASHBOARD_PORT=-1
STARTED=()

finish() {
  trap - EXIT INT TERM
  if ((${#STARTED[@]})); then
    kill -TERM "${STARTED[@]}" 2> /dev/null || true
    wait "${STARTED[@]}" 2> /dev/null || true
  fi
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() { printf '\n== %s\n' "$*"; }
run() { # show a command, and run it
  printf '$ penstock'
  printf ' %s' "$@"
  printf '\n'
  "$PENSTOCK" "$@"
}
start() { # start NAME PORT FLAGS...: a deployment, until it can answer
  local name=$1 port=$2
  shift 2
  printf '$ penstock up'
  printf ' %s' --engine "$ENGINE" "$@"
  printf '\n'
  "$PENSTOCK" up --engine "$ENGINE" --model "$MODEL" --data-dir "$FOLDER/$name" --http-port "$port" "$@" > "$FOLDER/$name.log" 2>&1 &
  STARTED+=("$!")
  "$PENSTOCK" health gateway --wait-s 3600 --url "http://127.0.0.1:$port/health/ready"
}
stop() { # the deployment that was started last
  kill -TERM "${STARTED[-1]}"
  wait "${STARTED[-1]}" || true
  unset 'STARTED[-1]'
}

mkdir -p "$FOLDER"
say "1. An aggregated deployment, and one with prefill and decode apart, under the same load"
load=(--isl "$ISL" --osl "$OSL" --concurrency "$LEVELS" --gpus "$WORKERS" --repeat 2 --out "$FOLDER/results")
start aggregated "$HTTP_PORT" --workers "$WORKERS"
run bench sweep --endpoint "aggregated=$FOLDER/aggregated/state.json" "${load[@]}"

stop
start split "$HTTP_PORT" --prefill "$PREFILL" --decode "$DECODE"
run bench sweep --endpoint "split=$FOLDER/split/state.json" "${load[@]}"

say "2. Plots, a comparison, and what each GPU serves at which cost"
run bench plot "$FOLDER/results"
run bench compare "$FOLDER/results/aggregated" "$FOLDER/results/split" || true
cat > "$FOLDER/prices.yaml" << END
currency: USD
gpus: {H100: {price_per_hour: 2.5, watts: 700, idle_watts: 120}}
energy_price_per_kwh: 0.12
END
run bench pareto "$FOLDER/results" --prices "$FOLDER/prices.yaml" --deployment aggregated:gpu=H100 --deployment split:gpu=H100

say "3. A profile of one worker"
start single "$((HTTP_PORT + 1))" --workers 1
run profile endpoint --endpoint "$FOLDER/single/state.json" --granularity 4 --max-context 8192 --osl 100 --max-concurrency 48 \
  --requests 2 --out "$FOLDER/profile/worker" --up "--engine $ENGINE"
stop

say "4. The smallest deployment that keeps TTFT below $TTFT ms and ITL below $ITL ms, and its Helm values"
run profile sla --data "$FOLDER/profile/worker" --ttft "$TTFT" --itl "$ITL" --isl "$ISL" --osl "$OSL" --rate 10 --out "$FOLDER/suggestion"
if command -v helm > /dev/null; then
  echo '$ helm lint'
  helm lint "$("$PYTHON" -c 'from penstock.deploy.kubernetes import CHART; print(CHART)')" -f "$FOLDER/suggestion/values.yaml" 2>&1 |
    grep -v -e dependencies -e "symbolic link" || true
fi
run kubernetes render llama3 --engine-image registry.example.com/penstock-trtllm:0.1.0 > "$FOLDER/llama3-values.yaml"

say "5. A planner on the running deployment, with a Prometheus beside it"
run monitoring --state "$FOLDER/split/state.json" --out "$FOLDER/monitoring" --prometheus "http://127.0.0.1:$((HTTP_PORT + 2))"
if command -v prometheus > /dev/null; then
  prometheus --config.file "$FOLDER/monitoring/prometheus.yml" --storage.tsdb.path "$FOLDER/monitoring/data" \
    "--web.listen-address=127.0.0.1:$((HTTP_PORT + 2))" > "$FOLDER/prometheus.log" 2>&1 &
  STARTED+=("$!")
fi
"$PENSTOCK" plan --data-dir "$FOLDER/split" --connector local --ttft 800 --itl 20 --interval-s 5 --start-s 5 --down-after-s 15 \
  --down-cooldown-s 5 > "$FOLDER/plan.log" 2>&1 &
STARTED+=("$!")
run bench sweep --endpoint "planned=$FOLDER/split/state.json" --rate 2,6,12,16 --requests 160 --isl 3000 --osl 150 \
  --out "$FOLDER/planned"
run plan --data-dir "$FOLDER/split" --history --since 10m

say "6. The dashboards"
if command -v prometheus > /dev/null; then
  "$PYTHON" -m penstock.deploy.monitoring.pictures --prometheus "http://127.0.0.1:$((HTTP_PORT + 2))" --minutes 4 \
    --out "$FOLDER/pictures"
fi
run doctor --data-dir "$FOLDER/split" || true
say "All files are in $FOLDER"
