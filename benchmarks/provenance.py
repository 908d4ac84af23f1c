"""What a benchmark's figures were taken with and on, and where its results are kept."""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"


def taken_with(module: str, *packages: str) -> dict[str, Any]:
    """Date, command, commit, versions and machine.

    Args:
        module: as it was started, by its full name.
        packages: whose versions matter, too.
    """
    # Imports torch, which a process that plan_speed times from its start must not pay for.
    from paceline.machine.discovery import num_cores, this_machine

    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": commit or None,
        "versions": {name: version(name) for name in ("paceline", "torch", *packages)},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "device": this_machine().device.name,
        "cores": num_cores(),
        "load_average_before": os.getloadavg(),
    }


def folder_of(results: Path, facts: dict[str, Any]) -> Path:
    """The machine's own folder among the results, made where it is missing."""
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    folder = results / f"{device}-{facts['cores']}-cores"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def keep(folder: Path, name: str, data: dict[str, Any], page: str | None = None) -> Path:
    """Write a result as JSON, and its page in Markdown beside it; returns the JSON's file."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(data, indent=1) + "\n")
    if page is not None:
        file.with_suffix(".md").write_text(page)
    return file


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A script's options: what it is, by its first line, and where its results go."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    return parser


def signature(facts: dict[str, Any]) -> str:
    """The last line of a results page."""
    return (
        f"{facts['cores']} cores of {facts['device']}, load {facts['load_average_before'][0]:.1f} "
        f"before; {facts['date']}, commit {facts['commit']}, torch {facts['versions']['torch']}: "
        f"`{facts['command']}`"
    )
