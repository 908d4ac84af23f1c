"""The leader of a run: the agent that makes its generations.

It collects who is there, asks what to do (`elastic.decision`), claims the next number in the Run
directory, keeps the store where the ranks of this generation meet, and tells all. Then it watches
until something is lost, somebody comes whom it pays to take in, or the run is over. It holds no
state that others need: when it is lost, another agent leads from the newest generation's file.

Everything that happens comes through one queue, and is taken in one place (`_take`); what follows
is decided between two messages.

Not here: who leads (`elastic.agent`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.comm.rendezvous import hold_store
from paceline.config.errors import EXIT_LEFT_OUT, EXIT_SAVED
from paceline.config.job import Job, to_raw
from paceline.elastic.aside import aside
from paceline.elastic.budget import Budget
from paceline.elastic.decision import Choose, Decision, JobOn, Loss, LossClass, Situation
from paceline.elastic.events import EventLog
from paceline.elastic.generation import Generation, Node, newest_number
from paceline.elastic.verdict import Progress, judge
from paceline.elastic.wire import Channel, Message

FINISHED, FAILED, WRONG_INPUT = 0, 1, 2
SAVED, LEFT_OUT = EXIT_SAVED, EXIT_LEFT_OUT
"""Exit codes: all steps done; the program's own failure; wrong input; start me again; the run goes
on without this node."""

_NUM_STEP_TIMES = 15
# After the last message: until all have heard it.
_GOODBYE_S = 5.0
# Until the agent that leads is a member of its own.
_OWN_JOIN_S = 1.0
_CLAIMED = "generation {} was claimed by another agent"


class _LeadsNoMoreError(Exception):
    """Why; no text: it was asked to."""


@dataclass
class Member:
    """An agent that follows this leader."""

    node: Node
    channel: Channel
    ready: int
    """The newest generation that it has left, or never was in."""
    heard: float = field(default_factory=time.monotonic)
    progress: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Ending:
    """How a run ends."""

    state: str
    """finished, saved or failed."""
    exit_code: int
    text: str


class Leader:
    """One agent's time as the leader.

    Args:
        generations: the folder of them, in the Run directory.
        before: the newest, in which this agent was; None: the run begins.
        newest: number of the newest of all: those of earlier starts count.
        dead: nodes of `before` that are known to be gone.
        losses: for which this agent leads now.
        num_coming: nodes that this start has; None: not known, so as many as may train.
    """

    def __init__(
        self,
        me: Node,
        job: Job,
        generations: Path,
        before: Generation | None,
        newest: int,
        choose: Choose,
        job_on: JobOn,
        events: EventLog,
        say: Callable[[str], None],
        dead: frozenset[str] = frozenset(),
        losses: tuple[Loss, ...] = (),
        num_coming: int | None = None,
    ) -> None:
        self._num_coming = num_coming
        self._me, self._job, self._settings = me, job, job.elastic
        self._folder, self._choose, self._job_on = generations, choose, job_on
        self._events, self._say = events, say
        self.before, self.number = before, newest
        self.is_waiting = True
        """For nodes, and not training."""
        self._members: dict[str, Member] = {}
        self._took = time.monotonic()
        """When it took the last message."""
        self._inbox: asyncio.Queue[tuple[Member | None, Message | None]] = asyncio.Queue()
        self._store: Any = None
        self._losses = list(losses)
        """Not yet taken account of."""
        self._handled: list[Loss] = []
        """For which the next generation is made."""
        self._failures: list[str] = []
        self._offered_at: int | None = None
        """The step during which a node came that waits to be taken in."""
        self._known_dead = set(dead)
        self._budget = Budget.of(before)
        self._ending: Ending | None = None
        self._has_abdicated = False
        self._newest_of_others = 0
        self._stop: tuple[float | None] | None = None
        self._is_saving = ""
        self._asks_again = False
        """Whether a rank says that something is left to do, if only an evaluation."""
        self._step = 0
        self._stepped_at: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEP_TIMES)
        """Seconds of a step between messages: those that come at once after a stop say nothing."""
        self._seconds: dict[str, float] = {}
        self._noticed = self._claimed = time.monotonic()
        self._waiting_since = time.monotonic()
        self._done: set[int] = set()
        self._joined: dict[int, Message] = {}
        self._has_stepped = False
        self._lost_peer_at: float | None = None

    # ---- what agents call ----

    async def serve(self, channel: Channel, join: Message) -> None:
        """Have an agent as a member for as long as its channel lasts."""
        node = Node(**join["node"])
        twin = self._members.get(node.name)
        if twin is not None and twin.node.incarnation == node.incarnation:
            self._drop(twin, "dead")  # it has left, and is back before its end was seen
        if (refusal := self._refusal(node, join)) is not None:
            text, code = refusal
            self._event("refused", node=node.name, check=text)
            channel.send({"kind": "refused", "text": text, "exit_code": code})
            channel.close()
            return
        member = Member(node, channel, ready=self.number)  # who asks to come in has left
        self._step = max(self._step, join["step"])
        self._budget.stepped(join["step"], self._trained())
        self._members[node.name] = member
        channel.send({"kind": "welcome"})
        self._inbox.put_nowait((member, {"kind": "came", "stop": join.get("stop")}))
        while (message := await channel.receive()) is not None:
            member.heard = time.monotonic()
            self._inbox.put_nowait((member, message))
        self._inbox.put_nowait((member, None))

    async def run(self) -> Ending | None:
        """Lead until the run is over (how it ends), or another one leads (None)."""
        ticker = asyncio.ensure_future(self._tick())
        for loss in self._losses:
            self._tell_loss(loss)
        try:
            while self._ending is None:
                await self._next_generation()
            await self._say_end(self._ending)
            return self._ending
        except _LeadsNoMoreError as why:
            if text := str(why):
                self._say(f"{self._me.name} leads no more: {text}.")
            return None
        finally:
            ticker.cancel()
            self._store = None
            for member in self._members.values():
                member.channel.close()

    def abdicate(self) -> None:
        """Another one leads: `run` ends as soon as this one isn't training."""
        self._has_abdicated = True
        self._inbox.put_nowait((None, None))

    def lose_to(self, newest: int) -> None:
        """Lead no more where another agent has claimed a later generation than this one's."""
        if newest > self.number and not self.is_waiting:  # who waits may be claiming that one
            self._newest_of_others = newest
            self._inbox.put_nowait((None, None))

    # ---- one generation after the other ----

    async def _next_generation(self) -> None:
        """Make one and watch it until it is over."""
        await self._gather()
        if self._stop is not None and self.before is None:
            self._ending = Ending("saved", SAVED, "stopped before it began")
        if self._ending is not None:
            return
        if self._has_abdicated:
            raise _LeadsNoMoreError
        decision = await self._decide()
        if decision.action == "wait":
            limit_s = decision.look_again_s or self._wait_left_s()
            there = set(self._members)
            await self._until(
                lambda: set(self._members) != there or self._must_end() or self._has_abdicated,
                limit_s,
            )
        elif decision.action == "stop":
            await self._stop_with_checkpoint(decision)
        else:
            await self._train(decision)

    async def _train(self, decision: Decision) -> None:
        await self._make(decision)
        await self._watch()

    async def _gather(self) -> None:
        """Let all leave the generation before, and wait for who answers."""
        self.is_waiting, self._store = True, None
        self._send_all({"kind": "leave", "generation": self.number})
        before = {node.name for node in self.before.nodes} if self.before else set()

        def are_there() -> bool:
            is_ready = all(one.ready >= self.number for one in self._members.values())
            gone = self._known_dead | self._budget.left_out.keys()
            return is_ready and self._members.keys() | gone >= before

        if not await self._until(are_there, self._settings.heartbeat_s):
            for one in list(self._members.values()):
                if one.ready < self.number:
                    self._drop(one, "vanished")
        if self.before is not None and not self._is_majority(before):
            await self._until(lambda: before <= self._members.keys(), self._settings.heartbeat_s)
        self._handled += self._losses
        if self._losses:
            self._judge_run()
        self._losses = []

    def _is_majority(self, before: set[str]) -> bool:
        """Whether this side of a network that may be split has most of those who may live."""
        losses = (*self._losses, *self._handled)
        ended = {loss.node for loss in losses if loss.cause == "dead" and loss.rank is None}
        left = before - ended - self._budget.left_out.keys()
        return 2 * len(left & self._members.keys()) > len(left)

    async def _decide(self) -> Decision:
        began = time.monotonic()
        situation = self._situation()
        target = self._max_nodes + self._settings.spares
        if self._num_coming is not None:
            target = min(target, self._num_coming)
        may_wait = self._wait_left_s() > 0 or not situation.nodes  # this node joins at once
        if self.before is None and len(situation.nodes) < target and may_wait:
            return Decision("wait", look_again_s=max(_OWN_JOIN_S, self._wait_left_s()))
        decision = await aside(self._choose, situation)
        self._seconds["decide"] = time.monotonic() - began
        self._event(
            "decision",
            action=decision.action,
            options=[asdict(option) for option in decision.options],
            sentence=decision.sentence,
        )
        if decision.sentence:
            self._say(decision.sentence)
        return decision

    async def _stop_with_checkpoint(self, decision: Decision) -> None:
        """Too few are left: one more generation, of as many as can hold the state, saves it."""
        if self.before is not None and not self._is_saving:
            for count in range(min(len(self._members), self._max_nodes), 0, -1):
                job = await aside(self._job_on, count)
                if job is not None:
                    self._is_saving, self._stop = decision.sentence, (None,)
                    nodes = tuple(node.name for node in self._there()[:count])
                    await self._train(Decision("stop", nodes, job))
                    return
        text = f"{decision.sentence} Start it again when they are back."
        self._ending = Ending("saved", SAVED, text)

    async def _make(self, decision: Decision) -> None:
        """Claim the next generation and tell all."""
        if not set(decision.nodes) <= self._members.keys():
            return  # somebody was lost meanwhile; `_watch` sees it at once
        assert decision.job is not None, "a decision to go on says with which Job"
        self._store = await aside(hold_store, self._me.address, 0)
        active = [self._members[name].node for name in decision.nodes]
        spares = [node for node in self._there() if node.name not in decision.nodes]
        generation = Generation(
            number=self.number + 1,
            leader=self._me.name,
            nodes=(*active, *spares),
            num_active=len(active),
            job=to_raw(decision.job),
            store=(self._me.address, self._store.port),
            reason=self._reason(),
            time=time.time(),
            budget=asdict(self._budget),
        )
        generation = replace(generation, helpers=self._helpers(generation))
        try:
            has_claimed = await aside(generation.claim, self._folder)
        except OSError as error:
            self._ending = Ending(
                "saved",
                SAVED,
                f"{self._folder} can't be written ({error.strerror}): make room, start it again.",
            )
            return
        if not has_claimed:
            raise _LeadsNoMoreError(_CLAIMED.format(generation.number))
        self.number, self.before, self.is_waiting = generation.number, generation, False
        self._claimed = time.monotonic()
        # What was lost since all were asked is taken account of at once.
        self._losses = [loss for loss in self._losses if loss.node in decision.nodes]
        self._handled, self._failures, self._done, self._joined = [], [], set(), {}
        self._has_stepped, self._lost_peer_at, self._offered_at = False, None, None
        self._known_dead.clear()
        self._send_all({"kind": "generation", "generation": asdict(generation)})
        if self._stop is not None:
            self._send_all({"kind": "stop", "within_s": self._stop[0]})
        self._event(
            "generation",
            nodes=[node.name for node in generation.nodes],
            num_active=generation.num_active,
            num_ranks=generation.num_ranks,
            layout=decision.job.layout.summary,
            leader=generation.leader,
            reason=generation.reason,
        )

    async def _watch(self) -> None:
        """Until something is lost, somebody is taken in or the run is over."""
        if self._ending is not None or self.is_waiting:
            return
        while not self._must_end() and not self._losses:
            await self._until(
                lambda: self._must_end() or bool(self._losses) or self._may_take_in(),
                float("inf"),
            )
            if self._losses or self._must_end():
                continue
            self._offered_at = None
            decision = await aside(self._choose, self._situation())
            assert self.before is not None
            active = tuple(node.name for node in self.before.active)
            if decision.job is not None and decision.nodes != active:
                self._noticed = time.monotonic()
                return
        if self.before is not None and len(self._done) >= self.before.num_ranks:
            self._end_done()

    def _may_take_in(self) -> bool:
        """Whether a node that came is taken in now. Workers of local updates go on from their last
        round then, so they do one more first: hardly a step is done again."""
        if self._offered_at is None or not self._has_stepped:
            return False
        local, every = self._job.comm.local, self._job.comm.local.round_steps
        # A round counts once the step after it is done: then all of a worker's ranks have kept it.
        ended = max(self._step - 1, 0) // every
        return local.method == "none" or ended > self._offered_at // every

    def _must_end(self) -> bool:
        all_done = self.before is not None and len(self._done) >= self.before.num_ranks
        stopped = self._stop is not None and self.before is None
        return self._ending is not None or all_done or stopped

    def _end_done(self) -> None:
        if self._ending is not None:
            return
        # Ranks ask for it by themselves where the Run's stop file told them.
        is_cut = self._stop is not None and self._step < self._job.train.steps
        if self._asks_again or is_cut:
            why = self._is_saving or "stopped as it was asked to"
            self._ending = Ending("saved", SAVED, f"{why} after step {self._step}")
        else:
            self._ending = Ending("finished", FINISHED, "")

    async def _say_end(self, ending: Ending) -> None:
        self._event("end", state=ending.state, exit_code=ending.exit_code)
        self._send_all({"kind": "end", **asdict(ending)})
        await self._until(lambda: not self._members, _GOODBYE_S)

    # ---- what happens ----

    async def _until(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Take what happens until something is so; False: it wasn't in time."""
        end = time.monotonic() + limit_s
        while not is_so():
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            try:
                got = await asyncio.wait_for(
                    self._inbox.get(), None if left_s == float("inf") else left_s
                )
            except TimeoutError:
                continue
            await self._leads_after_sleep()
            if self._newest_of_others > self.number:
                raise _LeadsNoMoreError(_CLAIMED.format(self._newest_of_others))
            self._take(*got)
        return True

    async def _leads_after_sleep(self) -> None:
        """Where this process was stopped, others may have gone on: it says nothing more of them."""
        before, self._took = self._took, time.monotonic()
        if self._took - before > self._settings.heartbeat_s:  # at least a tick comes in between
            number = await aside(newest_number, self._folder)
            if number > self.number:
                raise _LeadsNoMoreError(_CLAIMED.format(number))

    def _take(self, member: Member | None, message: Message | None) -> None:
        if member is None:
            self._look()
            return
        if self._members.get(member.node.name) is not member:
            return  # of one that was lost
        if message is None:
            self._drop(member, "dead")
            return
        match message["kind"]:
            case "came":
                self._on_came(member, message)
            case "beat":
                member.progress = message["ranks"]
            case "ready":
                member.ready = max(member.ready, message["generation"])
            case "lost_rank":
                self._on_lost_rank(member, message)
            case "rank":
                self._on_rank(member, message["rank"], message["message"])
            case "stop":
                self._on_stop(member, message["within_s"], message["source"])

    def _on_came(self, member: Member, message: Message) -> None:
        self._known_dead.discard(member.node.name)
        if not self.is_waiting:
            if self._offered_at is None:
                self._offered_at = self._step
            self._event("admitted", node=member.node.name, check="passed")
        if message["stop"] is not None:
            self._on_stop(member, message["stop"][0], "")

    def _on_stop(self, member: Member, within_s: float | None, source: str) -> None:
        if self._stop is None:
            self._stop = (within_s,)
            self._event("notice", node=member.node.name, within_s=within_s, source=source)
            self._send_all({"kind": "stop", "within_s": within_s})

    def _on_lost_rank(self, member: Member, message: Message) -> None:
        rank, node = message["rank"], member.node.name
        if self.before is None or self.is_waiting:
            return
        if rank not in self.before.ranks_of(node) and not self._is_helping(rank):
            return  # it has no place: started again, nothing is lost
        if message["generation"] != self.number or rank in self._done:
            return
        failure = message["failure"]
        if failure is not None:
            self._failures.append(failure["text"])
        if not message["outside"]:
            self._budget.died(node, message["step"])
        self._add_loss(Loss(node, rank, message["cause"], message["sentence"]))

    def _on_rank(self, member: Member, rank: int | None, message: Message) -> None:
        kind, number = message["kind"], message.get("generation")
        if kind == "failed":
            failure = message["failure"]
            if failure["kind"] in ("input", "run") and self._ending is None:
                code = WRONG_INPUT if failure["kind"] == "input" else FAILED
                self._ending = Ending("failed", code, failure["text"])
            return
        if number != self.number or rank is None:
            return
        if kind == "stepped":
            self._on_stepped(message["step"])
        elif kind == "joined":
            self._on_joined(rank, message)
        elif kind == "done":
            self._done.add(rank)
            self._asks_again |= message.get("asks_again", False)
            self._step = max(self._step, message["step"])
        elif kind == "lost" and self._lost_peer_at is None:
            self._lost_peer_at = time.monotonic()
        elif kind in ("saved", "spike", "audit"):
            fields = {k: v for k, v in message.items() if k not in ("kind", "generation")}
            self._event(kind, node=member.node.name, **fields)
        elif kind == "slow":
            self._on_slow(member, rank, message)

    def _on_slow(self, member: Member, rank: int, message: Message) -> None:
        loss = Loss(member.node.name, rank, "slow", message["text"])
        assert self.before is not None
        if self._settings.replace_slow and len(self._members) > self.before.num_active:
            why = loss.sentence.rstrip(".")
            self._budget.left_out[loss.node] = f"{loss.node} is replaced: {why}"
            self._tell_left_out(loss.node)
            self._add_loss(loss)
        else:
            self._tell_loss(loss)

    def _on_stepped(self, step: int) -> None:
        now = time.monotonic()
        if self._has_stepped and step < self._step:
            return  # a worker of local updates that has yet to reach the others
        if self._has_stepped and self._stepped_at is not None and step > self._step:
            self._steps_s.append((now - self._stepped_at) / (step - self._step))
        self._step, self._stepped_at = step, now
        self._budget.stepped(step, self._trained())
        if not self._has_stepped:
            self._has_stepped = True
            self._seconds["first_step"] = now - self._noticed
            self._event("first_step", step=step, seconds=round(now - self._noticed, 4))

    def _on_joined(self, rank: int, message: Message) -> None:
        self._joined[rank] = message
        self._step = max(self._step, message["step"])
        assert self.before is not None
        if len(self._joined) < self.before.num_ranks:
            return
        all_of = list(self._joined.values())
        kinds = sorted({key for one in all_of for key in one.get("seconds", {})})
        seconds = {key: max(one["seconds"].get(key, 0.0) for one in all_of) for key in kinds}
        seconds |= {"start": time.monotonic() - self._claimed}
        seconds["decide"] = self._seconds.get("decide", 0.0)
        seconds["notice"] = self._seconds.get("notice", 0.0)
        self._seconds |= seconds
        last = ("start", "live", "own", "buddy", "disk")
        self._event(
            "recovered",
            step=message["step"],
            source=max((one.get("source", "start") for one in all_of), key=last.index),
            recomputed=max(one.get("recomputed", 0) for one in all_of),
            bytes=sum(one.get("bytes", 0) for one in all_of),
            seconds={key: round(value, 4) for key, value in seconds.items()},
        )

    # ---- losses ----

    def _drop(self, member: Member, cause: LossClass) -> None:
        """An agent is lost, with all ranks of its node."""
        name = member.node.name
        del self._members[name]
        member.channel.close(at_once=True)
        self._known_dead.add(name)
        if self._ending is not None or self.before is None:
            return
        silent_s = time.monotonic() - member.heard
        how = f"is silent since {silent_s:.1f} s" if cause == "vanished" else "ended, or left"
        loss = Loss(name, None, cause, f"the agent of {name} {how}.")
        ranks = self.before.ranks_of(name)
        helps = any(node == name for node, _ in self.before.helpers)
        helps = helps and self._is_helping(self.before.num_ranks)
        if self.is_waiting or helps or (ranks and not self._done.issuperset(ranks)):
            self._seconds["notice"] = silent_s if cause == "vanished" else 0.0
            self._add_loss(loss)
        else:
            self._tell_loss(loss)

    def _add_loss(self, loss: Loss) -> None:
        if not self._losses and not self.is_waiting:
            self._noticed = self._waiting_since = time.monotonic()
        self._losses.append(loss)
        self._tell_loss(loss)

    def _tell_loss(self, loss: Loss) -> None:
        self._say(loss.sentence)
        nodes = self.before.nodes if self.before is not None else ()
        host = next((node.address for node in nodes if node.name == loss.node), None)
        fields = {"node": loss.node, "rank": loss.rank, "host": host, "class": loss.cause}
        self._event("lost", **fields, sentence=loss.sentence)

    def _judge_run(self) -> None:
        """After a loss: is it worth going on, and with whom?"""
        own = {loss.node for loss in self._losses if loss.rank is not None}
        assert self.before is not None, "before the first generation nothing is lost"
        gone = self._trained() - self._members.keys()
        has_stepped = self._budget.step > self.before.budget.get("step", 0)
        self._budget.lost(own, () if has_stepped else gone)
        text = self._failures[0] if self._failures else ""
        why, is_failure = self._budget.why_over(self._settings.restarts, len(self._members))
        if not why:
            self._leave_out()
        elif is_failure or text:
            self._ending = Ending("failed", FAILED, f"{text}\n{why}" if text else why)
        else:
            self._ending = Ending("saved", SAVED, f"{why} Look at events.jsonl, start it again")

    def _leave_out(self) -> None:
        """Part from nodes that are the cause again and again, where others are enough."""
        left_out = self._budget.left_out
        for name, why in self._budget.repeated(self._settings.restarts).items():
            is_enough = len(self._members.keys() - {name}) >= self._settings.min_nodes
            if is_enough and name not in left_out:
                left_out[name] = f"{name} is left out: {why}"
                self._tell_left_out(name)
        for name in left_out.keys() & self._members.keys():
            member = self._members.pop(name)
            member.channel.send({"kind": "refused", "text": left_out[name], "exit_code": LEFT_OUT})
            member.channel.close()

    def _tell_left_out(self, name: str) -> None:
        text = self._budget.left_out[name]
        self._event("left_out", node=name, why=text)
        self._say(f"{text}.")

    async def _tick(self) -> None:
        period_s = self._settings.heartbeat_s / 4
        last = time.monotonic()
        while True:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            if now - last > period_s + self._settings.heartbeat_s / 2:
                # It is this process that was stopped, or this machine that slept.
                for member in self._members.values():
                    member.heard = now
            last = now
            self._send_all({"kind": "beat"})
            self._inbox.put_nowait((None, None))

    def _look(self) -> None:
        """Now and then: who is silent, and who holds up the others?"""
        now = time.monotonic()
        for member in list(self._members.values()):
            if now - member.heard > self._settings.heartbeat_s:
                self._drop(member, "vanished")
        if self.before is None or self.is_waiting or self._losses:
            return
        if self._lost_peer_at is not None and now - self._lost_peer_at > (
            self._settings.heartbeat_s + 0.5
        ):
            # A collective failed, and all processes live: the links between them.
            text = "a collective failed though every rank lives: the links between them fail."
            self._add_loss(Loss(self.before.active[0].name, None, "vanished", text))
            return
        reports = [
            report
            for member in self._members.values()
            for raw in member.progress
            # Who is done has left the generation, and waits for nobody.
            if (report := _report(raw, member)) is not None
            and report.rank not in self._done
            and self._is_place_of(member, report.rank)
        ]
        verdict = judge(reports, self.number, now - self._claimed)
        if verdict is None:
            return
        if verdict.rank is None:
            if len(reports) + len(self._done) < self.before.num_ranks:
                return  # they wait for one that is still to begin; its agent has an eye on it
            self._add_loss(Loss(self.before.active[0].name, None, verdict.cause, verdict.sentence))
            return
        if (place := self.before.place_of(verdict.rank)) is not None:
            node, local_rank = place
            fields = {"cause": verdict.cause, "sentence": verdict.sentence}
            kill = {"kind": "kill", "local_rank": local_rank, **fields}
            self._members[node].channel.send(kill)

    # ---- what is known ----

    def _is_place_of(self, member: Member, number: int) -> bool:
        """Whether a process of a member has this number now; what it last said may be older."""
        place = self.before.place_of(number) if self.before is not None else None
        return place is not None and place[0] == member.node.name

    @property
    def _max_nodes(self) -> int:
        return self._settings.max_nodes or self._job.cluster.num_nodes

    def _trained(self) -> set[str]:
        """Nodes of the generation before that had ranks in it."""
        return {node.name for node in self.before.active} if self.before is not None else set()

    def _there(self) -> list[Node]:
        """Those of the generation before in its order, then others by name."""
        before = [node.name for node in self.before.nodes] if self.before else []
        place = {name: at for at, name in enumerate(before)}
        nodes = [member.node for member in self._members.values()]
        return sorted(nodes, key=lambda node: (place.get(node.name, len(place)), node.name))

    def _wait_left_s(self) -> float:
        return self._settings.wait_s - (time.monotonic() - self._waiting_since)

    def _situation(self) -> Situation:
        return Situation(
            before=self.before,
            nodes=tuple(self._there()),
            losses=tuple(self._handled),
            min_nodes=self._settings.min_nodes,
            max_nodes=self._max_nodes,
            waited_s=time.monotonic() - self._waiting_since,
            wait_s=self._settings.wait_s,
            step=self._step,
            steps_left=max(0, self._job.train.steps - self._step),
            step_s=median(self._steps_s) if self._steps_s else None,
            seconds=dict(self._seconds),
        )

    def _helpers(self, generation: Generation) -> tuple[tuple[str, int], ...]:
        """Processes that trained, or held state, until now and get no rank in what comes."""
        if self.before is None:
            return ()
        trained = [
            (node.name, local_rank)
            for node in self.before.active
            for local_rank in range(len(self.before.ranks_of(node.name)))
        ]
        return tuple(
            (name, local_rank)
            for name, local_rank in dict.fromkeys([*trained, *self.before.helpers])
            if name in self._members and local_rank >= len(generation.ranks_of(name))
        )

    def _is_helping(self, rank: int | None) -> bool:
        """Whether ranks still wait for what a process hands over."""
        assert self.before is not None
        is_helper = rank is not None and rank >= self.before.num_ranks
        return is_helper and len(self._joined) < self.before.num_ranks

    def _reason(self) -> str:
        if self.before is None:
            return "start"
        return " ".join(loss.sentence for loss in self._handled) or "a node came"

    def _refusal(self, node: Node, join: Message) -> tuple[str, int] | None:
        if node.name in self._budget.left_out:
            return self._budget.left_out[node.name], LEFT_OUT
        if (text := join.get("check")) is not None:
            return f"{node.name} is not taken in: {text}", LEFT_OUT
        twin = self._members.get(node.name)
        if twin is not None and twin.node.incarnation != node.incarnation:
            return (
                f"another agent for the node {node.name} is in this run: stop it, or give this "
                "machine another name by PACELINE_NODE",
                WRONG_INPUT,
            )
        return None

    def _send_all(self, message: Message) -> None:
        for member in list(self._members.values()):
            member.channel.send(message)

    def _event(self, event: str, **fields: Any) -> None:
        self._events.add(event, self.number, **fields)


def _report(raw: Message, member: Member) -> Progress | None:
    try:
        return Progress(
            rank=raw["rank"],
            host=member.node.name,
            generation=raw["generation"],
            step=raw["step"],
            section=raw["section"],
            since_s=raw["since_s"] + raw["ago_s"],
            limit_s=raw["limit_s"],
            place=raw["place"],
            is_waiting=raw["is_waiting"],
            calls={name: (count, names) for name, (count, names) in raw["calls"].items()},
        )
    except (KeyError, TypeError, ValueError):
        return None
