"""Guessers: those that `serve.speculate` asks for."""

from paceline.config.errors import InputError
from paceline.config.serving import Serving
from paceline.generate.draft import DraftGuesser
from paceline.generate.gain import PassTimes
from paceline.generate.paged import Memory
from paceline.generate.runner import Runner
from paceline.generate.speculation import Guesser, NgramGuesser, Speculator
from paceline.models.decoder import Decoder


def speculator_of(
    serving: Serving, runner: Runner, memory: Memory, most_tokens: int, draft: Decoder | None
) -> Speculator:
    """What guesses for a network.

    Args:
        runner: of the network, and its memory; `most_tokens` of a pass.
        draft: None: there is none.

    Raises:
        InputError: a draft that is needed and not there, that has no effect, or that doesn't fit.
    """
    kind, guessers = serving.speculate, dict[str, Guesser]()
    if kind in ("ngram", "auto"):
        guessers["ngram"] = NgramGuesser()
    if draft is not None:
        _check(draft, runner.decoder, kind)
        guessers["draft"] = DraftGuesser(
            draft, memory.spare_block, memory.block_size, most_tokens, is_timed=kind == "auto"
        )
    elif kind == "draft":
        raise InputError(
            'serve.speculate = "draft" needs a small network: give the directory of a run of one '
            "by serve.draft."
        )
    times = PassTimes(runner.times(most_tokens)) if kind == "auto" else None
    return Speculator(guessers, serving.guess_tokens, times)


def _check(draft: Decoder, decoder: Decoder, kind: str) -> None:
    if kind not in ("draft", "auto"):
        raise InputError(
            f'The draft has no effect with serve.speculate = "{kind}": set it to "draft" or '
            '"auto", or leave serve.draft out.'
        )
    if draft.model.vocab_size != decoder.model.vocab_size:
        raise InputError(
            f"The draft knows {draft.model.vocab_size} tokens and the network "
            f"{decoder.model.vocab_size}: give a draft that was trained with the same tokenizer."
        )
