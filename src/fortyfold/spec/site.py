"""A site: where to run. One class a kind, so that a key is valid only where something reads it.

`spec/site_file.py` makes sites from TOML.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fortyfold.spec.nodes import Gpus, NodeShape, parse_gpus, parse_memory, parse_seconds
from fortyfold.spec.section import Count, Section
from fortyfold.spec.site_words import (
    Duration,
    GpuText,
    Hosts,
    Line,
    Memory,
    Names,
    Ports,
    Text,
    Variables,
    Word,
)

# Options of the schedulers' that are not for `lines`, and the key to use instead.
_SLURM_OPTIONS = {
    "--nodes": "nodes", "-N": "nodes", "--gpus": "gpus", "-G": "gpus", "--gpus-per-node": "gpus",
    "--cpus-per-task": "cpus", "-c": "cpus", "--mem": "memory", "--time": "time_limit", "-t": "time_limit",
    "--account": "account", "-A": "account", "--partition": "partition", "-p": "partition", "--qos": "qos", "-q": "qos",
    "--constraint": "constraint", "-C": "constraint", "--output": "logs", "-o": "logs", "--error": "logs", "-e": "logs",
    "--signal": "warn_seconds", "--ntasks": "", "-n": "", "--ntasks-per-node": "", "--requeue": "", "--no-requeue": "",
    "--open-mode": "", "--array": "", "-a": "", "--wrap": "", "--job-name": "", "-J": "", "--chdir": "", "-D": "",
    "--export": "variables or secrets", "--export-file": "variables or secrets",
}  # fmt: skip
_PBS_OPTIONS = {
    "-l select": "nodes, cpus, memory, gpus and attributes", "-l walltime": "time_limit", "-l place": "",
    "-lselect": "nodes, cpus, memory, gpus and attributes", "-lwalltime": "time_limit", "-lplace": "",
    "-A": "account", "-q": "queue", "-o": "logs", "-e": "logs", "-v": "variables", "-V": "variables",
    "-I": "", "-J": "", "-N": "", "-r": "", "-j": "", "-W": "", "-X": "", "-z": "",
}  # fmt: skip
_PBS_RESOURCES = {"ncpus": "cpus", "ngpus": "gpus", "mem": "memory", "mpiprocs": "procs"}


NOT_A_FOLDER = re.compile(r"\w+:/|fs-\w+:")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")


class NodeGroup(Section):
    """Some nodes alike, where not all are; what is left out is the site's."""

    nodes: Count = 1
    procs: Count | None = None
    gpus: GpuText | None = None
    cpus: Count | None = None
    memory: Memory | None = None


class Site(Section):
    """What every kind of site has."""

    kind: Literal["local", "ssh", "slurm", "pbs", "aws"]
    """local: this machine. ssh: a list of hosts. slurm, pbs: a cluster's scheduler. aws: instances made for the run."""
    nodes: Count | None = None
    """How many machines; default: one, or all hosts of kind ssh. --nodes says otherwise."""
    procs: Count | None = None
    """Processes (ranks) on each; default: one a GPU, or one. --procs says otherwise."""
    gpus: GpuText | None = None
    """GPUs of each node: a count, or type and count as in "v100:4"."""
    cpus: Count | None = None
    """Processor cores of each node; without it a scheduler grants what is usual there, which may be one."""
    memory: Memory | None = None
    """Main memory of each node, such as "250gb"."""
    groups: tuple[NodeGroup, ...] = ()
    """Where nodes differ: groups of nodes, each with its own nodes, procs, gpus, cpus and memory."""
    modules: tuple[Text, ...] = ()
    """Environment modules to load on each node."""
    conda: Text | None = None
    """A conda environment to activate on each node: its name or path."""
    venv: Text | None = None
    """A Python virtual environment to activate on each node: its path."""
    variables: Variables = Field(default_factory=dict)
    """Environment variables for each node. They are written to files: no secrets."""
    secrets: Names = ()
    """Names of environment variables whose values reach the nodes, and no file, log or command line."""
    python: Text | None = None
    """The interpreter on the nodes; default: this one, or that of conda, venv or the container."""
    container: Text | None = None
    """An Apptainer image to run in: a .sif file, or docker://…"""
    binds: tuple[Text, ...] = ()
    """Folders that the container sees as well, as Apptainer's --bind takes them."""
    scratch: Text | None = None
    """A fast disk of each node; sharded data is staged there before training. Environment variables are filled in."""
    interface: Text | None = None
    """The network interface that nodes talk by; default: the one that leads from each node to the first."""
    ports: Ports | None = None
    """The first and the last port that the first node may listen on, where not all are let through; two are used."""
    run_root: Text | None = None
    """The folder on the nodes where run directories live; default: runs/ below the folder of the command, or, where
    hosts do not see that, ~/runs."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.conda and self.venv:
            raise ValueError("conda and venv exclude each other; keep one")
        if self.binds and not self.container:
            raise ValueError("binds is for a container, and does nothing here; leave it out")
        for key in ("run_root", "venv", "container", "python", "logs", "config", "identity"):
            if _VARIABLE.search(str(getattr(self, key, None) or "")):
                raise ValueError(f"{key} holds a variable, and only scratch has them filled in; write the path, or ~")
        self.check_run_root()
        if self.groups and self.nodes is not None:
            raise ValueError("groups count the nodes; leave nodes out")
        return self

    def check_run_root(self) -> None:
        if self.run_root and NOT_A_FOLDER.match(self.run_root):
            raise ValueError(f"run_root is a folder, and {self.run_root} is not; only kind aws has runs on S3 and EFS")

    @property
    def run_folder(self) -> str | None:
        """The folder on the nodes where run directories live, if the site says."""
        return self.run_root

    @property
    def keeps_runs(self) -> bool:
        """Whether run directories outlive the nodes, so that the machine that commands need not have checkpoints."""
        return False

    def shapes(self, nodes: int | None = None, procs: int | None = None) -> tuple[NodeShape, ...]:
        """What each node is asked for, node by node; `nodes` and `procs` win over the site's."""
        if self.groups and nodes is not None and nodes != sum(group.nodes for group in self.groups):
            raise ValueError(f"its groups have {sum(group.nodes for group in self.groups)} nodes, not {nodes}")
        groups = self.groups or (NodeGroup(nodes=nodes or self.nodes or self._usual_nodes()),)
        return tuple(self._shape(group, procs) for group in groups for _ in range(group.nodes))

    def _usual_nodes(self) -> int:
        return 1

    def _shape(self, group: NodeGroup, procs: int | None) -> NodeShape:
        def own(key: str) -> Any:
            given = getattr(group, key)
            return getattr(self, key) if given is None else given

        gpus, memory = own("gpus"), own("memory")
        asked = parse_gpus(gpus) if gpus is not None else Gpus(0)
        count = procs or own("procs") or asked.count or 1
        if asked.count and count > asked.count:
            raise ValueError(f"{count} processes on a node of {asked.count} GPUs; one needs a GPU of its own")
        return NodeShape(count, asked, own("cpus"), parse_memory(memory) if memory else None)


