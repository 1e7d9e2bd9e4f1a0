"""The scrub: everything stored is read again; what is broken is found, named, dropped, and its place
is given to nobody any more.

What is expected comes from tests/integration/state_files.py, which reads a directory by the offsets
of docs/format.md.
"""

import errno
import os
import re
import subprocess
import threading
import time

from cli import Tool, token_file
from daemon import admin_pb, check, equal, expect, failure, pb, scratch
from faults import Calls
from state_files import State, kvdump
from talk import (
    MISS, PAGE, REPLAY, Box, Talk, case, even, find_pages, flip, patiently, resumed, rng, run_cases, tokens)

FLAGS = {"ssd.segment_bytes": "256KiB", "ssd.bytes": "8MiB", "ssd.compact_below": "0"}
STATUS, START, STOP = (admin_pb.SCRUB_ACTION_STATUS, admin_pb.SCRUB_ACTION_START,
                       admin_pb.SCRUB_ACTION_STOP)


def scrub(box, action=STATUS, **fields):
    return box.operator.Scrub(admin_pb.ScrubRequest(action=action, **fields))


def whole_pass(box, seconds=60, **fields):
    """Starts a pass and waits for its end."""
    equal(scrub(box, START, **fields).changed, True, "the pass is a new one")
    return end_of_pass(box, seconds)


def end_of_pass(box, seconds=60):
    end = time.monotonic() + seconds
    got = scrub(box)
    while got.running and time.monotonic() < end:
        time.sleep(0.01)
        got = scrub(box)
    check(not got.running, f"the pass ended: {got}")
    return got


def tool(box, user="ops"):
    return Tool("unix:" + box.socket, token_file(box.directory, user))


