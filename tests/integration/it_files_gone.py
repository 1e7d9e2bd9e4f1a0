"""Files of the state directory deleted or moved while the daemon uses them.

Goal: it is noticed within seconds whatever file it is, before a restart makes it a loss: health and the
log say it, nothing more is acknowledged, turns go on, and what the log names can be copied back.
Method: the real daemon; after each damage the files are put back from /proc/PID/fd as the log says, or
moved back, and the next start must have dropped nothing.
"""

import os
import re
import shutil
import time

import daemon as d
from daemon import check, equal, expect
from faults import CROWDED, recovered, stored_sessions, well
from talk import Box, Talk, case, patiently, run_cases, tokens


def until(probe, seconds=8):
    end = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def begin(count=24):
    box = Box("synthetic", CROWDED).start()
    prompts = stored_sessions(box, count)
    time.sleep(1.5)  # It has looked at least once.
    equal(box.stats().health, "serving", "health before")
    return box, prompts


def noticed(box, words, records, what):
    """Health, note and log say it; saves are refused, turns go on."""
    check(until(lambda: box.stats().health != "serving"), f"{what}: it is noticed")
    health = box.stats().health
    check((words if records else "the SSD tier is read-only") in health, f"{what}: health: {health!r}")
    equal(box.client().health.Check(d.health_pb2.HealthCheckRequest(), timeout=5).status, 2,
          f"{what}: the health service")
    check(words in box.tier("ssd").note, f"{what}: note: {box.tier('ssd').note!r}")
    check(box.logged("event=files_gone"), f"{what}: the log")
    if records:
        expect(lambda: Talk(box.client(), "s-late"), code="FAILED_PRECONDITION",
               reason="SSD_READ_ONLY")
    else:
        got = patiently(Talk(box.client(), "late").prefill, tokens(300))
        equal((got.save_reason, got.computed_tokens), ("SSD_READ_ONLY", 300), f"{what}: a turn")
    return box.stats().checkpoints


def copies(box):
    """{name: path below /proc} as the log says."""
    return dict(re.findall(r'event=files_gone name="([^"]*)".* copy="([^"]*)"', box.log()))


def put_back(box, found):
    for name, source in found.items():
        path = os.path.join(box.state, name)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(source, "rb") as f, open(path + ".copy", "wb") as out:
            shutil.copyfileobj(f, out)
        os.rename(path + ".copy", path)


def whole_again(box, prompts, acknowledged, what):
    offset = len(box.log())
    box.crash()
    found, dropped = recovered(box, offset)
    equal((found, dropped), (acknowledged, 0), f"{what}: recovered and dropped")
    equal(box.counter("cached_lost_batches"), 0, f"{what}: batches lost")
    for name, prompt in list(prompts.items())[:6]:
        got = patiently(Talk(box.client(), name).prefill, prompt + tokens(3))
        check(got.hit_tokens > 0, f"{what}: {name} is served")
    well(box, what=what)
    equal(box.stats().health, "serving", f"{what}: health in the end")
    box.stop()


@case
def a_segment_that_nobody_writes():
    box, prompts = begin()
    check(len(box.segments()) > 2, "several segments")
    os.unlink(box.segments()[0])
    count = noticed(box, "segment-000000.kv was deleted under the daemon", False, "deleted")
    put_back(box, copies(box))
    whole_again(box, prompts, count, "a segment copied back")


@case
def a_segment_moved_away():
    for where in ("ssd/elsewhere", "ssd/segment-000900.kv", "../elsewhere"):
        box, prompts = begin(12)
        path, to = box.segments()[0], os.path.join(box.state, where)
        os.rename(path, to)
        count = noticed(box, "segment-000000.kv was moved under the daemon", False, where)
        os.rename(to, path)
        whole_again(box, prompts, count, f"moved to {where} and back")


@case
def the_manifest_deleted():
    box, prompts = begin()
    before = box.stats().checkpoints
    shutil.rmtree(os.path.join(box.state, "manifest"))
    equal(noticed(box, "was deleted under the daemon", True, "manifest"), before,
          "nothing more is acknowledged")
    check(until(lambda: len(copies(box)) >= 3), "each of its files is named")
    put_back(box, copies(box))
    whole_again(box, prompts, before, "a manifest copied back")


@case
def the_log_of_rocksdb_deleted():
    box, prompts = begin(12)
    before = box.stats().checkpoints
    folder = os.path.join(box.state, "manifest")
    for name in os.listdir(folder):
        if name.endswith(".log"):
            os.unlink(os.path.join(folder, name))
    noticed(box, ".log was deleted under the daemon", True, "log")
    put_back(box, copies(box))
    whole_again(box, prompts, before, "a log copied back")


@case
def the_superblock_deleted():
    box, prompts = begin(12)
    before = box.stats().checkpoints
    os.unlink(os.path.join(box.state, "superblock"))
    noticed(box, "superblock was deleted under the daemon", True, "superblock")
    put_back(box, copies(box))
    whole_again(box, prompts, before, "a superblock copied back")


@case
def the_directory_moved():
    box, prompts = begin(12)
    before = box.stats().checkpoints
    os.rename(box.state, box.state + ".moved")
    noticed(box, "was moved or deleted under the daemon", True, "directory")
    equal(box.log().count("event=files_gone"), 1, "one line, not one for each file")
    os.rename(box.state + ".moved", box.state)
    whole_again(box, prompts, before, "a directory moved and back")


@case
def what_rocksdb_deletes_is_no_alarm():
    """Its own files come and go: logs and tables at every start, and beside saves."""
    box = Box("synthetic", CROWDED).start()
    names = set()
    for round_number in range(4):
        stored_sessions(box, 6)
        names.update(os.listdir(os.path.join(box.state, "manifest")))
        time.sleep(2.5)
        names.update(os.listdir(os.path.join(box.state, "manifest")))
        equal(box.stats().health, "serving", f"health, start {round_number}")
        box.restart()
    gone = names - set(os.listdir(os.path.join(box.state, "manifest")))
    check(any(name.endswith(".log") for name in gone), "logs of RocksDB went")
    check("event=files_gone" not in box.log(), "no alarm")
    check("event=state_unwatched" not in box.log(), "it is watched")
    box.stop()


run_cases(__doc__)
