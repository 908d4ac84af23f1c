"""The command line: each command is a thin function over the Python API.

Commands import what they need when they are called: `paceline --help` loads neither torch nor
pydantic. Exit codes: 0 done, or stopped with a checkpoint as it was asked to; 2 the input is wrong,
said in one sentence; 69 an elastic run goes on without this node; 75 stopped in time, and to be
started again; 130 ended at once by a second signal; 1 anything else.
"""

import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from paceline.bench.cli import bench_app
from paceline.config.new import Kind
from paceline.config.outputs import check_output, output
from paceline.launch.runs_cli import runs_app
from paceline.serve.cli import serve_app

if TYPE_CHECKING:
    from paceline.config.hardware import Cluster
    from paceline.config.job import JobSpec
    from paceline.observe.run import Run

app = typer.Typer(
    name="paceline",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)

app.add_typer(bench_app, name="bench")
app.add_typer(runs_app, name="runs")
app.add_typer(serve_app)


# typer exports one kind of what is wrong with a command line; this is the base of all.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


# ---- arguments and options, by what they mean ---------------------------------------------------

JobFile = Annotated[
    Path | None,
    typer.Argument(
        help="A job.toml, or the directory of an earlier run. Left out: the built-in demo.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a setting, e.g. --set optim.lr=3e-4, or --set layout.tp=8, which fixes it for "
        "a plan. May be repeated.",
        metavar="SECTION.KEY=VALUE",
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Make the last line of output one JSON object.")
]
Clusters = Annotated[
    list[str] | None,
    typer.Option(
        help="Plan for 16x8xH100-SXM (nodes x devices x name), or for a Cluster file that "
        "paceline bench wrote. Left out: the Job's, or this machine.",
        metavar="WHAT",
        show_default=False,
    ),
]
Bounds = Annotated[
    list[str] | None,
    typer.Option(
        help="Bound a setting, e.g. --most tp=4. May be repeated.",
        metavar="KEY=VALUE",
        show_default=False,
    ),
]
Freed = Annotated[
    list[str] | None,
    typer.Option(
        help="Search this too: precision, param_dtype, async_tp, optimizer_state, offload, "
        "recompute_layers. May be repeated.",
        metavar="KEY",
        show_default=False,
    ),
]
DevicePrices = Annotated[
    list[float] | None,
    typer.Option(
        help="What a device costs an hour, USD. May be repeated, once for each cluster.",
        metavar="USD",
        show_default=False,
    ),
]
Tokens = Annotated[
    float | None,
    typer.Option(
        help="Train on so many, e.g. 2e12. Left out: what train.steps make.",
        show_default=False,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        help='The most that the run may cost and take, e.g. "30000 USD, 10 days": how many '
        "devices to rent, of each --cluster up to so many nodes.",
        metavar="TEXT",
        show_default=False,
    ),
]
PlanFolder = Annotated[
    str | None,
    typer.Option(
        help="Folder for the concrete job.toml, plan.json, plan.html and the predicted "
        "timeline (open it in Perfetto). With --serve: tokens of a text, 300 or 100-500.",
        metavar="WHAT",
        show_default=False,
    ),
]
Top = Annotated[int, typer.Option(help="Layouts, or fleets, to show.", min=1)]
Runs = Annotated[
    Path,
    typer.Option(help="Where run directories are kept.", callback=output("--runs", is_folder=True)),
]
LaunchedRun = Annotated[
    Path,
    typer.Argument(help="A run that was launched: its name, or its directory.", show_default=False),
]


# ---- commands -----------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from paceline.config.errors import InputError

        try:
            print(version("paceline"))
        except PackageNotFoundError:
            raise InputError(
                "paceline runs from a folder and is not installed, so its version is not known: "
                "install it with pip."
            ) from None
        raise typer.Exit


@app.callback()
def paceline(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version, and stop."
        ),
    ] = False,
) -> None:
    """Train PyTorch models on many devices, and account for each ms and byte."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command()
def train(
    job: JobFile = None,
    set_: Settings = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the Job with every default, and stop.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: delete what the run has so far.")
    ] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Train a model on every device of this machine.

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
    if show:
        _show(_read_in_steps(job, set_ or []))
        return
    from paceline.comm.forkserver_start import TRAINING

    # A notice waits until the Job has said what it means.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    _warm_up_own_ranks(TRAINING)
    from paceline.comm.rendezvous import exit_rank, ranks_from_env
    from paceline.observe.run import Run
    from paceline.train.command import train_job

    asked = _read(job, set_ or [])
    run = Run((_runs_folder(job, runs) / asked.name).absolute())
    train_job(asked, run, fresh=fresh)
    if as_json:
        print(json.dumps({"run": str(run.path), **(run.metrics() or [{}])[-1]}))
    if ranks_from_env("cpu") is not None:
        exit_rank()


@app.command()
def new(
    kind: Annotated[Kind, typer.Argument(help="What is to be trained.", show_default=False)],
    file: Annotated[
        Path | None,
        typer.Argument(help="The file to write. Left out: KIND.toml.", show_default=False),
    ] = None,
) -> None:
    """Write a commented Job to start from; a file that exists stays as it is.

    \b
    pretrain   a decoder learns text from its first weights; runs as it stands
    mixture    the same on several sources with weights, a curriculum
    stream     the same on what arrives while it trains
    sft        a network that somebody trained learns to answer (chat data)
    lora       the same by adapters, in a fraction of the memory
    dpo        it learns which of two answers is the better one
    grpo       it learns from a Python function that rates its own answers
    distill    a small decoder learns from a larger one
    images     a ResNet learns classes of images

    \b
    paceline new sft
    paceline new pretrain jobs/first.toml
    paceline train jobs/first.toml
    """
    from paceline.config.new import write_new

    path = write_new(kind, file)
    print(f'{path}: change the lines that say "yours", then paceline train {path}')


@app.command()
def stream(
    job: Annotated[
        Path, typer.Argument(help="A job.toml with \\[data.stream].", show_default=False)
    ],
    set_: Settings = None,
    once: Annotated[bool, typer.Option("--once", help="Take what is there now, and end.")] = False,
) -> None:
    """Append what arrives to the log of a Job's stream, until Ctrl-C.

    A run starts this beside its first rank by itself. On its own it takes data
    while nothing trains, or on another machine that shares the log's folder; a
    run leaves the log to whoever appends to it, and takes over when they end.

    \b
    paceline stream my.toml
    paceline stream my.toml --once
    paceline train my.toml
    """
    from paceline.train.data.stream.command import stream_command

    stream_command(_read(job, set_ or []), once=once)


@app.command()
def plan(
    job: JobFile = None,
    set_: Settings = None,
    cluster: Clusters = None,
    most: Bounds = None,
    free: Freed = None,
    price: DevicePrices = None,
    tokens: Tokens = None,
    budget: Budget = None,
    top: Top = 10,
    out: PlanFolder = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan how to serve the network instead.")
    ] = False,
    rate: Annotated[
        str | None,
        typer.Option(help="With --serve: requests, 5/s, 90/min or 2000/h.", show_default=False),
    ] = None,
    in_: Annotated[
        str | None,
        typer.Option(
            "--in", help="With --serve: tokens of a prompt, 1000 or 500-1500.", show_default=False
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help='With --serve: what is promised, "ttft 500ms, tpot 40ms, 99 %".',
            show_default=False,
        ),
    ] = None,
    api_price: Annotated[
        str | None,
        typer.Option(
            help='With --serve: what an API asks, "0.5,1.5", USD per million tokens in and out.',
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the layouts of a Job: time and memory by term, and why the others lose.

    Needs no GPU and trains nothing. Layout settings that are "auto" are searched,
    the others are kept. Convolutional networks (family = "resnet" or
    "efficientnet") are planned too, with replicas. Where nothing fits, what comes
    nearest is shown, and the exit code is 2. With cluster.device_mtbf_hours it
    says what failures leave of the run, started again or elastic, by spares.
    With --serve it plans how to serve the Job's network: replicas, devices that
    share it, batch and precision, the cheapest that keeps a promise (--slo), by a
    simulation of our engine: a run that `paceline bench serve` measured on this
    machine, or any Job on a --cluster.

    \b
    paceline plan my.toml --cluster 16x8xH100-SXM
    paceline plan my.toml --set cluster.device_mtbf_hours=50677
    paceline plan my.toml --set layout.pp=1 --most tp=4 --out plans/big
    paceline train plans/big/job.toml
    paceline plan my.toml --tokens 2e12 --budget "3M USD, 60 days" \\
        --cluster 64x8xH100-SXM --price 2.5 --cluster 128x8xA100-80 --price 1.2
    paceline plan my.toml --serve --cluster 8xH100-SXM --price 2.5 --rate 5/s \\
        --in 1000 --out 300 --slo "ttft 500ms, tpot 40ms" --api-price "0.5,1.5"
    paceline plan runs/demo --serve --rate 2/s --in 100 --out 50
    """
    if serve:
        _refuse_with("--serve", most=most, free=free, tokens=tokens, budget=budget)
        from paceline.plan.serving.command import ServeOptions, plan_serve_command

        plan_serve_command(
            *_served(job, set_ or []),
            _machine,
            ServeOptions(rate, in_, out, slo, api_price, cluster or (), price or ()),
            num=top,
            as_json=as_json,
        )
        return
    _refuse_with("a plan without --serve", rate=rate, in_=in_, slo=slo, api_price=api_price)
    from paceline.plan.answer.command import PlanOptions, plan_command

    folder = None if out is None else Path(out)
    if folder is not None:
        check_output("--out", folder, is_folder=True)
    asked = PlanOptions(
        clusters=cluster or (),
        prices=price or (),
        tokens=tokens,
        budget=budget,
        most=most or (),
        free=free or (),
    )
    plan_command(
        _read_in_steps(job, set_ or []), _machine, asked, num=top, out=folder, as_json=as_json
    )


