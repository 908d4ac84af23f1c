"""Language models: a decoder on text, its Task, what is read before it, and its weights for others.

The loss takes each token's next one, or the masked ones of a network that sees later tokens. Text
is tokenised once (`train.data`); a run keeps what an export says of the tokens
(`train.kept_tokenizer`).
"""

import json
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job, JobSpec
from paceline.config.model import Model
from paceline.kernels import switch
from paceline.kernels.dtypes import DTYPES
from paceline.kernels.loss import IGNORED, cross_entropy
from paceline.models.attention import Sdpa
from paceline.models.compressed import CONFIG, narrow_config, narrowed
from paceline.models.dcp import is_dcp, load_dcp
from paceline.models.decoder import Decoder
from paceline.models.quantised import Bits
from paceline.models.weights import load_weights, write_weights
from paceline.observe.run import Run
from paceline.parallel import vocabulary
from paceline.parallel.cp import positions_of
from paceline.train.attention_core import attention_choice
from paceline.train.data import (
    BatchShape,
    Corpus,
    MicroBatch,
    PreparedData,
    check_vocab,
    eval_batches,
    prepare_corpus,
    train_batches,
)
from paceline.train.data.build import Progress
from paceline.train.data.masks import Masking, masked
from paceline.train.data.stream.feed import StreamFeed, StreamWait
from paceline.train.data.stream.prepare import PreparedStream, prepare_stream
from paceline.train.data.stream.reader import LogReader
from paceline.train.distill import Teacher, check_teacher, distilled
from paceline.train.exact_eval import ExactLoss, check_exact_eval
from paceline.train.family import Trained, TrainFamily
from paceline.train.finetune import (
    check_finetune,
    decoder_to_train,
    fill_adapters,
    num_trained,
    train_flops_per_token,
)
from paceline.train.kept_tokenizer import GENERATION, about_tokens, keep_tokenizer
from paceline.train.preferences import FIGURES, preference_loss, with_reference
from paceline.train.reference import Reference
from paceline.train.rewards import Completions, figures_of_rewards, reward_loss
from paceline.train.rollouts import Rollouts
from paceline.train.samples import check_samples
from paceline.train.starting_weights import check_network, check_tokens
from paceline.train.task import Loss, StagedLoss, Step, Task
from paceline.train.weighted_loss import WeightedLoss

_MASK_SHARE = 0.15
"""As BERT's."""


