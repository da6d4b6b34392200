#!/usr/bin/env bash
# numa.sh COMMAND...: run it on the processor cores and memory beside its first GPU.
set -euo pipefail
GPU=${CUDA_VISIBLE_DEVICES:-0}
GPU=${GPU%%,*}
NODE=
if command -v numactl > /dev/null && command -v nvidia-smi > /dev/null; then
  BUS=$(nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader --id="$GPU" | tr '[:upper:]' '[:lower:]')
  # nvidia-smi writes a domain of eight digits, sysfs one of four.
  NODE=$(cat "${SYSFS:-/sys}/bus/pci/devices/${BUS#0000}/numa_node" 2> /dev/null || true)
fi
if [[ -z $NODE || $NODE == -1 ]]; then
  echo "numa.sh: no NUMA node is known for GPU $GPU (it takes numactl and nvidia-smi): not bound" >&2
  exec "$@"
fi
exec numactl "--cpunodebind=$NODE" "--membind=$NODE" "$@"
