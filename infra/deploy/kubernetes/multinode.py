"""One TensorRT-LLM engine over several pods: the leader starts an MPI rank per GPU on all of them and serves.

The other pods only run an SSH server, through which MPI starts their ranks; those compute and never run our code.
The names of the pods of a group are LeaderWorkerSet's: ``<set>-<group>`` leads ``<set>-<group>-1`` and so on.
"""

SSH_PORT = 2222
WAIT_S = 1800  # for the pods of the group to be scheduled and their images to be pulled
KEYS = "/etc/penstock/ssh"

# MPI runs as whatever the image runs as; host keys are new with each pod, so there is nothing to compare them with.
# The key is the group's own, and the port is reachable inside the cluster only.
LEAD = f"""\
#!/bin/bash
# The leader: waits for the others, then starts the engine's ranks; the first one is our worker.
set -euo pipefail
gpus=$1
shift
name=${{LWS_LEADER_ADDRESS%%.*}}
domain=${{LWS_LEADER_ADDRESS#*.}}
hosts=localhost:$gpus
for ((i = 1; i < LWS_GROUP_SIZE; i++)); do
  host=$name-$i.$domain
  for ((waited = 0; ; waited += 2)); do
    (exec 3<>"/dev/tcp/$host/{SSH_PORT}") 2>/dev/null && break
    if ((waited >= {WAIT_S})); then
      echo "no SSH server on $host after {WAIT_S} s" >&2
      exit 69
    fi
    sleep 2
  done
  hosts+=,$host:$gpus
done
install -d -m 700 ~/.ssh
install -m 600 {KEYS}/ssh-privatekey ~/.ssh/penstock
unchecked="-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
exec mpirun --allow-run-as-root --bind-to none -np $((gpus * LWS_GROUP_SIZE)) --host "$hosts" \\
  --mca plm_rsh_args "-p {SSH_PORT} -i $HOME/.ssh/penstock $unchecked" \\
  -x PATH -x LD_LIBRARY_PATH -x HF_HOME -x HF_TOKEN \\
  trtllm-llmapi-launch "$@"
"""

FOLLOW = f"""\
#!/bin/bash
# Any other pod of the group: lets the leader start ranks here.
set -euo pipefail
install -d -m 700 ~/.ssh
install -d /run/sshd
install -m 600 {KEYS}/ssh-publickey ~/.ssh/authorized_keys
ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/host <<<y >/dev/null
exec /usr/sbin/sshd -D -e -p {SSH_PORT} -h ~/.ssh/host -o PasswordAuthentication=no -o StrictModes=no
"""

SCRIPTS = {"lead.sh": LEAD, "follow.sh": FOLLOW}