def stored(box, count=6, shortest=150, longest=700):
    """Closed sessions of two users; {"user/name": prompt}."""
    prompts = {}
    for i in range(count):
        user = ("alice", "bob")[i % 2]
        prompt = tokens(rng.randrange(shortest, longest))
        talk = Talk(box.client(user), f"s{i}")
        got = patiently(talk.prefill, prompt[:len(prompt) // 2], level=pb.LEVEL_SSD)
        got = patiently(talk.prefill, prompt, level=pb.LEVEL_SSD)
        equal(got.save_reason, "", "saved")
        talk.close()
        prompts[f"{user}/s{i}"] = prompt
    return prompts


def places_add_up(box, what):
    """free + used + quarantined is every page of every segment file."""
    ssd = box.tier("ssd")
    whole = sum((os.path.getsize(p) - 4096) // box.stats().page_bytes for p in box.segments())
    usage = scrub(box)
    bad = box.counter("cached_tier_quarantined_bytes", 'tier="ssd"') / box.stats().page_bytes
    equal(usage.quarantined_pages, bad, f"{what}: quarantined, in status and in stats")
    free = box.counter("cached_tier_free_bytes", 'tier="ssd"') / box.stats().page_bytes
    equal(free + ssd.items_used + bad, whole, f"{what}: free + used + quarantined")


@case
def a_whole_directory():
    box = Box("synthetic", FLAGS).start()
    first = scrub(box)
    equal((first.running, first.rate_bytes, first.passes, first.full_age_ms), (False, 0, 0, 0),
          "before the first pass")
    prompts = stored(box)
    box.restart()
    used = box.tier("ssd").items_used
    age = box.counter("cached_scrub_age_seconds")
    for n in (1, 2):
        got = whole_pass(box)
        equal((got.pages, got.pages_total, got.bytes), (used, used, used * 20480), "pages read")
        equal((got.damaged, got.unread, got.waiting, got.checkpoints_dropped, got.passes),
              (0, 0, 0, 0, n), "nothing is wrong")
        equal(got.rate_bytes, 200 << 20, "the configured rate")
        check(got.full_age_ms >= 1, "the age of the pass")
    check(age > 0 and box.counter("cached_scrub_age_seconds") < 60, "age in the counters")
    equal(box.counter("cached_scrub_pages_total"), 2 * used, "pages counted")
    equal(box.counter("cached_scrub_bytes_total"), 2 * used * 20480, "bytes counted")
    equal(box.counter("cached_scrub_passes_total"), 2, "passes counted")
    equal(box.counter("cached_index_nodes"), 0, "no tree was loaded for it")
    for label, prompt in prompts.items():
        user, name = label.split("/")
        resumed(Talk(box.client(user), name).prefill(prompt + tokens(5)), REPLAY,
                even(len(prompt)), label)
    places_add_up(box, "whole")
    box.no_wrong_bytes()
    box.stop()


def damage_some(state, count):
    """Flips one bit in each of some pages: [page]."""
    hurt = rng.sample(state.pages(), count)
    for page in hurt:
        path, offset = state.where(page)
        flip(path, offset + rng.choice((rng.randrange(256), rng.randrange(256, state.page_bytes))))
    return hurt


@case
def one_pass_finds_every_flip():
    """R9: all of them; each named with file, offset and owners; what is not hurt is served."""
    box = Box("synthetic", FLAGS).start()
    prompts = stored(box, 8)
    box.stop()
    state = State(box.state)
    hurt = damage_some(state, 5)
    owners = {page.place: len(state.trees[page.session].owners(page.uid)) for page in hurt}
    gone = {page.session: set() for page in hurt}
    for page in hurt:
        gone[page.session] |= state.trees[page.session].below(page.uid)
    bytes_of = {page.place: state.read(page) for page in hurt}
    box.start()
    offset = len(box.log())
    got = whole_pass(box)
    equal((got.damaged, got.quarantined_pages, got.waiting), (5, 5, 0), "found")
    equal(got.checkpoints_dropped, sum(map(len, gone.values())), "checkpoints dropped")
    listed = {q.page: q for q in got.quarantined}
    equal(sorted(listed), sorted(p.place for p in hurt), "the places that are listed")
    for page in hurt:
        q, (path, at) = listed[page.place], state.where(page)
        equal((os.path.join(box.state, "ssd", q.file), q.offset, q.generation, q.found_by),
              (path, at, page.generation, "scrub"), f"page {page.place}")
        equal(q.owners, owners[page.place], "owners")
        check(len(q.cause) > 5, f"cause {q.cause!r}")
        line = f"file={q.file} offset={at} "
        equal(box.log(offset).count(line), 1, f"log lines that name {line}")
    equal(box.counter("cached_checksum_failures_total", 'tier="ssd",where="scrub"'), 5, "counted")
    places_add_up(box, "after the pass")
    again = whole_pass(box)
    equal((again.damaged, again.quarantined_pages), (0, 5), "a second pass finds no more")
    for label, prompt in prompts.items():
        user, name = label.split("/")
        session = state.session(label)
        result = Talk(box.client(user), name).prefill(prompt + tokens(5))
        equal(result.weakened, 0, f"{label}: no turn meets damage any more")
        if session not in gone:
            resumed(result, REPLAY, even(len(prompt)), f"{label} is not hurt")
    box.no_wrong_bytes()
    box.stop()

    code, out, _ = kvdump("verify", box.state)
    equal(code, 0, f"kvdump verify: {out}")
    equal(len(re.findall("^quarantined: segment", out, re.M)), 5, "kvdump names them")
    code, out, _ = kvdump("print", "--json", box.state)
    equal(out.count('"found_by": "scrub"'), 5, "so does its JSON")
    features = int.from_bytes(State(box.state).superblock[48:56], "little")
    check(features & 4, f"bit 2 of the features is set: {features:#x}")
    box.start()
    equal(scrub(box).quarantined_pages, 5, "after a restart they are as before")
    equal({q.page: q.owners for q in scrub(box).quarantined},
          {q.page: q.owners for q in got.quarantined}, "with their owners")
    places_add_up(box, "after a restart")
    fill(box)
    places_add_up(box, "when the tier is full")
    box.stop()
    for page in hurt:
        equal(State(box.state).read(page) == bytes_of[page.place], True,
              f"nobody wrote to page {page.place}")


def fill(box):
    """Saves until older ones have to make room."""
    client = box.client()
    for i in range(200):
        talk = Talk(client, f"fill{i}")
        equal(patiently(talk.prefill, tokens(900), level=pb.LEVEL_SSD).save_reason, "", "saved")
        talk.close()
        if box.counter("cached_evictions_total", 'tier="ssd",cause="capacity"') > 20:
            return
    check(False, "the tier is never full")


@case
def owners_are_counted():
    """One damaged page of a conversation: its owners are the checkpoints whose rows it holds."""
    box = Box("synthetic", FLAGS).start()
    talk = Talk(box.client(), "long")
    history = tokens(140)
    for _ in range(4):
        patiently(talk.prefill, history, level=pb.LEVEL_SSD)
        history += tokens(60)
    talk.close()
    box.stop()
    state = State(box.state)
    page = rng.choice([p for p in state.pages() if p.position <= 2 * PAGE])
    path, offset = state.where(page)
    flip(path, offset + 256 + 512 + rng.randrange(1000))
    box.start()
    got = whole_pass(box)
    equal([q.owners for q in got.quarantined],
          [len(state.trees[page.session].owners(page.uid))], "owners")
    check(got.quarantined[0].cause.startswith("checksum 0x"), got.quarantined[0].cause)
    equal(got.checkpoints_dropped, len(state.trees[page.session].below(page.uid)), "dropped")
    box.stop()


@case
def stale_and_swapped_pages():
    """Well formed, whole, and not what the record means."""
    box = Box("synthetic", FLAGS).start()
    stored(box, 6, 300, 600)
    box.stop()
    state = State(box.state)
    one, two, three, four = rng.sample([p for p in state.pages() if p.count == PAGE], 4)
    bytes_one, bytes_two = state.read(one), state.read(two)
    state.write(one, bytes_two)
    state.write(two, bytes_one)
    state.write(three, bytes(state.page_bytes))
    state.write(four, bytes_one)
    box.start()
    got = whole_pass(box)
    equal(got.damaged, 4, "all four are found")
    causes = {q.page: q.cause for q in got.quarantined}
    equal(causes[three.place], "wrong magic", "a page of zeros")
    check(all(len(causes[p.place]) > 5 for p in (one, two, four)), f"{causes}")
    box.stop()


@case
def a_read_quarantines_as_well():
    box = Box("synthetic", FLAGS).start()
    prompts = stored(box, 2, 400, 600)
    box.stop()
    state = State(box.state)
    page = next(p for p in state.pages() if p.position == PAGE and
                state.label(p.session) == "alice/s0")
    path, offset = state.where(page)
    flip(path, offset + 300)
    box.start()
    prompt = prompts["alice/s0"]
    before = len(box.log())
    got = Talk(box.client(), "s0").prefill(prompt + tokens(5), level=pb.LEVEL_SSD)
    equal((got.weakened, got.reason), (1, "CORRUPT"), "the turn that met it")
    status = scrub(box)
    equal([(q.page, q.found_by) for q in status.quarantined], [(page.place, "read")], "listed")
    equal(status.damaged, 0, "the scrub found nothing")
    equal(box.log(before).count("event=page_damaged"), 1, "one line in the log")
    places_add_up(box, "after a read")
    tool(box).code(0, "scrub", "status")
    box.crash()
    equal([q.page for q in scrub(box).quarantined], [page.place], "after kill -9")
    box.stop()


@case
def a_short_file_is_no_bad_place():
    """Pages beyond the end of a file are lost, their places are not."""
    box = Box("synthetic", FLAGS).start()
    stored(box, 6)
    for name in ("s0", "s2", "s4"):
        Talk(box.client(), name).close()
    last = box.segments()[1]
    os.truncate(last, 4096 + 3 * 20480)
    got = whole_pass(box)
    check(got.damaged > 0, "pages are missing")
    equal(got.quarantined_pages, 0, "none is quarantined")
    check(box.logged("its file ends before it"), "the log says why")
    check(got.checkpoints_dropped > 0, "what needs them is dropped")
    box.stop()


@case
def sessions_in_use_wait():
    """A finding of a session that is busy is settled when the session is at rest."""
    box = Box("synthetic", FLAGS).start()
    prompts = stored(box, 2, 500, 600)
    box.stop()
    state = State(box.state)
    page = next(p for p in state.pages() if p.position == 2 * PAGE and
                state.label(p.session) == "bob/s1")
    path, offset = state.where(page)
    box.start()
    talk = Talk(box.client("bob"), "s1")
    resumed(talk.prefill(prompts["bob/s1"] + tokens(3), no_checkpoint=True), REPLAY,
            even(len(prompts["bob/s1"])), "before the damage")
    stream = talk.stream(60000, no_checkpoint=True, timeout=60)
    next(stream)
    flip(path, offset + 5000)
    scrub(box, START)
    end = time.monotonic() + 20
    got = scrub(box)
    while got.waiting == 0 and got.running and time.monotonic() < end:
        time.sleep(0.01)
        got = scrub(box)
    equal((got.running, got.waiting, got.damaged), (True, 1, 0), "it waits for the session")
    stream.cancel()
    got = end_of_pass(box)
    equal((got.damaged, got.waiting, got.quarantined_pages), (1, 0, 1), "then it is settled")
    check(box.is_up(), "the daemon is up")
    box.no_wrong_bytes()
    box.stop()


@case
def a_page_that_a_live_session_holds():
    """Its checkpoints go; the rows in memory are good, and the next save writes them elsewhere."""
    for crash in (True, False):
        box = Box("synthetic", FLAGS).start()
        box.page_bytes = box.stats().page_bytes
        prompt = tokens(500)
        talk = Talk(box.client(), "live")
        patiently(talk.prefill, prompt, level=pb.LEVEL_SSD)
        turn = prompt
        (path, offset), = find_pages(box, prompt[PAGE:2 * PAGE])
        flip(path, offset + 5000)
        got = whole_pass(box)
        equal((got.damaged, got.quarantined_pages, got.checkpoints_dropped), (1, 1, 1), "found")
        equal(len(talk.get().checkpoints), 0, "what needs it is gone")
        if crash:
            box.crash()
        else:
            turn = prompt + tokens(9)
            more = patiently(talk.prefill, turn, level=pb.LEVEL_SSD)
            check(more.hit_tokens >= len(prompt) - 1, "the live session has its rows in memory")
            equal(more.save_reason, "", "and saves them again")
            box.restart()
        equal(scrub(box).quarantined_pages, 1, "after a restart")
        places_add_up(box, f"crash {crash}")
        got = patiently(Talk(box.client(), "live").prefill, turn + tokens(20))
        equal(got.weakened, 0, "no turn meets it any more")
        resumed(got, MISS if crash else REPLAY, 0 if crash else even(len(turn)),
                f"crash {crash}: what was acknowledged is there")
        equal((box.counter("cached_checksum_failures_total", 'tier="ssd",where="read"'),
               whole_pass(box).damaged), (0, 0), "nor does a scrub")
        box.no_wrong_bytes()
        box.stop()
        code, out, _ = kvdump("verify", box.state)
        equal(code, 0, f"kvdump verify: {out}")


@case
def nothing_that_moves_is_called_damaged():
    """Pages are written again, removed and their places used by others while passes run."""
    box = Box("synthetic", dict(FLAGS, **{"ssd.bytes": "4MiB"})).start()
    stop = threading.Event()
    errors = []

    def write(index):
        try:
            client = box.client(("alice", "bob")[index % 2])
            turn = 0
            while not stop.is_set():
                talk = Talk(client, f"w{index}-{turn}", ttl_ms=60000)
                history = tokens(100)
                for _ in range(6):
                    patiently(talk.prefill, history, level=pb.LEVEL_SSD)
                    history += tokens(40)
                talk.close()
                turn += 1
                if turn % 4 == 0 and index == 0:
                    box.advance(61000)  # All of them expire: places are free again.
        except Exception as error:  # Told by the main thread.
            errors.append(error)

    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in writers:
        thread.start()
    passes, read = 0, 0
    end = time.monotonic() + 6
    while time.monotonic() < end and not errors:
        got = whole_pass(box)
        passes += 1
        read += got.pages
        equal((got.damaged, got.unread), (0, 0), "what moved is not damaged")
    stop.set()
    for thread in writers:
        thread.join()
    check(not errors, f"writers: {errors}")
    check(passes > 3 and read > 50, f"{passes} passes read {read} pages")
    equal(scrub(box).quarantined_pages, 0, "nothing is quarantined")
    box.no_wrong_bytes()
    places_add_up(box, "after all")
    box.stop()


def turns(box, seconds):
    """Milliseconds of each of many turns of one conversation on a stored session."""
    talk = Talk(box.client(), f"t{rng.randrange(1 << 30)}")
    history, took = tokens(200), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        patiently(talk.prefill, history, level=pb.LEVEL_SSD)
        took.append((time.monotonic() - began) * 1000)
        history += tokens(8)
        if len(history) > 900:
            talk.close()
            talk = Talk(box.client(), f"t{rng.randrange(1 << 30)}")
            history = tokens(200)
    return sorted(took)


@case
def turns_beside_a_scrub():
    """Prints the times of turns with and without a scrub beside them; both are served in full."""
    box = Box("synthetic", dict(FLAGS, **{"ssd.bytes": "64MiB", "ssd.segment_bytes": "8MiB"}))
    box.start()
    stored(box, 30, 600, 1000)
    alone, beside, reads = [], [], 0
    for _ in range(3):
        alone += turns(box, 1.0)
        running = threading.Event()

        def again():
            while not running.is_set():
                if not scrub(box).running:
                    scrub(box, START)
                time.sleep(0.02)
        thread = threading.Thread(target=again)
        before = box.counter("cached_scrub_bytes_total")
        thread.start()
        beside += turns(box, 1.0)
        running.set()
        thread.join()
        reads += box.counter("cached_scrub_bytes_total") - before
    for name, took in (("alone", alone), ("beside a scrub", beside)):
        took.sort()
        print(f"turns {name}: {len(took)}, p50 {took[len(took) // 2]:.2f} ms, "
              f"p99 {took[len(took) * 99 // 100]:.2f} ms")
    print(f"the scrub read {reads / 3 / (1 << 20):.0f} MiB/s beside them, set to 200")
    check(reads > 0, "it read beside the turns")
    check(len(beside) > 10, "turns were served beside it")
    end_of_pass(box)
    box.stop()


@case
def the_rate_is_kept():
    box = Box("synthetic", dict(FLAGS, **{"scrub.rate": "1MiB"})).start()
    stored(box, 8, 600, 900)
    began = time.monotonic()
    got = whole_pass(box)
    seconds = time.monotonic() - began
    rate = got.bytes / (1 << 20) / seconds
    equal(got.rate_bytes, 1 << 20, "scrub.rate")
    check(rate <= 1.15, f"{got.bytes} bytes in {seconds:.2f} s: {rate:.2f} MiB/s, set to 1")
    check(rate >= 0.5, f"{rate:.2f} MiB/s, set to 1")
    got = scrub(box, START)
    got = scrub(box, START, rate_bytes=1 << 30)
    equal((got.changed, got.running, got.rate_bytes), (False, True, 1 << 30), "a new rate")
    began = time.monotonic()
    end_of_pass(box)
    check(time.monotonic() - began < seconds / 2, "it is faster from then on")
    box.stop()


@case
def stop_and_restart():
    box = Box("synthetic", dict(FLAGS, **{"scrub.rate": "1MiB"})).start()
    stored(box, 8, 600, 900)
    equal(scrub(box, STOP).changed, False, "nothing runs")
    equal(scrub(box, START).changed, True, "it begins")
    got = scrub(box, STOP)
    equal(got.changed, True, "it is told to stop")
    got = end_of_pass(box, 5)
    check(got.pages < got.pages_total, "before its end")
    equal((got.passes, got.full_age_ms), (0, 0), "it was no whole pass")
    check(box.logged("event=scrub_stopped"), "the log says so")
    scrub(box, START)
    code, seconds = box.stop()
    check(code == 0 and seconds < 5, f"a daemon stops while it runs: {seconds:.1f} s")
    box.start()
    equal(scrub(box).running, False, "a restart has stopped it")
    scrub(box, START)
    box.crash()
    equal(scrub(box).running, False, "kill -9 as well")
    box.stop()


FAULT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static ssize_t failing(const char *name, int fd, void *buf, size_t bytes, long offset)
{
    char link[64], path[512];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof(path) - 1);
    path[n > 0 ? n : 0] = 0;
    if (strstr(path, "/segment-") && offset >= atol(getenv("FAULT_OFFSET")) &&
        access(getenv("FAULT_FILE"), F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    return ((ssize_t (*)(int, void *, size_t, long))dlsym(RTLD_NEXT, name))(fd, buf, bytes, offset);
}
ssize_t pread(int fd, void *buf, size_t bytes, off_t offset)
{
    return failing("pread", fd, buf, bytes, offset);
}
ssize_t pread64(int fd, void *buf, size_t bytes, off64_t offset)
{
    return failing("pread64", fd, buf, bytes, offset);
}
"""


@case
def what_the_device_does_not_give_stays():
    place = scratch()
    library, trigger = os.path.join(place, "fault.so"), os.path.join(place, "now")
    made = subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o",
                           library, "-ldl"], input=FAULT.encode(), check=False)
    if not check(made.returncode == 0, "the faulty pread is built"):
        return
    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    box = Box("synthetic", dict(FLAGS, **{"io.backend": "pool"}), env={
        "LD_PRELOAD": library, "FAULT_FILE": trigger, "FAULT_OFFSET": str(4096 + 2 * 20480),
        "ASAN_OPTIONS": sanitizer}).start()
    prompts = stored(box, 4)
    box.restart()
    with open(trigger, "w", encoding="ascii"):
        pass
    got = whole_pass(box)
    check(got.unread > 0, f"pages were not read: {got.unread}")
    tool(box).code(1, "scrub", "status")
    equal((got.damaged, got.checkpoints_dropped, got.quarantined_pages), (0, 0, 0), "all stay")
    equal(box.counter("cached_scrub_read_failures_total"), got.unread, "counted")
    check(box.logged("event=page_read_failed where=scrub"), "logged")
    os.unlink(trigger)
    equal(whole_pass(box).unread, 0, "the device is well again")
    for label, prompt in prompts.items():
        user, name = label.split("/")
        resumed(Talk(box.client(user), name).prefill(prompt + tokens(5)), REPLAY,
                even(len(prompt)), label)
    box.stop()


@case
def records_that_cannot_be_read():
    """Tables of RocksDB damaged under the daemon: the pass goes no further, and a script sees it."""
    box = Box("synthetic", FLAGS).start()
    stored(box, 40, longest=300)
    box.restart()  # The records are in a table now, and nobody has read those of trees.
    folder = os.path.join(box.state, "manifest")
    for name in os.listdir(folder):
        if not name.endswith(".sst"):
            continue
        path = os.path.join(folder, name)
        for offset in range(0, os.path.getsize(path) - 2048, 64):
            flip(path, offset)
    done = tool(box).code(1, "scrub", "start", "--wait")
    check("ended early  records cannot be read: they are damaged" in done.stdout, done.stdout)
    done = tool(box).code(1, "scrub", "status", "--json")
    check('"failure": "records cannot be read' in done.stdout, done.stdout)
    got = scrub(box)
    equal((got.passes, got.full_age_ms), (0, 0), "that was no whole pass")
    check(got.pages < got.pages_total, f"{got.pages} of {got.pages_total} pages")
    check(box.logged("event=scrub_stopped"), "logged")
    box.kill()


@case
def a_pass_that_is_stopped():
    """Whoever waits for it learns that it was not whole."""
    box = Box("synthetic", dict(FLAGS, **{"hbm.bytes": "16MiB"})).start()
    stored(box, 24, shortest=400)
    waiter = {}

    def wait():
        waiter["said"] = tool(box).code(1, "scrub", "start", "--wait", "--rate", "1MiB/s")
    thread = threading.Thread(target=wait)
    thread.start()
    end = time.monotonic() + 10
    while not scrub(box).running and time.monotonic() < end:
        time.sleep(0.01)
    tool(box).code(0, "scrub", "stop")
    thread.join()
    check("the pass was stopped before its end" in waiter["said"].stderr, waiter["said"].stderr)
    box.stop()


@case
def the_commands():
    box = Box("synthetic", FLAGS).start()
    stored(box, 4)
    ops = tool(box)
    said = ops.code(0, "scrub", "status").stdout
    check("scrub        idle" in said and "none since the daemon started" in said, said)
    done = ops.code(0, "scrub", "start", "--wait", "--rate", "50MiB/s")
    check("scrub        ended" in done.stdout and "(100 %)" in done.stdout, done.stdout)
    got = ops.json("scrub", "status", "--json")
    equal((got["running"], got["damaged"], got["rate_bytes"]), (False, 0, 50 << 20), "--json")
    for bad in ("", "fast", "1", "1023KiB", "65GiB/s", "-1", "10MiB/m", "99999999999999999999GiB"):
        wrong = ops.code(2, "scrub", "start", "--rate", bad)
        check("1MiB/s to 64GiB/s" in wrong.stderr, wrong.stderr)
    ops.code(2, "scrub", "status", "extra")
    ops.code(2, "scrub", "begin")
    ops.code(0, "scrub", "stop")
    denied = tool(box, "alice").code(4, "scrub", "start")
    check("ROLE_DENIED" in denied.stderr, denied.stderr)
    tool(box, "stats").code(4, "scrub", "status")
    box.stop()
    state = State(box.state)
    damage_some(state, 1)
    box.start()
    ops = tool(box)
    found = ops.code(7, "scrub", "start", "--wait")
    check(re.search(r"damaged      1 pages", found.stdout), found.stdout)
    check(re.search(r"segment-\d{6}\.kv\t\d+\t\d+\tscrub\t", found.stdout), found.stdout)
    equal(len(ops.json("scrub", "status", "--json", code=7)["quarantined"]), 1, "--json and exit 7")
    status = ops.code(0, "stats").stdout
    check("cached_tier_quarantined_bytes" in status, "stats have it")
    box.stop()


def ahead_is_made(box):
    """Nothing is written that nobody asked for."""
    before = None
    while (now := box.counter("cached_ssd_pages_total", 'place="ahead"')) != before:
        before = now
        time.sleep(0.3)


@case
def quarantined_places_are_released():
    """What keeps a pattern and zeros is used again; what the device refuses stays out of use, and is no
    reason to keep nothing more."""
    calls = Calls()
    box = Box("synthetic", {**FLAGS, "io.backend": "pool"}, env=calls.env()).start()
    nothing = tool(box).json("scrub", "release", "--json")
    equal([nothing[key] for key in ("released", "still_bad", "not_tried", "quarantined_pages")],
          [0, 0, 0, 0], "none is quarantined")
    prompts = stored(box, 6)
    box.stop()
    hurt = damage_some(State(box.state), 5)
    box.start()
    equal(whole_pass(box).damaged, 5, "found")
    ahead_is_made(box)
    used = box.tier("ssd").items_used
    calls.fail("write", errno.EIO)
    got = tool(box).json("scrub", "release", "--json", code=7)
    equal((got["released"], got["still_bad"], got["quarantined_pages"]), (0, 5, 5), "refused writes")
    calls.fail("read", errno.EIO)
    said = tool(box).code(7, "scrub", "release").stdout
    check("still bad    5 pages" in said, f"refused reads: {said!r}")
    equal(box.log().count("event=page_still_bad"), 10, "each is told")
    equal(box.stats().health, "serving", "health")
    calls.work()
    places_add_up(box, "before")
    said = tool(box).code(0, "scrub", "release").stdout
    check("released     5 pages" in said and "quarantined  0 pages" in said, f"released: {said!r}")
    equal(box.log().count("event=page_released"), 5, "each is told")
    equal((scrub(box).quarantined_pages, len(scrub(box).quarantined)), (0, 0), "status")
    equal(box.tier("ssd").items_used, used, "nobody has them")
    places_add_up(box, "after")
    equal(box.counter("cached_quarantine_released_total"), 5, "counted")
    box.crash()
    equal(scrub(box).quarantined_pages, 0, "after kill -9")
    places_add_up(box, "after kill -9")
    box.stop()
    state = State(box.state)
    equal([key for key in state.records if key[:1] == b"Q"], [], "no record is left")
    for page in hurt:
        equal(state.read(page), bytes(state.page_bytes), "zeros stand there")
    equal(kvdump("verify", box.state)[0], 0, "kvdump verify")
    box.start()
    for label, prompt in prompts.items():
        user, name = label.split("/")
        equal(Talk(box.client(user), name).prefill(prompt + tokens(300)).save_reason, "", label)
    more = stored(box, 12)
    box.stop()
    places = {page.place for page in State(box.state).pages()}
    check(places & {page.place for page in hurt}, "they are used again")
    box.start()
    equal(whole_pass(box).damaged, 0, "and are good")
    for label, prompt in more.items():
        user, name = label.split("/")
        resumed(Talk(box.client(user), name).prefill(prompt + tokens(5)), REPLAY, even(len(prompt)),
                label)
    box.no_wrong_bytes()
    box.stop()


@case
def passes_begin_by_themselves():
    box = Box("synthetic", {**FLAGS, "scrub.every": "1s", "scrub.rate": "64MiB"}).start()
    prompts = stored(box, 4)
    used = box.tier("ssd").items_used
    end = time.monotonic() + 20
    while scrub(box).passes < 2 and time.monotonic() < end:
        time.sleep(0.05)
    got = scrub(box)
    check(got.passes >= 2, f"passes that nobody asked for: {got.passes}")
    equal((got.pages, got.damaged, got.rate_bytes), (used, 0, 64 << 20), "each of all of it")
    equal(box.log().count("event=scrub_started by=schedule"), scrub(box).passes, "each is told")
    box.stop()
    damage_some(State(box.state), 2)
    box.start()
    end = time.monotonic() + 20
    while scrub(box).passes < 1 and time.monotonic() < end:
        time.sleep(0.05)
    equal(scrub(box).quarantined_pages, 2, "damage that nobody asked for is found")
    check(len(prompts) == 4 and box.is_up(), "the daemon is up")
    box.stop()
    box.flags["scrub.every"] = "0"
    box.start()
    time.sleep(1.5)
    equal((scrub(box).running, scrub(box).passes), (False, 0), "0: none")
    box.stop()


@case
def a_place_that_a_record_names_is_not_released():
    """A Lookup finds damage and drops nothing: the place is out of use, and still in a record."""
    box = Box("synthetic", FLAGS).start()
    talk, prompt = Talk(box.client(), "s"), tokens(380)
    equal(talk.prefill(prompt).save_reason, "", "saved")
    talk.close()
    box.stop()
    state = State(box.state)
    page = next(p for p in state.pages() if p.position == 128)
    path, offset = state.where(page)
    flip(path, offset + 5000)
    box.start()
    talk = Talk(box.client(), "s")
    talk.lookup(prompt[:200] + tokens(50))
    equal(scrub(box).quarantined_pages, 1, "found by the lookup")
    got = scrub(box, admin_pb.SCRUB_ACTION_RELEASE)
    equal((got.released, got.still_bad, got.still_named), (0, 0, 1), "not tried")
    talk.prefill(prompt)
    got = scrub(box, admin_pb.SCRUB_ACTION_RELEASE)
    equal((got.released, got.still_named, got.quarantined_pages), (1, 0, 0), "after it was used")
    places_add_up(box, "released")
    box.no_wrong_bytes()
    box.stop()
    equal(kvdump("verify", box.state)[0], 0, "kvdump verify")


@case
def a_release_while_everything_runs():
    """Beside saves, reads, a pass and other releases; each place is given to one at a time."""
    box = Box("synthetic", FLAGS).start()
    prompts = stored(box, 8)
    for round_ in range(3):
        box.stop()
        damage_some(State(box.state), 4)
        box.start()
        found = whole_pass(box).quarantined_pages
        check(found >= 4, f"round {round_}: {found}")
        released = []

        def release():
            released.append(scrub(box, admin_pb.SCRUB_ACTION_RELEASE).released)

        def work(index):
            client = box.client()
            for turn in range(6):
                talk = Talk(client, f"r{round_}-{index}-{turn}")
                prompt = tokens(rng.randrange(150, 500))
                equal(patiently(talk.prefill, prompt).save_reason, "", "saved beside")
                prompts[f"alice/{talk.name}"] = prompt

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        threads += [threading.Thread(target=release) for _ in range(3)]
        for thread in threads:
            thread.start()
        scrub(box, START)
        for thread in threads:
            thread.join()
        end_of_pass(box)
        equal((sum(released), scrub(box).quarantined_pages), (found, 0), "each once")
        places_add_up(box, f"round {round_}")
    box.no_wrong_bytes()
    box.stop()
    equal(kvdump("verify", box.state)[0], 0, "kvdump verify")


@case
def bad_requests():
    box = Box("synthetic", FLAGS).start()
    for fields, field in (({}, "action"), ({"action": 5}, "action"),
                          ({"action": START, "rate_bytes": 1000}, "rate_bytes"),
                          ({"action": START, "rate_bytes": 65 << 30}, "rate_bytes"),
                          ({"action": STATUS, "rate_bytes": 1 << 20}, "rate_bytes"),
                          ({"action": STOP, "rate_bytes": 1 << 20}, "rate_bytes")):
        expect(box.operator.Scrub, admin_pb.ScrubRequest(**fields), code="INVALID_ARGUMENT",
               reason="SCRUB_INVALID", field=field)
    equal(scrub(box).running, False, "none of them started one")
    got = failure(box.client("stats").admin.Scrub, admin_pb.ScrubRequest(action=STATUS))
    equal(got.code, "PERMISSION_DENIED", "role stats")
    box.stop()


if __name__ == "__main__":
    run_cases(__doc__)
