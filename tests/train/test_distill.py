"""Distillation: equal to a plain torch loop, on several ranks to one rank, and what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.model import Model
from paceline.models.decoder import Decoder
from paceline.models.weights import load_weights, write_weights
from paceline.train.distill import check_teacher, divergences
from tests.command_line import losses, metrics, paceline, ranks, settings, write_tiny_job
from tests.parallel import training
from tests.train.test_finetune import run_recipe

TEACHER = Model(
    vocab_size=training.VOCAB, hidden_size=48, ffn_size=96, num_layers=3, num_heads=4,
    num_kv_heads=2, max_seq_len=training.SEQ,
)  # fmt: skip
WEIGHT, TEMPERATURE = 0.7, 2.0


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """`--set`s of a Job with a teacher."""
    teacher, folder = Decoder(TEACHER), tmp_path_factory.mktemp("taught") / "teacher"
    teacher.init_weights(torch.Generator().manual_seed(3))
    with torch.no_grad():
        teacher.head.weight.mul_(20)  # so that it has an opinion
    write_weights(folder, TEACHER, teacher.state_dict())
    return (
        "finetune.objective=distill", f"finetune.distill.teacher={folder}",
        f"finetune.distill.weight={WEIGHT}", f"finetune.distill.temperature={TEMPERATURE}",
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_divergence_and_its_gradient_are_those_of_torch(temperature):
    stream = torch.Generator().manual_seed(0)
    logits, wanted = (3 * torch.randn(2, 5, 11, generator=stream).double() for _ in range(2))
    logits.requires_grad_()
    own, theirs = (F.log_softmax(each / temperature, -1) for each in (logits, wanted))
    expected = F.kl_div(own, theirs, reduction="none", log_target=True).sum(-1)
    weights = torch.randn(2, 5, generator=stream).double()
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    found = divergences(logits, wanted, temperature)
    (got,) = torch.autograd.grad((found * weights).sum(), logits)
    assert (found - expected).abs().max() < 1e-12
    assert (got - gradient).abs().max() < 1e-12
    assert torch.autograd.gradcheck(lambda x: divergences(x, wanted, temperature), logits)


def test_a_step_is_that_of_a_plain_loop(taught):
    """Loss, both of its parts, held-out loss and parameters, against torch's own operators."""
    plain = ("optim.clip_norm=0", "optim.schedule=constant", "optim.weight_decay=0")
    case = (*training.FP64, *taught, *plain, "layout.micro_batch=6")
    job = training.job_of(1, case)
    found = training.train(0, 1, case)
    student, teacher = Decoder(job.model).double(), Decoder(TEACHER).double()
    student.init_weights(torch.Generator().manual_seed(job.train.seed))
    load_weights(teacher, job.finetune.distill.teacher)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=1e-2, betas=job.optim.betas, eps=1e-3, weight_decay=0
    )
    for step in range(training.STEPS):
        whole = [torch.cat(each) for each in _columns(training.micro_batches(step, job, 0))]
        logits = student(whole[0]).flatten(0, 1)
        with torch.no_grad():
            wanted = teacher(whole[0]).flatten(0, 1)
        likelihood = F.cross_entropy(logits, whole[1].flatten())
        own, theirs = (F.log_softmax(each / TEMPERATURE, -1) for each in (logits, wanted))
        divergence = F.kl_div(own, theirs, reduction="batchmean", log_target=True)
        loss = (1 - WEIGHT) * likelihood + WEIGHT * TEMPERATURE**2 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert found.losses[3 * step] == pytest.approx(loss.item(), rel=1e-10)
        assert found.losses[3 * step + 1 : 3 * step + 3] == pytest.approx(
            [divergence.item(), likelihood.item()], rel=1e-10
        )
    assert divergence > 0.1
    whole = [torch.cat(each) for each in _columns(training.micro_batches(training.STEPS, job, 0))]
    held_out = F.cross_entropy(student(whole[0]).flatten(0, 1), whole[1].flatten())
    assert found.eval_loss == pytest.approx(held_out.item(), rel=1e-10)
    for name, parameter in student.named_parameters():
        assert (parameter - found.parameters[name]).abs().max() < 1e-10, name


def _columns(batches):
    return [[batch.tokens for batch in batches], [batch.targets for batch in batches]]


