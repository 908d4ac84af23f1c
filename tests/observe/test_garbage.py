"""Garbage collections are timed, and marked in a profile (one process)."""

import gc
import json
import time

from torch.profiler import ProfilerActivity, profile

from paceline.observe.garbage import GARBAGE_RANGE, GarbageCollections


def test_collections_are_timed_until_they_are_taken():
    with GarbageCollections() as garbage:
        kept = [[number] for number in range(200_000)]
        garbage.take_s()
        began = time.perf_counter()
        gc.collect()
        whole_s = time.perf_counter() - began
        taken_s = garbage.take_s()
        assert garbage.take_s() == 0
    assert kept
    assert 0 < taken_s <= whole_s
    gc.collect()
    assert garbage.take_s() == 0, "nobody listens any more"


def test_what_is_there_already_is_spared():
    frozen = gc.get_freeze_count()
    with GarbageCollections():
        assert gc.get_freeze_count() > frozen + 10_000
        assert not gc.get_objects(generation=2)
    assert gc.get_freeze_count() == 0


def test_a_collection_stands_in_the_profile(tmp_path):
    with GarbageCollections(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        gc.collect()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["ph"] for event in events if event.get("name") == GARBAGE_RANGE] == ["X"]
