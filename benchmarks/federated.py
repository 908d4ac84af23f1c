"""Federated adapters: `paceline federate` against Flower's FedAvg of LoRA, and all data together.

How it works: a decoder of 0.9 M parameters that knows Python's own library learns Paceline's pages,
code and tests, which are cut among clients (Dirichlet over the three, so no two parts are alike).
Each recipe gets the same base, first adapters, parts, rounds, local steps and learning rate. In
each round a quarter of the clients, drawn by a seed, is killed (SIGKILL) while it trains.

- ours: `paceline federate` as it stands, with SecAgg+.
- FedAvg: `peers/flower_fedavg.py`, both matrices in fp32, without SecAgg+, and with Flower's.
- together: one process, as many steps as a client makes, on batches of all clients that answer.

Uploads are the bytes of the messages' objects as Flower sends them. Held-out loss is computed by
transformers and peft from the adapters on disk. The mean that the server came to is compared with
the mean of what the clients told, read from their folders.

What it doesn't say: seconds (processes share the cores), or large networks.

    python -m benchmarks.federated [--rounds 4] [--steps 40] [--clients 8] [--secagg-rounds 1]

It needs the extra `federate`, and peft. With other work on two cores a round took four minutes.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.provenance import ROOT, folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.config.job import read_job
from paceline.federate.command import prepare
from paceline.federate.processes import running, write_app
from paceline.federate.rounds import factor_of
from paceline.federate.shared_file import read_tensors, vector_of
from paceline.render.figures import bytes_text

SEQ, END, CHARS, EVERY = 128, 256, 800, 20
SOURCES = {"pages": ("docs", "*.md"), "code": ("src", "*.py"), "tests": ("tests", "*.py")}
PEER = "benchmarks.peers.flower_fedavg"
MODEL = """
[model]
family = "decoder"
vocab_size = 257
hidden_size = {width}
ffn_size = {ffn}
num_layers = {layers}
num_heads = 4
num_kv_heads = 4
max_seq_len = 128
tie_embeddings = true
"""
BASE = """
name = "base"
{model}
[cluster]
devices_per_node = 1
[data]
source = "python-stdlib"
tokenizer = "bytes"
[optim]
lr = 4e-3
warmup_steps = {warmup}
schedule = "cosine"
[train]
steps = {base_steps}
global_batch = 16
seq_len = 128
eval_every = 0
"""
ADAPTERS = """
name = "adapters"
[model]
hf = "{base}"
[cluster]
devices_per_node = 1
[finetune]
method = "lora"
rank = {rank}
alpha = {alpha}
[optim]
lr = {lr}
warmup_steps = 0
schedule = "constant"
[train]
weights = true
steps = {steps}
global_batch = {batch}
seq_len = 128
eval_every = 0
[data]
tokenizer = "bytes"
eval_fraction = 0.01
"""
FEDERATE = """
[federate]
job = "clients_job.toml"
clients = {clients}
rounds = {rounds}
steps = {steps}
bits = {bits}
split = "dirichlet"
alpha = {alpha}
"""


def main() -> None:
    """Train by every recipe, and keep what was found."""
    parser = parser_of(__doc__)
    for name, value, what in (
        ("clients", 8, "at least 4"),
        ("rounds", 4, "of each recipe"),
        ("secagg-rounds", 1, "of FedAvg with Flower's SecAgg+; it has a loss if they are all"),
        ("steps", 40, "of a client in a round"),
        ("batch", 8, "samples of 128 bytes in a client's step"),
        ("bits", 4, "of a number of ours"),
        ("rank", 16, "of adapters"),
        ("width", 128, "of the network"),
        ("layers", 4, "of the network"),
        ("base-steps", 400, "of the base on Python's library"),
        ("seed", 0, "of who drops out"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} ({value})")
    parser.add_argument("--lr", type=float, default=5e-3, help="of all recipes (5e-3)")
    parser.add_argument("--alpha", type=float, default=0.5, help="of the split (0.5)")
    asked = parser.parse_args()
    about = taken_with("benchmarks.federated", "flwr", "peft", "transformers")
    with tempfile.TemporaryDirectory() as kept:
        found = _measured(Path(kept), asked)
    found = {"about": about, "asked": {**vars(asked), "results": None}, **found}
    page = _page(found, asked) + f"\n{signature(about)}\n"
    print(page)
    keep(folder_of(asked.results, about), "federated", found, page)


def _measured(folder: Path, asked: Any) -> dict[str, Any]:
    held_out = _write_texts(folder)
    base = _base(folder, asked)
    job = ADAPTERS.format(base=base, **{**vars(asked), "alpha": 2 * asked.rank})
    clients = job + "".join(
        f'[[data.sources]]\nname = "{name}"\nsource = "{folder / name}.jsonl"\nweight = 1\n'
        for name in SOURCES
    )
    (folder / "clients_job.toml").write_text(clients)
    (folder / "ours.toml").write_text(FEDERATE.format(**vars(asked)))
    dropped, losses = _dropped(asked), {}

    def look(name: str, adapters: Path) -> None:
        losses[name] = _held_out_loss(base, adapters, held_out)
        print(f"{name}: {losses[name]:.4f} nats a byte", flush=True)

    ours = folder / "ours"
    with _dropping(ours, dropped) as watch:
        _command("paceline", "federate", str(folder / "ours.toml"), "--out", str(ours))
    recipes = {"ours": _told(ours, dropped)}
    look("ours", ours / "adapters")
    for name, rounds in (("fedavg", asked.rounds), ("fedavg_secagg", asked.secagg_rounds)):
        with _dropping(folder / name, dropped):
            _flower(folder, name, rounds)
        recipes[name] = _told(folder / name, dropped)
        if rounds == asked.rounds:
            look(name, folder / name / "adapters")
    look("together", _together(folder, job, asked))
    look("base", folder / "first")
    rows = [
        len((ours / "clients" / str(each) / "data.jsonl").read_text().splitlines())
        for each in range(asked.clients)
    ]
    return {
        "recipes": recipes, "losses": losses, "rows": rows, "mean_off": watch.mean_off,
        "dropped": {number: sorted(each) for number, each in dropped.items()},
        "held_out_bytes": len(held_out),
        "numbers": {each: len(vector_of(read_tensors(ours / "adapters"), each)) for each in "ab"},
    }  # fmt: skip


# ---- data and base ------------------------------------------------------------------------------


def _write_texts(folder: Path) -> bytes:
    """Write the rows of each source, and give the held-out text: each twentieth row."""
    held_out = b""
    for name, (room, pattern) in SOURCES.items():
        rows = [row for file in sorted((ROOT / room).rglob(pattern)) for row in _rows(file)]
        trained = [row for number, row in enumerate(rows) if number % EVERY]
        held_out += b"".join(row.encode() + b"\0" for row in rows[::EVERY])
        lines = "".join(json.dumps({"text": row}) + "\n" for row in trained)
        (folder / f"{name}.jsonl").write_text(lines)
    return held_out


def _rows(file: Path) -> Iterator[str]:
    """Parts of a file that end with a line and are about as long as CHARS."""
    part = ""
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        part += line
        if len(part) >= CHARS:
            yield part
            part = ""
    if part:
        yield part


def _base(folder: Path, asked: Any) -> Path:
    model = MODEL.format(width=asked.width, ffn=3 * asked.width, layers=asked.layers)
    steps = asked.base_steps
    text = BASE.format(model=model, base_steps=steps, warmup=steps // 20)
    (folder / "base.toml").write_text(text)
    _command("paceline", "train", str(folder / "base.toml"), cwd=folder)
    _command("paceline", "export", str(folder / "runs/base"), str(folder / "base"))
    return folder / "base"


def _together(folder: Path, job: str, asked: Any) -> Path:
    names = ", ".join(f'"{folder / name}.jsonl"' for name in SOURCES)
    (folder / "together.toml").write_text(f"{job}source = [{names}]\n")
    batch = asked.batch * (asked.clients - asked.clients // 4)
    _command(
        "paceline.federate.client_round", str(folder / "together.toml"), str(folder / "together"),
        f"train.steps={asked.rounds * asked.steps}", f"train.global_batch={batch}",
        f"finetune.adapters={folder / 'first'}",
    )  # fmt: skip
    return folder / "together"


def _held_out_loss(base: Path, adapters: Path, text: bytes) -> float:
    """Nats a byte, of pieces of SEQ that begin anew."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    network = PeftModel.from_pretrained(network, adapters).eval()
    ids = torch.tensor(list(text), dtype=torch.int64)
    ids = torch.where(ids == 0, END, ids)
    pieces = ids[: len(ids) // SEQ * SEQ].reshape(-1, SEQ)
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in pieces.split(64):
            logits = network(batch).logits[:, :-1].reshape(-1, network.config.vocab_size)
            targets = batch[:, 1:].reshape(-1)
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
    return total / count


# ---- rounds -------------------------------------------------------------------------------------


def _command(module: str, *arguments: str, cwd: Path | None = None) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=cwd, check=True)