CASES = {
    2: [("layout.dp=2",), ("layout.fsdp=2",), ("layout.fsdp=2", "layout.zero=1")],
    4: [("layout.dp=2", "layout.fsdp=2")],
}
OTHERS = {
    "documents": training.MODELS["documents"],
    "answers": training.MODELS["answers"],
    "sources": training.MODELS["sources"],
    "adapters": ("finetune.method=lora", "finetune.rank=3"),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_are_equal_to_one(taught, num_ranks):
    layouts = [(*training.FP64, *taught, *case) for case in CASES[num_ranks]]
    serial = training.train(0, 1, (*training.FP64, *taught))
    for case, got in zip(layouts, training.run_cases(num_ranks, layouts), strict=True):
        training.assert_equal(got, serial, 1e-10, case)


def test_other_data_and_adapters_are_equal_to_one_rank_too(taught):
    kinds = [(*training.FP64, *taught, *more) for more in OTHERS.values()]
    experts = (*training.FP64, *taught, *training.MODELS["experts"])
    cases = [(*kind, "layout.fsdp=2") for kind in kinds]
    cases.append((*experts, "layout.fsdp=2", "layout.ep=2"))
    results = training.run_cases(2, cases)
    for kind, got in zip([*kinds, experts], results, strict=True):
        training.assert_equal(got, training.train(0, 1, kind), 1e-10, kind)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("finetune.distill.teacher=nowhere",), "is neither a run nor a folder of weights"),
        (("layout.tp=2",), "layout.tp = 2 would cut it: set tp = 1"),
        (("layout.pp=2",), "layout.pp = 2 would cut it"),
        (("model.vocab_size=65",), "gives other logits than the teacher"),
        (("model.max_seq_len=99", "train.seq_len=48"), "is longer than what the teacher"),
        (("model.causal=false",), "decoders that predict the next token"),
        (("finetune.objective=likelihood",), "finetune.distill has no effect with"),
    ],
)
def test_what_can_not_be_is_refused(taught, changes, said):
    with pytest.raises(InputError, match=said):
        read_job(None, [*training.DENSE, *training.TRAIN, *taught, *changes])


def test_a_teacher_has_to_be_named():
    with pytest.raises(InputError, match=r"needs finetune.distill.teacher: name a run"):
        read_job(None, ["finetune.objective=distill"])


def test_axes_that_are_left_to_the_planner_are_those_that_work(taught):
    layout = read_job(None, [*training.DENSE, *training.TRAIN, *taught]).layout
    assert (layout.tp, layout.pp, layout.cp) == (1, 1, 1)
    assert layout.fsdp == layout.dp == "auto"


# --- runs

STUDENT = """
name = "student"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 16
ffn_size = 32
num_layers = 1
num_heads = 2
max_seq_len = 64
[cluster]
devices_per_node = 1
[data]
source = "text.txt"
eval_fraction = 0.1
[finetune]
objective = "distill"
distill.teacher = "runs/large"
[optim]
lr = 3e-3
[train]
steps = 8
global_batch = 12
seq_len = 32
eval_batches = 1
[checkpoint]
every = 4
[observe]
tensorboard = false
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run to learn from, and one that did."""
    folder = tmp_path_factory.mktemp("runs")
    write_tiny_job(folder)
    (folder / "student.toml").write_text(STUDENT)
    for job in (("job.toml", *settings("name=large")), ("student.toml",)):
        done = paceline("train", *job, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_run_teaches_and_what_is_held_out_is_judged_alone(tuned):
    lines = metrics(tuned, "student")
    for line in lines:
        parts = line["figures"]
        expected = 0.5 * parts["likelihood"] + 0.5 * parts["divergence"]
        assert line["loss"] == pytest.approx(expected, rel=1e-5)
    last = lines[-1]
    assert last["eval_perplexity"] == pytest.approx(math.exp(last["eval_loss"]), rel=1e-6)
    assert "eval_figures" not in last
    assert last["figures"]["divergence"] < lines[0]["figures"]["divergence"]


def test_a_folder_teaches_what_its_run_does(tuned):
    done = paceline("export", "runs/large", "teacher", folder=tuned)
    assert done.returncode == 0, done.stderr
    more = settings("finetune.distill.teacher=teacher", "name=by-folder")
    done = paceline("train", "student.toml", *more, folder=tuned)
    assert done.returncode == 0, done.stderr
    assert losses(tuned, "by-folder") == losses(tuned, "student")


def test_it_goes_on_as_if_it_had_never_stopped(tuned):
    for more in (("train.steps=3",), ()):
        changes = settings("name=twice", "optim.schedule=constant", *more)
        done = paceline("train", "student.toml", *changes, folder=tuned)
        assert done.returncode == 0, done.stderr
    done = paceline(
        "train", "student.toml", *settings("name=once", "optim.schedule=constant"), folder=tuned
    )
    assert done.returncode == 0, done.stderr
    assert losses(tuned, "twice") == losses(tuned, "once")


def test_a_teacher_of_other_tokens_is_refused(tuned):
    more = settings("data.tokenizer=bpe:257", "name=no")
    done = paceline("train", "student.toml", *more, *ranks(1), folder=tuned)
    assert done.returncode == 2, done.stderr
    assert "finetune.distill.teacher = " in done.stderr
    assert not (tuned / "runs" / "no").exists()


def test_a_teacher_that_became_another_network_is_refused(tuned):
    job = read_job(
        None,
        [
            "finetune.objective=distill", f"finetune.distill.teacher={tuned / 'runs/large'}",
            "model.vocab_size=257", "train.seq_len=32",
        ],
    )  # fmt: skip
    assert job.finetune.teacher.hidden_size == 32
    other = job.finetune.teacher.replace(ffn_size=80)
    distill = job.finetune.distill.replace(model=other)
    changed = job.replace(finetune=job.finetune.replace(distill=distill))
    with pytest.raises(InputError, match="has another network than when this run began"):
        check_teacher(changed, tuned / "runs/large/tokenizer/tokenizer.json")


def test_the_recipe_of_the_page_runs(tuned):
    for name in ("base", "larger"):
        done = paceline("export", "runs/large", name, folder=tuned)
        assert done.returncode == 0, done.stderr
    run_recipe(tuned, 5)
