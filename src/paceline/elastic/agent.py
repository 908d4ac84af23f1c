"""The agent of a node: what `paceline train` is where a run is elastic.

It keeps this node's ranks (`elastic.local_ranks`) and follows the leader, which is one of the
agents (`elastic.leader`). Agents find each other through the Run directory, runs/<name>/agents: a
file each. Where nobody leads, they ask around: the first of those who were in the newest
generation, in its order, leads. That is no election that has to be right: who leads is who claims
the next generation's file, which only one can.

- Members and leader send each other signs of life. A connection that closes is a loss at once,
  silence for `elastic.heartbeat_s` as well. Clocks that jump don't matter (all are monotonic), and
  who was stopped itself for a while blames nobody.
- A side of a split network that isn't most of the generation waits one heartbeat more before it
  claims. Who has lost a claim follows the winner, or asks until it hears it.
- An agent that was in none of the newest generation's life may claim the next only where that one's
  leader is gone: its file is taken away, belongs to another start, or is renewed no more.

Exit codes: 0 all steps are done; 75 saved, or resumable from its checkpoints: start it again; 69
the run goes on without this node; 1 the program failed; 2 wrong input.
"""

import asyncio
import json
import os
import re
import socket
import time
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import psutil
from filelock import FileLock, Timeout

from paceline.comm.rank_env import Ranks
from paceline.comm.rendezvous import LOOPBACK, own_address
from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.elastic.aside import aside
from paceline.elastic.check_node import Check, NeighbourGoneError, no_check
from paceline.elastic.decision import Choose, JobOn, Loss
from paceline.elastic.events import EventLog
from paceline.elastic.generation import (
    Generation,
    Node,
    generation_of,
    newest_number,
    read_generation,
)
from paceline.elastic.leader import FAILED, FINISHED, SAVED, Leader
from paceline.elastic.local_ranks import LocalRanks, StartRank
from paceline.elastic.signals import SignalListener, asking
from paceline.elastic.wire import (
    Channel,
    Listener,
    Message,
    StreamChannel,
    channels_here,
    dial,
    secret_of,
)
from paceline.observe.locks import is_held
from paceline.observe.run import Run, write_atomic

