"""The commands that make texts. As in `paceline.cli`, they import what they need when called."""

from pathlib import Path
from typing import Annotated

import typer

serve_app = typer.Typer()

Served = Annotated[
    Path,
    typer.Argument(
        help="The directory of a run, or a folder with config.json, safetensors and "
        "tokenizer.json, as paceline export writes it.",
        show_default=False,
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        help="Of this checkpoint of the run. Left out: the newest good one.",
        min=0,
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a setting, e.g. --set serve.precision=bf16, --set sampling.top_k=40. May be "
        "repeated.",
        metavar="SECTION.KEY=VALUE",
        show_default=False,
    ),
]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens that are made at most. [128]", show_default=False)
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the likeliest token each time. [1]", show_default=False),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same text. Left out: another one each time.",
        show_default=False,
    ),
]


@serve_app.command()
def generate(
    served: Served,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...",
            help="Texts to go on with; - reads one from standard input.",
            show_default=False,
        ),
    ] = None,
    tokens: Tokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    step: Step = None,
    set_: Settings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line: prompt, text, tokens, end.")
    ] = False,
) -> None:
    """Go on with texts, by the network of a run as it is.

    Nothing is exported or converted. All prompts are worked on at once. Settings
    of sampling: top_k, top_p, min_p, repetition_penalty, presence_penalty,
    frequency_penalty, stop, ignore_end. For several texts repeat the prompt.

    \b
    paceline generate runs/demo "def main(" --tokens 64 --temperature 0.7
    paceline generate runs/demo - < prompt.txt
    paceline generate exported/ "Once" "Twice" --json --set serve.precision=bf16
    """
    from paceline.config.serving import read_settings
    from paceline.serve.generate_command import generate_command

    settings = read_settings(set_ or (), max_tokens=tokens, temperature=temperature, seed=seed)
    generate_command(served, prompts or ["-"], settings, step, as_json=as_json)


@serve_app.command()
def serve(
    served: Served,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen at; beyond this host only with API keys. [127.0.0.1]",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port to listen at; 0: any that is free.", min=0, max=65535)
    ] = 8000,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Take newer good checkpoints of the run as they come."),
    ] = False,
    step: Step = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with one API key a line; keys may also stand in PACELINE_API_KEYS.",
            show_default=False,
        ),
    ] = None,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="Let everybody ask who reaches the port.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a record of where the time goes, which paceline explain reads.",
            show_default=False,
        ),
    ] = None,
    set_: Settings = None,
) -> None:
    """Answer requests over HTTP as OpenAI's API does, by the network of a run.

    Completions and chat, streamed or whole, many at once, on this host alone if
    nothing else is said; /metrics is for Prometheus. With --follow a run that
    still trains is served, and no request is lost when its weights change.
    SIGTERM or Ctrl-C lets requests end that are under way. docs/serving.md has
    the fields, the errors and the settings.

    \b
    paceline serve runs/demo
    paceline serve runs/demo --follow --port 8001 --set serve.max_sequences=16
    paceline serve exported/ --host 0.0.0.0 --api-key-file keys.txt
    """
    from paceline.config.serving import read_endpoint_settings
    from paceline.serve.serve_command import ServeOptions, serve_command

    options = ServeOptions(host, port, step, follow, api_key_file, no_keys, record)
    serve_command(served, read_endpoint_settings(set_ or ()), options)


@serve_app.command()
def index(
    documents: Annotated[
        Path,
        typer.Argument(
            help="A file or folder: texts, a document each; or JSON lines, Parquet or Arrow, a "
            "document in each line or row, under the key text.",
            show_default=False,
        ),
    ],
    encoder: Annotated[
        Path,
        typer.Option(
            help="Makes vectors of texts: a run or a folder of a decoder, or any folder that "
            "transformers' AutoModel opens, such as a sentence encoder's.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The folder that is written; must not exist.", show_default=False)
    ],
    tokens: Annotated[int, typer.Option(help="Of a chunk.", min=1)] = 128,
    overlap: Annotated[
        int, typer.Option(help="Tokens that neighbouring chunks have in common.", min=0)
    ] = 16,
    step: Step = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Make documents searchable, for answers that are made from them.

    Documents are cut into chunks, and the encoder makes a vector of each. A
    build that was interrupted goes on where it was, when started again.

    \b
    paceline index docs/ --encoder runs/demo --out idx
    paceline serve runs/demo --set retrieval.index=idx
    """
    from paceline.serve.retrieval.index_command import index_command

    index_command(documents, encoder, out, tokens, overlap, step, as_json=as_json)


@serve_app.command()
def evaluate(
    served: Served,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A file or folder of text. Left out: what the run's own evaluations read.",
            show_default=False,
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="All of the run's held-out text.")] = False,
    choices: Annotated[
        Path | None,
        typer.Option(
            help="Lines of JSON with context, choices and answer (the place of the right one, from "
            "0): how often it is the likeliest.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness: names or YAML files, with commas between.",
            show_default=False,
        ),
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(
            help="Examples before each question of a task. Left out: as the task says.",
            min=0,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Only the first questions of each task.", min=1, show_default=False),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask tasks as conversations, by the chat template.")
    ] = False,
    step: Step = None,
    set_: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say how well a network knows held-out text: loss, perplexity, bits a byte.

    By the passes that serve requests, so what is measured is what is served. The
    loss is that of the run's own evaluations within rounding; with serve.exact =
    true and train.exact_eval = true of the Job its logits have the same bits.
    Choices are scored as lm-evaluation-harness does it, and --tasks gives the
    network the harness's own tasks. A run keeps what they found in tasks.jsonl
    and its report. Tasks fetch no data unless HF_HUB_OFFLINE=0 is set.

    \b
    paceline evaluate runs/demo
    paceline evaluate runs/demo --whole --set serve.precision=bf16
    paceline evaluate exported/ --data notes.txt --json
    paceline evaluate exported/ --choices questions.jsonl
    paceline evaluate runs/demo --tasks arithmetic.yaml,lambada_openai
    """
    from paceline.config.errors import InputError
    from paceline.config.serving import read_settings

    settings = read_settings(set_ or ())
    if tasks is not None:
        from paceline.serve.tasks_command import TaskOptions, tasks_command

        if data is not None or choices is not None or whole:
            raise InputError(
                "--tasks have text of their own: leave --data, --choices, --whole out."
            )
        options = TaskOptions(tasks, fewshot, limit, is_chat=chat)
        tasks_command(served, settings, step, options, as_json=as_json)
        return
    if fewshot is not None or limit is not None or chat:
        raise InputError("--fewshot, --limit and --chat are of tasks: give --tasks.")
    from paceline.serve.evaluate_command import evaluate_command

    evaluate_command(
        served, settings, step, data=data, choices=choices, whole=whole, as_json=as_json
    )


@serve_app.command()
def chat(
    served: Served,
    tokens: Tokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    step: Step = None,
    set_: Settings = None,
) -> None:
    """Talk with the network of a run, line by line.

    A network that was trained on conversations has a chat template, which makes
    its prompts; any other goes on with what you write. What was said before is
    not computed again.

    \b
    paceline chat runs/demo
    paceline chat runs/demo --tokens 200 --set sampling.top_p=0.9
    """
    from paceline.config.serving import read_settings
    from paceline.serve.chat_command import chat_command

    settings = read_settings(set_ or (), max_tokens=tokens, temperature=temperature, seed=seed)
    chat_command(served, settings, step)
