"""Slurm's commands, asked with a limit on how long they may take.

What a person or an outer job has set for them (SBATCH_PARTITION, SQUEUE_FORMAT, ...) would count
more than what a script says, so it is left out, but for which Slurm it is.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from paceline.config.errors import InputError
from paceline.launch.contract import SilentError

_OTHERS = re.compile(r"(SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SCONTROL|SCANCEL|SPRIO|SLURM)_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
_LEADER = re.compile(r"^(\w+: error: |allocation failure: )")
PATIENCE_S = 60.0
_CURES = {
    "invalid partition": "set the site's partition to one that `sinfo` lists",
    "invalid account": "set the site's account to one that `sacctmgr show assoc user=$USER` lists",
    "invalid qos": "set the site's qos to one that `sacctmgr show assoc user=$USER` lists",
    "invalid feature": "set the node type's select to features that `sinfo -o %f` lists",
    "configuration is not available": "ask for fewer nodes, fewer devices on each or another type",
    "node count": "ask for fewer nodes",
    "nodes are busy": "ask again when some are free",
    "time limit": "ask for less time, see `sinfo -o '%P %l'`",
    "policy": "see `sacctmgr show assoc user=$USER` for what the account may use",
}
_SILENT = ("unable to contact", "socket timed out", "connection refused", "zero bytes")
"""What commands say of a controller that is down, or overwhelmed."""
_LATER = "try again when `scontrol ping` says UP"


def environment(**more: str) -> dict[str, str]:
    """This process's, without settings of Slurm's commands."""
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or not _OTHERS.match(k)}
    return {**kept, **more}


def run(
    *command: str, script: str = "", at: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A command's answer; times are Unix seconds.

    Args:
        script: its standard input.
        at: the folder that it runs in; None: this process's.

    Raises:
        InputError: there is no such command here, or it does not end.
    """
    try:
        return subprocess.run(
            command,
            cwd=at,
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            env=environment(SLURM_TIME_FORMAT="%s"),
            check=False,
        )
    except FileNotFoundError:
        raise no_slurm(command[0]) from None
    except subprocess.TimeoutExpired:
        raise no_answer(command[0]) from None


def ask(*command: str, script: str = "", at: Path | None = None) -> str:
    """What a command prints.

    Raises:
        InputError: as `run`, or it failed; has Slurm's own words.
    """
    done = run(*command, script=script, at=at)
    if done.returncode != 0:
        raise refused(done.stderr)
    return done.stdout


def rows(*command: str) -> Iterator[list[str]]:
    """The fields of each line that a command prints, which '|' separates.

    Raises:
        InputError: as `ask`.
    """
    for line in ask(*command).splitlines():
        if line.strip():
            yield [field.strip() for field in line.split("|")]


def hosts(names: str) -> tuple[str, ...]:
    """The nodes of a list as Slurm writes it: "n[1-3],m7".

    Raises:
        InputError: as `ask`.
    """
    if names in ("", "(null)", "None assigned", "Unknown"):
        return ()
    if "[" not in names:
        return tuple(names.split(","))
    return tuple(ask("scontrol", "show", "hostnames", names).split())


def unix_time(text: str) -> float | None:
    """A time that is known; None: Unknown, None, N/A."""
    return float(text) if text.isdecimal() and int(text) > 0 else None


def no_slurm(command: str) -> InputError:
    """There is no Slurm here."""
    return InputError(
        f"{command} is not here, so this is no machine of a Slurm cluster: launch from a login "
        "node, or on another site."
    )


def no_answer(command: str) -> SilentError:
    """Slurm is here, and silent."""
    return SilentError(f"{command} gave no answer within {PATIENCE_S:.0f} s: {_LATER}.")


def refused(words: str) -> InputError:
    """Slurm's refusal as one sentence, with what may help."""
    said = _LEADER.sub("", words.strip().splitlines()[-1]) if words.strip() else "no"
    said = said.strip().rstrip(".")
    if any(each in said.lower() for each in _SILENT):
        return SilentError(f"Slurm says {said!r}: {_LATER}.")
    cure = next((cure for part, cure in _CURES.items() if part in said.lower()), "change the job")
    return InputError(f"Slurm says {said!r}: {cure}.")
