"""Scheduler: which tokens of whom the next forward pass computes.

How it works: each step has room for so many tokens. First every text that is under way gets its
next token; what room is left goes to prompts, the oldest first, in parts where they are long. So a
long prompt doesn't make the others wait, and a pass is never larger than what was asked for.

A text is admitted when there are blocks for all it has so far. If blocks run out later, the
youngest gives back its own and waits; what it has made stays. A prompt that begins as one that is
being computed waits until it can share that one's blocks. Blocks that had to leave the memory may
come back (`offload`); meanwhile the others go on.

Papers: https://www.usenix.org/conference/osdi22/presentation/yu (Orca: a batch of every step anew),
https://arxiv.org/abs/2403.02310 (Sarathi: prompts in parts).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.generate.blocks import Blocks, name_of
from paceline.generate.sequence import EndReason, Fetch, Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that a forward pass computes."""

    sequence: Sequence
    start: int
    stop: int
    """Of the sequence's tokens."""
    num_choices: int
    """Of its last tokens, those whose logits are wanted; 0: the sequence isn't all computed."""
    num_guessed: int = 0
    """Tokens for whose guesses there is room."""
    guess: tuple[int, ...] = ()
    """Tokens that may come next; computed too, after the sequence's last token."""
    num_told: int = 0
    """Of the tokens before these choices, the last ones whose logits say what is told of the
    prompt."""

    def with_guess(self, guess: tuple[int, ...]) -> "Chunk":
        """This one, with a guess."""
        return replace(self, guess=guess, num_choices=self.num_choices + len(guess))

    @property
    def tokens(self) -> list[int]:
        """Those that are computed."""
        return [*self.sequence.tokens[self.start : self.stop], *self.guess]

    @property
    def num_tokens(self) -> int:
        """How many are computed."""
        return self.stop - self.start + len(self.guess)


class Elsewhere(Protocol):
    """Keeps blocks that left the memory (`offload`)."""

    def fetch(self, names: List[bytes], start: int, stop: int) -> Fetch | None:
        """Begin to fetch what pays of a sequence's next blocks; None: nothing does.

        Args:
            names: of the blocks, in order.
            start, stop: tokens of the sequence that are neither there nor computed.
        """
        ...

    def forget_all(self) -> None:
        """Nothing that was kept may be used again."""
        ...


