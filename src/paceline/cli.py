"""The command line: each command is a thin function over the Python API.

Commands import what they need when they are called: `paceline --help` loads neither torch nor
pydantic. Exit codes: 0 done; 2 the input is wrong, said in one sentence; 1 anything else.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.config.job import Job

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on many devices, and account for every millisecond and byte.",
)


@app.command()
def train(
    job: Annotated[
        Path | None,
        typer.Argument(
            help="A job.toml, or the directory of an earlier run. Left out: the built-in demo.",
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a setting, e.g. --set optim.lr=3e-4. May be repeated.",
            metavar="SECTION.KEY=VALUE",
            show_default=False,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the concrete Job with every default, and stop.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: delete what the run has so far.")
    ] = False,
    runs: Annotated[Path, typer.Option(help="Where run directories are kept.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Make the last line of output one JSON object.")
    ] = False,
) -> None:
    """Train a language model on every device of this machine.

    Without a Job it trains the demo: a small decoder on the source text of
    Python's standard library, about two minutes on two CPU cores. A run that
    exists goes on where its newest good checkpoint left off. Ctrl-C finishes
    the step, keeps a checkpoint and stops.

    \b
    paceline train --show > my.toml      a Job to start from
    paceline train my.toml --set name=big --set train.steps=5000
    paceline train runs/big              go on with a run
    torchrun --nnodes 2 ... -m paceline train my.toml
    """
    from paceline.comm.ranks import given_ranks, leave
    from paceline.train.command import train_command, warm_up_ranks

    concrete = _read(job, set_ or [])
    if show:
        _show(concrete)
        return
    warm_up_ranks()
    run = train_command(concrete, _runs_folder(job, runs), fresh=fresh)
    if as_json:
        print(json.dumps({"run": str(run.path), **(run.metrics() or [{}])[-1]}))
    if given_ranks("cpu") is not None:
        leave()


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The directory of a run.", show_default=False)],
    folder: Annotated[
        Path, typer.Argument(help="Where to write; must not exist yet.", show_default=False)
    ],
    dtype: Annotated[str, typer.Option(help="Type of the written weights: fp32 or bf16.")] = "fp32",
) -> None:
    """Write a run's weights and tokenizer as a folder that transformers opens.

    The newest good checkpoint is taken, whatever layout it was trained on.
    """
    from paceline.config.errors import InputError
    from paceline.observe.run import Run
    from paceline.train.export import export

    if dtype not in ("fp32", "bf16"):
        raise InputError(f"--dtype {dtype} is not one of fp32, bf16.")
    step = export(Run(run), folder, "bf16" if dtype == "bf16" else "fp32")
    print(f"{folder}: the weights after step {step}")


def _read(path: Path | None, overrides: list[str]) -> "Job":
    from paceline.config.job import read_job

    return read_job(path, overrides)


def _runs_folder(job: Path | None, runs: Path) -> Path:
    """A run that is named by its directory goes on there, wherever that is."""
    return job.absolute().parent if job is not None and job.is_dir() else runs


def _show(job: "Job") -> None:
    from paceline.config.job import to_toml
    from paceline.train.start import resolve_here

    print(to_toml(resolve_here(job).job), end="")


def main() -> None:
    """Run the command line and turn exceptions into exit codes."""
    from paceline.config.errors import InputError, RunError

    try:
        app()
    except InputError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
