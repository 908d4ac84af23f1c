"""Rounds of drawn requests on drawn engines, where every text is compared with the plain network.

How it works: a round draws an engine (family, precision, forms of weights and of keys, sizes of
blocks and passes, too few of them, tiers, layers in files, guesses, exactness) and requests
(lengths, beginnings that others have too, salts, sampling, grammars, stops, prompts that are told
of): `fuzzed_draws`. Between steps it cancels some, damages what is kept, or says that the weights
have changed, which they have not. In the end each text, of cancelled ones what was made, is held
against the plain network (`fuzzed_checks`): one pass over it without blocks, with weights and keys
in the same form, and what is chosen from its logits. With `exact` each choice and each logarithm of
a probability has to be the one, to the bit, of an engine of the same sizes that computes this text
alone. Then all blocks, files and reads have to be gone.

A round is a function of its seed. What threads do when, and so what is fetched, is not, nor what
"auto" guesses, nor the form of keys that "auto" measures to be quicker; texts are, in that form.
"""

import random
from collections import Counter
from pathlib import Path

from paceline.generate.sequence import Sequence
from tests.generate.fuzzed_checks import ViolationError, check_nothing_is_left, check_text
from tests.generate.fuzzed_draws import Drawn, draw_request, draw_setting

_MOST_WAITS = 2000


def run_round(seed, num_requests, folder: Path) -> Counter:
    """Do one round.

    Returns:
        how often what happened.

    Raises:
        ViolationError: says the round, the request and what is wrong.
    """
    draw = random.Random(seed)
    setting = draw_setting(draw, folder)
    engine = setting.engine()
    _choose_rule(draw, engine)
    counts = Counter(rounds=1)
    try:
        requests = _serve(draw, engine, num_requests, counts)
        for sequence, request in requests.items():
            counts[f"ended by {sequence.end}"] += 1
            check_text(setting, engine.key_form, request, sequence, counts)
        check_nothing_is_left(engine)
        numbers = engine.numbers()
    except ViolationError as violation:
        raise ViolationError(f"round {seed}, {setting}: {violation}") from None
    finally:
        engine.close()
    for key in ("preemptions", "blocks_fetched", "blocks_recomputed", "blocks_damaged"):
        counts[key] = numbers[key]
    for key in ("guessed", "guessed_right"):
        counts[f"tokens {key}"] = numbers[key]
    for kind in ("all", *setting.kinds):
        counts[f"requests, {kind}"] = len(requests)
    return counts


def _choose_rule(draw, engine) -> None:
    """Fetch always or never, or as measured: with networks that small, chance has a say in it."""
    rule = draw.choice(["always", "always", "always", "never", "measured"])
    if engine._offload is not None and rule != "measured":
        token_s = 1e9 if rule == "always" else 0.0
        engine._offload.passes.seconds = lambda start, stop: token_s * (stop - start)


def _serve(draw, engine, num_requests, counts) -> dict[Sequence, Drawn]:
    """Submit requests among steps, and do steps until all have ended."""
    requests: dict[Sequence, Drawn] = {}
    most_steps = 1000
    for number in range(num_requests):
        exact = engine.serving.exact
        request = draw_request(draw, engine.longest, number, exact, [*requests])
        requests[request.submit(engine)] = request
        # A text that gives its blocks back time and again is still computed further each time.
        most_steps += 40 * (len(request.prompt) + request.sampling.max_tokens)
        for _ in range(draw.choice([0, 1, 2, 8, 20])):
            _step(engine, counts)
        if draw.random() < 0.2:
            victim = draw.choice([*requests])
            counts["cancelled while blocks are fetched"] += victim.read is not None
            engine.cancel(victim)
        if draw.random() < 0.03:
            engine.weights_changed()
            counts["other weights"] += 1
        if draw.random() < 0.1:
            _damage(draw, engine)
    while not engine.is_idle:
        _step(engine, counts)
        if counts["steps"] > most_steps:
            raise ViolationError(
                f"{counts['steps']} steps, and {len(requests)} texts haven't ended"
            )
        if counts["waits"] > _MOST_WAITS:
            raise ViolationError("nothing is fetched any more")
    return requests


def _step(engine, counts) -> None:
    did = engine.step()
    counts["steps" if did else "waits"] += 1
    if not did and not engine.is_idle and not any(s.read for s in engine._scheduler.running):
        raise ViolationError("a step did nothing, and nothing is fetched")


def _damage(draw, engine) -> None:
    """Change a byte of half of what is kept."""
    if engine._offload is None:
        return
    tiers = engine._offload.tiers
    tiers.settle()
    for kept in (*tiers._host.values(), *tiers._disk.values()):
        if draw.random() < 0.5:
            if isinstance(file := getattr(kept, "path", None), Path):
                file.write_bytes(b"not what was written")
            elif not kept.num_readers:  # else it was checked already
                kept.data[draw.randrange(kept.num_bytes)] ^= 64
