"""Rounds on Flower's own processes: SuperLink, SuperNodes and SecAgg+, and clients that train."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.federate.command import federate_command, prepare
from paceline.federate.privacy import epsilon_of
from paceline.federate.server_optimizer import ServerOptimizer
from paceline.federate.shared_file import FOUND, plus, read_tensors, trained_names, vector_of
from paceline.models.weights import read_decoder, write_weights
from tests.generate.networks import MODELS, built

CLIENTS, ROUNDS = 4, 2
FEDERATE = f"""
[federate]
job = "lora.toml"
clients = {CLIENTS}
rounds = {ROUNDS}
steps = 3
split = "source"
"""
JOB = """
name = "lora"
[model]
hf = "base"
[cluster]
devices_per_node = 1
[data]
tokenizer = "bytes"
eval_fraction = 0.1
[finetune]
method = "lora"
rank = 4
[optim]
lr = 1e-2
[train]
weights = true
steps = 1
global_batch = 4
seq_len = 16
eval_batches = 1
"""

ADAPTED = JOB[JOB.index('method = "lora"') : JOB.index("steps = 1")]
"""Of the Job: from the adapters to the weights that they adapt."""
TRAINED = ADAPTED[ADAPTED.index("[") :]
"""The same without adapters."""
WARM = "lr = 1e-2\n[train]\nweights = true\nsteps = "
"""Of the Job: from the learning rate to how many steps, of which clients make fewer."""
TWO_WEIGHTS = 'weight = 1\n[[data.sources]]\nname = "t"\nsource = "1.txt"\nweight = 2\n'
SGD = 'name = "sgd"\nlr = 0.5\n'
WARM_UP = 'lr = 1e-2\nwarmup_steps = 4\nschedule = "constant"'
STAYING = '[[optim.groups]]\npattern = "*"\nlr_factor = 0.0\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, a Job, and a source for each client; the last one is too short to train on."""
    made = tmp_path_factory.mktemp("federate")
    model = MODELS["grouped"].replace(vocab_size=258)
    write_weights(made / "base", model, built(model).float().state_dict())
    job = JOB
    for client in range(CLIENTS):
        few = client == CLIENTS - 1
        rows = [f"{n} the client {client} has a text" for n in range(1 if few else 200)]
        (made / f"{client}.txt").write_text("\n".join("ab" if few else row for row in rows))
        job += f'[[data.sources]]\nname = "s{client}"\nsource = "{client}.txt"\nweight = 1\n'
    (made / "lora.toml").write_text(job)
    (made / "clients.toml").write_text(FEDERATE)
    return made


@pytest.fixture(scope="module")
def rounds(folder):
    """The lines of two rounds, in which the last client always drops out while it trains."""
    return federated(folder, "clients")


def federated(folder, name):
    """Run `paceline federate` in a process of its own; the lines of its rounds."""
    pytest.importorskip("flwr")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "federate", f"{name}.toml", "--json"],
        cwd=folder, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    out = folder / "federated" / name
    told = json.loads(done.stdout.splitlines()[-1])
    [shares] = {"adapters", "weights"} & told.keys()
    assert told[shares] == str(out / shares)
    return lines_of(out)


def lines_of(out):
    """Of the rounds that are over."""
    return [json.loads(line) for line in text_of(out / "rounds.jsonl").splitlines()]


def text_of(file):
    """Of a file; nothing where there is none."""
    return file.read_text() if file.exists() else ""


@pytest.mark.timeout(1800)  # Flower starts a process for each message
def test_the_sum_is_that_of_the_clients_who_answered(folder, rounds):
    """What a client told is what it learnt, less the error that it keeps."""
    out = folder / "federated" / "clients"
    assert [(line["asked"], line["answered"]) for line in rounds] == [(4, 3), (4, 3)]
    assert np.abs(missed(out, rounds[-1])).max() < 1e-6
    assert [line["factor"] for line in rounds] == ["b", "a"]