class LanguageModels(TrainFamily[Model]):
    """See `TrainFamily`."""

    def network_task(self, model: Model, job: Job, ranks: Ranks) -> Task:
        """The network with its loss; its batches come from elsewhere."""
        return decoder_task(model, job, ranks)

    def read_inputs(
        self, model: Model, job: Job, progress: Progress, say: Callable[[str], None]
    ) -> str:
        """Tokenise the text, and hold it and the starting weights against the Job."""
        weights = job.train.weights
        if job.train.exact_eval:
            check_exact_eval(job.layout)
        if job.observe.samples:
            check_samples(job.layout)
        if weights is not None:
            check_network(model, weights)
        check_finetune(model, job)
        is_stream = job.data.stream.is_on
        data = prepare_stream(job, progress) if is_stream else prepare_corpus(job.data, progress)
        if weights is not None:
            check_tokens(data.tokenizer_path, job.data, weights)
        if job.finetune.teacher is not None:
            check_teacher(job, data.tokenizer_path)
        check_vocab(data.vocab_size, model.vocab_size)
        masking(model, job, data.vocab_size)
        if isinstance(data, PreparedStream):
            return data.data_key
        for sentence in data.left_out():
            say(sentence)
        cut = data.for_samples(job.train.seq_len)
        for part in data.packed():
            say(_packing_sentence(part, job.train.seq_len))
        if packing := cut.packing_facts(job.train.seq_len):
            say(
                f"{packing['padding_share']:.1%} of the tokens of samples are padding; "
                f"{packing['num_cut']:,} documents are longer than one, and cut"
            )
        for name, asked, held_out in data.more_held_out_by(cut):
            say(
                f"data.eval_fraction = {job.data.eval_fraction} of {name} is {asked} tokens; "
                f"{held_out} are held out, which is one sample"
            )
        if job.data.sources:
            cut.check_length(job.train)
        return data.fingerprint

    def task(self, model: Model, job: Job, ranks: Ranks) -> Task:
        """The Job's own decoder on its own text."""
        train = job.train
        shape = BatchShape(
            global_batch=train.global_batch,
            micro_batch=job.micro_batch,
            seq_len=train.seq_len,
            rank=job.layout.data_rank(ranks.rank),
            num_ranks=job.layout.num_data_ranks,
            interleave=job.interleave,
            reset_at_documents=job.data.starts_anew,
            device=ranks.device,
        )
        if job.data.stream.is_on:
            return _stream_task(model, job, ranks, shape)
        data = prepare_corpus(job.data).for_samples(train.seq_len)
        if job.finetune.objective == "grpo":
            return _reward_task(model, job, ranks, shape, data)
        train_split = data.train_split(train.global_batch)
        packing = [_packing_facts(part, train.seq_len) for part in data.packed()]
        packing.append(data.packing_facts(train.seq_len))
        task, mask = self.network_task(model, job, ranks), masking(model, job, data.vocab_size)
        return replace(
            task,
            steps_from=lambda first: masked(
                train_batches(train_split, shape, train.seed, first), shape, mask, first
            ),
            eval_steps=lambda: masked(data.eval_steps(shape, train.eval_batches), shape, mask, 0),
            eval_names=data.eval_names,
            data_key=data.fingerprint,
            facts={**task.facts, "data": dict(ChainMap(data.facts(), *packing))},
        )

    def task_without_data(self, model: Model, job: Job, ranks: Ranks) -> Task:
        """On the same random tokens at each step."""
        return replace(
            self.network_task(model, job, ranks),
            steps_from=lambda _first: repeat(_random_step(model, job, ranks)),
        )

    def num_samples(self, model: Model, job: JobSpec, progress: Progress | None) -> int:
        """Those of what is trained on."""
        data = prepare_corpus(job.data, progress).for_samples(job.train.seq_len)
        grpo, each = job.finetune.grpo, 1
        if job.finetune.objective == "grpo":
            each = grpo.group * grpo.updates
        return data.num_samples(job.train.seq_len) * each

    def eval_figures(self, model: Model, job: JobSpec) -> list[str]:
        """Those of the loss, and the losses of what is held out by name."""
        objective, figures = job.finetune.objective, ["eval_loss"]
        if objective in ("likelihood", "distill"):
            figures.append("eval_perplexity")
        sets = [each.name for each in (*job.data.sources, *job.data.eval_sets)]
        if len(sets) > 1:
            return [*figures, *(f"loss.{name}" for name in sets)]
        if objective == "grpo":
            figures += figures_of_rewards(job.finetune.grpo)
        return [*figures, *FIGURES] if objective == "dpo" else figures

    def keep_inputs(self, run: Run, job: Job) -> None:
        """What an export says of the tokens."""
        keep_tokenizer(run, job)

    def export(self, model: Model, trained: Trained, folder: Path, dtype: torch.dtype) -> None:
        """A folder that transformers opens: config.json, weights, tokenizer."""
        export_decoder(model, trained, folder, dtype)


def export_decoder(
    model: Model,
    trained: Trained,
    folder: Path,
    dtype: torch.dtype,
    narrow: tuple[Bits, int] | None = None,
) -> None:
    """Write a folder that transformers opens: config.json, weights, tokenizer.

    Args:
        dtype: of the written weights.
        narrow: bits of matrices, and how many weights share a scale in 4 bits; None: as all others.

    Raises:
        InputError: as `TrainFamily.export`; or groups don't divide a matrix.
    """
    beside = about_tokens(trained.run, trained.job, model.max_seq_len)
    told = json.loads(beside[GENERATION])
    settings = {key: told[key] for key in told if key in ("bos_token_id", "eos_token_id")}
    change = None
    if narrow is not None:
        settings[CONFIG] = narrow_config(model, *narrow)
        change = narrowed(model, *narrow, dtype)
    write_weights(
        folder, model, trained.weights, dtype, settings=settings, beside=beside, narrowed=change
    )


