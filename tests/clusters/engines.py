"""The engines: how each is set up on the hosts, and starts a job there, by the commands of docs/clusters.md."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import ClassVar

from commands import Command, documented
from hosts import HOME, Hosts, is_of

SLURM = """ClusterName=test
SlurmctldHost=home
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdTimeout={timeout}
KillWait=2
StateSaveLocation=/run/slurm
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
NodeName=n[0-3] CPUs=1 RealMemory=1000
PartitionName=all Nodes=n[0-3] Default=YES State=UP
"""
SLURMD_SECONDS = 30
"""After which a node that Slurm does not hear from is down: longer than a cut that costs time only."""


class Engine:
    """Starts jobs on hosts."""

    first = HOME
    """The host that holds the coordinator."""
    tools: ClassVar[dict[str, str]] = {}
    """What it needs, and the package that has it."""
    daemons: tuple[str, ...] = ()
    """What the command lines of its processes on a host begin with."""
    carries = False
    """Whether the line to an agent goes through it, so that its end on a host is that of the agent."""

    def prepare(self, hosts: Hosts) -> None:
        """Have it run on the hosts."""

    def start(self, hosts: Hosts, folder: Path, *words: str) -> Command:
        """Start a job on all hosts."""
        raise NotImplementedError

    def daemon(self, hosts: Hosts, name: str) -> list[int]:
        """Its processes on a host."""
        found = hosts[name].processes(daemons=True).items()
        return [pid for pid, words in found if is_of(words, self.daemons)]


class Ssh(Engine):
    """One command, on a machine that is none of the hosts."""

    daemons = ("sshd",)
    carries = True

    def start(self, hosts: Hosts, folder: Path, *words: str) -> Command:
        """Start a job on all hosts."""
        named = ",".join(f"{name}:1" for name in hosts.names)
        return Command(hosts, {HOME: ["distbelief", "train", *words, "--hosts", named, "--json"]}, folder)


class Srun(Engine):
    """The command on every node, by Slurm."""

    first = "n0"
    tools: ClassVar = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
    daemons = ("slurmd", "slurmstepd")
    begin = "srun -N4"

    def prepare(self, hosts: Hosts) -> None:
        """Start a controller at home, a daemon on each node, and what authenticates them on both."""
        hosts.environment["SLURM_CONF"] = str(hosts.folder / "slurm.conf")
        (hosts.folder / "slurm.conf").write_text(SLURM.format(folder=hosts.folder, timeout=SLURMD_SECONDS))
        (hosts.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = hosts.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        for name, host in hosts.hosts.items():
            host.run("mkdir", "-m", "755", "/run/munge", "/run/slurm", "/run/slurmd")
            files = {"key-file": key, "pid-file": "/run/munge/pid", "log-file": "/run/munge/log"}
            seed = {"seed-file": "/run/munge/seed", "socket": "/run/munge/munge.socket.2"}
            host.run("munged", "--force", *(f"--{one}={path}" for one, path in {**files, **seed}.items()))
            host.run(*(["slurmctld"] if name == HOME else ["slurmd", "-N", name]), environment=hosts.environment)
        hosts[HOME].run("srun", "-N4", "true", environment=hosts.environment)
        for host in hosts.hosts.values():
            host.keep()

    def start(self, hosts: Hosts, folder: Path, *words: str) -> Command:
        """Start a job on all hosts."""
        return Command(hosts, {HOME: [*documented(self.begin), "train", *words, "--json"]}, folder)


class Salloc(Srun):
    """One command, in an allocation of Slurm's."""

    first = HOME
    carries = True
    begin = "salloc -N4"


class Mpirun(Engine):
    """The command on every host, by Open MPI."""

    first = "n0"
    tools: ClassVar = {"mpirun": "openmpi-bin"}
    daemons = ("orted",)

    def prepare(self, hosts: Hosts) -> None:
        """Say what Open MPI asks of root."""
        hosts.environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    def start(self, hosts: Hosts, folder: Path, *words: str) -> Command:
        """Start a job on all hosts."""
        return Command(hosts, {"n0": [*documented("mpirun -n 4"), "train", *words, "--json"]}, folder)


class Torchrun(Engine):
    """The command of torchrun on every host."""

    first = "n0"
    daemons = ("torchrun",)

    def start(self, hosts: Hosts, folder: Path, *words: str) -> Command:
        """Start a job on all hosts."""
        own = [*documented("torchrun --nnodes 4"), "train", *words, "--json"]
        return Command(hosts, dict.fromkeys(hosts.names, own), folder)


class Ray(Engine):
    """One command, on a node of a cluster of Ray's."""

    first = "n0"
    tools: ClassVar = {"ray": "distbelief[ray]"}
    daemons = ("raylet", "ray::")

    def prepare(self, hosts: Hosts) -> None:
        """Start the cluster, whose files are in a folder of its own on each host."""
        hosts.environment["RAY_TMPDIR"] = "/run/ray"
        for name in hosts.names:
            words = ["--head", "--port", "6379"] if name == "n0" else ["--address", "n0:6379"]
            own = ["--node-ip-address", hosts.addresses[name], "--num-cpus", "1", "--object-store-memory", "100000000"]
            hosts[name].run("ray", "start", *words, *own, environment=hosts.environment)
            hosts[name].keep()

    def start(self, hosts: Hosts, folder: Path, *words: str) -> Command:
        """Start a job on all hosts."""
        command = ["distbelief", "train", *words, "--on", "ray:n0:6379", "--json"]
        return Command(hosts, {"n0": command}, folder)


ENGINES = {
    "ssh": Ssh(), "srun": Srun(), "salloc": Salloc(), "torchrun": Torchrun(), "mpirun": Mpirun(), "ray": Ray(),
}  # fmt: skip
