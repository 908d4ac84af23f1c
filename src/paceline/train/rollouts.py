"""Rollouts: completions of prompts by the network that is trained, and their rewards.

How it works: before a step each rank completes its share of the prompts, a group of times each, by
the engine that serves networks. It works on the trained module itself, or where ranks share that
out on a whole copy, which is filled before each step. Keys and values are computed anew. Random
numbers follow from the seed, the running number of the prompt and of the completion, so that they
don't depend on the ranks. A person's function gives each completion a reward.

A run that is stopped between two updates on the same completions makes them anew when it goes on.
"""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.local_part import is_shared
from paceline.config.errors import InputError, RunError
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.kernels.dtypes import DTYPES
from paceline.kernels.loss import IGNORED
from paceline.models.adapters import merged
from paceline.models.decoder import Decoder
from paceline.models.weights import decoder_room
from paceline.observe.events import append_line
from paceline.observe.metrics import drop_from
from paceline.observe.run import Run
from paceline.train.data.batches import BatchShape
from paceline.train.data.cache import PreparedData
from paceline.train.data.order import Ids
from paceline.train.data.prompts import Prompt, Prompts
from paceline.train.reference import Reference
from paceline.train.rewards import Completions, advantages_of, log_probs_of
from paceline.train.samples import parted_by
from paceline.train.task import GiveOutputs, Step

Reward = Callable[..., float]
_MOST_AT_A_TIME = 64
_MOST_REWARD = 1e18
"""Its square is a number of fp32."""


class Asked(NamedTuple):
    """The prompts of a rank in a step."""

    number: int
    """Of the rollout; below 0 where the network is evaluated."""
    first: int
    """Running number of the first prompt."""
    prompts: list[Prompt]


