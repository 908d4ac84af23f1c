"""The parameter server: where rows live, how they are updated, what survives a kill -9."""

import itertools
import os
import signal
import threading
import time
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.rendezvous import Ranks, own_address
from paceline.config.errors import InputError, RunError
from paceline.config.recommender import RowOptim
from paceline.recommender.parameter_server.all_to_all import AllToAllTables
from paceline.recommender.parameter_server.cache import RowCache
from paceline.recommender.parameter_server.client import Servers
from paceline.recommender.parameter_server.consistent_hash import Numbering, RowPlacement
from paceline.recommender.parameter_server.rows import RowStore, initial_rows, merged
from paceline.recommender.parameter_server.serve import ServerSettings, make_server
from paceline.recommender.parameter_server.snapshot import ServerCheckpoints
from paceline.recommender.parameter_server.start import servers_of_node
from paceline.recommender.parameter_server.supervisor import SupervisedServer
from paceline.recommender.parameter_server.wire import (
    Message,
    MessageKind,
    authenticate_worker,
    decode,
    encode,
    failed,
    sentence_of,
)
from tests.ranks import run_ranks

TABLES = (40, 7, 23)
DIM = 4
KEY = bytes(range(32))


def _settings(folder, **changes):
    return ServerSettings(
        **{
            "server": 0,
            "num_servers": 1,
            "num_workers": 1,
            "tables": TABLES,
            "dim": DIM,
            "seed": 3,
            "optim": RowOptim().model_dump(),
            "lag": 0,
            "checkpoint_every": 1000,
            "folder": str(folder / "tables"),
            "run_checkpoints": str(folder / "checkpoints"),
            "host": "127.0.0.1",
            "timeout_s": 20.0,
            "key": KEY.hex(),
            **changes,
        }
    )


def _pushed(worker, step, ids, value=1.0, lr=0.1):
    gradients = np.full((len(ids), DIM), value, np.float32)
    return Message(
        MessageKind.PUSH, worker, step, lr=lr, ids=np.asarray(ids, np.int64), values=gradients
    )


def _greet(server, num_workers, step=0):
    for worker in range(num_workers):
        assert server.answer(Message(MessageKind.HELLO, worker, step)).kind == MessageKind.DONE


# ---- where rows live -----------------------------------------------------------------------------


def test_one_more_server_takes_rows_from_all_and_moves_none_between_them():
    tables = (30_000, 10_000)
    before, after = (RowPlacement(tables, n).all_servers for n in (4, 5))
    moved = before != after
    assert set(after[moved]) == {4}
    assert 0.1 < moved.mean() < 0.3, "about a fifth"
    assert {*before[moved]} == {0, 1, 2, 3}
    shares = np.bincount(before) / len(before)
    assert shares.min() > 0.25 * 0.75
    assert shares.max() < 0.25 * 1.25


def test_a_row_of_a_table_stays_where_it_is_when_other_tables_grow():
    ids = np.arange(500)
    short, long = RowPlacement((1000, 500), 3), RowPlacement((1_000, 900_000), 3)
    np.testing.assert_array_equal(short.server_of(1000 + ids), long.server_of(1000 + ids))


def test_first_values_do_not_depend_on_who_holds_a_row():
    numbering = Numbering(TABLES)
    ids = np.arange(numbering.num_rows)
    whole = initial_rows(numbering, ids, DIM, seed=1)
    some = ids[::3]
    np.testing.assert_array_equal(initial_rows(numbering, some, DIM, seed=1), whole[some])
    assert not np.array_equal(initial_rows(numbering, ids, DIM, seed=2), whole)
    for first, rows in zip(numbering.offsets, TABLES, strict=False):
        part = whole[first : first + rows]
        assert np.abs(part).max() <= rows**-0.5
        assert np.abs(part).max() > 0.8 * rows**-0.5
    assert len(np.unique(whole)) > 0.99 * whole.size


