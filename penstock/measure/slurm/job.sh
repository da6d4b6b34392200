# What every job of `penstock slurm` does; the lines before say for which point.
set -euo pipefail

ID=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
ID=${ID:-$SLURM_JOB_ID}
LOGS=$OWN/logs-$ID
WORK=$LOCAL_FOLDER/penstock-$ID # on the head node only
HEAD=${SLURMD_NODENAME:-$(hostname -s)}
PORT=$((10000 + SLURM_JOB_ID % 200 * 100)) # jobs that share a node differ
HTTP=http://127.0.0.1:$((PORT + 1))
SRUN=(srun --overlap --input=none --cpu-bind=none --kill-on-bad-exit=1)
POLL_S=${POLL_S:-0.5}
STEPS=() NAMES=() ALONE=()
mkdir -p "$LOGS"

case $RUNTIME in
  pyxis) SRUN+=("--container-image=$IMAGE" "--container-mounts=$MOUNTS") ;;
  apptainer) ALONE=(apptainer exec --nv --bind "$MOUNTS" "$IMAGE") ;;
esac

say() { echo "$(date -u +%H:%M:%S) $*"; }

fail() {
  say "$*"
  exit 1
}

# The exit status is kept beside the results: not every cluster has accounting. Steps get SIGTERM and 40 s. They are
# signalled by ID: SLURM_JOB_ID of an array's last job is the whole array's.
finish() {
  local status=$? step
  trap - EXIT
  trap '' INT TERM
  say "stopping"
  if ((${#STEPS[@]})); then
    scancel --signal=TERM "$ID" 2> /dev/null || true
    for _ in $(seq 80); do
      alive || break
      sleep "$POLL_S"
    done
    kill -TERM "${STEPS[@]}" 2> /dev/null || true # srun ends its tasks with SIGKILL
    for step in "${STEPS[@]}"; do
      wait "$step" 2> /dev/null || true
    done
  fi
  rm -rf "$WORK" || true
  echo "$status" > "$OWN/exit-$ID"
  say "done, status $status"
  exit "$status"
}
trap finish EXIT
trap 'say interrupted; exit 130' INT
trap 'say "terminated: cancelled, or out of time"; exit 143' TERM
rm -rf "$WORK" # a job that Slurm queued again after its node had failed has the same id
mkdir -m 700 "$WORK"

alive() {
  local step
  for step in "${STEPS[@]}"; do
    ! kill -0 "$step" 2> /dev/null || return 0
  done
  return 1
}

# The name of the first step that has ended.
ended() {
  local index
  for index in "${!STEPS[@]}"; do
    kill -0 "${STEPS[$index]}" 2> /dev/null || { echo "${NAMES[$index]}" && return 0; }
  done
  return 1
}

# step NAME SRUN-OPTIONS... -- COMMAND...: start it in the background; its output goes to a file of that name.
step() {
  local name=$1 options=()
  shift
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  "${SRUN[@]}" "${options[@]}" "--output=$LOGS/$name.log" "${ALONE[@]}" "$@" &
  STEPS+=("$!") NAMES+=("$name")
}

ON_HEAD=(--nodes=1 --ntasks=1 "--nodelist=$HEAD")
[[ -z $GRES ]] || ON_HEAD+=(--gres=none)

# until_done PID: wait for it, but no longer than the steps run.
until_done() {
  local name status=0
  while kill -0 "$1" 2> /dev/null; do
    if name=$(ended); then
      kill -TERM "$1" 2> /dev/null || true
      sleep 1 # steps of a job that is cancelled get its signal too, and may end before it comes here
      fail "$name has ended: $(tail -n 3 "$LOGS/$name.log" 2> /dev/null | tr '\n' ' ') (in $LOGS/$name.log)"
    fi
    sleep "$POLL_S"
  done
  wait "$1" || status=$?
  ((status == 0)) || sleep 1 # likewise
  return "$status"
}

# Each cell has a broker and a router. Those of cell 0 are called nats and router, those of cell 1 nats-1 and router-1.
in_cell() { (($2)) && echo "$1-$2" || echo "$1"; }
broker_port() { echo $((PORT + ($1 ? 1 + 2 * $1 : 0))); } # PORT + 1 is that of HTTP
router_port() { echo $((PORT + 2 + 2 * $1)); }            # of its metrics

# url USER CELL: the URL of a user of a cell's broker. Passwords go by environment: others can read command lines.
url() {
  local at
  at=$HEAD:$(broker_port "$2")
  sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/nats:\/\/$1:\1@$at/p" "$WORK/$(in_cell store "$2")/secrets.json"
}

# cell_urls USER: those of the cells after the first.
cell_urls() {
  local cell urls=
  for ((cell = 1; cell < CELLS; cell++)); do
    urls+=${urls:+,}$(url "$1" "$cell")
  done
  echo "$urls"
}

# on_head NAME USER CELL COMMAND...: start a process beside its broker.
on_head() {
  local name=$1 user=$2 cell=$3
  shift 3
  PENSTOCK_NATS_URL=$(url "$user" "$cell") PENSTOCK_NAMESPACE=$(in_cell ps "$cell") \
    step "$name" "${ON_HEAD[@]}" -- "$@"
}

# of_all NAME USER COMMAND...: start a process that is connected to all cells.
of_all() {
  local name=$1 user=$2
  shift 2
  PENSTOCK_CELLS=$CELLS PENSTOCK_CELL_NATS_URLS=$(cell_urls "$user") on_head "$name" "$user" 0 "$@"
}

# instance NAME CELL NODES NODE-COUNT TASKS DEVICES COMMAND...: start a worker; several tasks are one engine's ranks, or
# with --nodes its nodes.
instance() {
  local name=$1 cell=$2 nodes=$3 count=$4 tasks=$5 devices=$6 options=() command=() launcher=mpi
  shift 6
  options=("--nodes=$count" "--ntasks=$tasks" "--nodelist=$nodes")
  [[ -z $GRES ]] || options+=("--gres=$GRES")
  ((tasks == 1)) || options+=("--ntasks-per-node=$((tasks / count))")
  [[ " $* " == *" --nodes="* ]] && launcher=node
  ((tasks == 1)) || [[ $launcher == node ]] || options+=(--mpi=pmix)
  if [[ -n ${OTLP_ENDPOINT:-} && " $* " == *" --engine="@(trtllm|vllm)" "* ]]; then # the engine's own spans
    export OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=${OTEL_EXPORTER_OTLP_TRACES_PROTOCOL:-http/protobuf}
    set -- "$@" "--otlp-endpoint=$OTLP_ENDPOINT"
  fi
  [[ -z $devices ]] || command+=(env "CUDA_VISIBLE_DEVICES=$devices")
  [[ $BIND != numa ]] || command+=("$OWN/numa.sh")
  if [[ $launcher == node ]]; then
    command+=(bash -c 'exec "$@" "--node-rank=$SLURM_PROCID"' node)
  elif ((tasks > 1)); then
    command+=(env "PROMETHEUS_MULTIPROC_DIR=$WORK-$name" trtllm-llmapi-launch)
  fi
  PENSTOCK_NATS_URL=$(url worker "$cell") PENSTOCK_NAMESPACE=$(in_cell ps "$cell") \
    step "$name" "${options[@]}" -- "${command[@]}" "$@"
}

# ranks NAME NODE PORT: start the metrics page of that worker's ranks on another node than its first.
ranks() {
  step "$1-metrics-$2" --nodes=1 --ntasks=1 "--nodelist=$2" -- env "PROMETHEUS_MULTIPROC_DIR=$WORK-$1" \
    "$PENSTOCK" rank-metrics --metrics-host=0.0.0.0 "--metrics-port=$3"
}

say "point $POINT on $SLURM_JOB_NODELIST"
"${SRUN[@]}" "${ON_HEAD[@]}" "${ALONE[@]}" "$PENSTOCK" slurm layout "$OWN/point.json" \
  "--first-port=$(($(router_port $((CELLS - 1))) + 1))" "--nodes=$SLURM_JOB_NODELIST" "--tasks=$SLURM_TASKS_PER_NODE" ${GRES:+--devices} > "$LOGS/instances.sh"

for ((cell = 0; cell < CELLS; cell++)); do
  step "$(in_cell nats "$cell")" "${ON_HEAD[@]}" -- "$PENSTOCK" nats "--data-dir=$WORK/$(in_cell store "$cell")" \
    "--namespace=$(in_cell ps "$cell")" --nats-host=0.0.0.0 "--nats-port=$(broker_port "$cell")" \
    "--store-size=$STORE_GIB"
done
for ((cell = 0; cell < CELLS; cell++)); do
  log=$LOGS/$(in_cell nats "$cell").log
  for _ in $(seq 120); do # until its streams are there
    ! grep -qs '^nats-server on' "$log" || break
    ! name=$(ended) || fail "the broker has ended: $(tail -n 3 "$LOGS/$name.log")"
    sleep "$POLL_S"
  done
  grep -qs '^nats-server on' "$log" || fail "the broker is not ready after 60 s: see $log"
done

TRACED=()
if [[ -n ${OTLP_ENDPOINT:-} ]]; then
  TRACED=(--tracing=all)
  of_all tracing operator "$PENSTOCK" trace "--otlp-endpoint=$OTLP_ENDPOINT"
fi
for ((cell = 0; cell < CELLS; cell++)); do
  on_head "$(in_cell router "$cell")" router "$cell" "$PENSTOCK" router "--metrics-port=$(router_port "$cell")" \
    "${ROUTER[@]}"
done
of_all gateway gateway "$PENSTOCK" gateway "--http-port=$((PORT + 1))" "${GATEWAY[@]}" "${TRACED[@]}"
. "$LOGS/instances.sh"
for ((cell = CELLS - 1; cell >= 0; cell--)); do
  METRICS=("--metrics=$POINT=http://127.0.0.1:$(router_port "$cell")/metrics" "${METRICS[@]}")
done

say "waiting for $WORKERS workers, up to $READY_S s"
"${SRUN[@]}" "${ON_HEAD[@]}" "${ALONE[@]}" "$PENSTOCK" health gateway --ready "--url=$HTTP/health" \
  "--workers=$WORKERS" "--wait-s=$READY_S" &
until_done "$!" || fail "the deployment is not ready after $READY_S s: see $LOGS"

say "load"
"${SRUN[@]}" "${ON_HEAD[@]}" "--output=$LOGS/client.log" "${ALONE[@]}" "$PENSTOCK" bench sweep \
  "--endpoint=$POINT=$HTTP" "--gpus=$GPUS" "--out=$OUT" "${METRICS[@]}" "${LOAD[@]}" &
until_done "$!" || fail "the load has failed: $(tail -n 3 "$LOGS/client.log") (in $LOGS/client.log)"
