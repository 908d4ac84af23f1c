"""Engine: takes requests, does steps, hands out tokens.

    engine = Engine(decoder, Serving(), tokenizer=tokenizer)
    print(engine.texts(["def main():"], Sampling(max_tokens=64)))

How it works: each step asks the scheduler which tokens to compute, the runner for their logits, and
chooses the next token of each sequence that is computed as far as it goes. The network is borrowed
for each pass: between steps it may be trained, or get other weights (`weights_changed`).

An engine is for one thread at a time.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from tokenizers import Tokenizer
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving, WeightForm
from paceline.generate.blocks import Blocks
from paceline.generate.choice import Place, choose, logprobs
from paceline.generate.guessers import speculator_of
from paceline.generate.key_prices import chosen_key_form
from paceline.generate.layers import StreamedLayers, layers_of
from paceline.generate.narrow_keys import kept_type
from paceline.generate.offload import NOTHING_KEPT, offload_of
from paceline.generate.paged import KeyShape, Memory
from paceline.generate.prices import chosen_form
from paceline.generate.runner import Runner
from paceline.generate.scheduler import Chunk, Scheduler
from paceline.generate.score import Given, Score, Scorer
from paceline.generate.sequence import EndReason, Sequence, check_tokens
from paceline.generate.speculation import Load
from paceline.generate.text import TextStream
from paceline.generate.work import Step
from paceline.machine.freed_memory import keep_freed_memory
from paceline.models.decoder import Decoder
from paceline.models.heads import GuessHeads

if TYPE_CHECKING:
    from paceline.generate.ranks import Others

_EXACT_TOKENS, _TOKENS = 64, 512
_SHARE_OF_FREE_MEMORY = 0.25
_LONGEST_WAIT_S = 0.05
"""For blocks that are fetched: orders between steps wait as long."""


@dataclass(frozen=True)
class Progress:
    """What a step did for a sequence."""

    sequence: Sequence
    tokens: List[int]
    """That were made."""


class Engine:
    """Makes texts with a decoder.

    Args:
        decoder: on one device, or this rank's part of it.
        serving: how its memory is shared out.
        tokenizer: for prompts and texts; None: tokens only.
        end_tokens: end a text.
        draft: guesses tokens, where `serving.speculate` says so.
        others: ranks that have the other parts of the network; None: the decoder is all of it.
        layers: of a decoder that was opened in them; None: as `serving.weights_gb` says.

    Raises:
        InputError: the memory for keys and values doesn't hold a block of tokens, settings that
            contradict each other, or a draft that isn't what `serving.speculate` needs.
    """

    def __init__(
        self,
        decoder: Decoder,
        serving: Serving,
        tokenizer: Tokenizer | None = None,
        end_tokens: Iterable[int] = (),
        draft: Decoder | GuessHeads | None = None,
        others: "Others | None" = None,
        layers: StreamedLayers | None = None,
    ) -> None:
        self.decoder, self.serving, self.tokenizer = decoder, serving, tokenizer
        self.others = others
        self.end_tokens = frozenset(end_tokens)
        self.tell_step: Callable[[Step], None] | None = None
        """Told of each step that did something."""
        self._longest = decoder.model.max_seq_len
        first = next(decoder.parameters())
        if first.device.type == "cpu":
            keep_freed_memory()
        shape, size = KeyShape.of(decoder), serving.block_size
        exact = _EXACT_TOKENS if serving.exact else None
        most = (exact or _TOKENS) if serving.max_tokens == "auto" else serving.max_tokens
        self.most_tokens = most
        """Of a forward pass."""
        self.key_form = chosen_key_form(decoder, serving, most)
        keys_in = kept_type(self.key_form, first.dtype)
        block_bytes = shape.block_bytes(size, keys_in)
        if isinstance(draft, Decoder):
            dtype = next(draft.parameters()).dtype
            block_bytes += KeyShape.of(draft).block_bytes(size, dtype)
        num_blocks = self._num_blocks(block_bytes)
        self.weight_form: WeightForm = "as_trained"
        self._layers = layers
        if others is None:
            self._memory = Memory(
                shape, num_blocks, size, keys_in, first.device, is_exact=serving.exact
            )
            self.weight_form = chosen_form(decoder, serving, most)
            self._layers = layers or layers_of(decoder, serving)
            self._runner = Runner(
                decoder,
                self._memory,
                most if serving.exact else None,
                self._layers,
                self.weight_form,
                serving.weight_group,
            )
        else:
            self._memory, self._runner = others.begin(decoder, num_blocks, size, self.key_form)
        longest = min(self._longest, num_blocks * size)
        self._offload = offload_of(serving, self._memory, longest, most) if others is None else None
        leaves = (lambda block, name: None) if self._offload is None else self._offload.keep
        self._blocks = Blocks(num_blocks, shares=serving.share_prefixes, leaves=leaves)
        self._scorer = Scorer(self._runner, self._memory, self._blocks, most)
        self._scheduler = Scheduler(self._blocks, size, most, serving.max_sequences, self._offload)
        self._speculator = speculator_of(serving, self._runner, self._memory, most, draft)

    def submit(
        self,
        prompt: List[int],
        sampling: Sampling,
        *,
        salt: bytes = b"",
        take_text: Callable[[list[int]], str | None] | None = None,
        matcher: Any = None,
        prompt_logprobs: int | None = None,
    ) -> Sequence:
        """Take a request; `step` works on it from now on.

        Args:
            prompt: its tokens.
            salt: only requests with the same one share keys and values.
            take_text: is told each token that was made, and says whether a stop string ended it.
            matcher: of its grammar.
            prompt_logprobs: tell of the prompt's tokens as well, with so many likeliest ones beside
                each. Then all of them are computed, whoever has begun alike.

        Raises:
            InputError: a prompt that is empty or too long, tokens that the network doesn't know, or
                a setting that lacks what it needs.
        """
        self._check(prompt, sampling)
        if sampling.max_tokens == 0 and prompt_logprobs is None:
            raise InputError(
                "max_tokens = 0 makes no text, and nothing of the prompt is asked for: raise it."
            )
        if sampling.grammar is not None and matcher is None:
            raise InputError("A text with a grammar needs a matcher of it, which was not given.")
        if sampling.stop and take_text is None:
            raise InputError("Stop strings need text: give take_text, such as TextStream.add.")
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        most = min(len(prompt) + sampling.max_tokens, self.longest)
        sequence = Sequence([*prompt], sampling, seed, len(prompt), most, salt)
        sequence.take_text, sequence.matcher = take_text, matcher
        sequence.num_prompt_logprobs = prompt_logprobs
        self._scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants this text any more: its blocks are free at once."""
        if sequence.end is None:
            self._scheduler.end(sequence, "cancelled")

    def step(self) -> list[Progress]:
        """Do a forward pass; what it did for whom, nothing where nothing is to do, or where blocks
        that everybody waits for are still fetched."""
        begun_s = time.perf_counter()
        scheduler, speculator = self._scheduler, self._speculator
        rows = scheduler.num_to_compute()
        load = Load(rows, self.most_tokens - rows)
        chunks = scheduler.next_chunks(speculator.counts(scheduler.running, load))
        taken = self._blocks.newly_taken()
        self._memory.clear(taken)
        speculator.clear(taken)
        if not chunks:
            scheduler.wait_for_read(_LONGEST_WAIT_S)
            return []
        chunks = speculator.guess(chunks)
        pass_begun_s = time.perf_counter()
        with speculator.watch(chunks):
            logits = self.compute(chunks)
            pass_ended_s = time.perf_counter()
            choices = self._choices(chunks, self._tell_prompts(chunks, logits))
        if self._offload is not None:
            spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in chunks]
            self._offload.passes.add(time.perf_counter() - pass_begun_s, spans)
        progress = [self._go_on(chunk, raw, tokens) for chunk, raw, tokens in choices]
        if self.tell_step is not None:
            ended_s = time.perf_counter()
            self.tell_step(Step(chunks, begun_s, pass_begun_s, pass_ended_s, ended_s))
        return progress

    def compute(self, chunks: List[Chunk]) -> Tensor:
        """Logits of chunks, whoever chose them; see `Runner.logits`."""
        return self._runner.logits(chunks)

    @property
    def is_idle(self) -> bool:
        """Whether nobody wants anything."""
        return not self._scheduler.waiting and not self._scheduler.running

    @property
    def longest(self) -> int:
        """Tokens of the longest text, with its prompt."""
        return min(self._longest, self._blocks.num_blocks * self.serving.block_size)

    @torch.no_grad()
    def take_weights(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Go on with other weights, all of the network's. Where a part can't be had, some are the
        old ones and some are new, and no step may be done.

        Args:
            parts: some weights each, by the network's names, such as those of a layer.
        """
        if self.others is None:
            own = self.decoder.state_dict()
            for part in parts:
                for name, tensor in part.items():
                    own[name].copy_(tensor)
                if self._layers is not None:
                    self._layers.leave_files()
        else:
            self.others.take_weights(self.decoder, parts)
        self.weights_changed()

    def weights_changed(self) -> None:
        """The network has other weights: all that is kept of the old ones is computed anew."""
        self._runner.weights_changed()
        self._speculator.weights_changed()
        self._scheduler.compute_anew()

    def close(self) -> None:
        """No more steps are done: what is kept beyond the device is removed."""
        if self._offload is not None:
            self._offload.tiers.close()
        if self.others is not None:
            self.others.close()

    def texts(self, prompts: List[str], sampling: Sampling) -> list[str]:
        """The text that follows each prompt; does steps until all are there.

        Raises:
            InputError: as `submit`; or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InputError("This engine has no tokenizer: give it one, or submit tokens.")
        streams = []
        for prompt in prompts:
            tokens = self.tokenizer.encode(prompt, add_special_tokens=False).ids
            stream = TextStream(self.tokenizer, sampling.stop, tokens)
            streams.append(stream)
            self.submit(tokens, sampling, take_text=stream.add)
        while not self.is_idle:
            self.step()
        for stream in streams:
            stream.finish()
        return [stream.text for stream in streams]

    def losses(self, texts: Iterable[Given]) -> Iterator[Tensor]:
        """How unlikely given texts are, while no others are made.

        Args:
            texts: of at most `longest` tokens.

        Yields:
            of each text, in order, -log p of its targets: (num_tokens,) fp32, in nats.
        """
        return (score.losses for score in self.scores(texts))

    def scores(self, texts: Iterable[Given]) -> Iterator[Score]:
        """As `losses`, with whether each target was the likeliest token."""
        self._check_makes_texts()
        return self._scorer.scores(texts)

    def numbers(self) -> dict[str, int]:
        """How busy it is: sequences, blocks by tier, preemptions and guesses, by name."""
        scheduler, blocks = self._scheduler, self._blocks
        return {
            **(NOTHING_KEPT if self._offload is None else self._offload.numbers()),
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "blocks": blocks.num_blocks,
            "blocks_free": blocks.num_free,
            "blocks_idle": blocks.num_idle,
            "preemptions": scheduler.num_preemptions,
            "guessed": self._speculator.num_guessed,
            "guessed_right": self._speculator.num_right,
        }

    def _check_makes_texts(self) -> None:
        if not self.decoder.model.causal:
            raise InputError(
                "This network sees later tokens (model.causal = false), so that it makes no texts: "
                "ask it for embeddings, or choose another."
            )

    def _check(self, prompt: List[int], sampling: Sampling) -> None:
        self._check_makes_texts()
        vocab = self.decoder.model.vocab_size
        check_tokens(prompt, vocab)
        if len(prompt) + min(1, sampling.max_tokens) > self.longest:
            raise InputError(
                f"The prompt has {len(prompt)} tokens, but prompt and text together may have "
                f"{self.longest}: shorten it."
            )
        if wrong := [token for token in sampling.logit_bias if not 0 <= token < vocab]:
            raise InputError(
                f"logit_bias names token {wrong[0]}, but the network knows 0 to {vocab - 1}."
            )

    def _tell_prompts(self, chunks: List[Chunk], logits: Tensor) -> Tensor:
        """Take down what is to be told of prompts; the logits of choices."""
        if not any(chunk.num_told for chunk in chunks):
            return logits
        sizes = [size for chunk in chunks for size in (chunk.num_told, chunk.num_choices)]
        parts = logits.split(sizes)
        for chunk, rows in zip(chunks, parts[::2], strict=True):
            sequence, first = chunk.sequence, len(chunk.sequence.prompt_logprobs) + 1
            if sequence.num_prompt_logprobs is not None:
                tokens = sequence.tokens[first : first + chunk.num_told]
                told = logprobs(rows, tokens, sequence.num_prompt_logprobs)
                sequence.prompt_logprobs += told
        return torch.cat(parts[1::2])

    def _choices(
        self, chunks: List[Chunk], logits: Tensor
    ) -> list[tuple[Chunk, Tensor | None, list[int]]]:
        """Of each chunk the logits that were unchanged, where they are asked for, and tokens."""
        places = [
            Place(chunk.sequence, chunk.guess[:count])
            for chunk in chunks
            for count in range(chunk.num_choices)
        ]
        raw = (
            logits.clone()
            if any(place.sequence.sampling.logprobs is not None for place in places)
            else None
        )
        chosen = choose(logits, places) if places else []
        of_chunks, row = [], 0
        for chunk in chunks:
            own = slice(row, row + chunk.num_choices)
            of_chunks.append((chunk, None if raw is None else raw[own], chosen[own]))
            row += chunk.num_choices
        return of_chunks

    def _go_on(self, chunk: Chunk, raw: Tensor | None, chosen: List[int]) -> Progress:
        """Give a sequence the tokens that were chosen, as far as its guess was right."""
        sequence = chunk.sequence
        end: EndReason | None = None
        if chosen and sequence.sampling.max_tokens == 0:
            chosen, end = [], "length"
        new: list[int] = []
        for place, token in enumerate(chosen):
            new.append(token)
            if raw is not None and sequence.sampling.logprobs is not None:
                row = raw[place : place + 1]
                sequence.logprobs += logprobs(row, [token], sequence.sampling.logprobs)
            if sequence.matcher is not None:
                sequence.matcher.take(token)
            sequence.tokens.append(token)
            end = self._end(sequence, token)
            if end or (place < len(chunk.guess) and token != chunk.guess[place]):
                break
        num_right = max(0, len(new) - 1)
        self._scheduler.was_computed(chunk, chunk.stop - chunk.start + num_right)
        self._speculator.learn(chunk, num_right)
        if end is not None:
            self._scheduler.end(sequence, end)
        return Progress(sequence, new)

    def _end(self, sequence: Sequence, token: int) -> EndReason | None:
        """Why a text ends with this token; None: it goes on."""
        if token in self.end_tokens and not sequence.sampling.ignore_end:
            return "stop"
        if sequence.take_text is not None and sequence.take_text([token]) is not None:
            return "stop"
        if sequence.matcher is not None and sequence.matcher.is_over:
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.most_tokens else None

    def _num_blocks(self, block_bytes: int) -> int:
        serving, size = self.serving, self.serving.block_size
        of_sequence = -(-self._longest // size)
        if not self.decoder.model.causal:  # it keeps no keys: they would change with later tokens
            return of_sequence
        if serving.kv_gb != "auto":
            num = int(serving.kv_gb * 1e9 / block_bytes)
        else:
            most = _SHARE_OF_FREE_MEMORY * self._free_bytes()
            num = min(serving.max_sequences * of_sequence, int(most / block_bytes))
        if num < 1:
            raise InputError(
                f"serve.kv_gb = {serving.kv_gb} doesn't hold a block of {size} tokens, which takes "
                f"{block_bytes / 1e6:.3g} MB: raise it, or lower serve.block_size."
            )
        return num

    def _free_bytes(self) -> int:
        """Memory that this rank may count on."""
        device = next(self.decoder.parameters()).device
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0]
        return psutil.virtual_memory().available // self.serving.num_ranks