# ---- updates -------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30))
def test_merging_sums_the_gradients_of_each_row(drawn):
    ids = np.asarray(drawn, np.int64)
    gradients = np.arange(len(ids) * DIM, dtype=np.float32).reshape(-1, DIM)
    distinct, sums = merged(ids, gradients)
    assert distinct.tolist() == sorted(set(drawn))
    for row, got in zip(distinct, sums, strict=True):
        np.testing.assert_array_equal(got, gradients[ids == row].sum(axis=0))


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_updates_equal_the_formula_row_by_row(kind):
    optim = RowOptim(kind=kind)
    store = RowStore(Numbering(TABLES), np.arange(70), DIM, 0, optim)
    rng = np.random.default_rng(0)
    expected = store.values.astype(np.float64)
    square, first = np.zeros(70), np.zeros((70, DIM))
    times = np.zeros(70)
    for _ in range(5):
        ids = np.sort(rng.choice(70, 9, replace=False))
        gradients = rng.normal(size=(9, DIM)).astype(np.float32)
        store.update(ids, gradients, lr=0.1)
        for row, g in zip(ids, gradients.astype(np.float64), strict=True):
            times[row] += 1
            if kind == "adagrad":
                square[row] += (g**2).mean()
                expected[row] -= 0.1 * g / (np.sqrt(square[row]) + optim.eps)
                continue
            beta1, beta2 = optim.betas
            first[row] += (1 - beta1) * (g - first[row])
            square[row] += (1 - beta2) * ((g**2).mean() - square[row])
            unbiased = square[row] / (1 - beta2 ** times[row])
            step = first[row] / (1 - beta1 ** times[row])
            expected[row] -= 0.1 * step / (np.sqrt(unbiased) + optim.eps)
    np.testing.assert_allclose(store.values, expected, rtol=2e-5, atol=1e-6)


# ---- messages ------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(MessageKind),
    st.integers(0, 2**32 - 1),
    st.integers(-1, 2**62),
    st.lists(st.integers(0, 2**62), max_size=20),
    st.lists(st.floats(width=32), max_size=20),
)
def test_messages_arrive_as_they_were(kind, worker, step, ids, values):
    sent = Message(kind, worker, step, 5, 0.25, np.array(ids, np.int64), np.array(values, "f4"))
    got = decode(bytes(encode(sent)))
    assert got[:5] == sent[:5]
    np.testing.assert_array_equal(got.ids, sent.ids)
    np.testing.assert_array_equal(got.values, sent.values)


@given(st.binary(max_size=100))
def test_bytes_that_are_no_message_are_refused(data):
    try:
        message = decode(data)
    except ValueError:
        return
    assert bytes(encode(message))[40:] == data[40:]


def test_a_reason_survives_the_way():
    assert sentence_of(decode(bytes(encode(failed("äöü went wrong"))))) == "äöü went wrong"


# ---- modes ---------------------------------------------------------------------------------------


def test_synchronous_pushes_are_applied_together_in_the_order_of_workers(tmp_path):
    """The sum of these three in fp32 is 0 or 1, by the order in which they are added."""
    shares = [_pushed(0, 0, [1, 2], 1.0), _pushed(1, 0, [2, 5], 1e8), _pushed(2, 0, [2], -1e8)]
    results = []
    for order in itertools.permutations(range(3)):
        server = make_server(_settings(tmp_path, num_workers=3), print)
        _greet(server, 3)
        before = server.store.read(np.arange(10))
        for worker in order[:2]:
            server.answer(shares[worker])
        np.testing.assert_array_equal(server.store.read(np.arange(10)), before)
        assert server.clock == 0
        server.answer(shares[order[2]])
        assert server.clock == 1
        results.append(server.store.read(np.arange(10)))
    changed = np.flatnonzero((results[0] != before).any(axis=1))
    assert {1, 5} <= set(changed) <= {1, 2, 5}
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize(("lag", "answered"), [(0, 2), (2, 4), (None, 9)])
def test_a_pull_waits_until_it_is_fresh_enough(tmp_path, lag, answered):
    """Worker 1 has pushed two steps: worker 0 may pull for steps up to two plus the lag."""
    server = make_server(_settings(tmp_path, num_workers=2, lag=lag, timeout_s=0.05), print)
    _greet(server, 2)
    for step in range(10):
        server.answer(_pushed(0, step, [1]))
    for step in range(2):
        server.answer(_pushed(1, step, [1]))
    for step in range(10):
        got = server.answer(Message(MessageKind.PULL, 0, step, ids=np.asarray([1])))
        assert (got.kind == MessageKind.ROWS) == (step <= answered)
        if got.kind == MessageKind.FAILED:
            assert "workers [1] did not push" in sentence_of(got)


