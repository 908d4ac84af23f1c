"""The task of a job, as SkyPilot takes it (pure).

How a machine ends decides what follows (`resources.job_recovery`): with 75 all machines are given
back and others are rented; so where one is taken away. Any other code ends the job.

Source: docs.skypilot.co, "SkyPilot YAML" and "Managed Jobs"; fields as the schemas of SkyPilot 0.14
have them. YAML takes JSON.
"""

import json
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.config.errors import EXIT_SAVED, InputError
from paceline.config.site import NodeType, Site
from paceline.launch.contract import Rendered, Request
from paceline.launch.engines.skypilot.node_script import NODE_SCRIPT, node_script
from paceline.launch.job_folder import job_name
from paceline.launch.start_script import START_SCRIPT, start_script
from paceline.launch.supervision.engine import check_num_nodes, check_starts_whole

TASK = "task.yaml"
PLACE_FILE = "skypilot.json"
"""How many machines a job has, and the devices of one."""
_HARDWARE = ("accelerators", "instance_type", "cpus")
_WORDS = (
    *_HARDWARE,
    *("memory", "disk_size", "disk_tier", "local_disk", "network_tier", "image_id", "ports"),
)
_PLACE = "infra"
_MOST_PRIORITY = 1000
_PROBE_CPUS = "2+"


def rendered(request: Request, site: Site) -> Rendered:
    """The task, the scripts of a machine, and the job's size.

    Raises:
        InputError: the site lacks what machines need, or the job asks for what SkyPilot can't do.
    """
    _check(request, site)
    kind = site.node_type(request.node_type)
    assert kind is not None  # checked
    resources = _resources(kind, is_spot=request.spot)
    _check_devices(resources, request)
    if request.priority:
        resources["priority"] = max(-_MOST_PRIORITY, min(_MOST_PRIORITY, request.priority))
    script = shlex.quote(str(request.folder / NODE_SCRIPT))
    task = _task(site, job_name(request), request.num_nodes, resources, f"exec bash {script}")
    size = {"num_nodes": request.num_nodes, "devices_per_node": request.devices_per_node}
    # The machine is the container, and was set up before.
    inside = site.replace(container="", setup=())
    files = {
        TASK: task,
        START_SCRIPT: start_script(request, inside),
        NODE_SCRIPT: node_script(request),
        PLACE_FILE: json.dumps(size) + "\n",
    }
    return Rendered(files, TASK)


def probe_task(site: Site, name: str, run: str) -> str:
    """A task of one machine without devices, where the site's first node type is.

    Args:
        run: shell.

    Raises:
        InputError: the site lacks what machines need.
    """
    check_site_of(site)
    resources = _resources(next(iter(site.node_types.values())), is_spot=False)
    where = {key: resources[key] for key in (_PLACE, "any_of", "image_id") if key in resources}
    return _task(site, name, 1, {**where, "cpus": _PROBE_CPUS}, run)


def check_site_of(site: Site) -> None:
    """Refuse a site whose machines can't be rented, or would see no common folder.

    Raises:
        InputError: it is so.
    """
    if not site.shared:
        raise InputError(
            'a site with engine = "skypilot" needs shared: the folder where machines and this one '
            "see the same files, by the volume `claim` or mounted by lines of `setup`."
        )
    if not site.node_types:
        raise InputError(
            'a site with engine = "skypilot" needs node_types, such as node_types.h100 = '
            '{cluster = "8xH100-SXM", num_nodes = 4, select = ["accelerators=H100:8"]}.'
        )
    for folder, bucket in site.buckets.items():
        at, shared = PurePosixPath(folder), PurePosixPath(site.shared)
        if not at.is_absolute() or not re.fullmatch(r"[a-z0-9]+://[^\s/]\S*", bucket):
            raise InputError(
                f'buckets: {folder} = {bucket!r} names no bucket: write "/folder" = "s3://name".'
            )
        if at.is_relative_to(shared) or shared.is_relative_to(at):
            raise InputError(
                f"buckets: {folder} can't be in or around shared ({site.shared}), since a run "
                "needs links between files, which a mounted bucket has not: mount it beside, for "
                "checkpoint.copy_to."
            )


def _check(request: Request, site: Site) -> None:
    check_site_of(site)
    for path in (request.directory, request.folder):
        if not path.is_relative_to(Path(site.shared)):
            raise InputError(
                f"{path} is not below {site.shared}, which is all that machines see: launch from "
                "a folder in there."
            )
    kind = site.node_type(request.node_type)
    if kind is None:
        known = ", ".join(sorted(site.node_types))
        raise InputError(f"which machines are to be rented is not said: name one of {known}.")
    check_starts_whole(request)
    check_num_nodes(request, kind.num_nodes)
    if request.after:
        raise InputError(
            'engine "skypilot" knows no order of jobs: leave --after out, and launch it when the '
            "other has finished."
        )
    if request.at_most is not None:
        raise InputError(
            'engine "skypilot" can\'t bound the trials that run at once: leave at_most out, or '
            "launch fewer."
        )


def _check_devices(resources: dict[str, Any], request: Request) -> None:
    told = str(resources.get("accelerators", ""))
    count = int(told.partition(":")[2] or 1)
    if told and count < request.devices_per_node:
        raise InputError(
            f"select: accelerators={told} has {count} devices, and {request.devices_per_node} of "
            "a node are to be used: correct select, or the node type's cluster."
        )


def _task(site: Site, name: str, num_nodes: int, resources: dict[str, Any], run: str) -> str:
    image = {"image_id": f"docker:{site.container}"} if site.container else {}
    task = {
        "name": name,
        "num_nodes": num_nodes,
        "resources": {**resources, **image},
        "volumes": {site.shared: site.claim} if site.claim else {},
        "file_mounts": {
            folder: {"source": bucket, "mode": "MOUNT_CACHED"}
            for folder, bucket in site.buckets.items()
        },
        "setup": "\n".join(site.setup),
        "run": run,
    }
    # As they are: YAML knows no pairs of surrogates.
    text = json.dumps(
        {key: value for key, value in task.items() if value}, ensure_ascii=False, indent=1
    )
    return f"{text}\n"


def _resources(kind: NodeType, *, is_spot: bool) -> dict[str, Any]:
    """What SkyPilot is asked for: one machine."""
    asked: dict[str, Any] = {}
    places = []
    for word in kind.select:
        key, _, value = word.partition("=")
        if key == _PLACE and value:
            places.append({_PLACE: value})
        elif key in _WORDS and value and key not in asked:
            asked[key] = int(value) if key == "disk_size" and value.isdecimal() else value
        else:
            raise InputError(
                f"select: {word!r} is no resource of a SkyPilot task: write one of "
                f"{', '.join(_WORDS)} or {_PLACE}, such as accelerators=H100:8."
            )
    if not any(key in asked for key in _HARDWARE):
        raise InputError(
            "select names no machine: write what one has, such as accelerators=H100:8, or its "
            "instance_type."
        )
    if not re.fullmatch(r"[\w.-]+(:[1-9]\d{0,3})?", asked.get("accelerators", "none")):
        raise InputError(
            f"select: accelerators={asked['accelerators']} is no name and number: write it as "
            "accelerators=H100:8."
        )
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [EXIT_SAVED]}
    asked |= {"use_spot": is_spot, "job_recovery": recovery}
    if len(places) == 1:
        return asked | places[0]
    return asked | ({"any_of": places} if places else {})
