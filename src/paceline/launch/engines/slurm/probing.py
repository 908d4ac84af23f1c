"""Ask machines of a site what they are."""

from collections.abc import Mapping

from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch.engines.slurm.commands import ask
from paceline.launch.engines.slurm.script import selected, where

_MINUTES = 5
_WAIT_S = 30


def probe(site: Site, script: str) -> Mapping[str, str]:
    """What a script prints on one node of each type of a site, by node.

    Raises:
        InputError: none was free; says why the last one was not.
    """
    said: dict[str, str] = {}
    error: InputError | None = None
    for kind in site.node_types.values() or (None,):
        size = ("--nodes=1", "--ntasks=1", f"--time={_MINUTES}", f"--immediate={_WAIT_S}")
        options = (*size, *where(site, spot=False), *selected(kind))
        text = f'echo "$SLURMD_NODENAME"\n{script}'
        try:
            node, _, answer = ask("srun", *options, "bash", "-c", text).partition("\n")
            said[node] = answer
        except InputError as problem:
            error = problem
    if not said and error is not None:
        raise error
    return said