def missed(out, line, shares="adapters"):
    """What is shared beside the mean of what clients told: (n,). After the first round of a factor,
    which is the last round as well."""
    factor, names = line["factor"], trained_names(out)

    def read(folder):
        return vector_of(read_tensors(folder, names), factor)

    clients = [out / "clients" / str(n) for n in range(CLIENTS - 1)]
    samples = read_job(clients[0] / "job.toml").train.global_batch
    changes = [read(each / FOUND) / samples for each in clients]
    assert np.std(changes, axis=0).max() > 1e-4
    told = [t - np.load(c / f"error-{factor}.npy") for t, c in zip(changes, clients, strict=True)]
    return read(out / shares) - read(clients[0] / shares) - np.mean(told, axis=0)


@pytest.mark.timeout(1800)
def test_weights_are_shared_but_for_those_that_stay(folder):
    """A Job without adapters, of which one block and the head's norm are trained."""
    trained = "".join(
        f'[[optim.groups]]\npattern = "{each}"\n' for each in ("blocks.1.*", "norm.*")
    )
    job = (folder / "lora.toml").read_text().replace('method = "lora"\nrank = 4\n', "")
    (folder / "full.toml").write_text(job + trained + STAYING)
    once = FEDERATE.replace("lora.toml", "full.toml").replace(f"rounds = {ROUNDS}", "rounds = 1")
    (folder / "whole.toml").write_text(once)
    [line] = federated(folder, "whole")
    assert (line["asked"], line["answered"], line["factor"]) == (4, 3, "all")
    out = folder / "federated" / "whole"
    assert np.abs(missed(out, line, "weights")).max() < 1e-6
    before, after = (read_decoder(each).state_dict() for each in (folder / "base", out / "weights"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith(("blocks.1.", "norm."))}
    assert line["numbers"] == sum(before[name].numel() for name in changed)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("tells", "factor"), [('"gradients"', "gradient"), ('"fedavg"\nsteps = 3', "all")]
)
def test_the_server_takes_the_mean_of_those_who_answered(folder, tells, factor):
    """Each client leaves what it told, and what it found: the server steps by the mean gradient, or
    adds the mean change."""
    asked = FEDERATE.replace("steps = 3", f"tells = {tells}\nbits = 6\ntold = 0.9")
    (folder / f"{factor}s.toml").write_text(asked.replace(f"rounds = {ROUNDS}", "rounds = 1"))
    sizes, line = federated(folder, f"{factor}s")
    assert [(each["asked"], each["answered"]) for each in (sizes, line)] == [(4, 3), (4, 3)]
    assert [(each["round"], each["factor"]) for each in (sizes, line)] == [(0, factor), (1, factor)]
    out = folder / "federated" / f"{factor}s"
    clients = [out / "clients" / str(n) for n in range(CLIENTS - 1)]
    told = [np.load(each / "told.npy") for each in clients]
    found = [vector_of(read_tensors(each / FOUND), "all") for each in clients]
    assert all(np.corrcoef(pair)[0, 1] > 0.7 for pair in zip(told, found, strict=True))
    samples = [read_job(each / "job.toml").train.global_batch for each in clients]
    assert sum(samples) >= 3
    assert np.std(told, axis=0).max() > 1e-3
    before = read_tensors(clients[0] / "adapters")
    mean = np.sum(told, 0) / sum(samples)
    if factor == "all":
        expected = plus(before, "all", mean)
    else:
        expected = ServerOptimizer(out, before).step(0, mean)
    after = vector_of(read_tensors(out / "adapters"), "all")
    assert np.abs(after - vector_of(expected, "all")).max() < 1e-6
    assert np.abs(after - vector_of(before, "all")).max() > 1e-3
    packed = line["answered"] * line["numbers"] * 6 / 8
    assert packed <= line["upload_bytes"] - sizes["upload_bytes"] < packed + 3 * 500


@pytest.mark.timeout(1800)
def test_with_privacy_the_sum_has_noise_and_the_round_says_its_epsilon(folder):
    pytest.importorskip("dp_accounting")
    privacy = "rounds = 1\n[federate.privacy]\nepsilon = 50.0\nclip = 10.0\nnoise = 0.5\n"
    (folder / "private.toml").write_text(FEDERATE.replace(f"rounds = {ROUNDS}", "") + privacy)
    [line] = federated(folder, "private")
    assert line["answered"] == 3
    assert line["epsilon"] == epsilon_of(0.5, 1e-5, 1)
    assert (line["delta"], line["noise"], line["clip"]) == (1e-5, 0.5, 10.0)
    noise = missed(folder / "federated" / "private", line)
    # Seven standard deviations of such an estimate of a standard deviation.
    near = 7 / np.sqrt(2 * len(noise))
    assert noise.std() == pytest.approx(0.5 * 10 / 3, rel=near)
    assert abs(noise.mean()) < 7 * 0.5 * 10 / 3 / np.sqrt(len(noise))