def test_a_waiting_pull_is_answered_when_the_last_push_comes(tmp_path):
    server = make_server(_settings(tmp_path, num_workers=2), print)
    _greet(server, 2)
    server.answer(_pushed(0, 0, [1]))
    got = []
    ask = Message(MessageKind.PULL, 0, 1, ids=np.asarray([1]))
    thread = threading.Thread(target=lambda: got.append(server.answer(ask)))
    thread.start()
    time.sleep(0.05)
    assert not got
    server.answer(_pushed(1, 0, [1]))
    thread.join(10)
    assert got[0].clock == 1
    np.testing.assert_array_equal(got[0].values, server.store.read(np.asarray([1])))


@pytest.mark.parametrize("lag", [0, 3, None])
def test_a_push_that_comes_twice_counts_once(tmp_path, lag):
    server = make_server(_settings(tmp_path, lag=lag), print)
    _greet(server, 1)
    server.answer(_pushed(0, 0, [1, 2]))
    once = server.store.values.copy()
    server.answer(_pushed(0, 0, [1, 2]))
    np.testing.assert_array_equal(server.store.values, once)
    server.answer(_pushed(0, 1, [1, 2]))
    assert (server.store.values != once).any()


def test_what_a_server_does_not_hold_is_refused_not_invented(tmp_path):
    server = make_server(_settings(tmp_path, num_servers=2), print)
    _greet(server, 1)
    foreign = RowPlacement(TABLES, 2).ids_of(1)[:1]
    got = server.answer(Message(MessageKind.PULL, 0, 0, ids=foreign))
    assert got.kind == MessageKind.FAILED
    assert "not held here" in sentence_of(got)


# ---- the cache -----------------------------------------------------------------------------------


def test_cached_rows_are_used_within_the_staleness_only():
    cache = RowCache(64, DIM, staleness=2)
    ids = np.asarray([3, 9])
    cache.put(ids, np.ones((2, DIM), np.float32), clock=5)
    for step, fresh in ((5, True), (7, True), (8, False)):
        values = np.zeros((3, DIM), np.float32)
        hit = cache.look_up(np.asarray([3, 9, 11]), step, values)
        assert hit.tolist() == [fresh, fresh, False]
        assert (values[:2] == fresh).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), max_size=25))
def test_the_cache_never_gives_another_rows_value(batches):
    cache = RowCache(7, DIM, staleness=3)
    for step, batch in enumerate(batches):
        ids = np.unique(np.asarray(batch, np.int64))
        values = np.full((len(ids), DIM), np.nan, np.float32)
        hit = cache.look_up(ids, step, values)
        # The value says the row and the step that it was pulled at.
        assert (values[hit, 0] == ids[hit]).all()
        assert (step - values[hit, 1] <= 3).all()
        pulled = np.stack([ids, np.full_like(ids, step)], axis=1).repeat(2, axis=1)[:, [0, 2, 1, 3]]
        cache.put(ids[~hit], pulled[~hit].astype(np.float32), step)