NODE, ADDRESS = "PACELINE_NODE", "PACELINE_ADDRESS"
"""The variables that name this node, and the address at which other nodes reach it."""
NUM_NODES = "PACELINE_NUM_NODES"
"""How many nodes this start has, where a scheduler gave fewer than the Job has: nobody waits for
more."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIAL_S = 0.5
_ASK_AGAIN_S = 0.02
_ASK_AGAIN_LATER_S = 0.2
# A leader's file is renewed every heartbeat; disks that nodes share may show it late.
_DEAD_AFTER_HEARTBEATS = 5
_GRACE_S = 10.0
_ENDS = (FINISHED, SAVED)
_AGAIN_S = 1.0
_STOPPED_AT_ONCE = 130
_TWIN_PATIENCE_S = 2.0
# Of a check's transfer with a member: its time, and what is on its way at once.
_ECHO_S, _ECHO_BYTES = 10.0, 1 << 20
# Of a process that waits for the agent: between looks, and until one it can't see is given up.
_LOOK_S, _GONE_S = 0.5, 300.0
# A process with one's number that began at another time is another one; the kernel rounds.
_SAME_S = 2.0


def run_agent(
    run: Run,
    job: Job,
    start_rank: StartRank,
    choose: Choose,
    job_on: JobOn,
    say: Callable[[str], None],
    check: Check = no_check,
) -> int:
    """Be this node's agent until the run is over.

    Args:
        job: concrete, of a cluster of any size; its `elastic` holds.
        start_rank: starts a process that makes a `RankLink`, in a session of its own.
        choose: what to do after a loss or a return.
        job_on: the best Job on so many nodes.
        say: takes sentences for a person.
        check: of this machine, before it asks to be taken in.

    Returns:
        the exit code.

    Raises:
        InputError: an agent of this name runs already, or no address leads here.
    """
    num_coming()  # what can be refused is refused before anything starts
    agent = Agent(run, job, start_rank, choose, job_on, say, check)
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(agent.run())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_AGAIN_S))
        loop.close()


def node_name() -> str:
    """Of this node: PACELINE_NODE, Slurm's, or the host's.

    Raises:
        InputError: it can't be the name of a file.
    """
    env = os.environ
    name = env.get(NODE) or env.get("SLURMD_NODENAME") or socket.gethostname()
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{NODE} = {name!r} is no name of a node: use letters, digits, '.', '_' and '-'."
        )
    return name


def listen_address(job: Job) -> str:
    """Where this node's agent is reached: loopback where no other node belongs to the run.

    Raises:
        InputError: this host's name leads to no address that other nodes can reach.
    """
    if address := os.environ.get(ADDRESS):
        return address
    elastic = job.elastic
    if max(job.cluster.num_nodes, elastic.max_nodes, elastic.min_nodes) + elastic.spares == 1:
        return LOOPBACK
    return own_address(Ranks(world_size=2, local_world_size=1))


def num_coming() -> int | None:
    """How many nodes this start has; None: nobody says.

    Raises:
        InputError: what PACELINE_NUM_NODES says is no number of nodes.
    """
    given = os.environ.get(NUM_NODES)
    if given is None:
        return None
    if not given.isdecimal() or int(given) == 0:
        raise InputError(f"{NUM_NODES} = {given!r} is no number of nodes: set it to 1 or more.")
    return int(given)


class _Answer(NamedTuple):
    """What another agent says when it is asked who leads."""

    node: Node
    leads: bool
    generation: int
    follows: str | None


class Agent:
    """See `run_agent`."""

    def __init__(
        self,
        run: Run,
        job: Job,
        start_rank: StartRank,
        choose: Choose,
        job_on: JobOn,
        say: Callable[[str], None],
        check: Check,
    ) -> None:
        self._run, self._job, self._say, self._check = run, job, say, check
        self._choose, self._job_on = choose, job_on
        self._heartbeat_s = job.elastic.heartbeat_s
        self._agents, self._generations = run.path / "agents", run.path / "generations"
        self._name = node_name()
        self._me = Node(self._name, uuid4().hex, "", 0, job.cluster.devices_per_node)
        self._ranks = LocalRanks(
            self._name,
            job.cluster.devices_per_node,
            start_rank,
            self._tell,
            self._give_up,
            self._heartbeat_s,
        )
        self._events = EventLog(run, say)
        self._secret = b""
        self._newest: Generation | None = None
        """The newest generation that this agent was told of."""
        self._leader: Leader | None = None
        self._leading: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._follows: Node | None = None
        self._heard = 0.0
        self._lost: Loss | None = None
        """The leader, while nobody else leads."""
        self._refused: set[str] = set()
        """Nodes whose host lives, and whose agent does not."""
        self._stop: tuple[float | None] | None = None
        self._first_signal: float | None = None
        self._sentence: str | None = None
        self._exit_code: int | None = None
        self._text = ""
        self._changed = asyncio.Event()
        self._sign: tuple[int, int, float] = (0, 0, 0.0)
        """Of the newest generation's leader: its number, its last renewal, seen when."""

    async def run(self) -> int:
        """Follow whoever leads, or lead, until the run is over."""
        listener = await self._open()
        try:
            while self._exit_code is None:
                channel = await self._seek()
                if channel is not None:
                    await self._follow(channel)
            await self._ranks.end(_GRACE_S if self._exit_code in _ENDS else 0.0)
            if self._leading is not None:
                await self._leading
            if self._text:
                self._say(self._text)
            return self._exit_code
        finally:
            self._ranks.kill_all()
            listener.close()
            self._signals.close()
            self._events.close()
            self._sign_off()

    # ---- begin and end ----

    async def _open(self) -> Listener:
        self._secret = secret_of(self._agents)
        self._lock = FileLock(self._agents / f"{self._name}.lock", timeout=_TWIN_PATIENCE_S)
        try:
            self._lock.acquire()
        except Timeout:
            raise InputError(
                f"another agent for the node {self._name} runs here: stop it, or give this one "
                f"another name by {NODE}."
            ) from None
        self._loop = asyncio.get_running_loop()

        def hear(name: str) -> None:
            self._loop.call_soon_threadsafe(self._on_signal, name)

        self._signals = SignalListener(asking(self._job.elastic), hear)
        listener = Listener(self._secret, self._on_channel)
        address = listen_address(self._job)
        try:
            port = await listener.open(address)
        except OSError as error:
            raise InputError(
                f"{address} is no address of this host ({error.strerror}): set {ADDRESS} to one "
                "at which other nodes reach it."
            ) from None
        self._me = Node(**{**asdict(self._me), "address": address, "port": port})
        await self._ranks.open()
        self._sentence = await aside(self._check, self._me, self._transfer)
        own = {**asdict(self._me), "pid": os.getpid(), "host": socket.gethostname()}
        own |= {"began_s": _began_s(psutil.Process())}
        write_atomic(self._file, json.dumps(own))
        return listener

    def _transfer(self, block: bytes) -> bytes:
        """For the check, in its thread: some member sends a block back."""
        return asyncio.run_coroutine_threadsafe(self._echoed(block), self._loop).result()

    async def _echoed(self, block: bytes) -> bytes:
        answers = await self._ask_around()
        members = sorted(answers, key=lambda one: (one.leads, one.node.name))  # others have time
        for node in [one.node for one in members if one.follows is not None][:1]:
            try:
                async with asyncio.timeout(_ECHO_S):
                    return await self._echo(node, block)
            except OSError:  # a time-out as well
                if await self._ask(node) is not None:
                    raise
        raise NeighbourGoneError

    async def _echo(self, node: Node, block: bytes) -> bytes:
        channel = await dial(node.address, node.port, self._secret, _ECHO_S)
        parts = [block[at : at + _ECHO_BYTES] for at in range(0, len(block), _ECHO_BYTES)]
        came_back = []
        try:
            channel.send({"kind": "echo"})
            for part in parts:
                channel.send({"kind": "part", "data": b64encode(part).decode()})
                if (said := await channel.receive()) is None:
                    raise ConnectionError("the connection was closed")
                came_back.append(b64decode(said["data"]))
        finally:
            channel.close()
        return b"".join(came_back)

    @property
    def _file(self) -> Path:
        return self._agents / f"{self._name}.json"

    def _sign_off(self) -> None:
        with suppress(OSError):
            end = {"incarnation": self._me.incarnation, "launch": _launch()}
            told = json.dumps({**end, "exit_code": self._exit_code})
            write_atomic(self._agents / f"{self._name}.end", told)
            self._file.unlink(missing_ok=True)
        self._lock.release()

    def _on_signal(self, name: str) -> None:
        if self._first_signal is None:
            self._first_signal = time.monotonic()
            self._say("stopping with a checkpoint (Ctrl-C again: at once)")
            self._stop = (self._job.elastic.save_within_s,)
            self._tell({"kind": "stop", "within_s": self._stop[0], "source": name})
            self._changed.set()
        elif name == "SIGINT" and time.monotonic() - self._first_signal > _AGAIN_S:
            self._ranks.kill_all()
            os._exit(_STOPPED_AT_ONCE)

    def _give_up(self, sentence: str) -> None:
        """This node's ranks can't begin, or it can't lead."""
        self._text, self._exit_code = sentence, FAILED
        if self._channel is not None:
            self._channel.close()
        self._changed.set()

    def _tell(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    # ---- follow ----

    async def _follow(self, channel: Channel) -> None:
        """Do what the leader says until it, or the run, is gone."""
        self._channel, self._heard = channel, time.monotonic()
        steps = [one["step"] for one in self._ranks.progress()]
        join = {"kind": "join", "node": asdict(self._me), "generation": self._number}
        join |= {"step": max(steps, default=0), "check": self._sentence, "stop": self._stop}
        channel.send(join)
        beats = asyncio.ensure_future(self._beat(channel))
        try:
            while (message := await channel.receive()) is not None:
                self._heard = time.monotonic()
                await self._obey(message)
                if self._exit_code is not None:
                    return
        finally:
            beats.cancel()
            channel.close()
            self._channel = None
        self._ranks.leave(self._number)
        if self._follows is not None and self._follows.name != self._name:
            silent_s = time.monotonic() - self._heard
            cause = "vanished" if silent_s > self._heartbeat_s / 2 else "dead"
            how = f"is silent since {silent_s:.1f} s" if cause == "vanished" else "ended, or left"
            name = self._follows.name
            self._lost = Loss(name, None, cause, f"the agent of {name}, which led, {how}.")  # type: ignore[arg-type]
        self._follows = None

    async def _obey(self, message: Message) -> None:
        match message["kind"]:
            case "leave":
                self._ranks.leave(message["generation"])
                self._tell({"kind": "ready", "generation": message["generation"]})
            case "generation":
                self._newest = generation_of(message["generation"])
                self._lost, self._refused = None, set()
                self._ranks.enter(self._newest)
            case "kill":
                self._ranks.kill(message["local_rank"], message["cause"], message["sentence"])
            case "stop":
                self._stop = (message["within_s"],)
                self._ranks.stop(message["within_s"])
            case "refused" | "end":
                self._exit_code, self._text = message["exit_code"], message["text"]

    async def _beat(self, channel: Channel) -> None:
        """Signs of life, both ways."""
        period_s, last = self._heartbeat_s / 4, time.monotonic()
        while True:
            now = time.monotonic()
            if now - last > period_s + self._heartbeat_s / 2:
                self._heard = now  # it is this process that was stopped
                self._ranks.forgive()
            last = now
            channel.send({"kind": "beat", "ranks": self._ranks.progress()})
            if now - self._heard > self._heartbeat_s:
                channel.close(at_once=True)
            if self._leader is not None and not self._leader.is_waiting:
                await aside(self._renew, self._leader)
            await asyncio.sleep(period_s)

    def _renew(self, leader: Leader) -> None:
        """Show the others that the leader of this generation lives, and see whether one claimed a
        later one: a disk that shows files late may have told it that nobody renews this one."""
        with suppress(OSError):
            os.utime(self._generations / f"{leader.number}.json")
            newest = newest_number(self._generations)
            self._loop.call_soon_threadsafe(leader.lose_to, newest)

    @property
    def _number(self) -> int:
        return self._newest.number if self._newest is not None else 0

    # ---- lead, or find who does ----

    async def _seek(self) -> Channel | None:
        """A channel to the leader, who may be this agent; None: look at the exit code."""
        began = time.monotonic()
        while self._exit_code is None:
            # A leader that was silent isn't waited for at first, but it may come back.
            is_new = time.monotonic() - began < self._heartbeat_s
            was_silent = self._lost is not None and self._lost.cause == "vanished"
            skipped = self._lost.node if self._lost and was_silent and is_new else None
            answers = await self._ask_around(skipped)
            leading = [one for one in answers if one.leads]
            for one in sorted(leading, key=lambda one: -one.generation):
                with suppress(OSError):
                    channel = await dial(
                        one.node.address, one.node.port, self._secret, self._heartbeat_s
                    )
                    self._follows = one.node
                    return channel
            if not leading and (code := await aside(self._code_of_run)) is not None:
                self._exit_code = code
                self._text = f"the run went on without {self._name}, and has ended."
            elif not leading:
                over = await self._may_lead_after(answers, time.monotonic() - began)
                if over is not None:
                    return self._lead(over)
            waited_s = time.monotonic() - began
            if self._stop is not None and self._newest is None:
                self._text, self._exit_code = "stopped before it began", SAVED
            if waited_s > max(self._job.elastic.wait_s, 3 * self._heartbeat_s):
                self._exit_code = SAVED
                self._text = (
                    f"{self._name} found nobody who leads within {waited_s:.0f} s: start it again "
                    "when the links to the others are up."
                )
            self._changed.clear()
            pause_s = _ASK_AGAIN_S if waited_s < 1 else _ASK_AGAIN_LATER_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause_s)
        return None

    async def _ask_around(self, skipped: str | None = None) -> list[_Answer]:
        """What all other agents say that can be reached."""
        known = {node.name: node for node in self._newest.nodes} if self._newest else {}
        known |= await aside(self._in_directory)
        for name in (self._name, skipped):
            known.pop(name or "", None)
        self._refused &= known.keys()
        answers = await asyncio.gather(*(self._ask(node) for node in known.values()))
        return [one for one in answers if one is not None]

    def _in_directory(self) -> dict[str, Node]:
        found = {}
        for file in self._agents.glob("*.json"):
            with suppress(OSError, ValueError, TypeError, KeyError):
                raw = json.loads(file.read_text())
                node = Node(**{name: raw[name] for name in asdict(self._me)})
                found[node.name] = node
        return found

    async def _ask(self, node: Node) -> _Answer | None:
        try:
            channel = await dial(node.address, node.port, self._secret, _DIAL_S)
        except ConnectionRefusedError:
            self._refused.add(node.name)
            return None
        except OSError:
            return None
        try:
            channel.send({"kind": "who"})
            async with asyncio.timeout(_DIAL_S):
                said = await channel.receive()
            if said is None:
                return None
            return _Answer(Node(**said["node"]), said["leads"], said["generation"], said["follows"])
        except (TimeoutError, KeyError, TypeError):
            return None
        finally:
            channel.close()

    async def _may_lead_after(self, answers: list[_Answer], waited_s: float) -> int | None:
        """The generation that is over, where it is this agent's turn to make the next."""
        order = [node.name for node in self._newest.nodes] if self._newest else []
        place = {name: at for at, name in enumerate(order)}

        def turn(name: str, generation: int) -> tuple[int, int, str]:
            return -generation, place.get(name, len(place)), name

        mine = turn(self._name, self._number)
        if any(turn(one.node.name, one.generation) < mine for one in answers):
            return None
        gone = {self._lost.node} if self._lost is not None else set()
        if any(one.follows not in (None, self._name, *gone) for one in answers):
            return None  # others hear a leader that this agent doesn't
        if order:
            there = {one.node.name for one in answers} | {self._name}
            left = set(order) - self._refused
            is_most = 2 * len(there & left) > len(left)
            if not is_most and waited_s < self._heartbeat_s:
                return None
        return await aside(self._newest_is_over)

    def _code_of_run(self) -> int | None:
        """As which the run ended that went on without this agent; None: it hasn't, or not well."""
        if self._newest is None:
            return None
        with suppress(OSError, ValueError, KeyError, InputError):
            number = newest_number(self._generations)
            if number > self._number:
                leads = read_generation(self._generations, number)
                said = json.loads((self._agents / f"{leads.leader}.end").read_text())
                leader = next(node for node in leads.nodes if node.name == leads.leader)
                if said["incarnation"] == leader.incarnation and said["exit_code"] in _ENDS:
                    return int(said["exit_code"])
        return None

    def _newest_is_over(self) -> int | None:
        """The newest generation, where it is this agent's or its leader is gone for good."""
        try:
            newest = newest_number(self._generations)
            if newest <= self._number:
                return self._number
            leads = read_generation(self._generations, newest)
            renewed = (self._generations / f"{newest}.json").stat().st_mtime_ns
            leader = next(node for node in leads.nodes if node.name == leads.leader)
            now = self._in_directory().get(leader.name)
            if now is None or now.incarnation != leader.incarnation:
                return newest
            if self._is_gone_here(leader.name):
                return newest
        except (OSError, InputError, StopIteration):
            return None
        number, last, seen = self._sign
        if (number, last) != (newest, renewed):
            self._sign = newest, renewed, time.monotonic()
            return None
        is_dead = time.monotonic() - seen > _DEAD_AFTER_HEARTBEATS * self._heartbeat_s
        return newest if is_dead else None

    def _is_gone_here(self, name: str) -> bool:
        """Whether an agent of this very host has ended."""
        raw = json.loads((self._agents / f"{name}.json").read_text())
        if raw["host"] != socket.gethostname():
            return False
        try:
            process = psutil.Process(raw["pid"])
            is_another = abs(_began_s(process) - raw["began_s"]) > _SAME_S
            return is_another or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    def _lead(self, over: int) -> Channel:
        """Lead, and claim the generation after the one that is over. Others may have claimed that
        one since it was looked at: only a claim can tell, so nothing newer is looked up here."""
        self._leader = Leader(
            self._me,
            self._job,
            self._generations,
            self._newest,
            over,
            self._choose,
            self._job_on,
            self._events,
            self._say,
            dead=frozenset(self._refused | ({self._lost.node} if self._lost else set())),
            losses=(self._lost,) if self._lost is not None else (),
            num_coming=num_coming(),
        )
        self._follows = self._me
        mine, others = channels_here()
        self._leading = asyncio.ensure_future(self._run_leader(self._leader, others))
        return mine

    async def _run_leader(self, leader: Leader, channel: Channel) -> None:
        async def serve_self() -> None:
            join = await channel.receive()
            if join is not None:
                await leader.serve(channel, join)

        serving = asyncio.ensure_future(serve_self())
        watching = asyncio.ensure_future(self._yield_to_others(leader))
        try:
            await leader.run()
        except Exception:  # a fault of ours: to lead again would meet it again
            self._give_up(f"{self._name} leads no more, and leaves:\n{traceback.format_exc()}")
        finally:
            self._leader = None
            watching.cancel()
            channel.close()
            await serving

    async def _yield_to_others(self, leader: Leader) -> None:
        """While this agent leads and waits for nodes: two who do so become one."""
        while True:
            await asyncio.sleep(_ASK_AGAIN_LATER_S)
            if not leader.is_waiting:
                continue
            for one in await self._ask_around():
                if one.leads and (-one.generation, one.node.name) < (-leader.number, self._name):
                    leader.abdicate()

    async def _on_channel(self, channel: StreamChannel) -> None:
        """Another agent asks who leads, or to come in."""
        try:
            async with asyncio.timeout(_DIAL_S * 4):
                message = await channel.receive()
        except TimeoutError:
            message = None
        leader = self._leader
        if message is not None and message["kind"] == "who":
            channel.send(
                {
                    "kind": "who",
                    "node": asdict(self._me),
                    "leads": leader is not None,
                    "generation": self._number,
                    "follows": self._follows.name if self._follows is not None else None,
                }
            )
        elif message is not None and message["kind"] == "echo":
            with suppress(TimeoutError):
                async with asyncio.timeout(_ECHO_S):
                    while (part := await channel.receive()) is not None:
                        channel.send(part)
        elif message is not None and message["kind"] == "join" and leader is not None:
            with suppress(KeyError, TypeError):
                await leader.serve(channel, message)
                return
        channel.close()


