"""Guessers: those that `serve.speculate` asks for."""

from paceline.config.errors import InputError
from paceline.config.serving import Serving
from paceline.generate.draft import DraftGuesser
from paceline.generate.gain import PassTimes
from paceline.generate.head_guesser import HeadGuesser
from paceline.generate.paged import Memory
from paceline.generate.runner import Runner
from paceline.generate.speculation import Guesser, NgramGuesser, Speculator
from paceline.models.decoder import Decoder
from paceline.models.heads import GuessHeads

_NEEDED = {
    "draft": "a small network: give the directory of a run of one by serve.draft",
    "heads": 'heads: train them with model.family = "heads", and give their run by serve.draft',
}


def speculator_of(
    serving: Serving,
    runner: Runner,
    memory: Memory,
    most_tokens: int,
    draft: Decoder | GuessHeads | None,
) -> Speculator:
    """What guesses for a network.

    Args:
        runner: of the network, and its memory; `most_tokens` of a pass.
        draft: None: there is none.

    Raises:
        InputError: a draft that is needed and not there, that has no effect, or that doesn't fit.
    """
    asked, guessers = serving.speculate, dict[str, Guesser]()
    is_timed = asked == "auto"
    kind = None if draft is None else "heads" if isinstance(draft, GuessHeads) else "draft"
    if asked in _NEEDED and kind != asked:
        raise InputError(f'serve.speculate = "{asked}" needs {_NEEDED[asked]}.')
    if kind is not None and asked not in (kind, "auto"):
        raise InputError(
            f'The draft has no effect with serve.speculate = "{asked}": set it to "{kind}" or '
            '"auto", or leave serve.draft out.'
        )
    if asked in ("ngram", "auto"):
        guessers["ngram"] = NgramGuesser()
    if isinstance(draft, GuessHeads):
        _check_heads(draft, runner.decoder)
        guessers["heads"] = HeadGuesser(draft, serving.max_sequences, is_timed=is_timed)
    elif draft is not None:
        _check_draft(draft, runner.decoder)
        guessers["draft"] = DraftGuesser(
            draft, memory.spare_block, memory.block_size, most_tokens, is_timed=is_timed
        )
    times = PassTimes(runner.times(most_tokens)) if is_timed else None
    return Speculator(guessers, serving.guess_tokens, times)


def _check_draft(draft: Decoder, decoder: Decoder) -> None:
    if draft.model.vocab_size != decoder.model.vocab_size:
        raise InputError(
            f"The draft knows {draft.model.vocab_size} tokens and the network "
            f"{decoder.model.vocab_size}: give a draft that was trained with the same tokenizer."
        )


def _check_heads(heads: GuessHeads, decoder: Decoder) -> None:
    theirs, own = heads.model.trunk, decoder.model
    if (theirs.hidden_size, theirs.vocab_size) != (own.hidden_size, own.vocab_size):
        raise InputError(
            f"The heads are of {heads.model.of}, which is {theirs.hidden_size} wide and knows "
            f"{theirs.vocab_size} tokens, and this network is {own.hidden_size} wide and knows "
            f"{own.vocab_size}: train heads of this one."
        )
    heads.set_trunk(decoder)
    heads.to(next(decoder.parameters()).dtype)