def decoder_task(model: Model, job: Job, ranks: Ranks, reference: Reference | None = None) -> Task:
    """A decoder with its loss; its batches come from elsewhere.

    Args:
        model: that of the Job.
        job: concrete.
        ranks: this one's place.
        reference: is given the first weights; None: one of its own, where the loss needs them.
    """
    objective, reference = job.finetune.objective, reference or Reference(job.finetune)
    staged = _LOSSES[objective](job, ranks)
    eval_loss: Loss | None = ExactLoss() if job.train.exact_eval else None
    teacher = None if job.finetune.teacher is None else Teacher(job, ranks.device)
    if teacher is not None:  # what is held out says how well the text is known
        eval_loss = eval_loss or unstaged_loss(staged)
        staged = distilled(job, teacher, staged)
    attention = attention_choice(model, job, ranks.device)
    module = decoder_to_train(model, job)
    facts = {"num_params": model.num_params}
    if job.finetune.is_adapted:
        facts["num_trained_params"] = num_trained(module)
    if attention is not None:
        module.set_attend(Sdpa(attention.backend))
    return Task(
        module=module,
        loss=unstaged_loss(staged),
        steps_from=lambda _first: iter(()),
        eval_steps=None,
        unit=model.unit,
        units_per_sample=job.train.seq_len,
        train_flops_per_unit=train_flops_per_token(model, job, module),
        staged=staged,
        fill=partial(_fill, job, reference, teacher),
        figure_names=FIGURES if objective == "dpo" else (),
        prepare=partial(with_reference, reference) if objective == "dpo" else None,
        facts=facts,
        part_names=_part_names(job),
        eval_loss=eval_loss,
        sentences=()
        if attention is None
        else (f"attention by {attention.backend}: {attention.why}",),
    )


def _reward_task(model: Model, job: Job, ranks: Ranks, shape: BatchShape, data: Corpus) -> Task:
    """The Job's own decoder on its own completions of prompts."""
    reference = Reference(job.finetune)
    rollouts = Rollouts(job, data.first, shape, reference)
    task = decoder_task(model, job, ranks, reference)
    return replace(
        task,
        steps_from=rollouts.steps_from,
        eval_steps=rollouts.eval_steps,
        prepare=rollouts.prepare,
        keep_in=rollouts.keep_in,
        data_key=data.fingerprint,
        facts={**task.facts, "data": data.facts()},
    )


def _stream_task(model: Model, job: Job, ranks: Ranks, shape: BatchShape) -> Task:
    """The Job's own decoder on what arrives."""
    train, stream, prepared = job.train, job.data.stream, prepare_stream(job)
    reader = LogReader(prepared.folder)
    wait = StreamWait(reader, train.seq_len, stream.wait_s)
    feed = StreamFeed(reader, shape, stream, train.seed, wait)
    data: dict[str, Any] = {"tokenizer": prepared.meta.tokenizer, "stream": str(prepared.folder)}
    split = None if prepared.held_out is None else prepared.held_out.dataset("eval")
    if prepared.held_out is not None:
        data["eval_tokens"] = prepared.held_out.meta.eval_tokens
    task, mask = decoder_task(model, job, ranks), masking(model, job, prepared.vocab_size)
    return replace(
        task,
        steps_from=lambda first: masked(feed.steps_from(first), shape, mask, first),
        eval_steps=None
        if split is None
        else lambda: masked(eval_batches(split, shape, train.eval_batches), shape, mask, 0),
        data_key=prepared.data_key,
        facts={**task.facts, "data": data},
        stream=feed,
    )


