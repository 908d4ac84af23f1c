"""How workers that may be lost begin together, and how one comes in later.

The first worker's state is the run's: it alone restores and saves checkpoints. The others take what
they go on from out of its hands, at the start like later: the number of steps done, parameters and
inner optimizer, and the momentum of the outer one. Samples, learning rate and the end of the run
follow from the number of steps, so they agree from then on. What a lost worker would have read in
the meantime is not seen.

In any other run nothing happens here. What a round does is
`elastic.elastic_rounds`'s.
"""

from typing import Any

from paceline.elastic.elastic_rounds import ElasticRounds
from paceline.train.checkpoint import restore_training_state, training_state
from paceline.train.trainer import Trainer

# By this much processes may start later than each other, however soon a round is missed. Assumed.
_START_S = 60.0


def come_together(trainer: Trainer, done: int) -> tuple[int, bool]:
    """Begin with the other workers: as the first one wait for them and tell them from where on, as
    another one wait to be let in.

    Args:
        done: steps of the run that this worker has restored.

    Returns:
        the steps that the run has done, and whether the workers agreed to stop there.

    Raises:
        RunError: too few workers came within comm.timeout_s, or a minute where that is less; or
            nobody lets this one in.
    """
    rounds = trainer.replicas
    if not isinstance(rounds, ElasticRounds):
        return done, False
    if trainer.ranks.is_first:
        wait_s = max(trainer.job.comm.timeout_s, _START_S)
        rounds.membership.open(trainer.ranks.world_size, wait_s)
        welcome_workers(trainer, done, is_over=False)
        return done, False
    state = rounds.join(trainer.ranks.device)
    optimizer = state.get("optimizer", {})  # none before the first step
    taken = {"model": state["model"], "optimizer": optimizer}
    restore_training_state(trainer.module, trainer.update.optimizer, taken)
    rounds.load({"start": {}, "momentum": state["momentum"], "arriving": {}, "error": {}})
    return state["step"], state["is_over"]


def welcome_workers(trainer: Trainer, done: int, *, is_over: bool) -> None:
    """After a round: give the first worker's state to those who came in with it, if anybody did."""
    rounds = trainer.replicas
    if not isinstance(rounds, ElasticRounds):
        return

    def handed_over() -> dict[str, Any]:
        # Right after a round what the workers agreed on are the first one's parameters.
        state = training_state(trainer.module, trainer.update.optimizer)
        momentum = rounds.state()["momentum"]
        return {**state, "momentum": momentum, "step": done, "is_over": is_over}

    rounds.welcome(handed_over)
