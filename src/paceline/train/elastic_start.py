"""How workers that may be lost begin together, and how one comes in later.

The first worker's state is the run's: it alone restores and saves checkpoints. The others take what
they go on from out of its hands, at the start like later: the number of steps done, parameters and
inner optimizer, and the momentum of the outer one. Samples, learning rate and the end of the run
follow from the number of steps, so they agree from then on. What a lost worker would have read in
the meantime is not seen.

`open_membership` and `welcome_workers` do nothing in any other run. What a round does is
`elastic.elastic_rounds`'s.
"""

from typing import Any

from paceline.elastic.elastic_rounds import ElasticRounds
from paceline.train.checkpoint import restore_training_state, training_state
from paceline.train.trainer import Trainer

# By this much processes may start later than each other, however soon a round is missed. Assumed.
_START_S = 60.0


def open_membership(trainer: Trainer, done: int) -> None:
    """As the first worker: wait for the others, and tell them from where on.

    Args:
        done: steps of the run.

    Raises:
        RunError: too few workers came within comm.timeout_s, or a minute where that is less.
    """
    rounds = trainer.replicas
    if isinstance(rounds, ElasticRounds):
        wait_s = max(trainer.job.comm.timeout_s, _START_S)
        rounds.membership.open(trainer.ranks.world_size, wait_s)
        welcome_workers(trainer, done, is_over=False)


def welcome_workers(trainer: Trainer, done: int, *, is_over: bool) -> None:
    """After a round: give the state to those who came in with it, if anybody did.

    Args:
        done: steps of the run.
        is_over: whether the workers agreed to stop here.
    """
    rounds = trainer.replicas
    if isinstance(rounds, ElasticRounds):
        rounds.welcome(lambda: {**_state(trainer, rounds), "step": done, "is_over": is_over})


def join_workers(trainer: Trainer) -> tuple[int, bool]:
    """As another worker: wait to be let in, and go on from the first one's state.

    Returns:
        the steps that the run has done, and whether the workers agreed to stop there.

    Raises:
        RunError: nobody lets this worker in.
    """
    rounds = trainer.replicas
    assert isinstance(rounds, ElasticRounds), "only there a worker has no state of its own"
    state = rounds.join(trainer.ranks.device)
    optimizer = state.get("optimizer", {})  # none before the first step
    taken = {"model": state["model"], "optimizer": optimizer}
    restore_training_state(trainer.module, trainer.update.optimizer, taken)
    rounds.load({"start": {}, "momentum": state["momentum"], "arriving": {}, "error": {}})
    return state["step"], state["is_over"]


def _state(trainer: Trainer, rounds: ElasticRounds) -> dict[str, Any]:
    """Of the first worker, right after a round: what the workers agreed on are its parameters."""
    state = training_state(trainer.module, trainer.update.optimizer)
    return {**state, "momentum": rounds.state()["momentum"]}