def test_uploads_are_the_bits_of_masked_numbers_and_keys(rounds):
    for line in rounds:
        numbers = line["answered"] * (line["numbers"] + 65)
        assert numbers * 6 / 8 <= line["upload_bytes"] < numbers * 6 / 8 + 4 * 6000


def running_below(folder):
    """Processes of federations below a folder, Flower's own among them."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in each.environ().get("FLWR_HOME", ""):
                found.append(each)
    return found


def test_nothing_is_left_running(folder, rounds):
    assert not running_below(folder / "federated" / "clients")


def killed_when(folder, name, is_time):
    """Begin a federation, kill the command when it is time, and wait for all that it started."""
    command = subprocess.Popen(
        [sys.executable, "-m", "paceline", "federate", f"{name}.toml"], cwd=folder
    )
    try:
        while not is_time(folder / "federated" / name):
            assert command.poll() is None
            time.sleep(0.2)
    finally:
        command.kill()
        command.wait()
    left = running_below(folder / "federated" / name)
    assert left
    assert not psutil.wait_procs(left, timeout=60)[1]
    assert not running_below(folder / "federated" / name)


@pytest.mark.timeout(1800)
def test_a_command_that_is_killed_leaves_nothing_running_and_goes_on(folder, monkeypatch):
    """Before the first round is over, and after it; of changes."""
    pytest.importorskip("flwr")
    (folder / "killed.toml").write_text(FEDERATE)
    out = folder / "federated" / "killed"
    killed_when(folder, "killed", lambda at: "strategy sampled" in text_of(at / "logs/run.log"))
    assert not (out / "rounds.jsonl").exists()
    killed_when(folder, "killed", lambda at: text_of(at / "rounds.jsonl"))
    [first] = lines_of(out)
    (out / "rounds.jsonl").write_text("")  # as if it had been killed before the line
    lines = federated(folder, "killed")
    assert lines[0] == first
    assert [(line["round"], line["factor"]) for line in lines] == [(1, "b"), (2, "a")]
    assert np.abs(missed(out, lines[1])).max() < 1e-6
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match="has all 2 rounds already"):
        federate_command(Path("killed.toml"), [], None, read_job)
    (folder / "killed.toml").write_text(FEDERATE.replace("steps = 3", "steps = 4"))
    with pytest.raises(InputError, match=r"federate.steps = 3, which is 4 now"):
        federate_command(Path("killed.toml"), [], None, read_job)


@pytest.mark.timeout(1800)
def test_steps_of_a_server_that_was_killed_are_those_of_one_that_was_not(folder):
    """But for dithers of 15 bits, as Flower gives clients other numbers at each start. With
    momentum, which is lost or kept; AdamW's steps would be as long where gradients are nearly
    zero."""
    job = (folder / "lora.toml").read_text().replace("lr = 1e-2", f"{SGD}momentum = 0.9")
    (folder / "sgd.toml").write_text(job)
    asked = FEDERATE.replace("steps = 3", 'tells = "gradients"\nbits = [16, 15]')
    asked = asked.replace("lora.toml", "sgd.toml")
    for name in ("whole", "parts"):
        (folder / f"{name}.toml").write_text(asked.replace(f"rounds = {ROUNDS}", "rounds = 3"))
    federated(folder, "whole")
    killed_when(folder, "parts", lambda at: len(lines_of(at)) == 3)
    federated(folder, "parts")
    whole, parts = (folder / "federated" / name for name in ("whole", "parts"))
    assert [line["round"] for line in lines_of(parts)] == [0, 1, 2, 3]
    tensors = [read_tensors(each / "adapters") for each in (whole, parts)]
    moved = vector_of(tensors[0], "b")  # from zero
    off = vector_of(tensors[1], "all") - vector_of(tensors[0], "all")
    assert np.abs(moved).max() > 1e-3
    assert np.sqrt(np.mean(off**2)) < 1e-3 * np.sqrt(np.mean(moved**2))


@pytest.mark.timeout(900)
def test_rounds_in_which_nobody_can_train_end_as_a_failure(folder):
    """Each client's rows are fewer than a sample."""
    pytest.importorskip("flwr")
    (folder / "short.txt").write_text("ab\n" * CLIENTS)
    job = JOB + '[[data.sources]]\nname = "s"\nsource = "short.txt"\n'
    (folder / "short-job.toml").write_text(job)
    text = FEDERATE.replace("lora.toml", "short-job.toml").replace('"source"', '"even"')
    (folder / "short.toml").write_text(text.replace(f"rounds = {ROUNDS}", "rounds = 1"))
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "federate", "short.toml"],
        cwd=folder, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no round changed anything" in done.stderr
    assert "0 of 4 clients, too few" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (ADAPTED, TRAINED.replace("weights = true\n", ""), "there are none"),
        (ADAPTED, f"{STAYING}{TRAINED}", "leave every parameter as it is"),
        (ADAPTED, f"{STAYING.replace('*', 'nose')}{TRAINED}", "fits no parameter"),
        ("rank = 4", "decomposed = true", "finetune.decomposed = false"),
        ('tokenizer = "bytes"', 'tokenizer = "bpe:300"', "another one on each client"),
        ('"0.txt"', '"nothing-*.txt"', "is no file here"),
        ('"0.txt"', '"lora.toml"', "of .jsonl or .txt files"),
        ('"0.txt"', '"3.txt"', "client 1 of 4 has none of 1 rows"),
        ("[cluster]", "[layout]\ntp = 2\n[cluster]", "does not divide the 1 ranks"),
        (
            WARM,
            f"{WARM}9 #".replace("[train]", "warmup_steps = 7\n[train]"),
            "take 7 steps but train.steps",
        ),
        ("weight = 1\n", TWO_WEIGHTS, 'sources "t" is read in another way than "s"'),
    ],
)
def test_what_clients_cannot_train_is_refused(folder, monkeypatch, old, new, words):
    pytest.importorskip("flwr")
    monkeypatch.chdir(folder)
    text = JOB + '[[data.sources]]\nname = "s"\nsource = "0.txt"\nweight = 1\n'
    (folder / "other.toml").write_text(text.replace(old, new))
    (folder / "refused.toml").write_text(FEDERATE.replace("lora.toml", "other.toml"))
    with pytest.raises(InputError, match=words):
        federate_command(folder / "refused.toml", [], None, read_job)
    assert not Path("federated/refused").exists()