def _flower(folder: Path, name: str, rounds: int) -> None:
    """Rounds of the peer, from the very parts and adapters that ours began with."""
    begun = prepare(folder / "ours.toml", [], folder / name, read_job)
    if not (folder / "first").exists():
        _copy_adapters(begun.folder / "adapters", folder / "first")
    rows = [
        (begun.folder / "clients" / str(n) / "data.jsonl").read_text().count("\n")
        for n in range(begun.asked.clients)
    ]
    secagg = {"secagg": name == "fedavg_secagg", "rows": max(rows)}
    ends = {"server": f"{PEER}.server", "client": f"{PEER}.client"}
    write_app(begun.folder / "app", {**begun.stated, "rounds": rounds, **secagg}, ends)
    home, logs = begun.folder / "flower", begun.folder / "logs"
    with running(begun.folder / "app", home, begun.asked.clients, logs) as run:
        while len(lines := _lines(begun.folder)) < rounds:
            if run.poll() is not None and len(_lines(begun.folder)) < rounds:
                raise SystemExit(
                    f"{name} ended after {len(lines)} rounds:\n{(logs / 'run.log').read_text()}"
                )
            time.sleep(0.5)


def _copy_adapters(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Lines of the rounds that are over."""
    file = folder / "rounds.jsonl"
    whole = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in whole]


def _dropped(asked: Any) -> dict[int, set[int]]:
    """The clients that are killed in each round."""
    stream = np.random.default_rng(asked.seed)
    return {
        number: set(stream.choice(asked.clients, asked.clients // 4, replace=False).tolist())
        for number in range(1, asked.rounds + 1)
    }


class _Watch(threading.Thread):
    """Kills clients while they train, and follows what the others tell."""

    def __init__(self, folder: Path, dropped: dict[int, set[int]]) -> None:
        super().__init__(daemon=True)
        self._folder, self._dropped = folder, dropped
        self._before: dict[str, Any] = {}
        self._errors: dict[tuple[int, str], Any] = {}
        self.over = threading.Event()
        self.mean_off: list[float] = []
        """Of each round: the farthest that a number of the mean is from the clients' own."""

    def run(self) -> None:
        while not self.over.wait(0.5):
            number = len(_lines(self._folder)) + 1
            if not self._before and (self._folder / "app").exists():
                self._before = read_tensors(self._folder / "adapters")
            clients = self._folder / "clients"
            _kill({str(clients / f"{n}/round-{number}") for n in self._dropped.get(number, ())})
            if number > len(self.mean_off) + 1:
                self._check(number - 1)

    def _check(self, number: int) -> None:
        """Of ours: the mean of what clients told against the change of the shared adapters."""
        factor = factor_of(number)
        after, told = read_tensors(self._folder / "adapters"), []
        for client in range(len(list((self._folder / "clients").iterdir()))):
            own = self._folder / "clients" / str(client)
            if client in self._dropped[number] or not (own / f"error-{factor}.npy").exists():
                continue
            error = np.load(own / f"error-{factor}.npy")
            kept = self._errors.get((client, factor), np.zeros_like(error))
            trained = vector_of(read_tensors(own / f"round-{number}"), factor)
            told.append(trained - vector_of(self._before, factor) + kept - error)
            self._errors[client, factor] = error
        if told:
            change = vector_of(after, factor) - vector_of(self._before, factor)
            self.mean_off.append(float(np.abs(np.mean(told, axis=0) - change).max()))
        else:
            self.mean_off.append(float("nan"))  # FedAvg has no grid
        self._before = after


def _kill(outs: set[str]) -> None:
    """End whoever trains to one of these folders."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "paceline.federate.client_round" in line and not outs.isdisjoint(line):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def _dropping(folder: Path, dropped: dict[int, set[int]]) -> Iterator[_Watch]:
    watch = _Watch(folder, dropped)
    watch.start()
    try:
        yield watch
        deadline = time.monotonic() + 60
        while len(watch.mean_off) < len(_lines(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        watch.over.set()
        watch.join()


def _told(folder: Path, dropped: dict[int, set[int]]) -> dict[str, Any]:
    """Upload of a client that stayed, in a round, and what the rounds say of themselves."""
    lines = _lines(folder)
    clients = len(list((folder / "clients").iterdir()))
    for line in lines:
        if line["answered"] != clients - len(dropped[line["round"]]):
            raise SystemExit(f"{folder.name}: others dropped out than were to: {line}")
    answers = sum(line["answered"] for line in lines)
    upload = sum(line["upload_bytes"] for line in lines) / answers
    print(f"{folder.name}: {upload:,.0f} bytes from a client in a round", flush=True)
    return {"upload_bytes": upload, "rounds": lines}


# ---- the page -----------------------------------------------------------------------------------


def _page(found: dict[str, Any], asked: Any) -> str:
    losses, recipes = found["losses"], found["recipes"]
    ours = recipes["ours"]["upload_bytes"]
    titles = (
        "recipe",
        "upload of a client in a round",
        "times ours",
        "held-out loss",
        "together's",
    )
    names = {
        "ours": f"paceline federate, SecAgg+, {asked.bits} bits",
        "fedavg": "Flower's FedAvg, fp32",
        "fedavg_secagg": "Flower's FedAvg and SecAgg+",
    }
    lines: list[Sequence[str]] = []
    for key, name in names.items():
        upload = recipes[key]["upload_bytes"]
        loss = losses.get(key)
        lines.append((name, bytes_text(upload), f"{upload / ours:.2f}", *_loss(loss, losses)))
    lines.append(("all data together", "", "", *_loss(losses["together"], losses)))
    lines.append(("no adapters", "", "", *_loss(losses["base"], losses)))
    off, counts = max(found["mean_off"]), found["numbers"]
    masked = len(recipes["fedavg_secagg"]["rounds"])
    return f"""# Federated adapters

{markdown(titles, lines, ("recipe",))}
{asked.clients} clients with {min(found["rows"])} to {max(found["rows"])} rows, of whom
{asked.clients // 4} are killed in each of {asked.rounds} rounds ({masked} of FedAvg with
SecAgg+). A round has {asked.steps} steps of {asked.batch} times {SEQ} bytes, learning rate
{asked.lr:g}. Adapters of rank {asked.rank} have {counts["a"]:,} numbers in A and {counts["b"]:,}
in B. In no round is a number of the server's mean farther than {off:.1e} from the mean of what
clients told. Losses are in nats a byte, of {found["held_out_bytes"]:,} held-out bytes.
"""


def _loss(loss: float | None, losses: dict[str, float]) -> tuple[str, str]:
    if loss is None:
        return "", ""
    return f"{loss:.4f}", f"{loss / losses['together'] - 1:+.2%}"


if __name__ == "__main__":
    main()