def test_rows_seen_once_do_not_drive_out_a_hot_one():
    cache = RowCache(1, DIM, staleness=100)
    cache.put(np.asarray([0]), np.ones((1, DIM), np.float32), 0)
    for cold in range(1, 20):
        assert cache.look_up(np.asarray([0]), 1, np.empty((1, DIM), np.float32)).all()
        cache.put(np.asarray([cold]), np.zeros((1, DIM), np.float32), 1)
    cache.put(np.asarray([50]), np.zeros((1, DIM), np.float32), 1)
    assert not cache.look_up(np.asarray([0]), 1, np.empty((1, DIM), np.float32)).any()


# ---- checkpoints ---------------------------------------------------------------------------------


def test_other_numbers_of_holders_read_what_some_wrote(tmp_path):
    numbering, optim = Numbering(TABLES), RowOptim()
    rng = np.random.default_rng(1)
    for part in range(3):
        ids = RowPlacement(TABLES, 3).ids_of(part)
        store = RowStore(numbering, ids, DIM, 0, optim)
        store.update(ids, rng.normal(size=(len(ids), DIM)).astype(np.float32), 0.1)
        ServerCheckpoints(tmp_path, part, 3).write(8, dict(store.arrays()))
    whole = RowStore(numbering, np.arange(70), DIM, 0, optim)
    assert sum(whole.take(part) for part in ServerCheckpoints(tmp_path, 0, 1).read(8)) == 70
    pair = [RowStore(numbering, RowPlacement(TABLES, 2).ids_of(k), DIM, 5, optim) for k in range(2)]
    for number, store in enumerate(pair):
        for arrays in ServerCheckpoints(tmp_path, number, 2).read(8):
            store.take(arrays)
        np.testing.assert_array_equal(store.values, whole.values[store.ids])
        np.testing.assert_array_equal(
            store.state["square_sum"], whole.state["square_sum"][store.ids]
        )