def test_a_start_that_is_interrupted_leaves_no_folder(folder, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.chdir(folder)

    def interrupted(folder, *_):
        assert folder.is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.federate.command._write_client", interrupted)
    (folder / "cut.toml").write_text(FEDERATE)
    with pytest.raises(KeyboardInterrupt):
        prepare(folder / "cut.toml", [], None, read_job)
    assert not Path("federated/cut").exists()


@pytest.mark.parametrize(
    ("lines", "table", "words"),
    [
        ('name = "muon"\n', "", "takes no such optim.name"),
        (
            f"[train]\nx = 1\n{STAYING}".replace("lr_factor = 0.0", "lr_factor = 0.5"),
            "",
            "optim.groups",
        ),
        ("", "share = 1.0\nbits = 2\n", "too few for the sum of what 4 clients tell"),
    ],
)
def test_what_the_server_cannot_step_by_is_refused(folder, monkeypatch, lines, table, words):
    pytest.importorskip("flwr")
    monkeypatch.chdir(folder)
    text = JOB + '[[data.sources]]\nname = "s"\nsource = "0.txt"\nweight = 1\n'
    first, _, groups = lines.partition("[train]\nx = 1\n")
    text = text.replace("[optim]\n", f"[optim]\n{first}") + groups
    (folder / "stepped.toml").write_text(text)
    asked = FEDERATE.replace("lora.toml", "stepped.toml").replace("source", "even")
    asked = asked.replace("steps = 3", f'tells = "gradients"\n{table}')
    (folder / "unstepped.toml").write_text(asked)
    with pytest.raises(InputError, match=words):
        federate_command(folder / "unstepped.toml", [], None, read_job)
    assert not Path("federated/unstepped").exists()


@pytest.mark.parametrize(
    ("tells", "growth"), [('"fedavg"\nsteps = 2', [1, 7 / 3, 8 / 7, 1]), ('"gradients"', [1] * 4)]
)
def test_changes_are_expected_to_grow_with_the_learning_rate(folder, monkeypatch, tells, growth):
    """Rounds of two steps, of which two warm up: 0.25 and 0.5, 0.75 and 1, 1 and 1."""
    pytest.importorskip("flwr")
    from paceline.federate.strategies import STRATEGIES

    monkeypatch.chdir(folder)
    job = (folder / "lora.toml").read_text().replace("steps = 1", "steps = 9")
    (folder / "warm.toml").write_text(job.replace("lr = 1e-2", WARM_UP))
    asked = FEDERATE.replace("lora.toml", "warm.toml").replace(f"rounds = {ROUNDS}", "rounds = 4")
    (folder / "rates.toml").write_text(asked.replace("steps = 3", f"tells = {tells}"))
    begun = prepare(folder / "rates.toml", [], folder / f"rates-{len(tells)}", read_job)
    strategy = STRATEGIES[begun.asked.tells](begun.stated)
    assert [strategy.growth(number) for number in range(4)] == pytest.approx(growth)


def test_an_optimizer_with_weights_of_its_own_is_not_kept(folder, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.chdir(folder)
    text = JOB + '[[data.sources]]\nname = "s"\nsource = "0.txt"\nweight = 1\n'
    (folder / "free.toml").write_text(text.replace("[optim]\n", '[optim]\nname = "schedulefree"\n'))
    asked = FEDERATE.replace("lora.toml", "free.toml").replace("source", "even")
    (folder / "unkept.toml").write_text(asked)
    with pytest.raises(InputError, match="has weights of its own"):
        federate_command(folder / "unkept.toml", [], None, read_job)
    assert not Path("federated/unkept").exists()


def test_batches_of_gradients_are_as_many_rows_of_each_client(folder, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.chdir(folder)
    job = JOB
    for client, rows in enumerate((20, 40, 60, 120)):
        (folder / f"rows{client}.txt").write_text("a row of some letters\n" * rows)
        job += f'[[data.sources]]\nname = "s{client}"\nsource = "rows{client}.txt"\n'
    (folder / "rows.toml").write_text(f"{job}[layout]\nmicro_batch = 2\n")
    asked = FEDERATE.replace("lora.toml", "rows.toml").replace("steps = 3", 'tells = "gradients"')
    (folder / "batches.toml").write_text(asked)
    begun = prepare(folder / "batches.toml", [], None, read_job)
    jobs = [read_job(begun.folder / "clients" / str(n) / "job.toml") for n in range(CLIENTS)]
    assert [each.train.global_batch for each in jobs] == [2, 2, 4, 8]
    assert {each.train.steps for each in jobs} == {ROUNDS}


def test_a_client_reads_its_rows_as_the_job_says(folder, monkeypatch):
    """How sources are read goes to each client; what only one process may hold does not."""
    pytest.importorskip("flwr")
    monkeypatch.chdir(folder)
    rows = "".join(f'{{"body": "text {n}", "keep": true}}\n' for n in range(9))
    job = f"{JOB}[observe]\nprometheus_port = 9100\n"
    for name in ("one", "two"):
        (folder / f"{name}.jsonl").write_text(rows)
        job += f'[[data.sources]]\nname = "{name}"\nsource = "{name}.jsonl"\n'
        job += 'text_field = "body"\nfilter = "keep"\n'
    (folder / "fields.toml").write_text(job)
    (folder / "read.toml").write_text(FEDERATE.replace("lora", "fields").replace("source", "even"))
    begun = prepare(folder / "read.toml", [], None, read_job)
    for client in range(CLIENTS):
        own = read_job(begun.folder / "clients" / str(client) / "job.toml", [])
        assert (own.data.text_field, own.data.filter) == ("body", "keep")
        assert Path(own.data.source).read_text().count("body") >= 4
        assert own.observe.prometheus_port is None
