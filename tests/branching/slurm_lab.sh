#!/bin/bash
# A real Slurm of one node (slurmctld, slurmd, munge) in namespaces of its own: nothing listens outside of them.
# usage: [KILL_WAIT=seconds] slurm_lab.sh FOLDER COMMAND...     needs root; apt-get install slurmd slurmctld slurm-client munge
set -u
folder=$1
if [ -z "${IN_LAB:-}" ]; then exec env IN_LAB=1 unshare -n -m -p -f --mount-proc bash "$0" "$@"; fi
shift
mkdir -p "$folder"/{state,spool,log}; chmod 700 "$folder" "$folder/state"
# name resolution passes over 127.0.0.1 where there is no other address, and slurm then fails to listen
ip link set lo up; ip addr add 192.0.2.10/32 dev lo
host=$(hostname -s)
dd if=/dev/urandom of="$folder/munge.key" bs=1 count=128 2>/dev/null; chmod 600 "$folder/munge.key"
cat > "$folder/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$folder/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/ctld.pid
SlurmdPidFile=$folder/d.pid
SlurmctldLogFile=$folder/log/ctld.log
SlurmdLogFile=$folder/log/d.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=${KILL_WAIT:-5}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_min_interval=200000,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10
# jobs here make room for those of main
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1
CONF
export SLURM_CONF="$folder/slurm.conf"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.sock" --pid-file="$folder/munge.pid" \
  --log-file="$folder/log/munge.log" --seed-file="$folder/munge.seed"
slurmctld -D -f "$SLURM_CONF" >"$folder/log/ctld.out" 2>&1 &
slurmd -D -f "$SLURM_CONF" >"$folder/log/d.out" 2>&1 &
for _ in $(seq 120); do timeout 5 sinfo -h -o %t 2>/dev/null | grep -q idle && break; sleep .25; done
timeout 5 sinfo -h -o %t | grep -q idle || { echo "slurm did not start"; tail -n 20 "$folder"/log/*; exit 70; }
# all that runs in the namespace ends with this shell, its first process
"$@"
