"""The commands that measure: `paceline bench` and what it has below it.

As in `paceline.cli`, they import what they need when they are called.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.config.outputs import check_output, output

bench_app = typer.Typer(invoke_without_command=True)

NumRanks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        help="Measure with this many ranks. Left out: as many as training starts.",
        show_default=False,
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Fewer sizes and shorter looks: a rough picture.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Make the last line of output one JSON object.")
]


@bench_app.callback()
def bench(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(help="The Cluster file to write; a page goes beside it.")
    ] = Path("cluster.toml"),
    ranks: NumRanks = None,
    quick: Quick = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure one part: device, codecs, collectives, step or input. May be repeated. "
            "The others stay as the file has them.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: a Cluster file for the planner, and a page of it.

    Products, attention, memory, launch overhead and optimizer of a device
    while all of them work; what compresses; every collective by size and number
    of ranks; steps of small models, to calibrate our own runtime; the data path.
    Takes a few minutes; leave the machine alone meanwhile. Ctrl-C writes nothing.

    \b
    paceline bench --ranks 4 --out four.toml
    torchrun --nnodes 2 ... -m paceline bench
    paceline train --set 'cluster.file="four.toml"'
    paceline bench collectives --help     the links alone, and which one is slow
    """
    from paceline.config.errors import InputError

    if context.invoked_subcommand is not None:
        if any((ranks, quick, only, as_json)):
            name = context.invoked_subcommand
            raise InputError(f"options of paceline bench {name} are given after its name.")
        return
    check_output("--out", out)
    from paceline.comm.forkserver_start import MEASURING, warm_up_ranks

    warm_up_ranks(MEASURING)
    from paceline.bench.command import bench_command
    from paceline.comm.rendezvous import exit_rank, ranks_from_env

    facts = bench_command(out, num_ranks=ranks, quick=quick, only=only or [])
    if as_json and facts is not None:
        print(json.dumps(facts))
    if ranks_from_env("cpu") is not None:
        exit_rank()