def _random_step(model: Model, job: Job, ranks: Ranks) -> Step:
    """This rank's micro-batches of random tokens, the same on ranks that share their samples."""
    share = job.train.global_batch // job.layout.num_data_ranks
    stream = torch.Generator().manual_seed(job.layout.data_rank(ranks.rank))
    tokens = torch.randint(model.vocab_size, (share, job.train.seq_len + 1), generator=stream)
    parts = (
        (part[:, :-1].contiguous(), part[:, 1:].contiguous())
        for part in tokens.to(ranks.device).split(job.micro_batch)
    )
    if job.finetune.objective == "grpo":
        noise = torch.linspace(-1, 1, job.micro_batch, device=ranks.device)
        return [Completions(*part, noise, noise) for part in parts]
    if job.finetune.objective == "dpo":  # a sample is two texts
        ids = torch.arange(job.train.seq_len, device=ranks.device) * 2 // job.train.seq_len
        return [MicroBatch(*part, ids.repeat(job.micro_batch, 1)) for part in parts]
    return [MicroBatch(*part, None) for part in parts]


def _packing_sentence(data: PreparedData, seq_len: int) -> str:
    """How conversations became samples."""
    packing, per_row = data.conversations("train").packing(seq_len), data.meta.texts_per_row
    noun = "conversations" if per_row == 1 else "pairs"
    sentence = (
        f"{len(packing.conversations) // per_row} {noun} fill {len(packing.ends)} samples of "
        f"{seq_len} tokens, {packing.padding_share(seq_len):.1%} of them padding"
    )
    if packing.num_cut:
        sentence += f"; {packing.num_cut} are longer than a sample, and cut"
    if left_out := packing.num_left_out + data.meta.num_empty_documents:
        why = "longer than a sample, or " if per_row > 1 else ""
        sentence += f"; {left_out} are left out, {why}without an answer to learn"
    return sentence


def _packing_facts(data: PreparedData, seq_len: int) -> dict[str, Any]:
    packing = data.conversations("train").packing(seq_len)
    return {
        "answer_tokens": data.meta.answer_tokens,
        "padding_share": packing.padding_share(seq_len),
        "num_cut": packing.num_cut,
        "num_left_out": packing.num_left_out,
    }


def _fill(job: Job, reference: Reference, teacher: Teacher | None, module: nn.Module) -> None:
    """Give (a stage of) a decoder the Job's weights, or random ones by the Job's seed."""
    assert isinstance(module, Decoder)
    weights = job.train.weights
    if weights is not None:
        load = load_dcp if is_dcp(weights) else load_weights
        load(module, weights)
    else:
        module.init_weights(torch.Generator().manual_seed(job.train.seed))
    if job.finetune.is_adapted:
        fill_adapters(job, module)
    if job.finetune.needs_reference:
        reference.keep(module)
    if teacher is not None:
        teacher.stand_beside(module)


def masking(model: Model, job: Job, num_tokens: int) -> Masking | None:
    """Which tokens are masked, where they are what is learnt.

    Args:
        num_tokens: ids that the tokenizer gives, from 0.

    Raises:
        InputError: no id is left for the mask.
    """
    if model.causal:
        return None
    token = job.data.mask_token
    if token is None and num_tokens >= model.vocab_size:
        raise InputError(
            f"model.vocab_size = {model.vocab_size} has an id for each token and none for a masked "
            "one: raise it by one, or say by data.mask_token which id that is."
        )
    token = model.vocab_size - 1 if token is None else token
    if token >= model.vocab_size:
        raise InputError(
            f"data.mask_token = {token} is no id below model.vocab_size = {model.vocab_size}: give "
            "one that is."
        )
    share = _MASK_SHARE if job.data.mask_share is None else job.data.mask_share
    return Masking(job.train.seed, share, token, num_tokens)