class Scheduler:
    """Of the sequences of one engine.

    Args:
        blocks: of the engine.
        block_size: tokens of a block.
        most_tokens: of a forward pass.
        most_sequences: that are under way at a time.
        elsewhere: where blocks are kept that left the memory; None: nowhere.
    """

    def __init__(
        self,
        blocks: Blocks,
        block_size: int,
        most_tokens: int,
        most_sequences: int,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._blocks, self._block_size, self._elsewhere = blocks, block_size, elsewhere
        self._most_tokens, self._most_sequences = most_tokens, most_sequences
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        """The oldest first."""
        self._version = 0
        """Of the weights."""
        self._coming: dict[bytes, Sequence] = {}
        """Names of blocks that are being computed, and by whom."""
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits for its turn."""
        self.waiting.append(sequence)

    def next_chunks(self, num_guessed: Mapping[Sequence, int]) -> list[Chunk]:
        """What the next forward pass computes; nothing, where nothing is to do.

        Args:
            num_guessed: room that running sequences want for tokens that will be guessed.
        """
        for sequence in self.running:
            if sequence.read is not None and sequence.read.is_done:
                self._take_read(sequence, sequence.read)
        chunks: list[Chunk] = []
        chosen: set[Sequence] = set()
        room = self._most_tokens

        def choose(sequence: Sequence) -> None:
            nonlocal room
            wanted = num_guessed.get(sequence, 0)
            if room > 0 and (chunk := self._chunk(sequence, room, wanted, chosen)) is not None:
                chunks.append(chunk)
                chosen.add(sequence)
                room -= chunk.num_tokens + chunk.num_guessed

        for is_next_token in (True, False):
            for sequence in list(self.running):
                if (sequence.num_left == 1) == is_next_token and sequence in self.running:
                    choose(sequence)
        while room > 0 and (admitted := self._admit()) is not None:
            choose(admitted)
        return chunks

    def was_computed(self, chunk: Chunk, num_tokens: int) -> None:
        """So many tokens of a chunk are tokens of its sequence, with keys and values in blocks."""
        self._is_there(chunk.sequence, chunk.start + num_tokens)

    def end(self, sequence: Sequence, reason: EndReason) -> None:
        """A sequence is over; its blocks are free at once."""
        sequence.end = reason
        if sequence in self.running:
            del self.running[sequence]
            self._clear(sequence)
        else:
            self.waiting.remove(sequence)

    def compute_anew(self) -> None:
        """Everything that was computed is void: the weights have changed."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)
        for sequence in self.waiting:
            sequence.names.clear()
        self._blocks.forget_all()
        if self._elsewhere is not None:
            self._elsewhere.forget_all()
        self._version += 1

    def wait_for_read(self, seconds: float) -> None:
        """Wait until what somebody needs was fetched, at most so long."""
        reads = (sequence.read for sequence in self.running if sequence.read is not None)
        if (first := next(reads, None)) is not None:
            first.wait(seconds)

    def _take_read(self, sequence: Sequence, read: Fetch) -> None:
        """Of what was fetched all comes, or only a beginning: the rest is computed."""
        first = sequence.num_computed // self._block_size
        count = read.place(sequence.blocks[first:])
        sequence.read = None
        sequence.num_shared += count * self._block_size
        self._is_there(sequence, sequence.num_shared)

    def _is_there(self, sequence: Sequence, num_tokens: int) -> None:
        """Keys and values of a sequence's first tokens are in its blocks."""
        places = range(sequence.num_computed // self._block_size, num_tokens // self._block_size)
        sequence.num_computed = num_tokens
        for place in places:
            name = self._name(sequence, place)
            self._blocks.put_name(sequence.blocks[place], name)
            self._came(name, sequence)

    def num_to_compute(self) -> int:
        """Tokens that running sequences lack, up to those of a pass."""
        return min(sum(sequence.num_left for sequence in self.running), self._most_tokens)

    def _chunk(
        self, sequence: Sequence, room: int, wanted: int, chosen: Iterable[Sequence]
    ) -> Chunk | None:
        if sequence.read is not None:
            return None
        start, whole = sequence.num_computed, len(sequence.tokens)
        stop = min(whole, start + room)
        if not self._make_room(sequence, stop, chosen):
            return None
        guessed = 0
        if wanted and stop - start == 1 and stop == whole:
            # Everybody's next token comes before anybody's guess.
            most = min(room - len(self.running), self._room_after(sequence, stop))
            guessed = max(0, min(wanted, most))
        self._take(sequence, stop + guessed)
        return Chunk(
            sequence, start, stop, int(stop == whole), guessed, (), self._num_told(sequence, stop)
        )

    def _num_told(self, sequence: Sequence, stop: int) -> int:
        """The logits of a prompt's token tell of the next one; those of its last are a choice."""
        if not sequence.num_untold:
            return 0
        first = max(sequence.num_computed, len(sequence.prompt_logprobs))
        return max(0, min(stop, sequence.num_prompt - 1) - first)

    def _take(self, sequence: Sequence, num_tokens: int) -> None:
        for _ in range(self._missing(sequence, num_tokens)):
            sequence.blocks.append(self._blocks.take())

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens lacks."""
        return -(-num_tokens // self._block_size) - len(sequence.blocks)

    def _room_after(self, sequence: Sequence, stop: int) -> int:
        """Tokens after `stop` for which there are blocks without preempting anybody."""
        held = len(sequence.blocks) + self._blocks.num_free
        return held * self._block_size - stop

    def _make_room(self, sequence: Sequence, stop: int, chosen: Iterable[Sequence]) -> bool:
        """Take blocks from younger sequences until there are enough; False: there are not."""
        while self._missing(sequence, stop) > self._blocks.num_free:
            youngest_first = reversed(list(self.running))
            victim = next(one for one in youngest_first if one is sequence or one not in chosen)
            if victim is sequence:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        del self.running[sequence]
        self._clear(sequence)
        self.waiting.appendleft(sequence)

    def _clear(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):  # a text's beginning is kept longest
            self._blocks.give_back(block)
        for name in sequence.names:
            self._came(name, sequence)
        sequence.blocks.clear()
        sequence.num_computed = 0
        if sequence.read is not None:
            sequence.read.close()
            sequence.read = None

    def _admit(self) -> Sequence | None:
        """Start the first waiting sequence that can be; None: none can."""
        if len(self.running) >= self._most_sequences:
            return None
        for sequence in self.waiting:
            # The last token is computed in any case: its logits are wanted. Where something is told
            # of the prompt, all are.
            num_known = 0 if sequence.num_untold else len(sequence.tokens) - 1
            names = [self._name(sequence, place) for place in range(num_known // self._block_size)]
            shared = self._shared(names)
            if len(shared) < len(names) and names[len(shared)] in self._coming:
                continue
            for block in shared:
                self._blocks.use(block)
            sequence.blocks.extend(shared)
            if self._missing(sequence, len(sequence.tokens)) > self._blocks.num_free:
                self._clear(sequence)
                return None
            self._take(sequence, len(sequence.tokens))
            sequence.num_computed = sequence.num_shared = len(shared) * self._block_size
            for name in names[len(shared) :]:
                self._coming[name] = sequence
            if self._elsewhere is not None:
                start, stop = sequence.num_computed, len(sequence.tokens)
                sequence.read = self._elsewhere.fetch(names[len(shared) :], start, stop)
            self.waiting.remove(sequence)
            self.running[sequence] = None
            return sequence
        return None

    def _shared(self, names: list[bytes]) -> list[int]:
        blocks = []
        for name in names:
            if (block := self._blocks.find(name)) is None:
                break
            blocks.append(block)
        return blocks

    def _name(self, sequence: Sequence, place: int) -> bytes:
        """The name of a sequence's block, which is full."""
        names, size = sequence.names, self._block_size
        while len(names) <= place:
            start = len(names) * size
            before = names[-1] if names else self._version.to_bytes(8) + sequence.root
            names.append(name_of(before, sequence.tokens[start : start + size]))
        return names[place]

    def _came(self, name: bytes, sequence: Sequence) -> None:
        if self._coming.get(name) is sequence:
            del self._coming[name]
