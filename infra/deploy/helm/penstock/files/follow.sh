#!/bin/bash
# Any other pod of the group: an SSH server, through which the leader's MPI starts ranks. It needs no root.
set -euo pipefail
install -d -m 700 ~/.ssh
install -m 600 "${SSH_KEYS:?}/ssh-publickey" ~/.ssh/authorized_keys
[[ -e ~/.ssh/host ]] || ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/host
((UID != 0)) || install -d /run/sshd
if [[ -n ${PROMETHEUS_MULTIPROC_DIR:-} ]]; then # the metrics of the ranks on this pod
  penstock rank-metrics --metrics-host=:: "--metrics-port=${METRICS_PORT:?}" &
fi
exec /usr/sbin/sshd -D -e -p "${SSH_PORT:?}" -h ~/.ssh/host -o "AuthorizedKeysFile=$HOME/.ssh/authorized_keys" \
  -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o UsePAM=no -o StrictModes=no -o PidFile=none
