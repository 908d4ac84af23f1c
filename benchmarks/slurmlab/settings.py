"""What a laboratory's Slurm is: the text of its files (pure). Comments say why a value isn't the
usual one; slurm.conf(5) and slurmdbd.conf(5) say what each means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CLUSTER = "lab"
DATABASE = "slurm"
CPUS = 8
"""That each node says it has (config_overrides: nobody looks)."""


@dataclass(frozen=True)
class Plan:
    """Of one laboratory."""

    folder: Path
    num_nodes: int
    devices_per_node: int
    grace_s: int
    """From SIGTERM to SIGKILL for a job of `spot` that another takes the nodes of."""
    ports: Sequence[int]
    """Of the controller, of accounting, then of each node."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names, n1 the first."""
        return tuple(f"n{number + 1}" for number in range(self.num_nodes))

    @property
    def munge_socket(self) -> Path:
        """Where clients ask for credentials."""
        return self.folder / "munge.socket"

    @property
    def database_socket(self) -> Path:
        """Where only accounting connects."""
        return self.folder / "mysql.socket"

    def slurm_conf(self) -> str:
        """Two leaves; partitions main, prod and spot over all nodes, of which prod takes those of
        spot; accounting with QOS. The first half of the nodes has the feature fast."""
        controller, accounting, *ports = self.ports
        half = self.num_nodes // 2
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={CPUS} RealMemory=8000 Gres=gpu:{self.devices_per_node} "
            f"Feature={'fast' if at < half else 'slow'}"
            for at, (name, port) in enumerate(zip(self.nodes, ports, strict=True))
        )
        return f"""\
ClusterName={CLUSTER}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until credentials of its last start are void: 120 s, usually.
AuthInfo=socket={self.munge_socket},cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
# Several nodes of one host: neither cgroups nor Slurm's own look at the hardware.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Who asked for a signal before an end (sbatch --signal) gets that one.
SlurmctldParameters=preempt_send_user_signal
PriorityType=priority/multifactor
PriorityWeightQOS=10000
PriorityWeightAge=1000
PriorityWeightFairshare=1000
SchedulerType=sched/backfill
# Times here are a hundredth of real ones, and so is the precision of an estimated start.
SchedulerParameters=bf_interval=1,bf_continue,bf_window_linear=1,sched_interval=2,requeue_delay=0
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting}
AccountingStoragePass={self.munge_socket}
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
# A node that is silent is down after so long.
SlurmdTimeout=6
KillWait=5
UnkillableStepTimeout=126
ReturnToService=2
MinJobAge=600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=2-0 PriorityTier=5 PreemptMode=OFF
PartitionName=prod Nodes=ALL MaxTime=2-0 PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=1-0 PriorityTier=1 PreemptMode=REQUEUE GraceTime={self.grace_s}
PartitionName=short Nodes=ALL MaxTime=10 PriorityTier=5 PreemptMode=OFF
"""

    def topology_conf(self) -> str:
        """Two leaves below one switch."""
        half = self.num_nodes // 2
        first, second = ",".join(self.nodes[:half]), ",".join(self.nodes[half:])
        return (
            f"SwitchName=leaf1 Nodes={first}\n"
            f"SwitchName=leaf2 Nodes={second}\n"
            "SwitchName=spine Switches=leaf1,leaf2\n"
        )

    def gres_conf(self) -> str:
        """The same files on each node: they are one host's."""
        last = self.devices_per_node - 1
        which = f"[0-{last}]" if last else "0"
        return f"NodeName={','.join(self.nodes)} Name=gpu File={self.folder}/device{which}\n"

    def slurmdbd_conf(self) -> str:
        """Asked through loopback alone."""
        return f"""\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={self.ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.munge_socket}
CommunicationParameters=NoInAddrAny
PidFile={self.folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc={DATABASE}
"""

    def database_options(self) -> list[str]:
        """Of mariadbd: small, private, and without care for a power cut."""
        return [
            "--no-defaults",
            f"--datadir={self.folder}/database",
            f"--socket={self.database_socket}",
            f"--pid-file={self.folder}/mysql.pid",
            f"--tmpdir={self.folder}/database",
            "--user=root",
            "--skip-networking",
            "--skip-grant-tables",
            "--innodb-data-file-path=ibdata1:4M:autoextend",
            "--innodb-log-file-size=4M",
            "--innodb-buffer-pool-size=32M",
            "--innodb-lock-wait-timeout=900",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-flush-method=nosync",
            "--innodb-doublewrite=0",
            "--innodb-file-per-table=0",
            "--debug-no-sync",
        ]


ACCOUNTS = (
    "add qos high set priority=100",
    "add qos two set grptres=gres/gpu=2",
    "add account research,teaching",
    "add user root account=research,teaching defaultaccount=research "
    "qos=normal,high,two defaultqos=normal",
)
"""For sacctmgr: QOS `high` comes first, all of `two` together hold two devices."""
