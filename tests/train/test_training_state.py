"""What makes up a training state, by name, and that it comes back: one process, no ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from paceline.config.errors import InputError
from paceline.parallel.stages import StageModules
from paceline.train.checkpoint.state import restore_training_state, training_state
from paceline.train.optim import AdamW
from tests.train import checkpoint_cases as cases
from tests.train.checkpoint_cases import assert_same, opened, optimizer_of, tiny, train, whole


def test_the_state_of_a_run_is_named_as_in_the_bare_module():
    module = tiny()
    optimizer = optimizer_of(module)
    train(module, optimizer, range(1))
    state = training_state(module, optimizer)
    assert set(state["model"]) == {
        "embed.weight",  # head.weight is tied to it
        "inner.0.weight",
        "inner.0.bias",
        "inner.2.weight",
        "temperature",
        "seen",
    }
    assert set(state["optimizer"]) == set(state["model"]) - {"seen"}


class Named(nn.Module):
    """A module that has a child called "module": only DDP's own one may be left out of names."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def wrapped(module: cases.Tiny) -> nn.Module:
    module.inner[0] = checkpoint_wrapper(module.inner[0])
    module.inner = torch.compile(module.inner, backend="eager")
    return torch.compile(module, backend="eager")


def test_wrappers_leave_no_trace_in_the_names_and_load_into_each_other(tmp_path):
    bare, inside = tiny(0), wrapped(tiny(1))
    of_bare, of_inside = optimizer_of(bare), optimizer_of(inside)
    train(bare, of_bare, range(2))
    checkpointer = opened(tmp_path)
    checkpointer.save(1, training_state(bare, of_bare), {})
    found = checkpointer.latest_good()
    state = training_state(inside, of_inside, found)
    checkpointer.load(found, state)
    restore_training_state(inside, of_inside, state)
    assert_same(training_state(inside, of_inside), training_state(bare, of_bare))


def test_a_child_called_module_keeps_its_name():
    named = Named()
    state = training_state(named, optimizer_of(named))
    assert set(state["model"]) == {"module.weight", "module.bias"}


@pytest.mark.parametrize("settings", [{"foreach": False}, {"fused": True}, {"amsgrad": True}])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, settings):
    whole_run, first, second = tiny(0), tiny(0), tiny(1)
    optimizers = [optimizer_of(m, **settings) for m in (whole_run, first, second)]
    train(whole_run, optimizers[0], range(6))
    train(first, optimizers[1], range(3))
    checkpointer = opened(tmp_path)
    checkpointer.save(3, training_state(first, optimizers[1]), {})
    found = checkpointer.latest_good()
    state = training_state(second, optimizers[2], found)
    checkpointer.load(found, state)
    restore_training_state(second, optimizers[2], state)
    train(second, optimizers[2], range(3, 6))
    assert_same(training_state(second, optimizers[2]), training_state(whole_run, optimizers[0]))


def test_settings_of_the_optimizer_are_those_of_the_job_that_goes_on(tmp_path):
    first, second = tiny(0), tiny(1)
    of_first, of_second = optimizer_of(first), optimizer_of(second)
    train(first, of_first, range(2))
    of_second.param_groups[0]["weight_decay"] = 0.7
    checkpointer = opened(tmp_path)
    checkpointer.save(2, training_state(first, of_first), {})
    found = checkpointer.latest_good()
    state = training_state(second, of_second, found)
    checkpointer.load(found, state)
    restore_training_state(second, of_second, state)
    assert of_second.param_groups[0]["weight_decay"] == 0.7


def test_an_optimizer_that_has_not_stepped_is_saved_and_loaded_as_such(tmp_path):
    module = tiny()
    optimizer = optimizer_of(module)
    before = whole(training_state(module, optimizer))
    checkpointer = opened(tmp_path)
    checkpointer.save(0, training_state(module, optimizer), {})
    assert not optimizer.state
    train(module, optimizer, range(2))
    found = checkpointer.latest_good()
    state = training_state(module, optimizer, found)
    checkpointer.load(found, state)
    restore_training_state(module, optimizer, state)
    assert not optimizer.state
    assert_same(training_state(module, optimizer), before)


