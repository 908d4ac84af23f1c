"""Is a site what its file says: engine, node types, folders and software on its nodes, clocks."""

import shlex
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.outputs import check_output
from paceline.config.site import Site
from paceline.launch.contract import Request
from paceline.launch.engines import engine_named
from paceline.plan.answer.options import cluster_of
from paceline.render.figures import plural

# Elastic runs need no common clock; figures of several nodes are compared by the second.
_APART_S = 2.0


@dataclass(frozen=True)
class SiteFinding:
    """One thing that was looked at."""

    is_ok: bool
    text: str
    """A sentence: what is so, or what is wrong and what to change."""


def check_site(site: Site, directory: Path) -> tuple[SiteFinding, ...]:
    """Ask the site's nodes.

    Args:
        directory: where the person launches from.

    Raises:
        InputError: the shared folder can't be written here.
    """
    shared = Path(site.shared) if site.shared else directory
    if not shared.is_dir():
        return (
            SiteFinding(False, f"shared = {shared} is no folder here: make it, or correct it."),
        )
    check_output("shared", shared, is_folder=True)
    token = shared / f".paceline-{uuid.uuid4().hex}"
    token.write_text("made by paceline doctor --site, which removes it")
    try:
        before = time.time()
        answers = engine_named(site.engine).probe(site, _script(site, directory, token))
        after = time.time()
    except InputError as error:
        return (SiteFinding(False, f"engine {site.engine} can't be used: {error}"),)
    finally:
        token.unlink()
    found = [SiteFinding(True, f"engine {site.engine} answers")]
    for name, kind in site.node_types.items():
        is_spot = kind.spot_usd_per_device_hour is not None
        found.extend(_of_type(site, directory, name, spot) for spot in (False, True)[: 1 + is_spot])
    for node, text in answers.items():
        found.extend(_of_node(site, directory, shared, node, text.split(), (before, after)))
    return tuple(found)


def _of_type(site: Site, directory: Path, name: str, spot: bool) -> SiteFinding:
    """Whether all nodes of a type could be asked for, for as long as a job may run; asks nobody to
    run anything."""
    kind, engine = site.node_types[name], engine_named(site.engine)
    what = f"node type {name}{', spot' if spot else ''}"
    try:
        request = Request(
            name="paceline-doctor",
            command=("true",),
            directory=directory,
            folder=directory,
            num_nodes=kind.num_nodes,
            devices_per_node=cluster_of(kind.cluster).devices_per_node,
            node_type=name,
            time_limit_s=None if site.max_hours is None else int(site.max_hours * 3600),
            grace_s=site.grace_s,
            spot=spot,
        )
        engine.expected_start(request, engine.render(request, site))
    except InputError as error:
        said = str(error).removeprefix("--")
        return SiteFinding(False, f"{what}, {plural(kind.num_nodes, 'node')}: {said}")
    return SiteFinding(
        True, f"{what}: {plural(kind.num_nodes, 'node')} of {kind.cluster} can be asked for"
    )


def _script(site: Site, directory: Path, token: Path) -> str:
    """Prints a word for each thing that is there, and the time."""
    looks = {
        "shared": f"[ -e {shlex.quote(str(token))} ]",
        "directory": f"[ -d {shlex.quote(str(directory))} ]",
        "venv": f"[ -x {shlex.quote(f'{_venv(site)}/bin/paceline')} ]",
        "container": "command -v apptainer >/dev/null",
        "image": "command -v paceline >/dev/null",
        "modules": "{ command -v module >/dev/null || . /etc/profile; "
        f"module load {shlex.join(site.modules)}; }} >/dev/null 2>&1",
        "scratch": f"[ -w {shlex.quote(site.scratch or '/')} ]",
    }
    return "\n".join([*(f"{look} && echo {name}" for name, look in looks.items()), "date +%s.%N"])


def _venv(site: Site) -> str:
    return site.venv or sys.prefix


def _of_node(
    site: Site,
    directory: Path,
    shared: Path,
    node: str,
    words: list[str],
    around: tuple[float, float],
) -> Iterator[SiteFinding]:
    if not words:
        yield SiteFinding(False, f"{node} can't be reached: mend it, or leave it out of the site.")
        return
    wanted = {
        "shared": f"{shared} is the same folder: set shared to one that all nodes see",
        "directory": f"{directory}, where you launch from, is there: launch from a folder that all "
        "nodes see",
    }
    if site.engine == "kubernetes" or (site.engine == "skypilot" and site.container):
        wanted["image"] = "paceline is in the image: install it there"
    elif site.container:
        wanted["container"] = "Apptainer is there: install it, or load its module in setup"
    else:
        wanted["venv"] = (
            f"{_venv(site)}/bin/paceline is there: install Paceline into a folder that all nodes "
            "see, and set venv to it"
        )
    if site.modules:
        wanted["modules"] = f"module load {shlex.join(site.modules)} works: correct modules"
    if site.scratch:
        wanted["scratch"] = f"{site.scratch} can be written: correct scratch, or make it in setup"
    for name, sentence in wanted.items():
        fact, _, cure = sentence.partition(": ")
        if name in words:
            yield SiteFinding(True, f"{node}: {fact}")
        else:
            yield SiteFinding(False, f"{node}: it is not so that {fact}; {cure}.")
    yield _of_clock(node, words[-1], around)


def _of_clock(node: str, text: str, around: tuple[float, float]) -> SiteFinding:
    try:
        clock = float(text)
    except ValueError:
        return SiteFinding(False, f"{node} does not tell its time: install coreutils there.")
    before, after = around
    apart = max(before - clock, clock - after, 0.0)
    if apart > _APART_S:
        return SiteFinding(
            False,
            f"{node}: its clock is {apart:.0f} s from this machine's; synchronise both by NTP, "
            "since times of nodes are compared.",
        )
    return SiteFinding(True, f"{node}: its clock agrees with this machine's")