@bench_app.command()
def collectives(
    out: Annotated[
        Path,
        typer.Option(
            callback=output("--out"),
            help="The Cluster file that gets the curves; the rest of it stays.",
        ),
    ] = Path("cluster.toml"),
    ranks: NumRanks = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="gloo, nccl or mpi. Left out: what training uses here.", show_default=False
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the buffer: 4KiB,1MiB or 512:1GiB:8 (smallest, largest, factor). "
            "Left out: 512 B to 1 GiB.",
            metavar="SIZES",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            help="Seconds for the collectives; sizes beyond are left out.", min=1, max=1e6
        ),
    ] = 180.0,
    pairs: Annotated[
        bool, typer.Option("--pairs/--no-pairs", help="Every rank to every rank.")
    ] = True,
    quick: Quick = False,
    html: Annotated[
        Path | None,
        typer.Option(
            callback=output("--html"),
            help="Write a page with curves and heat maps.",
            show_default=False,
        ),
    ] = None,
    tune_nccl: Annotated[
        bool, typer.Option("--tune-nccl", help="Try NCCL_ALGO, NCCL_PROTO, ..., and say what pays.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the links between ranks: every collective, and every pair.

    All-reduce, all-gather, reduce-scatter, all-to-all, broadcast and messages, by
    size, inside a node and across, each result checked. algbw is the buffer over
    the time; busbw what must leave each rank over the time, to be held against
    the rate of a link (as nccl-tests defines them). Groups are measured together,
    and one alone: the quotient is contention. Between CPU ranks our own
    algorithms are measured too, so that a plan can choose.

    The matrix of pairs names a slow host or link: one below half of the rest.

    \b
    paceline bench collectives --ranks 4 --html links.html
    paceline bench collectives --sizes 64MiB --no-pairs
    torchrun --nnodes 4 ... -m paceline bench collectives
    """
    from paceline.comm.forkserver_start import MEASURING, warm_up_ranks

    warm_up_ranks(MEASURING)
    from paceline.bench.network.command import CollectivesOptions, collectives_command
    from paceline.comm.rendezvous import exit_rank, ranks_from_env

    asked = CollectivesOptions(out, ranks, backend, sizes, budget, pairs, quick, html, tune_nccl)
    facts = collectives_command(asked)
    if as_json and facts is not None:
        print(json.dumps(facts))
    if ranks_from_env("cpu") is not None:
        exit_rank()


@bench_app.command()
def kernels(
    only: Annotated[
        list[str] | None,
        typer.Option(help="One operator, such as swiglu. May be repeated.", show_default=False),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Look for the best launches and write their table.")
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            callback=output("--out"), help="The table of launches that --tune writes or adds to."
        ),
    ] = Path("launches.json"),
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Check and time the Triton kernels on this GPU.

    Each operator, forward and backward, is checked against fp64 and against
    itself, and timed in turns with eager torch and torch.compile: milliseconds,
    bytes or operations per second, and the share of what a copy or a product
    reached.

    layout.kernels = "auto" takes an operator's kernels only where a table of
    launches says that they win on this device: --tune writes one.

    \b
    paceline bench kernels --only swiglu
    paceline bench kernels --tune --out h100.json
    PACELINE_KERNEL_TABLE=h100.json paceline train job.toml
    """
    from paceline.bench.kernels.command import kernels_command

    facts = kernels_command(only or [], out, tune=tune, quick=quick)
    if as_json:
        print(json.dumps(facts))


@bench_app.command()
def serve(
    served: Annotated[
        Path,
        typer.Argument(
            help="The directory of a run, or a folder as paceline export writes it.",
            show_default=False,
        ),
    ],
    rate: Annotated[
        str | None,
        typer.Option(
            help="Send requests at this rate, e.g. 4/s, at random moments; or all at once: max. "
            "Left out: none are sent.",
            metavar="RATE",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="That are sent.", min=1, max=100_000)] = 64,
    in_: Annotated[
        str, typer.Option("--in", help="Tokens of a prompt, a number or a range.", metavar="N-M")
    ] = "32-128",
    out: Annotated[str, typer.Option(help="Tokens of a text.", metavar="N-M")] = "32-128",
    slo: Annotated[
        str | None,
        typer.Option(
            help='Count the requests that keep to it: "ttft 500ms, tpot 40ms".',
            metavar="TEXT",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Send them to an endpoint that speaks OpenAI's API, and measure nothing else.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure passes anew that were measured before.")
    ] = False,
    forms: Annotated[
        bool,
        typer.Option(
            "--forms",
            help="Measure instead what weights, keys and values in fewer bits take: memory, time "
            "and loss.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the requests.", min=0, max=2**63)] = 0,
    step: Annotated[
        int | None,
        typer.Option(
            help="Of this checkpoint of the run. Left out: the newest good one.",
            min=0,
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a setting, e.g. --set serve.precision=bf16. May be repeated. "
            "sampling.temperature is 0 here.",
            metavar="SECTION.KEY=VALUE",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how this machine makes texts with a network.

    Forward passes by their tokens, contexts and parts of prompts, the host's time
    beside them, start-up and memory, into a file beside the weights, one for each
    form of them; `paceline plan --serve` reads all. When it was interrupted it
    goes on. With --rate it also sends requests, and says what they waited for in
    the words of vllm bench serve: time to first token (TTFT), per output token
    (TPOT), between tokens (ITL), end to end (E2E).

    \b
    paceline bench serve runs/demo
    paceline bench serve runs/demo --rate 4/s --slo "ttft 500ms, tpot 40ms"
    paceline bench serve runs/demo --rate max --url http://127.0.0.1:8000
    paceline bench serve runs/demo --forms
    """
    from paceline.bench.command import source_text
    from paceline.bench.serving.command import LoadOptions, bench_serve_command
    from paceline.config.errors import InputError
    from paceline.config.serving import read_settings
    from paceline.plan.serving.options import range_of, rate_of
    from paceline.plan.serving.slo import slo_of

    if rate is None and (slo or url):
        raise InputError("--slo and --url are about requests that are sent: give their --rate.")
    settings = read_settings(set_ or (), temperature=0.0)
    if forms:
        from paceline.bench.serving.forms_command import bench_forms_command

        if rate is not None or fresh:
            raise InputError("--forms sends no requests and keeps nothing: leave the others out.")
        prices = bench_forms_command(served, settings, step)
        if as_json:
            print(json.dumps(prices))
        return
    load = None
    if rate is not None:
        load = LoadOptions(
            None if rate == "max" else rate_of(rate),
            requests,
            range_of("--in", in_),
            range_of("--out", out),
            url,
            None if slo is None else slo_of(slo),
            seed,
        )
    found = bench_serve_command(served, settings, load, source_text(), step=step, fresh=fresh)
    if as_json:
        print(json.dumps(found))
