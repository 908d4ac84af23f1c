"""The commands `paceline runs` and what it has below it.

As in `paceline.cli`, they import what they need when they are called.
"""

from pathlib import Path
from typing import Annotated

import typer

runs_app = typer.Typer(invoke_without_command=True)

Folder = Annotated[Path, typer.Option("--runs", help="Where run directories are kept.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Make the last line of output one JSON value.")
]
ARun = Annotated[
    Path, typer.Argument(help="A run: its directory, or its name.", show_default=False)
]


@runs_app.callback()
def runs(
    context: typer.Context,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help='Runs of which this holds, alone: "loss<3", "state=finished", '
            '"optim.lr>=1e-3". May be repeated.',
            metavar="CONDITION",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            help='Order by this: loss, started, train.steps, "-usd" (the largest first).',
            metavar="FIELD",
            show_default=False,
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Runs with this tag, alone.", show_default=False)
    ] = None,
    folder: Folder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs: state, steps, loss, device time; by any figure or setting.

    Made from the run directories, and kept in .index.sqlite beside them, which
    may be deleted at any time. --json has every field that --where and --sort
    know, and all settings.

    \b
    paceline runs --where "eval_loss<3" --sort eval_loss
    paceline runs tag demo baseline
    paceline runs compare demo other
    paceline runs prune --keep-last 1 --keep-best --older-than "30 days"
    """
    from paceline.config.errors import InputError
    from paceline.launch.runs_command import Selection, runs_command

    if context.invoked_subcommand is not None:
        if where or sort or tag or as_json or folder != Path("runs"):
            name = context.invoked_subcommand
            raise InputError(f"options of paceline runs {name} are given after its name.")
        return
    runs_command(folder, Selection(where or (), sort, tag), as_json=as_json)


@runs_app.command("tag")
def tag_run(
    run: ARun,
    tag: Annotated[str, typer.Argument(help="A word for it.", show_default=False)],
    remove: Annotated[bool, typer.Option("--remove", help="Take it away.")] = False,
    folder: Folder = Path("runs"),
) -> None:
    """Give a run a tag, kept in its directory."""
    from paceline.launch.runs_command import tag_command
    from paceline.observe.run import run_named

    tag_command(run_named(run, folder), tag, remove=remove)


@runs_app.command()
def compare(
    one: ARun,
    other: ARun,
    folder: Folder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show in which settings and figures two runs differ."""
    from paceline.launch.runs_command import compare_command
    from paceline.observe.run import run_named

    compare_command(run_named(one, folder), run_named(other, folder), as_json=as_json)


@runs_app.command()
def prune(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs. Left out: all in the folder.", show_default=False),
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(help="Keep so many of the newest of each run.", min=1, show_default=False),
    ] = None,
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Keep that of the best evaluation.")
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            help='Remove only what is older, e.g. "30 days".', metavar="TIME", show_default=False
        ),
    ] = None,
    copies: Annotated[
        bool,
        typer.Option("--copies", help="Those in the store of checkpoint.copy_to instead."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them. Left out: say what would be removed.")
    ] = False,
    folder: Folder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints by a rule; says what would go, unless --yes.

    The newest checkpoint of a run stays, and so do checkpoints/best, those that
    were exported, and those that checkpoint.keep_every keeps for good. A run
    that trains now is left alone.

    \b
    paceline runs prune --keep-last 2 --keep-best
    paceline runs prune demo --older-than "30 days" --yes
    paceline runs prune demo --keep-last 5 --copies
    """
    from paceline.config.duration import seconds_of
    from paceline.config.errors import InputError
    from paceline.launch.prune import Rule
    from paceline.launch.runs_command import prune_command, runs_in
    from paceline.observe.run import run_named

    if keep_last is None and not keep_best and older_than is None:
        raise InputError(
            "paceline runs prune needs a rule: give --keep-last, --keep-best or --older-than."
        )
    age_s = 0.0 if older_than is None else seconds_of("--older-than", older_than)
    named = [run_named(each, folder) for each in runs] if runs else runs_in(folder)
    rule = Rule(keep_last or 1, keep_best, age_s)
    prune_command(named, rule, in_store=copies, yes=yes, as_json=as_json)
