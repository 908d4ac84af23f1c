"""Engine "ray": see the folder. A supervisor on the machine that launches keeps each job."""

import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch.contract import Rendered, Request, Submitted
from paceline.launch.engines.ray.connection import check_address, connected
from paceline.launch.supervision.engine import SupervisedEngine, check_num_nodes
from paceline.launch.supervision.state import ORDERS_TYPE, Bundles
from paceline.plan.answer.options import cluster_of

_PROBE_S = 60


class RayEngine(SupervisedEngine):
    """See the module; `contract.Engine` says what the methods do."""

    name = "ray"

    def places(self, request: Request, site: Site) -> Bundles:
        """What a node of the job gives: what its type says, else its devices."""
        check_address(site.ray_address)
        kind = site.node_type(request.node_type)
        most = 0 if kind is None else kind.num_nodes
        if kind is not None and kind.select:
            return Bundles(site.ray_address, dict(_resource(word) for word in kind.select), most)
        is_cpu = kind is not None and cluster_of(kind.cluster).device.kind == "cpu"
        resources = {"CPU" if is_cpu else "GPU": float(request.devices_per_node)}
        return Bundles(site.ray_address, resources, most)

    def expected_start(self, request: Request, rendered: Rendered) -> float | None:
        """Nobody knows how long others hold the machines."""
        return None

    def submit(self, request: Request, rendered: Rendered) -> Submitted:
        """See `contract.Engine`. More machines than there are, and may come, are refused."""
        bundles = ORDERS_TYPE.validate_json(rendered.files[rendered.main]).places
        assert isinstance(bundles, Bundles)
        with connected(bundles.address) as library:
            able = [one for one in _alive(library) if _gives(one, bundles.resources)]
        check_num_nodes(request, max(len(able), bundles.most))
        return super().submit(request, rendered)

    def probe(self, site: Site, script: str) -> Mapping[str, str]:
        """See `contract.Engine`."""
        check_address(site.ray_address)
        with connected(site.ray_address) as library:
            return dict(_answers(library, script))

    def why(self, job: Submitted, request: Request, site: Site) -> tuple[str, ...]:
        """See `contract.Explains`: who holds machines, and who waits before this job."""
        with connected(site.ray_address) as library:
            return tuple(_sentences(library, self.places(request, site), request))


def _alive(library: Any) -> list[dict[str, Any]]:
    return [one for one in library.nodes() if one["Alive"]]


def _gives(machine: Mapping[str, Any], resources: Mapping[str, float]) -> bool:
    """Whether a machine has what a node takes, free or not."""
    return all(machine["Resources"].get(key, 0.0) >= amount for key, amount in resources.items())


def _answers(library: Any, script: str) -> Iterator[tuple[str, str]]:
    """What the script prints, by machine; "" of one that does not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def ask() -> str:
        done = subprocess.run(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
        return done.stdout.decode(errors="replace")

    task = library.remote(ask)
    asked = {}
    for at, machine in enumerate(_alive(library)):
        place = NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False)
        answer = task.options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote()
        asked[f"{machine['NodeManagerHostname']}-{at}"] = answer
    for name, answer in asked.items():
        try:
            yield name, library.get(answer, timeout=_PROBE_S)
        except (library.exceptions.RayError, TimeoutError):
            yield name, ""


def _sentences(library: Any, bundles: Bundles, request: Request) -> Iterator[str]:
    from ray.util.placement_group import placement_group_table

    able = [one for one in _alive(library) if _gives(one, bundles.resources)]
    wanted = ", ".join(f"{key} {amount:g}" for key, amount in bundles.resources.items())
    yield (
        f"It wants {request.num_nodes} machines with {wanted} at once; {len(able)} of the "
        "cluster's are large enough, free or not."
    )
    free, total = library.available_resources(), library.cluster_resources()
    for key in bundles.resources:
        yield f"{key}: {free.get(key, 0.0):g} of {total.get(key, 0.0):g} is free in the cluster."
    groups = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
    for state, what in (("CREATED", "hold machines"), ("PENDING", "wait for machines")):
        names = sorted(
            one["name"] or "one without a name" for one in groups if one["state"] == state
        )
        if names:
            yield f"Placement groups that {what}: {', '.join(names)}."


def _resource(word: str) -> tuple[str, float]:
    name, _, amount = word.partition("=")
    try:
        return name, float(amount)
    except ValueError:
        raise InputError(
            f"select: {word!r} is no resource of Ray's: write NAME=AMOUNT, as GPU=8."
        ) from None
