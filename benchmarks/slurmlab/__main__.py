"""Run a command beside a Slurm that lives as long as the command: `-- bash` to look around."""

import argparse
import os
import subprocess
import sys

from benchmarks.slurmlab.laboratory import Laboratory
from paceline.config.errors import InputError


def main() -> None:
    options = _options()
    try:
        with Laboratory(options.nodes, options.devices, options.grace) as lab:
            environment = {**os.environ, **lab.environment}
            sys.exit(subprocess.run(options.command, env=environment, check=False).returncode)
    except InputError as error:
        print(f"slurmlab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slurmlab", description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2, help="of each node")
    parser.add_argument("--grace", type=int, default=10, help="seconds, of preemption")
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()