@app.command()
def cache(
    folder: Annotated[
        str, typer.Option(help="As data.cache_dir of a Job.", show_default=False)
    ] = "auto",
    most: Annotated[
        float | None,
        typer.Option(
            help="Remove what was used longest ago until it takes so many GB.",
            min=0,
            show_default=False,
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove it. Left out: say what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the tokens that are kept of sources, and remove old ones.

    What a run reads now is left alone. All of it can be made again. The setting
    data.cache_gb keeps a limit without this command.

    \b
    paceline cache
    paceline cache --most 50 --yes
    """
    from paceline.train.data.cache_command import cache_command

    cache_command(folder, most, is_meant=yes, as_json=as_json)


@app.command()
def tokens(
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URL",
            help="Folder or URL of fsspec to publish tokens in, for Jobs to train from.",
            show_default=False,
        ),
    ] = None,
    megatron: Annotated[
        Path | None,
        typer.Option(
            callback=output("--megatron"),
            help="Prefix of Megatron's .bin and .idx files to write.",
            show_default=False,
        ),
    ] = None,
    job: JobFile = None,
    set_: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise what a Job reads, and publish it, or write it as Megatron reads it.

    --to: Jobs train from there by data.format = "tokens", without tokenising.
    They read what they need, and keep some of it. Of a mixture each source has a
    folder of its name there. Killed, it goes on where it stopped. Credentials
    come from the environment.

    --megatron: PREFIX-train and PREFIX-eval, .bin and .idx each; of a mixture,
    with the name of each source between. Every document is followed by its end.

    \b
    paceline tokens job.toml --to s3://bucket/corpus
    paceline tokens job.toml --megatron out/corpus
    """
    from paceline.train.data.tokens_command import tokens_command

    tokens_command(_read(job, set_ or []).data, megatron, to, as_json=as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The directory of a run.", show_default=False)],
    folder: Annotated[
        Path,
        typer.Argument(
            callback=output("folder", is_folder=True),
            help="Where to write; must not exist yet.",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            help="Of this checkpoint. Left out: the newest good one.", min=0, show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of the written weights: fp32 (if left out) or bf16.", show_default=False
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="safetensors; or dcp, torch's Distributed Checkpoint: parameters and optimizer "
            "state, by the run's own names and types; or torchtitan or megatron: a dense "
            "decoder's weights in DCP by their names; or peft: the adapters alone; or gguf: a file "
            "for llama.cpp. For edge: safetensors, gguf, onnx or executorch.",
        ),
    ] = "safetensors",
    weights: Annotated[
        str | None,
        typer.Option(
            help="Matrices of a decoder in fewer bits, by compressed-tensors, which vLLM and "
            "transformers read: int8, or int4 with a scale for each --group of weights. "
            "In gguf: Q8_0 and Q4_0, with a scale for each 32. Of edge also fp32.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            help="Neighbouring weights that share a scale in int4; 64 if left out.",
            min=8,
            show_default=False,
        ),
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="edge: a small device. Matrices have 8 bits, or as --weights says; the file's own "
            "runtime runs it on held-out tokens, and what it finds is kept as edge.json.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help='Of edge: bytes, such as "50 MB", or "50 MB, 5 ms" with the time of a token. Of '
            "fp32, int8 and int4 the most bits that fit are taken.",
            show_default=False,
        ),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            help='Of a decoder: leave out what does least, down to sizes such as "num_layers=6, '
            'num_kv_heads=2, ffn_size=704". What is left is to be trained on.',
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a run's weights as a folder that others open.

    Any checkpoint is taken, whatever layout it was trained on: the newest good
    one, or that of --step.
    transformers opens a decoder's folder, with its tokenizer. Others hold one
    model.safetensors: a ResNet's names are torchvision's, a recommender's those
    of DLRM's own code, and a module of your own has its own.

    \b
    paceline export runs/demo out
    paceline export runs/demo out --for edge --format gguf --budget "5 MB"
    paceline export runs/demo out --prune "num_layers=6, ffn_size=704"
    """
    from paceline.config.errors import InputError
    from paceline.observe.run import Run
    from paceline.train.export import (
        FORMS,
        GGUF_FORMS,
        export,
        export_adapters,
        export_as,
        export_dcp,
        export_gguf,
    )

    if for_ is not None:
        _refuse_with("--for edge", dtype=dtype, group=group, prune=prune)
        _export_for(for_, Run(run), folder, form, weights, budget, step)
        return
    _refuse_with("an export without --for edge", budget=budget)
    if dtype not in (None, "fp32", "bf16"):
        raise InputError(f"--dtype {dtype} is not one of fp32, bf16.")
    known = ("safetensors", "dcp", "gguf", "peft", *FORMS)
    if form not in known:
        raise InputError(f"--format {form} is not one of {', '.join(known)}.")
    if form == "dcp" and dtype is not None:
        raise InputError(
            f"--format dcp keeps the run's types, and --dtype {dtype} was given: leave one out."
        )
    if weights not in (None, "int8", "int4"):
        raise InputError(f"--weights {weights} is not one of int8, int4.")
    if weights is not None and form not in ("safetensors", "gguf"):
        raise InputError(
            f"--weights {weights} is of --format safetensors and gguf: leave {form} out."
        )
    if weights != "int4":
        _refuse_with("an export without --weights int4", group=group)
    if form == "gguf" and weights is not None:
        _refuse_with(f"--format gguf with --weights {weights}", dtype=dtype, group=group)
    if group is not None and group % 8:
        raise InputError(f"--group {group} is no multiple of 8, as eight weights are one number.")
    narrow: tuple[Literal[8, 4], int] | None = None
    if weights is not None:
        narrow = (8 if weights == "int8" else 4, group or 64)
    kept: Literal["bf16", "fp32"] = "bf16" if dtype == "bf16" else "fp32"
    if prune is not None:
        odd_form = None if form == "safetensors" else form
        _refuse_with("an export with --prune", format=odd_form, weights=weights)
        _export_pruned(Run(run), folder, prune, kept, step)
        return
    if form == "dcp":
        of_step = export_dcp(Run(run), folder, step)
    elif form == "peft":
        of_step = export_adapters(Run(run), folder, kept, step)
    elif form == "gguf":
        of_step = export_gguf(Run(run), folder, GGUF_FORMS[weights or kept], step)
    elif form == "safetensors":
        of_step = export(Run(run), folder, kept, step, narrow)
    else:
        of_step = export_as(FORMS[form], Run(run), folder, kept, step)
    print(f"{folder}: the weights after step {of_step}")
    finetune = Run(run).job().finetune
    if finetune.is_narrow and form != "peft":
        print(
            f"The adapters are merged into the matrices that finetune.base = {finetune.base!r} "
            "stands for, not into those of train.weights."
        )


def _export_pruned(
    run: "Run", folder: Path, sizes: str, dtype: Literal["bf16", "fp32"], step: int | None
) -> None:
    from paceline.train.prune import export_pruned, parse_sizes

    cut = export_pruned(run, folder, parse_sizes(sizes), dtype, step)
    before, after = cut.losses
    print(
        f"{folder}: {cut.model.num_params:,} of {cut.whole.num_params:,} parameters after step "
        f"{cut.step}. On {cut.num_tokens:,} tokens that the run was trained on the loss is "
        f"{after:.3f}, and was {before:.3f}: train it on, with the run as its teacher "
        "(paceline new distill)."
    )


def _export_for(
    device: str,
    run: "Run",
    folder: Path,
    form: str,
    weights: str | None,
    budget: str | None,
    step: int | None,
) -> None:
    from paceline.config.errors import InputError
    from paceline.serve.edge.command import FORMATS, Budget, export_for_edge

    if device != "edge":
        raise InputError(f"--for {device} is not known: write --for edge, or leave it out.")
    if form not in FORMATS:
        raise InputError(f"--format {form} is not one of edge's: {', '.join(FORMATS)}.")
    most = None if budget is None else Budget.parse(budget)
    kept: Literal["fp32", "int8", "int4"] | None
    match weights:
        case None | "fp32" | "int8" | "int4":
            kept = weights
        case _:
            raise InputError(f"--weights {weights} is not one of fp32, int8, int4.")
    found = export_for_edge(run, folder, form, kept, most, step)
    print(f"{folder}: the weights after step {found.step}, in {found.weights}")


@app.command()
def validate(
    tables: Annotated[
        list[Path], typer.Argument(help="CSV tables of published runs.", show_default=False)
    ],
    calibrate_on: Annotated[
        str | None,
        typer.Option(
            "--calibrate-on",
            help="Fit the constants of each device and stack first, to: 6 (so many of its lines), "
            "5% (that part of them), or others (other sources with the same software).",
            metavar="WHAT",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Sources whose name has this in it, alone.", show_default=False),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of the draw of lines to fit to.", min=0, max=2**63)
    ] = 0,
    html: Annotated[
        Path | None,
        typer.Option(
            callback=output("--html"),
            help="Write a page with every line as a point.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict published runs and print how wrong the planner is.

    Each line of a table is a run: gpu, gpus, layers, hidden, heads, seq,
    global_batch_seqs, micro_batch, dp, tp, pp, ... and what was measured
    (tokens_per_s_per_gpu, step_time_s or step_time_ms, peak_mem_gb).
    Empty cells are inferred where only one value fits; lines that can't be
    predicted are counted, with the reason. Lines that the constants were
    fitted to have no part in the errors.

    \b
    paceline validate runs.csv                       nothing fitted
    paceline validate runs.csv --calibrate-on 6      six lines per stack
    paceline validate a.csv b.csv --calibrate-on 5% --html errors.html
    """
    from paceline.published.validate.command import validate_command

    validate_command(tables, calibrate_on, only, seed, html, as_json)


@app.command()
def explain(
    path: Annotated[
        Path,
        typer.Argument(
            help="The directory of a run, a trace of torch.profiler (json, json.gz), a folder of "
            "traces, one per rank, or what paceline serve --record wrote.",
            show_default=False,
        ),
    ],
    top: Annotated[int, typer.Option(help="Findings to show.", min=1)] = 5,
    all_: Annotated[
        bool, typer.Option("--all", help="Show findings of less than 1 % of the step, too.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="Another run or trace: what differs, term by term.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            callback=output("--html"),
            help="Write a page too: this one's, or with --against the comparison's.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a step takes as long as it does, and what to change.

    Splits the step into terms that sum to it, from the devices' peak to what was
    measured, beside what was planned. Names causes with their evidence and the
    gain of mending them, as settings to try. Reads any PyTorch job's trace
    (docs/explain.md: how to record one); a run of Paceline's own needs
    --set observe.profile_every=50. A run that ended out of memory is told which
    term was too large, and the cheapest change that fits. Of a server's record it
    tells queue, host, passes and idle time, beside what was planned for them.

    \b
    paceline explain runs/demo
    paceline explain trace.json.gz --all
    paceline explain runs/new --against runs/old
    """
    from paceline.plan.serving.record import RECORD_FILE

    if (path / RECORD_FILE).is_file():
        _refuse_with("the explanation of a server", all=all_, against=against, html=html)
        from paceline.explain.serving import explain_record_command

        explain_record_command(path / RECORD_FILE, as_json=as_json)
        return
    from paceline.explain.command import explain_command

    explain_command(path, top=top, all_findings=all_, as_json=as_json, against=against, html=html)


@app.command()
def tune(
    job: JobFile = None,
    set_: Settings = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="Stop at efficiency=0.85 (scaling), mfu=0.5, tokens_per_s=2e5 or samples_per_s.",
            metavar="GOAL",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help='The most time, e.g. "15 min"; measuring an unknown machine comes before it.',
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="The most trials.", min=1, show_default=False)
    ] = None,
    free: Annotated[
        list[str] | None,
        typer.Option(
            help="Change this too, which changes what is computed: precision, param_dtype, "
            "optimizer_state. May be repeated.",
            metavar="KEY",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Never change this, e.g. --keep tp, --keep comm.dp.compress. May be repeated.",
            metavar="KEY",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=output("--out", is_folder=True),
            help="Folder for trials, page and result. Left out: tunes/<name of the Job>.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a Job faster: measure, plan, try, explain, keep what helped.

    Tries few layouts, those that the planner and the findings of profiles
    promise most of, as short real runs that take turns on the real ranks.
    Changes whatever the Job says of how its work is split, stored and sent;
    never model, data, optimizer or batch. Gradients may travel in a form that was
    measured to keep the loss, where that gains 3 % or more (--keep
    comm.dp.compress holds it). Run it again to go on; Ctrl-C keeps what is there.

    \b
    paceline tune my.toml --until efficiency=0.85 --budget "15 min"
    paceline train tunes/my/job.toml
    torchrun --nnodes 2 ... -m paceline tune my.toml
    """
    from paceline.comm.forkserver_start import MEASURING

    _warm_up_own_ranks(MEASURING)
    from paceline.comm.rendezvous import exit_rank, ranks_from_env
    from paceline.tune.command import TuneOptions, tune_command

    wanted = _read_in_steps(job, set_ or [])
    asked = TuneOptions(until, budget, trials, free or (), keep or ())
    found = tune_command(wanted, asked, out or Path("tunes") / wanted.name)
    if as_json and found is not None:
        print(json.dumps(found))
    if ranks_from_env("cpu") is not None:
        exit_rank()


@app.command()
def search(
    space: Annotated[
        Path, typer.Argument(help="A file with tables \\[search] and \\[search.space].")
    ],
    set_: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=output("--out", is_folder=True),
            help="Folder for trials, page and result. Left out: searches/<name of the file>.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Launch the trials on this site, one node each. Left out: they run here.",
            metavar="SITE",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search settings of a Job: loss against time, memory, latency, energy or USD.

    Any settings are a space: the learning rate as well as depth and width. What
    the planner says can't run, can't fit or is slower than a limit never starts.
    Trials are real runs, one after the other; the best go on to longer rungs
    from their checkpoint. Run it again to go on; Ctrl-C keeps what is there.

    \b
    \\[search]
    job = "my.toml"
    objectives = ["loss", "time"]   # memory, latency, energy, usd
    within = "20 min"               # of device time, all trials together
    \\[search.space]
    "optim.lr" = {low = 1e-4, high = 1e-2, log = true}
    "model.num_layers" = [2, 4, 8]
    \\[search.limits]
    time_s = 300                    # and memory_gb, latency_ms, usd, loss

    \b
    paceline search space.toml
    paceline search space.toml --on cluster
    paceline train searches/space/job.toml
    """
    from paceline.comm.forkserver_start import TRAINING

    _warm_up_own_ranks(TRAINING)
    from paceline.search.command import search_command

    found = search_command(space, set_ or [], out, _read_in_steps, on)
    if as_json:
        print(json.dumps(found))


@app.command()
def ladder(
    job: JobFile = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help='What ladder and run may cost and take together, e.g. "500 USD, 3 days".',
            metavar="TEXT",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Where the run will be trained: 8xH100-SXM, or a Cluster file. Left out: the "
            "Job's, or this machine.",
            metavar="WHAT",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            help="What a device there costs an hour, USD.", metavar="USD", show_default=False
        ),
    ] = None,
    share: Annotated[
        float, typer.Option(help="Part of the budget's time that the small runs may take here.")
    ] = 0.05,
    largest: Annotated[
        float | None,
        typer.Option(
            help="Parameters of a small run at most, e.g. 3e6 (blocks and head). Left out: as the "
            "time allows.",
            min=1,
            show_default=False,
        ),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(
            help="Parameters of the recommended run. Left out: those with the least loss.",
            min=1,
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="Hold a run that was made against its prediction; nothing is trained.",
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    set_: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=output("--out", is_folder=True),
            help="Folder for runs, page and result. Left out: ladders/<name of the Job>.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the run that a budget buys, from small runs made here.

    Networks in the proportions of the Job's, but small, are trained to several
    lengths; the smallest with several learning rates, which under muP suit all
    sizes. A law of loss by parameters and tokens is fitted to them. Then the
    planner says what each larger network costs on the cluster, and the one with
    the least predicted loss is written as a Job, ready to train: its size,
    tokens, learning rate and layout, with loss, time and price as predicted.
    Run it again to go on; with another --budget, --cluster or --price it
    recommends anew from the same small runs.

    \b
    paceline ladder my.toml --budget "12 hours"       # on this machine
    paceline ladder my.toml --budget "3 days" --cluster 8xH100-SXM
    paceline train ladders/my/job.toml
    paceline ladder my.toml --compare runs/my-run     # predicted and measured
    """
    from paceline.comm.forkserver_start import TRAINING

    if (budget is None) == (compare is None):
        raise typer.BadParameter(
            'give --budget "500 USD, 3 days", or --compare and the run that was made.'
        )
    if compare is None:
        _warm_up_own_ranks(TRAINING)
    from paceline.search.ladder.command import LadderOptions, compare_command, ladder_command

    wanted = _read_in_steps(job, set_ or [])
    folder = out or Path("ladders") / wanted.name
    if compare is not None:
        from paceline.observe.run import Run

        found = compare_command(folder, Run(compare))
    else:
        asked = LadderOptions(budget or "", cluster, price, share, largest, params)
        found = ladder_command(wanted, asked, folder)
    if as_json:
        print(json.dumps(found))


@app.command()
def federate(
    file: Annotated[Path, typer.Argument(help="A file with a table \\[federate].")],
    set_: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=output("--out", is_folder=True),
            help="Folder for what is shared and rounds. Left out: federated/<name of the file>.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train on many clients, of whose changes the server learns the sum.

    Clients are processes of this machine that Flower starts, each with its part
    of the data. A Job with finetune.method = "lora" shares adapters, any other
    its weights, but for those that optim.groups leave as they are. What clients
    tell is rounded to a few bits and masked (SecAgg+); clients may drop out.
    Ctrl-C ends everything and leaves what the last round came to, in PEFT's or
    Hugging Face's format; the same command goes on from there.

    A client tells "changes", of one matrix of each adapter in turn, so their
    mean is exact; or by "fedavg" those of all at once, which learn the most for
    the upload; or "gradients", and the server makes the steps.

    \b
    \\[federate]
    job = "lora.toml"
    clients = 8
    rounds = 10
    steps = 20
    split = "dirichlet"    # "even", "source"
    tells = "changes"      # "fedavg", "gradients"

    \b
    \\[federate.privacy]     # adapters then tell little of a client
    epsilon = 8.0
    clip = 0.5

    \b
    paceline federate clients.toml
    paceline train lora.toml --set finetune.adapters=federated/clients/adapters
    """
    from paceline.federate.command import federate_command

    found = federate_command(file, set_ or [], out, _read_in_steps)
    if as_json:
        print(json.dumps(found))


@app.command()
def coordinates(
    job: JobFile = None,
    set_: Settings = None,
    widths: Annotated[
        str, typer.Option(help="Values of model.hidden_size, with commas.")
    ] = "64,128,256,512",
    steps: Annotated[int, typer.Option(help="Of the optimizer, at each width.", min=1)] = 4,
    as_json: AsJson = False,
) -> None:
    """Check whether one learning rate suits every width of a network (muP).

    Networks of several widths train for some steps on random tokens; what their
    layers give must change alike. The exit code is 1 if it doesn't.

    \b
    paceline coordinates job.toml
    paceline coordinates job.toml --set model.parametrization=mup
    """
    from paceline.bench.coordinates import coordinates_command
    from paceline.config.errors import InputError

    given = widths.split(",")
    if not all(each.strip().isdecimal() for each in given):
        raise InputError(f"--widths {widths}: give whole numbers with commas, as 64,128,256.")
    found = list(map(int, given))
    if not coordinates_command(_read(job, set_ or []), found, steps, as_json=as_json):
        sys.exit(1)


@app.command()
def doctor(
    folder: Annotated[
        Path, typer.Option(help="Where runs are kept: its space and speed are looked at.")
    ] = Path(),
    nccl_log: Annotated[
        Path | None,
        typer.Option(help="Output of a job with NCCL_DEBUG=INFO.", show_default=False),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Judge another machine, by a folder that --save wrote there (or with "
            "nvidia-smi.xml, nvidia-smi-topo.txt, ibstat.txt, nccl.log, ... made by hand).",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            callback=output("--save", is_folder=True),
            help="Write what this machine says to a folder.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Keep what was found with this run, as its doctor.json, which paceline explain "
            "reads. Do it while the run trains: clocks are told under load.",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Check a site's file against its machines instead: the engine, shared folders, "
            "software, clocks.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check devices, drivers, network, NCCL and host; each finding with its fix.

    Changes nothing; a file of at most 256 MiB is written to the folder, and
    removed. What can't be looked at is said. The exit code is 1 if there is a
    problem, which a job's script may heed.

    \b
    paceline doctor --folder /scratch
    NCCL_DEBUG=INFO paceline train ... > job.log
    paceline doctor --nccl-log job.log
    paceline doctor --site cluster
    """
    if site is not None:
        from paceline.launch.command import site_command

        if not site_command(site, as_json=as_json):
            sys.exit(1)
        return
    from paceline.doctor.command import DoctorOptions, doctor_command

    found = doctor_command(DoctorOptions(folder, nccl_log, from_, save, run))
    if as_json:
        print(json.dumps(found))
    if found["problems"]:
        sys.exit(1)


@app.command()
def launch(
    job: JobFile = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="What a script of your own is given.", show_default=False),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", help="A site of paceline-sites.toml, or local: this machine.")
    ] = "local",
    nodes: Annotated[
        str | None,
        typer.Option(
            help="How many, or from how few: 1-4 starts with those of four that are free, goes on "
            "without lost ones, and comes back with those that are free then. Left out: all sizes "
            "that the site has are planned, and the one that ends first is taken.",
            metavar="N or M-N",
            show_default=False,
        ),
    ] = None,
    cheapest: Annotated[
        bool, typer.Option("--cheapest", help="Take the size that costs least instead.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help='The most that the job may cost and take, e.g. "3000 USD, 2 days".',
            metavar="TEXT",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the run; left out: the Job's.", show_default=False)
    ] = None,
    set_: Settings = None,
    priority: Annotated[
        int,
        typer.Option(
            help="Above 0: before your other jobs, as far as the scheduler lets you.",
            min=-(10**6),
            max=10**6,
        ),
    ] = 0,
    after: Annotated[
        list[str] | None,
        typer.Option(
            help="A run that must have finished before. May be repeated.", show_default=False
        ),
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="On machines that may be taken away.")
    ] = False,
    patch: Annotated[
        bool,
        typer.Option(
            "--patch", help="Keep what is not committed as a patch, rather than refuse it."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files that would start it, and stop.")
    ] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Start a run on machines that a scheduler, or a list of hosts, hands out.

    Chooses the size, refuses what can't fit or can't end in time before it
    waits for anything, and submits it. It is started again when it was
    preempted or lost a machine. A .py file is a script of your own that calls
    paceline.train; it starts once on each node. A file with a sweep table is
    a Job with many settings: each trial is a run. docs/cluster.md says how a
    site and a sweep are written.

    \b
    paceline launch my.toml --on cluster
    paceline launch my.toml --on cluster --budget "3000 USD, 2 days" --dry-run
    paceline launch train.py --on lab --nodes 2 -- --epochs 3
    paceline launch my.toml --on cluster --nodes 1-4 --spot
    paceline launch sweep.toml --on cluster
    """
    from paceline.config.site import site_named
    from paceline.launch.command import launch_command
    from paceline.launch.prepare import Asked, nodes_of, prepare_job, prepare_script
    from paceline.launch.sweep import is_sweep, read_sweep, trials_of
    from paceline.launch.sweep_command import sweep_command

    site = site_named(on)
    fewest, most = nodes_of(nodes)
    asked = Asked(
        site_name=on,
        site=site,
        num_nodes=most,
        min_nodes=fewest,
        priority=priority,
        after=after or (),
        is_spot=spot,
        is_cheapest=cheapest,
        budget=budget,
        with_patch=patch,
    )
    folder = runs if runs != Path("runs") or not site.shared else Path(site.shared) / "runs"
    is_script = job is not None and job.suffix == ".py"
    if job is not None and is_script:
        _refuse_settings(set_)
        prepared = prepare_script(job, arguments or (), name, asked, folder.absolute(), _machine)
    elif job is not None and is_sweep(job):
        _refuse_arguments(arguments)
        sweep = read_sweep(job, name)
        trials = trials_of(sweep, job, set_ or (), _read_to_launch)
        sweep_command(
            sweep,
            trials,
            asked,
            folder.absolute(),
            (job, job.parent / sweep.job),
            _machine,
            is_dry=dry_run,
            as_json=as_json,
        )
        return
    else:
        _refuse_arguments(arguments)
        renamed = [*(set_ or []), *([f"name={name}"] if name is not None else [])]
        spec = _read_to_launch(job, renamed)
        sources = () if job is None else (job,)
        prepared = prepare_job(spec, asked, folder.absolute(), sources, _machine)
        _must_have_steps_left(prepared.run, spec)
    launch_command(prepared, is_dry=dry_run, as_json=as_json)


@app.command()
def jobs(
    runs: Runs = Path("runs"),
    all_: Annotated[bool, typer.Option("--all", help="Earlier launches of each run, too.")] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="The trials of this sweep: settings, state, losses.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    release_idle: Annotated[
        str | None,
        typer.Option(
            help='Give back first what did nothing for so long, e.g. "20 minutes".',
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what was launched, and how it stands.

    With --release-idle the job of a run that is over is stopped, and nodes that
    have no rank are given back where the engine can.
    """
    from paceline.config.duration import seconds_of
    from paceline.launch.command import jobs_command, release_idle_command
    from paceline.launch.sweep_command import sweep_table_command

    if release_idle is not None:
        release_idle_command(runs, seconds_of("--release-idle", release_idle))
    if sweep is not None:
        sweep_table_command(runs, sweep, as_json=as_json)
        return
    jobs_command(runs, is_all=all_, as_json=as_json)


@app.command()
def logs(
    run: LaunchedRun,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job is over.")
    ] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Print what a launched run's nodes wrote, attempt by attempt."""
    from paceline.launch.command import logs_command
    from paceline.observe.run import run_named

    logs_command(run_named(run, runs).path, is_following=follow)


@app.command()
def stop(
    run: LaunchedRun,
    save: Annotated[
        bool,
        typer.Option("--save", help="Save, give the machines back, and go on when it has some."),
    ] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Stop a launched run with a checkpoint; nobody starts it again."""
    from paceline.launch.command import stop_command
    from paceline.observe.run import run_named

    stop_command(run_named(run, runs).path, is_saving=save)


@app.command()
def why(run: LaunchedRun, runs: Runs = Path("runs")) -> None:
    """Say how a launched run stands, and why it waits."""
    from paceline.launch.command import why_command
    from paceline.observe.run import run_named

    why_command(run_named(run, runs).path)


@app.command()
def top(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Directories of runs; several make one line each. Left out: those in runs/.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show one frame, and stop.")] = False,
    every: Annotated[
        float, typer.Option(help="Seconds between frames.", min=0.1, max=3600.0)
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Watch runs: loss, throughput, terms of a step, lag and memory of each rank.

    Reads the run's directory alone, so it works from any machine that sees it,
    before, during and after the run, and never disturbs it. A run that has not
    begun is waited for. q or Ctrl-C leaves.
    """
    from paceline.observe.top.command import top_command

    top_command(runs or (), once=once, every_s=every, as_json=as_json)


@app.command()
def cost(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Runs, by name or directory. Left out: all in runs/, and what was launched there.",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            help="What a device costs an hour, USD. Left out: --site's, or the Job's "
            "cluster.prices.",
            min=0.0,
            max=1e6,
            metavar="USD",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Take the price of a site's node type: lab, or lab/h100 where it has several.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Take the site's price of spot machines.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(callback=output("--html"), help="Write a page too.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where every device-second of runs went, and what it cost.

    From submission to end, over all attempts, in one class each: queued,
    starting, data wait, compute, exposed communication, checkpoint stall, lost
    work, restart, hang, idle but held, preempted. With a price: USD in all, per
    kept step, token, epoch and checkpoint, beside what was planned.

    \b
    paceline cost runs/demo --price 2.5
    paceline cost runs/a runs/b --site lab --html cost.html
    """
    from paceline.config.errors import InputError
    from paceline.launch.cost import Price, site_price
    from paceline.launch.cost_command import cost_command

    if price is not None and site is not None:
        raise InputError("--price and --site both give a price: leave one of them out.")
    if spot and site is None:
        raise InputError("--spot takes a price of a site: name it with --site.")
    given = None if price is None else Price(price, "--price")
    if site is not None:
        given = site_price(site, spot=spot)
    cost_command(runs or (), given, html=html, as_json=as_json)


def _read(path: Path | None, overrides: list[str]) -> "JobSpec":
    from paceline.config.job import read_job

    return read_job(path, overrides)


def _read_in_steps(path: Path | None, overrides: list[str]) -> "JobSpec":
    job = _read(path, overrides)
    if job.train.steps:
        return job
    from paceline.train.length import length_in_steps

    return length_in_steps(job)


def _read_to_launch(path: Path | None, overrides: list[str]) -> "JobSpec":
    """What the job would refuse only once it has its machines, it refuses here."""
    job = _read_in_steps(path, overrides)
    if job.checkpoint.best is not None:  # importing torch takes seconds, and few Jobs say it
        from paceline.train.start import must_be_judged_by_figure

        must_be_judged_by_figure(job)
    return job


def _must_have_steps_left(run: Path, job: "JobSpec") -> None:
    """Importing torch takes seconds, and most runs that are launched have no checkpoints yet."""
    from paceline.observe.run import Run, complete_steps

    found = Run(run)
    if complete_steps(found.checkpoint_folder):
        from paceline.train.start import must_have_steps_left

        must_have_steps_left(found, job)


def _warm_up_own_ranks(module: str) -> None:
    """Get ready to start ranks, but as one of several that a launcher started: it starts none, and
    the others need the cores. An agent among them does it itself."""
    from paceline.comm.forkserver_start import warm_up_ranks
    from paceline.comm.rank_env import ranks_from_env

    given = ranks_from_env("cpu")
    if given is None or given.world_size == 1:
        warm_up_ranks(module)


def _machine() -> "Cluster":
    from paceline.machine.discovery import this_machine

    return this_machine()


def _served(path: Path | None, settings: list[str]) -> "tuple[JobSpec, Path | None]":
    """The Job whose network is served, and the folder of its weights where one was given."""
    if path is not None and (path / "config.json").is_file():
        return _read(None, [f"model.hf={json.dumps(str(path))}", *settings]), path
    is_folder = path is not None and path.is_dir()
    return _read(path, settings), path if is_folder else None


def _refuse_with(what: str, **options: Any) -> None:
    from paceline.config.errors import InputError

    for name, given in options.items():
        if given:
            option = f"--{name.strip('_').replace('_', '-')}"
            raise InputError(f"{option} has no effect in {what}: leave it out.")


def _refuse_settings(settings: list[str] | None) -> None:
    from paceline.config.errors import InputError

    if settings:
        raise InputError(
            f"--set {settings[0]} changes a Job, and a script has none here: give it arguments, "
            "behind a double hyphen."
        )


def _refuse_arguments(arguments: list[str] | None) -> None:
    from paceline.config.errors import InputError

    if arguments:
        raise InputError(
            f"{arguments[0]} was given after a Job, and only a script (.py) takes arguments: "
            "change a Job's settings by --set."
        )


def _runs_folder(job: Path | None, runs: Path) -> Path:
    """A run that is named by its directory goes on there, wherever that is."""
    return job.absolute().parent if job is not None and job.is_dir() else runs


def _show(job: "JobSpec") -> None:
    from paceline.config.job import to_toml
    from paceline.train.this_machine import resolve_on_this_machine

    print(to_toml(resolve_on_this_machine(job).job), end="")


def _leave_with(code: int) -> NoReturn:
    """End a rank without waiting for the threads of process groups that wait for others."""
    if "paceline.comm.rendezvous" in sys.modules:  # else nobody has met
        from paceline.comm.rendezvous import exit_rank, ranks_from_env

        if ranks_from_env("cpu") is not None:
            exit_rank(code)
    sys.exit(code)


def _sentence(error: Exception) -> str:
    """What a command line is refused for; given none, a person wants to see the commands."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "paceline"
    text = " ".join(str(getattr(error, "format_message", error.__str__)()).split()).rstrip(".")
    return f"{text.replace('Input should be', 'it must be')}: see {path} --help."


def _let_threads_sleep() -> None:
    """Let an operator's threads that wait for each other sleep after a tenth of a millisecond. By
    default they hold their core for some more, which the last of them may need: where other
    programs are busy, steps took several times as long (docs/decisions/waiting-threads.md). libgomp
    reads this when torch is imported; what a person has set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def main() -> None:
    """Run the command line and turn exceptions into exit codes."""
    from paceline.config.errors import InputError, RunError, StoppedInTimeError

    _let_threads_sleep()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A script's job in the background inherits that; it can be interrupted all the same.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # Else typer would print a box of usage around what is wrong, and end with codes of its own.
        if code := app(standalone_mode=False):
            sys.exit(code)
    except _UsageError as error:
        print(f"paceline: {_sentence(error)}", file=sys.stderr)
        _leave_with(2)
    except typer.Abort:
        _leave_with(130)
    except StoppedInTimeError as stopped:
        _leave_with(stopped.code)
    except InputError as error:
        # A value without end, which a sentence repeats, is shown by its beginning.
        print("paceline:", re.sub(r"(\S{100})\S{300,}", r"\1...", str(error)), file=sys.stderr)
        _leave_with(2)
    except RunError as error:
        print(error, file=sys.stderr)
        _leave_with(1)
    except OSError as error:
        # A full disk, a folder without rights: the person's to mend, and no matter of frames.
        if error.filename is None or error.strerror is None:
            raise
        from paceline.config.outputs import shown_path

        name = shown_path(Path(os.fsdecode(error.filename)))
        print(
            f"paceline: {name}: {error.strerror}: mend that, or give another place.",
            file=sys.stderr,
        )
        _leave_with(2)
    except Exception:
        traceback.print_exc()
        _leave_with(1)
