"""How much an elastic run may lose before it is over: by progress, not by count.

What was used of it stands in each generation's file, so a new leader goes on where the last one was
lost, and a loop of deaths ends whoever leads.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.elastic.generation import Generation

# Own deaths at one step, on other machines, that are the program's fault.
_MOST_DEATHS_AT_STEP = 3
_MOST_DEATHS_OF_NODE = 2


@dataclass
class Budget:
    """What was lost since the last finished step."""

    step: int = 0
    """The latest that was finished."""
    num_losses: int = 0
    """Times that a generation ended, with no step between them."""
    causes: dict[str, int] = field(default_factory=dict)
    """Node -> in how many of them a rank of its own died."""
    deaths: list[tuple[int, str]] = field(default_factory=list)
    """Own deaths of ranks: after which step, on which node."""
    in_vain: dict[str, int] = field(default_factory=dict)
    """Node -> how often in a row it was lost before a step was finished with it. Others may go on
    in between: a node that comes and dies again and again costs them a recovery each time."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Nodes that are taken in no more -> why."""

    @classmethod
    def of(cls, before: Generation | None) -> "Budget":
        """What is left to a generation that follows."""
        found = cls(**before.budget) if before is not None else cls()
        found.deaths = [(int(step), str(node)) for step, node in found.deaths]
        return found

    def stepped(self, step: int, nodes: Collection[str] = ()) -> None:
        """A step is finished, with these nodes."""
        if step > self.step:
            self.step, self.num_losses, self.causes = step, 0, {}
            self.in_vain = {name: n for name, n in self.in_vain.items() if name not in nodes}

    def died(self, node: str, step: int) -> None:
        """A rank died of its own, after this step."""
        self.deaths.append((step, node))

    def lost(self, nodes: Collection[str], gone: Collection[str] = ()) -> None:
        """A generation is over.

        Args:
            nodes: whose own ranks are the cause.
            gone: that were lost themselves, before a step was finished with them.
        """
        self.num_losses += 1
        self.causes = dict(Counter(self.causes) + Counter(nodes))
        self.in_vain = dict(Counter(self.in_vain) + Counter(gone))

    def repeated(self, restarts: int) -> dict[str, str]:
        """Nodes that are the cause again and again -> why they are left out.

        Args:
            restarts: `elastic.restarts`.
        """
        own = {
            name: f"its ranks died {count} times with no step between them"
            for name, count in self.causes.items()
            if count >= _MOST_DEATHS_OF_NODE
        }
        come_and_gone = {
            name: f"it was lost {count} times with no step finished with it, which are more than "
            f"elastic.restarts = {restarts}"
            for name, count in self.in_vain.items()
            if count > restarts
        }
        return own | come_and_gone

    def why_over(self, restarts: int, num_members: int) -> tuple[str, bool]:
        """Why the run is over, a sentence, and whether that is the program's own fault.

        Args:
            restarts: `elastic.restarts`.
            num_members: nodes that are there.

        Returns:
            "" where it goes on.
        """
        at = Counter(step for step, _ in self.deaths).most_common(1)
        if at and at[0][1] >= _MOST_DEATHS_AT_STEP:
            step, count = at[0]
            nodes = {node for of, node in self.deaths if of == step}
            if len(nodes) > 1 or num_members == 1:
                return f"{count} ranks died after step {step}: the program fails there.", True
        if self.num_losses > restarts:
            why = f"{self.num_losses} losses without a finished step between them are more than"
            return f"{why} elastic.restarts = {restarts}.", False
        return "", False
