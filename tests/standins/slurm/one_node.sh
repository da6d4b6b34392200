#!/usr/bin/env bash
# The real Slurm on one node in a folder, without systemd: munged, slurmctld and slurmd until this script ends.
#
#   apt-get install slurm-wlm munge
#   tests/standins/slurm/one_node.sh /tmp/slurm &     # as root
#   export SLURM_CONF=/tmp/slurm/slurm.conf  # then sbatch, srun, squeue, ...
#
# CPUS pretends that the node has so many processors (default: 16): mock engines need few.
set -euo pipefail
DIR=${1:?usage: one_node.sh FOLDER}
CPUS=${CPUS:-16}
PORT=${PORT:-16817}
HOST=$(hostname -s)
mkdir -p "$DIR"/{state,spool,munge}
[[ -s $DIR/munge/key ]] || dd if=/dev/urandom of="$DIR/munge/key" bs=1 count=1024 status=none
chown -R munge: "$DIR/munge" && chmod 755 "$DIR/munge" && chmod 600 "$DIR/munge/key"
cat > "$DIR/slurm.conf" <<END
ClusterName=one
SlurmctldHost=$HOST(127.0.0.1)
SlurmUser=root
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/socket
CredType=cred/munge
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdLogFile=$DIR/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/completed.txt
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=$CPUS State=UNKNOWN
PartitionName=all Nodes=$HOST Default=YES MaxTime=UNLIMITED State=UP
END
export SLURM_CONF=$DIR/slurm.conf
STARTED=()
trap 'kill "${STARTED[@]}" 2>/dev/null || true; wait' EXIT
trap 'exit 143' INT TERM
runuser -u munge -- munged --foreground --force --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" \
  --pid-file="$DIR/munge/pid" --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed" > "$DIR/munged.out" 2>&1 &
STARTED+=("$!")
for _ in $(seq 100); do [[ -S $DIR/munge/socket ]] && break; sleep 0.1; done
slurmctld -D -c > "$DIR/slurmctld.out" 2>&1 &
STARTED+=("$!")
slurmd -D > "$DIR/slurmd.out" 2>&1 &
STARTED+=("$!")
wait -n "${STARTED[@]}"