class Rollouts:
    """Those of a rank.

    Args:
        reference: has the first weights, where the loss asks for them.
    """

    def __init__(
        self, job: Job, data: PreparedData, shape: BatchShape, reference: Reference
    ) -> None:
        assert job.finetune.grpo.reward is not None
        self._job, self._data, self._shape = job, data, shape
        self._settings, self._reference = job.finetune.grpo, reference
        self._reward = load_reward(job.finetune.grpo.reward)
        self._tokenizer = Tokenizer.from_file(str(data.tokenizer_path))
        self._end = data.meta.end_of_document
        self._engine: Engine | None = None
        self._copy: Decoder | None = None
        self._made: tuple[int, Step] | None = None
        self._run: Run | None = None

    def keep_in(self, run: Run) -> None:
        """Write the completions of each step's first prompt there."""
        self._run = run

    def steps_from(self, first: int) -> Iterator[Step]:
        """What to complete from so many samples on: the same prompts for each of the updates."""
        index, prompts = first // self._shape.global_batch, self._data.prompts("train")
        order = prompts.order(self._job.train.seed, self._shape.seq_len)
        self._made = None
        if self._run is not None:  # a start that was killed may have been further
            drop_from(self._run.rollouts_file, "rollout", index // self._settings.updates)
        while True:
            number = index // self._settings.updates
            yield [self._asked(prompts, number, order(number * self._num_asked, self._num_asked))]
            index += 1

    def eval_steps(self) -> Iterator[Step]:
        """The first held-out prompts, in their own order."""
        prompts = self._data.prompts("eval")
        count = prompts.num_samples(self._shape.seq_len)
        for batch in range(self._job.train.eval_batches):
            places = torch.arange(batch * self._num_asked, (batch + 1) * self._num_asked) % count
            yield [self._asked(prompts, -1 - batch, places.numpy())]

    def prepare(self, module: nn.Module, step: Step, _give_outputs: GiveOutputs) -> Step:
        """Complete what is asked, and learn from it."""
        (asked,) = step
        if self._made is not None and self._made[0] == asked.number:
            return self._made[1]
        batches: Step = [
            self._with_log_probs(module, batch) for batch in self._completed(module, asked)
        ]
        if asked.number >= 0:
            self._made = asked.number, batches
        return batches

    @property
    def _num_asked(self) -> int:
        """Prompts of a step, of all ranks."""
        return self._shape.global_batch // self._settings.group

    def _asked(self, prompts: Prompts, number: int, ids: Ids) -> Asked:
        share = self._num_asked // self._shape.num_ranks
        own = slice(self._shape.rank * share, (self._shape.rank + 1) * share)
        first = number * self._num_asked + self._shape.rank * share
        return Asked(number, first, prompts.read(ids[own], self._shape.seq_len))

    def _completed(self, module: nn.Module, asked: Asked) -> list[Completions]:
        group, device = self._settings.group, self._shape.device
        made = self._made_by(module, asked)
        texts = [self._tokenizer.decode(tokens) for tokens in made]
        given = [prompt for prompt in asked.prompts for _ in range(group)]
        rewards = torch.tensor(
            [self._rewarded(prompt, text) for prompt, text in zip(given, texts, strict=True)],
            device=device,
        )
        _take_those_of_first(module, rewards)
        if self._run is not None and asked.number >= 0:
            line = {
                "rollout": asked.number,
                "prompt": self._text(asked.prompts[0]),
                "completions": texts[:group],
                "rewards": rewards[:group].tolist(),
            }
            append_line(self._run.rollouts_file, json.dumps(line).encode() + b"\n")
        advantages = advantages_of(rewards.view(-1, group)).flatten()
        tokens, targets = self._padded([each.tokens for each in given], made)
        parts = (tokens.to(device), targets.to(device), advantages, rewards)
        split = (part.split(self._job.micro_batch) for part in parts)
        return [Completions(*each) for each in zip(*split, strict=True)]

    def _made_by(self, module: nn.Module, asked: Asked) -> list[list[int]]:
        """The tokens of all completions, group after group."""
        settings, seq_len = self._settings, self._shape.seq_len
        is_training = module.training
        module.eval()
        engine, sequences = self._engine_of(module), []
        for place, prompt in enumerate(asked.prompts):
            room = min(settings.max_tokens, seq_len + 1 - len(prompt.tokens))
            for number in range(settings.group):
                seed = self._seed(asked.first + place, number)
                sampling = Sampling(max_tokens=room, temperature=settings.temperature, seed=seed)
                sequences.append(engine.submit(prompt.tokens, sampling))
        while not engine.is_idle:
            engine.step()
        module.train(is_training)
        return [sequence.made for sequence in sequences]

    def _engine_of(self, module: nn.Module) -> Engine:
        network = module.module if isinstance(module, DistributedDataParallel) else module
        model, layout = self._job.model, self._job.layout
        assert isinstance(model, Model)
        # Latent attention reads a matrix besides calling it, which leaves its adapter out.
        is_read = self._job.finetune.is_adapted and model.latent is not None
        if is_read or parted_by(layout):
            network = self._copy_of(network, model)
        if self._engine is None:
            serving = Serving(max_sequences=_MOST_AT_A_TIME, host_gb=0)
            self._engine = Engine(cast(Decoder, network), serving, end_tokens=[self._end])
        else:
            self._engine.weights_changed()
        return self._engine

    def _copy_of(self, module: nn.Module, model: Model) -> Decoder:
        """The network, whole and with its adapters merged, of the same types."""
        job = self._job
        state = {
            name: each.full_tensor() if is_shared(each) else each
            for name, each in module.state_dict().items()
        }
        if job.finetune.is_adapted:
            state = merged(state, job.finetune)
        if self._copy is None:
            dtype = DTYPES[job.layout.param_dtype]
            self._copy = decoder_room(model, dtype, self._shape.device).eval()
            self._copy.reset_buffers()
        self._copy.load_state_dict(state)
        return self._copy

    def _seed(self, prompt: int, number: int) -> int:
        text = f"{self._job.train.seed}/{prompt}/{number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")

    def _rewarded(self, prompt: Prompt, completion: str) -> float:
        name = self._settings.reward
        try:
            reward = float(self._reward(self._text(prompt), completion, **prompt.columns))
        except (Exception, SystemExit) as error:  # a person's own function may raise anything
            raise RunError(
                f"finetune.grpo.reward = {name!r} raised {error!r}: correct it."
            ) from error
        if not abs(reward) <= _MOST_REWARD:  # also NaN
            raise RunError(
                f"finetune.grpo.reward = {name!r} gave {reward} for {completion!r:.100}, and a "
                f"number from {-_MOST_REWARD:g} to {_MOST_REWARD:g} is required: correct it."
            )
        return reward

    def _text(self, prompt: Prompt) -> str:
        return self._tokenizer.decode(prompt.tokens, skip_special_tokens=False)

    def _padded(self, prompts: list[list[int]], made: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(p) + len(m) for p, m in zip(prompts, made, strict=True)) - 1
        longest += -longest % self._job.layout.tp  # whose ranks may share out the tokens
        tokens = torch.full((len(made), longest), self._end)
        targets = torch.full_like(tokens, IGNORED)
        for row, (prompt, completion) in enumerate(zip(prompts, made, strict=True)):
            ids = torch.tensor(prompt + completion)
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
        return tokens, targets

    def _with_log_probs(self, module: nn.Module, batch: Completions) -> Completions:
        settings = self._settings
        if settings.updates > 1:
            batch = batch._replace(made_with=log_probs_of(module, batch, settings))
        if settings.beta > 0:
            with self._reference.in_place_of(module):
                batch = batch._replace(reference=log_probs_of(module, batch, settings))
        return batch


def _take_those_of_first(module: nn.Module, rewards: Tensor) -> None:
    """Let ranks that learn from the same completions have the same rewards: a person's function may
    draw them at random."""
    mesh = next((each.device_mesh for each in module.parameters() if is_shared(each)), None)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        dist.broadcast(rewards, group=mesh["tp"].get_group(), group_src=0)


def load_reward(named: str) -> Reward:
    """A person's function. Its file finds modules beside it, as a script does.

    Args:
        named: "file.py:function".

    Raises:
        InputError: there is none.
    """
    file, _, name = named.rpartition(":")
    setting = f"finetune.grpo.reward = {named!r}"
    path = Path(file).expanduser()
    if not file or not path.is_file():
        raise InputError(f'{setting} names no file: write "file.py:function".')
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{setting} names no Python file: give one that ends in .py.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for dataclasses in it
    sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a person's own file may raise anything
        raise InputError(f"{setting} can't be read ({error!r}): correct the file.") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"{setting}: {path} has no function {name!r}: correct it.")
    return cast(Reward, found)
