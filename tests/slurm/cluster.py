"""A real SLURM cluster on the hosts of a network: slurmctld on node0, a slurmd on each, munged.

Everything of it is in one folder, and ends with the network.
"""

import os
import shutil
import time
from pathlib import Path

from tests.multinode.network import Network, unavailable

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged")
CONFIG = """\
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire: a requeued job waits that many seconds, by default 120.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/linear
SlurmdParameters=config_overrides
NodeName=node[0-{last}] CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; "" when there can."""
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    return f"{absent[0]} is not installed (tests/slurm/install.sh)" if absent else unavailable()


class Cluster:
    def __init__(self, network: Network, folder: Path):
        self.network, self.folder = network, folder
        for name in ("state", *(f"spool-node{host}" for host in network.hosts)):
            (folder / name).mkdir(parents=True)
        # `ip netns exec` hides the cgroups; nothing here needs them, and this plugin does not look.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        last, cpus = len(network.hosts) - 1, os.cpu_count()
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, last=last, cpus=cpus))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = ("socket", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in names]
        self._start(0, "munged", "--foreground", "--force", f"--key-file={key}", *files)
        self._wait_for("munged", (folder / "munge.socket").exists)
        self._start(0, "slurmctld", "-D")
        for host in network.hosts:
            self._start(host, "slurmd", "-D", "-N", f"node{host}")
        self._wait_for("slurmd", lambda: self.run("sinfo", "-h", "-o", "%T").strip() == "idle")

    def _start(self, host: int, *command: str) -> None:
        log = self.folder / f"{command[0]}-node{host}.log"
        self.network.start(host, list(command), log, env=self.environment)

    def _wait_for(self, what: str, condition, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.logs()}"
            time.sleep(0.2)

    def run(self, *command: str, **how) -> str:
        """A command of SLURM on node0; its output."""
        options = {"env": self.environment} | how
        return self.network.run(0, list(command), timeout=30.0, **options).stdout

    def logs(self) -> str:
        return "\n".join(f"{log}:\n{log.read_text()}" for log in self.folder.glob("*.log"))

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)