@pytest.mark.parametrize("damage", ["flip", "cut", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    snapshots = ServerCheckpoints(tmp_path, 0, 1)
    for step in (5, 10):
        snapshots.write(step, {"ids": np.arange(3), "values": np.full((3, DIM), step, "f4")})
    body = tmp_path / "part-0" / "step-10.safetensors"
    data = bytearray(body.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
        body.write_bytes(data)
    elif damage == "cut":
        body.write_bytes(data[:-4])
    else:
        body.with_suffix(".json").unlink()
    step, arrays = snapshots.newest_good()
    assert step == 5
    assert (arrays["values"] == 5).all()
    with pytest.raises(RunError, match="step 10"):
        list(snapshots.read(10))


def test_a_server_keeps_its_newest_checkpoints_and_those_of_the_run(tmp_path):
    server = make_server(_settings(tmp_path, checkpoint_every=2, lag=None), print)
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    _greet(server, 1)
    for step in range(12):
        server.answer(_pushed(0, step, [1]))
        if server._writer is not None:
            server._writer.join()
        if step == 2:
            server.answer(Message(MessageKind.SAVE, 0, 3))
    assert server.snapshots.steps() == [3, 10, 12]


# ---- processes -----------------------------------------------------------------------------------


def _run_one_worker(tmp_path, kill_before=(), steps=6, every=2):
    """Pull and push rows of two servers; return the last values, what was said, reconnections."""
    said = []
    common = _settings(tmp_path, num_servers=2, checkpoint_every=every)
    kept = [
        SupervisedServer(ServerSettings(**{**vars(common), "server": k}), said.append)
        for k in range(2)
    ]
    placement = RowPlacement(TABLES, 2)
    servers = Servers(placement, DIM, [one.address for one in kept], KEY, 0, 60.0)
    ids = np.arange(70)
    try:
        servers.ask_all(MessageKind.LOAD, 0)
        servers.greet(0)
        for step in range(steps):
            servers.settle()
            _await_checkpoint(tmp_path, step // every * every)
            if step in kill_before:
                os.kill(kept[1].process.pid, signal.SIGKILL)
            values, clock = servers.pull(ids, step)
            assert clock == step
            servers.push(ids, values * 0 + step + 1, step, 0.1)
        values, _ = servers.pull(ids, steps)
        reconnected = [link.num_reconnected for link in servers.links]
    finally:
        servers.close()
        for one in kept:
            one.close()
    return values, said, reconnected


def _await_checkpoint(folder, step):
    """Wait until both servers have written it: they do so beside their work, one at a time."""
    files = [folder / "tables" / f"part-{part}" / f"step-{step}.json" for part in range(2)]
    deadline = time.monotonic() + 20
    while step and not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_server_killed_comes_back_and_loses_what_came_after_its_checkpoint(tmp_path):
    """The kill comes after 5 steps, the last checkpoint after 4: one step's updates are lost."""
    plain, said, _ = _run_one_worker(tmp_path / "plain")
    assert said == []
    killed, said, reconnected = _run_one_worker(tmp_path / "killed", kill_before=(5,))
    assert reconnected == [1, 2]
    assert len(said) == 2, said
    assert "server 1" in said[0]
    assert "ended by SIGKILL: started again, the workers wait" in said[0]
    assert "back from its checkpoint of step 4: the updates of steps 5 to 5" in said[1]
    mine = RowPlacement(TABLES, 2).all_servers == 0
    np.testing.assert_array_equal(killed[mine], plain[mine])
    expected = RowStore(Numbering(TABLES), np.arange(70), DIM, 3, RowOptim())
    for step in (0, 1, 2, 3, 5):
        expected.update(np.arange(70), np.full((70, DIM), step + 1, np.float32), 0.1)
    np.testing.assert_array_equal(killed[~mine], expected.values[~mine])
    assert (killed[~mine] != plain[~mine]).all()


def test_a_server_that_came_back_waits_for_no_worker_that_asks_it_nothing(tmp_path):
    """Such a worker may wait for the one that asks, in an all-reduce: it says hello by itself."""
    kept = SupervisedServer(_settings(tmp_path, num_workers=2, lag=1), print)
    placement = RowPlacement(TABLES, 1)
    both = [Servers(placement, DIM, [kept.address], KEY, worker, 8.0) for worker in range(2)]
    try:
        both[0].ask_all(MessageKind.LOAD, 0)
        for servers in both:
            servers.greet(0)
        for servers in both:
            servers.push(np.arange(3), np.ones((3, DIM), np.float32), 0, 0.1)
            servers.settle()
        kept.process.kill()
        values, clock = both[0].pull(np.arange(3), 1)
        assert clock == 1
        assert values.shape == (3, DIM)
    finally:
        for servers in both:
            servers.close()
        kept.close()


def test_closing_while_a_look_waits_for_a_server_leaves_the_connection_to_it():
    """A server that came back and hasn't answered yet: the look drops the link once it has."""
    with Listener(("127.0.0.1", 0)) as listener:
        others = set(threading.enumerate())
        servers = Servers(RowPlacement(TABLES, 1), DIM, [listener.address], KEY, 0, 20.0)
        (watch,) = set(threading.enumerate()) - others
        asked = threading.Thread(target=servers.greet, args=(0,))
        asked.start()
        with listener.accept() as first:
            authenticate_worker(first, KEY)
            for _ in range(2):  # of the connection, of greet
                first.recv_bytes()
                first.send_bytes(encode(Message(MessageKind.HELLO)))
            asked.join()
        with listener.accept() as again:
            authenticate_worker(again, KEY)
            assert decode(again.recv_bytes()).kind == MessageKind.HELLO
            servers.close()
            assert watch.is_alive()
            again.send_bytes(encode(Message(MessageKind.HELLO)))
            watch.join(10)
            assert not watch.is_alive()
            with pytest.raises((EOFError, ConnectionResetError)):
                again.recv_bytes()


def test_a_stranger_without_the_key_learns_and_changes_nothing(tmp_path):
    kept = SupervisedServer(_settings(tmp_path), print)
    try:
        placement = RowPlacement(TABLES, 1)
        stranger = Servers(placement, DIM, [kept.address], b"guess" * 8, 0, 0.5)
        with pytest.raises(RunError, match="can't be reached"):
            stranger.pull(np.arange(3), 0)
        stranger.close()
        friend = Servers(placement, DIM, [kept.address], KEY, 0, 20.0)
        friend.greet(0)
        assert friend.pull(np.arange(3), 0)[0].shape == (3, DIM)
        friend.close()
    finally:
        kept.close()


def _stop(pid: int) -> None:
    """SIGSTOP a process, and wait until its last thread stands still."""
    os.kill(pid, signal.SIGSTOP)
    states = Path(f"/proc/{pid}/task").glob("*/stat")
    for stat in list(states):
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)


def test_a_hanging_server_ends_the_wait_in_time(tmp_path):
    kept = SupervisedServer(_settings(tmp_path), print)
    servers = Servers(RowPlacement(TABLES, 1), DIM, [kept.address], KEY, 0, 1.0)
    try:
        servers.greet(0)
        _stop(kept.process.pid)
        began = time.monotonic()
        with pytest.raises(RunError, match=r"server 0 of the tables .* has not answered for 1 s"):
            servers.pull(np.arange(3), 0)
        assert time.monotonic() - began < 10
    finally:
        servers.close()
        kept.close()


def test_servers_are_spread_over_nodes():
    places = [Ranks(rank, 6, rank % 2, 2) for rank in range(6)]
    assert [list(servers_of_node(place, 5)) for place in places[::2]] == [[0, 3], [1, 4], [2]]


def test_a_server_listens_at_the_given_interface_only(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address(Ranks(0, 4, 0, 2)) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-nic")
    with pytest.raises(InputError, match="names no interface"):
        own_address(Ranks(0, 2, 0, 2))


# ---- by all-to-all -------------------------------------------------------------------------------


def _train_exchanged(rank, world_size, folder, first_step):
    """Steps on rows by all-to-all; the loss weights each value by the sample and the table."""
    tables = AllToAllTables(
        Numbering(TABLES), DIM, 3, RowOptim(), rank, world_size, torch.device("cpu")
    )
    tables.open(Path(folder), Path(folder), print)
    tables.load(first_step)
    share = 12 // world_size
    for step in range(first_step, first_step + 3):
        generator = torch.Generator().manual_seed(step)
        sizes = torch.tensor(TABLES)
        ids = (torch.rand(12, 3, generator=generator) * sizes).long()
        weight = torch.randn(12, 3, DIM, generator=generator)
        mine = slice(rank * share, (rank + 1) * share)
        rows = tables.rows(ids[mine])
        (rows * rows * weight[mine]).sum(dim=(1, 2)).mean().backward()
        tables.finish(0.1, skip=step == 1)
    tables.save(first_step + 3)
    with torch.no_grad():
        ids = torch.stack([torch.arange(6)] * 3, dim=1)
        return tables.rows(ids).numpy()


def test_tables_by_all_to_all_equal_one_process_and_resume_on_other_ranks(tmp_path):
    serial = [_train_exchanged(0, 1, str(tmp_path / "serial"), first) for first in (0, 3)]
    first = run_ranks(_train_exchanged, 2, str(tmp_path / "ranks"), 0)
    for got in first:
        np.testing.assert_allclose(got, serial[0], atol=1e-6)
    resumed = run_ranks(_train_exchanged, 3, str(tmp_path / "ranks"), 3)
    for got in resumed:
        np.testing.assert_allclose(got, serial[1], atol=1e-6)
    assert np.abs(serial[1] - serial[0]).max() > 0.01