class LocalSite(Site):
    kind: Literal["local"]

    @model_validator(mode="after")
    def _is_here(self) -> Self:
        for name, field in type(self).model_fields.items():
            default = field.get_default(call_default_factory=True)
            if name not in ("kind", "procs") and getattr(self, name) != default:
                raise ValueError(f"{name} does nothing on this machine; a site of kind local has procs only")
        return self


class BatchSite(Site):
    """What clusters with a scheduler have in common. All nodes see the run directory."""

    time_limit: Duration | None = None
    """The longest that the job may take: "20:00" is twenty minutes, "1:00:00" an hour, "2-00:00:00" two days."""
    account: Word | None = None
    """Whom the time is charged to."""
    warn_seconds: Annotated[int, Field(ge=10)] = 180
    """So long before the time limit the run is saved and queued again."""
    logs: Text | None = None
    """The folder for the job's own output; default: logs/ in the run directory."""
    lines: tuple[Line, ...] = ()
    """More options for the scheduler, one each, such as --reservation=maintenance."""

    @model_validator(mode="after")
    def _time_suffices(self) -> Self:
        if self.time_limit and self.warn_seconds >= parse_seconds(self.time_limit):
            raise ValueError(
                f'time_limit "{self.time_limit}" is {parse_seconds(self.time_limit)} s, of which warn_seconds '
                f'({self.warn_seconds}) leaves nothing; two hours are "2:00:00"'
            )
        return self

    def refuse_lines(self, owned: Mapping[str, str]) -> None:
        """Those that fortyfold sets itself, by the key that is named, or that would make something else of the job."""
        for line in self.lines:
            for option, key in owned.items():
                name = line.partition("=")[0]
                abbreviated = name.startswith("--") and option.startswith(name)  # getopt takes abbreviations
                if abbreviated or (not option.startswith("--") and line.startswith(option)) or line == option:
                    instead = f"use {key}" if key else "fortyfold sets it, or it would make something else of the job"
                    raise ValueError(f"{line} is not for lines: {instead}")


class SlurmSite(BatchSite):
    kind: Literal["slurm"]
    partition: Word | None = None
    """Slurm's --partition."""
    qos: Word | None = None
    """Slurm's --qos."""
    constraint: Word | None = None
    """Slurm's --constraint: features that the nodes must have."""

    @model_validator(mode="after")
    def _lines_are_others(self) -> Self:
        self.refuse_lines(_SLURM_OPTIONS)
        if any(line.startswith("--gres=gpu") for line in self.lines):
            raise ValueError("--gres=gpu is not for lines: use gpus")
        return self


class PbsSite(BatchSite):
    kind: Literal["pbs"]
    queue: Word | None = None
    """PBS's -q."""
    attributes: dict[Word, Word | int] = Field(default_factory=dict)
    """What the site asks for in each chunk besides, such as { gpu_model = "a100", phase = 28 }."""

    @model_validator(mode="after")
    def _lines_are_others(self) -> Self:
        self.refuse_lines(_PBS_OPTIONS)
        for name, key in _PBS_RESOURCES.items():
            if name in self.attributes:
                raise ValueError(f"{name} is not for attributes: use {key}")
        if self.secrets:
            raise ValueError("secrets: PBS shows the variables of a job to everybody; put them where programs look for "
                             "them on the nodes, such as ~/.netrc")  # fmt: skip
        return self


class RemoteSite(Site):
    """What sites have in common whose nodes are reached by ssh."""

    config: Text | None = None
    """A configuration file for ssh, instead of the user's own."""
    shared: bool = True
    """Whether all hosts and this machine see the run directory under the same path. If not, it is kept on the first
    host, and fetched after every checkpoint."""
    bootstrap: Literal["there", "wheel"] = "there"
    """How the hosts get fortyfold: it is there already, or a wheel is sent, and installed once a version."""

    @model_validator(mode="after")
    def _one_way_to_get_it(self) -> Self:
        if self.bootstrap == "wheel" and self.container:
            raise ValueError('a container has its own fortyfold; write bootstrap = "there", or leave out the container')
        return self


class SshSite(RemoteSite):
    kind: Literal["ssh"]
    hosts: Hosts
    """The machines, as ssh is told them; the first one leads."""

    def _usual_nodes(self) -> int:
        return len(self.hosts)