def next_token(job: Job, ranks: Ranks) -> StagedLoss:
    """The loss of a decoder: of the tokens of each sequence that this rank holds."""
    layout, seq_len = job.layout, job.train.seq_len
    counts_differ = job.data.counts_some or job.model.sees_later_tokens
    weigh = partial(_weighed, job.micro_batch * seq_len) if counts_differ else _alike
    apart = partial(_apart, len(job.data.sources))
    if layout.is_plain:
        dtype = DTYPES[layout.precision]
        return StagedLoss(
            inputs=partial(_whole_inputs, ranks.device.type, dtype),
            criterion=lambda out, batch: apart(
                out,
                batch.targets,
                batch.sources,
                lambda: weigh(_whole_loss(out, batch), batch.targets),
            ),
        )
    ulysses = layout.ulysses
    place = layout.place(ranks.rank).cp
    held = positions_of(seq_len, layout.cp // ulysses, ulysses, place).to(ranks.device)
    return StagedLoss(
        inputs=lambda batch: (
            batch.tokens[:, held],
            {"document_ids": batch.document_ids, "positions": held},
        ),
        criterion=lambda logits, batch: apart(
            logits,
            batch.targets[:, held],
            batch.sources,
            lambda: _of_held(logits, batch.targets[:, held], weigh),
        ),
    )


def _part_names(job: Job) -> tuple[str, ...]:
    """Of the losses of a mixture's sources."""
    names = [source.name for source in job.data.sources]
    return tuple(f"loss.{name}" for name in names) if len(names) > 1 else ()


def _apart(
    num_sources: int,
    logits: Tensor,
    targets: Tensor,
    sources: Tensor | None,
    loss: Callable[[], Tensor | WeightedLoss],
) -> Tensor | WeightedLoss:
    """A loss with those of its sources, where there are several.

    Args:
        num_sources: of the mixture.
        logits: (batch, seq, vocab).
        targets: (batch, seq), those of this rank.
        sources: (batch,), see `MicroBatch.sources`.
        loss: gives the mean, and may write over the logits.
    """
    if sources is None or num_sources < 2:
        return loss()
    sums = vocabulary.losses_of_samples(logits, targets)
    counted = (targets != IGNORED).sum(-1)
    is_of = sources == torch.arange(num_sources, device=sources.device).unsqueeze(-1)
    numbers = torch.stack([sums.double(), counted.double()]).unsqueeze(1)  # (2, 1, batch)
    parts = torch.where(is_of, numbers, 0).sum(-1) / counted.sum()
    return replace(WeightedLoss.of(loss()), parts=parts)


def _alike(loss: Tensor, _targets: Tensor) -> Tensor:
    """A mean over as many tokens as any other."""
    return loss


def _weighed(most: int, loss: Tensor, targets: Tensor) -> WeightedLoss:
    """A mean that counts by its tokens.

    Args:
        most: tokens of a whole micro-batch. Weights are shares of the next power of two, by which
            numbers are divided without rounding, and stay in fp16's range.
        loss: mean over the targets that count.
        targets: those of this rank.
    """
    return WeightedLoss(loss, (targets != IGNORED).sum().float() / (1 << most.bit_length()))


def _of_held(
    logits: Tensor, targets: Tensor, weigh: Callable[[Tensor, Tensor], Tensor | WeightedLoss]
) -> Tensor | WeightedLoss:
    return weigh(_cross_entropy(logits, targets), targets)


def _whole_inputs(
    device_type: str, dtype: torch.dtype, batch: MicroBatch
) -> tuple[Tensor, dict[str, Any]]:
    told = {"document_ids": batch.document_ids}
    if switch.takes_on("loss", device_type, dtype) and batch.sources is None:
        # The fused loss needs the head's weight, so it is the network's last layer. Plain torch's
        # is better off outside, where FSDP2 has let that weight go.
        told["targets"] = batch.targets
    return batch.tokens, told


def _whole_loss(out: Tensor, batch: MicroBatch) -> Tensor:
    """What the network returned, if that is the loss."""
    return out if out.ndim == 0 else cross_entropy(out, batch.targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of logits that may be split over the vocabulary (tensor parallel)."""
    if isinstance(logits, DTensor):
        return vocabulary.cross_entropy(logits, targets)
    return cross_entropy(logits, targets)


_LOSSES: Mapping[str, Callable[[Job, Ranks], StagedLoss]] = {
    "likelihood": next_token,
    "dpo": preference_loss,
    "grpo": reward_loss,
    "distill": next_token,
}
"""By `finetune.objective`."""


def unstaged_loss(staged: StagedLoss) -> Loss:
    """The loss in one piece, for a module that isn't cut into stages."""

    def loss(module: nn.Module, batch: Any) -> Tensor | WeightedLoss:
        x, told = staged.inputs(batch)
        return staged.criterion(module(x, **told), batch)

    return loss
