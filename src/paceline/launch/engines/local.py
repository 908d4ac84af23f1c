"""Engine "local": this machine. Jobs start at once, beside whatever else runs."""

import subprocess
from collections.abc import Mapping

from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch.contract import Request
from paceline.launch.supervision.engine import SupervisedEngine
from paceline.launch.supervision.state import Hosts, Node

_PROBE_S = 60


class LocalEngine(SupervisedEngine):
    """See the module."""

    name = "local"

    def places(self, request: Request, site: Site) -> Hosts:
        """This machine."""
        return Hosts((Node("localhost"),), is_exclusive=False)

    def probe(self, site: Site, script: str) -> Mapping[str, str]:
        """See `contract.Engine`."""
        try:
            done = subprocess.run(
                ["bash", "-c", script],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InputError(f"this machine did not answer within {_PROBE_S} s: see why.") from None
        return {"localhost": done.stdout.decode(errors="replace")}


def engine() -> LocalEngine:
    """See `paceline.launch.engines`."""
    return LocalEngine()
