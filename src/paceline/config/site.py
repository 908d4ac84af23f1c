"""Site: what a person would type each time to get machines: scheduler, account, environment.

It is read from paceline-sites.toml in the folder that one launches from, and from
~/.config/paceline/sites.toml; of a name that both have, the former counts. A file has a table for
each site.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.config import files
from paceline.config.errors import InputError
from paceline.config.frozen import Count, CountOrNone, FrozenConfig, Ways, nearest

EngineName = Literal["local", "ssh", "slurm", "ray", "kubernetes", "skypilot"]
Usd = Annotated[float, Field(ge=0, le=10**6)]
Words = Annotated[tuple[str, ...], Field(strict=False)]


class NodeType(FrozenConfig):
    """Machines of one kind that a site hands out."""

    cluster: str
    """What one is: a Cluster file, or devices x name, such as "8xH100-SXM"."""
    num_nodes: Ways
    """How many the site has of them at most."""
    usd_per_device_hour: Usd | None = None
    spot_usd_per_device_hour: Usd | None = None
    """What a device costs that may be taken away; None: there are no such machines."""
    spot_mtbp_hours: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Mean hours until a spot machine is taken away."""
    select: Words = ()
    """How the engine is asked for them: Slurm's --constraint=..., --gres=...; of Ray what a node
    gives, by Ray's names: GPU=8, CPU=64; of Kubernetes labels of nodes, LABEL=VALUE, and what a pod
    takes of one beside its GPUs, limits.memory=900Gi; of SkyPilot a task's resources,
    accelerators=H100:8, and places of which any will do, infra=aws/us-east-1."""


class Site(FrozenConfig):
    """Where runs are launched, and how."""

    engine: EngineName
    partition: str = ""
    """Slurm's; of Kubernetes Kueue's LocalQueue, "": none."""
    account: str = ""
    qos: str = ""
    """Slurm's; of Kubernetes Kueue's WorkloadPriorityClass."""
    spot_partition: str = ""
    """Where jobs go that may be preempted."""
    hosts: Words = ()
    """Of engine "ssh": machines without a scheduler, as ssh knows them."""
    ssh_config: str = ""
    """Of engine "ssh": a file for `ssh -F`; "": the person's own."""
    ray_address: str = "auto"
    """Of engine "ray": host:port of the cluster's head; "auto": the one of this machine."""
    context: str = ""
    """Of engine "kubernetes": of the kubeconfig; "": the current one."""
    namespace: str = ""
    """Of engine "kubernetes"; "": the context's."""
    claim: str = ""
    """Of engine "kubernetes": the PersistentVolumeClaim of the folder `shared`. Of engine
    "skypilot": the volume of it (`sky volumes`); "": lines of `setup` mount it."""
    topology: str = ""
    """Of engine "kubernetes": the label of nodes below one switch, where Kueue keeps a job if it
    can; "": anywhere."""
    buckets: dict[str, str] = Field(default_factory=dict)
    """Of engine "skypilot": by folder of the machines the bucket that is mounted there, such as
    s3://copies: for `checkpoint.copy_to`, and for data."""
    container: str = ""
    """An image that Apptainer runs, or that pods or SkyPilot's machines have; "": none."""
    venv: str = ""
    """A folder with bin/paceline that all nodes see; "": the one that launches."""
    modules: Words = ()
    """Loaded before the command: `module load ...`."""
    setup: Words = ()
    """Lines of shell before the command, for what else a site needs; of engine "skypilot": once on
    each machine that is rented, to install and to mount."""
    scratch: str = ""
    """A fast folder on each node."""
    shared: str = ""
    """A folder that all nodes see; runs are kept below it. "": where the person launches."""
    node_types: dict[str, NodeType] = Field(default_factory=dict)
    max_hours: Annotated[float, Field(gt=0, le=10**5)] | None = None
    """The longest a job may run at once; None: as the engine says."""
    grace_s: Count = 60
    """From the notice of an end to the end."""
    grow_after_s: CountOrNone = 600
    """Of Slurm: after so many seconds with fewer nodes than it would like, a job saves and comes
    back when more are free; 0: it stays as it is."""

    def node_type(self, name: str) -> NodeType | None:
        """The one of a name; of "" the only one, None where there are none or several.

        Raises:
            InputError: the site has none of this name.
        """
        if not name:
            return next(iter(self.node_types.values())) if len(self.node_types) == 1 else None
        if name not in self.node_types:
            known = ", ".join(sorted(self.node_types)) or "none"
            raise InputError(
                f"the site has no node type {name!r}: take one of its node_types, which are "
                f"{known}."
            )
        return self.node_types[name]


_ENGINES: dict[str, tuple[EngineName, ...]] = {
    "partition": ("slurm", "kubernetes"),
    "account": ("slurm",),
    "qos": ("slurm", "kubernetes"),
    "spot_partition": ("slurm", "kubernetes"),
    "hosts": ("ssh",),
    "ssh_config": ("ssh",),
    "ray_address": ("ray",),
    "context": ("kubernetes",),
    "namespace": ("kubernetes",),
    "claim": ("kubernetes", "skypilot"),
    "topology": ("kubernetes",),
    "buckets": ("skypilot",),
    "grow_after_s": ("slurm",),
}
"""Of settings that not all engines heed: those that do."""


def site_files() -> tuple[Path, Path]:
    """The person's file, and the project's, which counts more; either may not exist."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return own / "paceline" / "sites.toml", Path("paceline-sites.toml")


def read_sites(file: Path) -> dict[str, Site]:
    """The sites of a file, by name.

    Raises:
        InputError: it can't be read, or holds something else; names the site and the key.
    """
    raw = files.read_toml(file, "write a table for each site, see docs/cluster.md")
    sites = {}
    for name, table in raw.items():
        if not isinstance(table, dict):
            raise InputError(f"{file}: {name} is no site: write it as a table, [{name}].")
        try:
            sites[name] = Site.parse(table, where=name)
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        engine = sites[name].engine
        for key in table:
            if engine not in _ENGINES.get(key, (engine,)):
                raise InputError(
                    f"{file}: {name}.{key} has no effect with engine {engine!r}: leave it out."
                )
    return sites


def site_named(name: str) -> Site:
    """The site of a name; "local" needs no file.

    Raises:
        InputError: there is none; names the nearest.
    """
    known = [file for file in site_files() if file.is_file()]
    sites = {key: site for file in known for key, site in read_sites(file).items()}
    if name in sites:
        return sites[name]
    if name == "local":
        return Site(engine="local")
    if not known:
        own, project = site_files()
        raise InputError(
            f"no site {name!r} is known, since neither {project} nor {own} exists: write one of "
            "them (docs/cluster.md), or launch --on local."
        )
    raise InputError(
        f"no site {name!r} is in {' or '.join(map(str, known))}{nearest(name, [*sites, 'local'])}"
    )
