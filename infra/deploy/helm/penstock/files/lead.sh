#!/bin/bash
# The leader of an engine over several pods: waits for the others, then starts the engine's ranks by MPI on all of
# them. The first rank is our worker; the others compute and run nothing of ours.
# LeaderWorkerSet names the pods of a group: <set>-<group> leads <set>-<group>-1 and so on.
set -euo pipefail
gpus=$1
shift
port=${SSH_PORT:?} keys=${SSH_KEYS:?}
name=${LWS_LEADER_ADDRESS%%.*}
domain=${LWS_LEADER_ADDRESS#*.}
hosts=localhost:$gpus
for ((i = 1; i < LWS_GROUP_SIZE; i++)); do
  host=$name-$i.$domain
  for ((waited = 0; ; waited += 2)); do
    (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null && break
    # until the pods are scheduled and their images are pulled
    if ((waited >= ${WAIT_S:-1800})); then
      echo "no SSH server on $host after ${WAIT_S:-1800} s" >&2
      exit 69
    fi
    sleep 2
  done
  hosts+=,$host:$gpus
done
install -d -m 700 ~/.ssh
install -m 600 "$keys/ssh-privatekey" ~/.ssh/penstock
# Host keys are new with each pod, so there is nothing to compare them with. The port is reachable by the group only.
unchecked="-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
exec mpirun --allow-run-as-root --bind-to none -np $((gpus * LWS_GROUP_SIZE)) --host "$hosts" \
  --mca plm_rsh_args "-p $port -i $HOME/.ssh/penstock $unchecked" \
  -x PATH -x LD_LIBRARY_PATH -x HOME -x HF_HOME -x HF_TOKEN -x PROMETHEUS_MULTIPROC_DIR \
  trtllm-llmapi-launch "$@"