def await_agent(run: Run) -> int:
    """As another process that a launcher started on a node: wait for the end of its agent.

    Returns:
        the agent's exit code; 1 where it was killed.
    """
    name, launch, first = node_name(), _launch(), _first_of_launch()
    agents = run.path / "agents"
    is_gone_since: float | None = None
    while True:
        is_gone = first is not None and not _is_alive(first)
        with suppress(OSError, ValueError, KeyError):
            said = json.loads((agents / f"{name}.end").read_text())
            if said["launch"] == launch:
                return FAILED if said["exit_code"] is None else int(said["exit_code"])
        if is_gone:
            return FAILED
        if first is None and not is_held(agents / f"{name}.lock"):
            is_gone_since = is_gone_since or time.monotonic()
            if time.monotonic() - is_gone_since > _GONE_S:
                return FAILED
        else:
            is_gone_since = None
        time.sleep(_LOOK_S)


def _launch() -> str:
    """What only the processes have in common that a launcher started together on this node."""
    env = os.environ
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "-".join([str(os.getppid()), *(env.get(name, "") for name in names)])


def _first_of_launch() -> psutil.Process | None:
    """The process that the launcher started first on this node: the agent, or a shell around it;
    None: it can't be seen."""
    with suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):
                env = process.environ()
                if env.get("LOCAL_RANK", env.get("SLURM_LOCALID")) == "0":
                    return process
    return None


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _began_s(process: psutil.Process) -> float:
    """When a process began, in seconds since this host did: clocks may jump."""
    host_s = psutil.boot_time()
    return process.create_time() - host_s


def is_live(run: Run) -> bool:
    """Whether the agent of another node runs: each holds the lock of its name."""
    locks = (run.path / "agents").glob("*.lock")
    return any(is_held(lock) for lock in locks if lock.stem != node_name())
