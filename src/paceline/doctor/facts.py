"""Facts: all that is known of a machine, from its readings."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import TypeAdapter

from paceline.config.errors import InputError
from paceline.config.files import parse_json
from paceline.doctor import amd, infiniband, nccl_log, nvidia, system
from paceline.doctor.infiniband import Port
from paceline.doctor.nccl_log import NcclLog
from paceline.doctor.nvidia import Driver, Gpu
from paceline.doctor.software import Software
from paceline.doctor.storage import Storage
from paceline.doctor.system import OsKernel, System
from paceline.machine import nvidia_smi

_T = TypeVar("_T")


@dataclass(frozen=True)
class MachineFacts:
    """A machine; None: not known."""

    driver: Driver | None
    driver_error: str | None
    """What nvidia-smi printed instead of devices."""
    gpus: tuple[Gpu, ...]
    """Of either maker; empty: none seen."""
    matrix: nvidia_smi.LinkMatrix | None
    """Links between devices and cards."""
    amd_links: frozenset[str]
    """Kinds of links between AMD's devices: XGMI, PCIE."""
    ports: tuple[Port, ...] | None
    nccl: NcclLog | None
    software: Software | None
    system: System | None
    kernel: OsKernel
    storage: Storage | None

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that NCCL, gloo and torch heed: of this process and of the job that logged."""
        return {
            **(self.system.environment if self.system else {}),
            **(self.nccl.settings if self.nccl else {}),
        }

    @property
    def num_ranks(self) -> int | None:
        """Ranks on this host: a launcher's word, else one per device."""
        told = self.environment.get("LOCAL_WORLD_SIZE", "")
        return int(told) if told.isdigit() else len(self.gpus) or None


def facts_of(said: Mapping[str, str]) -> MachineFacts:
    """Understand what a machine said.

    Raises:
        InputError: a text is not what its name promises.
    """
    driver, gpus, amd_links = _devices(said)
    return MachineFacts(
        driver=driver,
        driver_error=nvidia.failure(said.get("nvidia-smi.xml", "")),
        gpus=gpus,
        matrix=_read(said, "nvidia-smi-topo.txt", nvidia_smi.parse),
        amd_links=amd_links,
        ports=_ports(said),
        nccl=_read(said, "nccl.log", nccl_log.parse),
        software=_read(said, "software.json", _json(Software)),
        system=_read(said, "system.json", _json(System)),
        kernel=_understood("a text of /proc", lambda: system.kernel(said)),
        storage=_read(said, "storage.json", _json(Storage)),
    )


def _devices(said: Mapping[str, str]) -> tuple[Driver | None, tuple[Gpu, ...], frozenset[str]]:
    """Driver, devices, and AMD's links; NVIDIA's devices where there are both."""
    nvlink = said.get("nvidia-smi-nvlink.txt", "")
    if nvidia.failure(said.get("nvidia-smi.xml", "")) is None:
        found = _read(said, "nvidia-smi.xml", lambda xml: nvidia.parse(xml, nvlink))
        if found is not None:
            return *found, frozenset()
    return _read(said, "rocm-smi.json", amd.parse) or (None, (), frozenset())


def _ports(said: Mapping[str, str]) -> tuple[Port, ...] | None:
    if "ibstat.txt" in said:
        return infiniband.parse_ibstat(said["ibstat.txt"])
    return _read(said, "infiniband.json", _json(tuple[Port, ...]))


def _json(kind: type[_T]) -> Callable[[str], _T]:
    """Reads what an `ask` wrote."""
    return partial(parse_json, kind=TypeAdapter(kind))


def _read(said: Mapping[str, str], name: str, parse: Callable[[str], _T]) -> _T | None:
    return _understood(name, lambda: parse(said[name])) if name in said else None


def _understood(name: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{name} is not understood ({str(error)[:200]}): leave it out, or save it anew with "
            "paceline doctor --save."
        ) from None


def as_data(facts: MachineFacts) -> dict[str, Any]:
    """The facts as plain data, for JSON."""
    return {name: _plain(value) for name, value in _shallow(facts).items()}


def _shallow(facts: MachineFacts) -> dict[str, Any]:
    found = dict(vars(facts))
    if facts.matrix is not None:
        joined = {f"{a} {b}": kind for (a, b), kind in facts.matrix.links.items()}
        found["matrix"] = {"devices": facts.matrix.devices, "links": joined}
    if facts.system is not None:
        cards = [card.model_dump(mode="json") for card in facts.system.cards]
        found["system"] = {**vars(facts.system), "cards": cards}
    return found


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return "unlimited" if value == float("inf") else value