def test_extra_state_keeps_its_own_dtype(tmp_path):
    """An fp32 master copy of a bf16 parameter, and a nested dict with a number in it."""
    module = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for p in module.parameters():
        noise = {"scale": torch.rand(2), "rounds": 4}
        optimizer.state[p] = {"master": torch.rand_like(p, dtype=torch.float32), "noise": noise}
    checkpointer = opened(tmp_path)
    checkpointer.save(1, training_state(module, optimizer), {})
    saved = whole(training_state(module, optimizer))
    other = nn.Linear(3, 3).bfloat16()
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    found = checkpointer.latest_good()
    state = training_state(other, of_other, found)
    checkpointer.load(found, state)
    restore_training_state(other, of_other, state)
    assert_same(training_state(other, of_other), saved)
    assert of_other.state[other.weight]["master"].dtype == torch.float32
    assert of_other.state[other.weight]["noise"]["rounds"] == 4


def halves(seed: int) -> tuple[StageModules, torch.optim.Optimizer]:
    """Two stages of a network on one rank, each with a copy of the embedding, and an optimizer."""
    first, last = tiny(seed), tiny(seed)
    del first.head, last.inner
    stages = StageModules([first, last])
    return stages, optimizer_of(stages)


def step_alike(stages: StageModules, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for stage in stages:
            for p in stage.parameters():
                p.grad = torch.full_like(p, step + 1.0)
        optimizer.step()


def test_stages_are_named_as_in_the_whole_and_copies_are_listed_once():
    stages, optimizer = halves(0)
    step_alike(stages, optimizer, 1)
    whole_module = tiny()
    of_whole = optimizer_of(whole_module)
    train(whole_module, of_whole, range(1))
    expected = training_state(whole_module, of_whole)
    state = training_state(stages, optimizer)
    assert state["model"].keys() == expected["model"].keys()
    assert state["optimizer"].keys() == expected["optimizer"].keys()


def test_copies_on_one_rank_get_the_same_state_each_their_own(tmp_path):
    (first, of_first), (second, of_second) = halves(0), halves(1)
    step_alike(first, of_first, 2)
    checkpointer = opened(tmp_path)
    checkpointer.save(2, training_state(first, of_first), {})
    found = checkpointer.latest_good()
    state = training_state(second, of_second, found)
    checkpointer.load(found, state)
    restore_training_state(second, of_second, state)
    for stages, optimizer in ((first, of_first), (second, of_second)):
        step_alike(stages, optimizer, 1)
    copies = [stage.embed.weight for stage in second]
    assert torch.equal(*copies)
    assert torch.equal(copies[0], first[0].embed.weight)
    states = [of_second.state[p] for p in copies]
    assert_same(states[0], states[1])
    assert states[0]["exp_avg"].data_ptr() != states[1]["exp_avg"].data_ptr()


def test_state_that_waits_on_the_host_is_loaded_there(tmp_path):
    def built(device: str) -> tuple[nn.Module, AdamW]:
        module = nn.Linear(3, 3, device=device)
        group = {"params": list(module.parameters()), "weight_decay": 0.0}
        defaults = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
        return module, AdamW([group], defaults, is_coded=False, is_on_host=False)

    module, optimizer = built("cpu")
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpointer = opened(tmp_path)
    checkpointer.save(1, training_state(module, optimizer), {})
    found = checkpointer.latest_good()
    far, of_far = built("meta")  # a device that isn't the host
    of_far.is_on_host = True
    state = training_state(far, of_far, found)["optimizer"]["weight"]
    assert {key: value.device.type for key, value in state.items()} == {
        "step": "meta",
        "exp_avg": "cpu",
        "exp_avg_sq": "cpu",
    }


def test_an_optimizer_of_another_module_is_refused():
    with pytest.raises(InputError, match="after the module is wrapped"):
        training_state(tiny(), optimizer_of(tiny()))
