"""Bad luck of an operator: what is wrong is named, the rest goes on, service comes back by itself.

A row of docs/operations.md each.  Clocks are in it_clock.py, full disks in it_faults.py, another
version's directory in it_kvdump.py, two daemons in it_lifecycle.py, a RocksDB that does not open in
it_faults.py.
"""

import fcntl
import os
import re
import resource
import shutil
import struct
import subprocess
import time

import grpc
from cli import Tool, token_file
from daemon import check, equal, expect, pb
from faults import (
    CROWDED, MIB, Calls, come_back, lookers, mounted, owners, pages_on_disk, recovered,
    stored_sessions, well)
from state_files import State, resealed_record
from talk import (
    EXACT, MISS, PAGE, REPLAY, Box, Talk, case, even, flip, name_of, overwrite, patiently, resumed,
    run_cases, skip_case, tokens)

NOBODY = 65534
GOING_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
NOTHING_FLUSHED = 2


def refused(box, what, *words, clean=True):
    """Exit code 2, one sentence that says all these words; and the directory is nobody's."""
    code, said = box.refused()
    own = [line for line in said.splitlines() if not re.match(r"\d{4}-\d\d-\d\dT", line)]
    equal(code, 2, f"{what}: exit code of a refused start: {said!r}")
    check(len(own) == 1 and own[0].startswith("cached: "), f"{what}: one sentence: {said!r}")
    for word in words:
        check(word in said, f"{what}: names {word!r}: {said!r}")
    check("event=ready" not in said, f"{what}: it never served")


def at(place, **flags):
    box = Box("synthetic", {**CROWDED, "state.dir": os.path.join(place, "state"), **flags})
    box.state = box.flags["state.dir"]
    return box


def hits(box, prompts, what):
    client = box.client()
    for name, prompt in prompts.items():
        got = Talk(client, name).prefill(prompt + tokens(3), no_checkpoint=True)
        equal((got.hit_tokens >= even(len(prompt)), got.weakened), (True, 0),
              f"{what}: {name} hits {got.hit_tokens} of {len(prompt)}")


def saves_again(box, what, seconds=5):
    """A save is stored, at the latest after so long."""
    end = time.monotonic() + seconds
    client, reason = box.client(), "never tried"
    while reason and time.monotonic() < end:
        talk = Talk(client, f"again{time.monotonic_ns()}")
        reason = patiently(talk.prefill, tokens(300)).save_reason
        time.sleep(0.02)
    return equal(reason, "", f"{what}: saves work again within {seconds} s")


# ---- Places ----

@case
def a_file_system_without_o_direct():
    """ramfs has none: refused with a sentence that says what is missing."""
    with mounted("a_file_system_without_o_direct", "-t", "ramfs", "ramfs") as place:
        if place is None:
            return
        refused(at(place), "no O_DIRECT", "has no O_DIRECT", place)


@case
def a_file_system_too_small_for_one_segment():
    with mounted("a_file_system_too_small_for_one_segment", mib=24) as place:
        if place is None:
            return
        small = at(place, **{"ssd.segment_bytes": "64MiB", "ssd.bytes": "128MiB"})
        refused(small, "too small", str(64 * MIB), place)
        equal(os.listdir(small.state), ["lock"], "what is left of it")
        fits = at(place, **{"ssd.segment_bytes": "1MiB", "ssd.bytes": "4MiB"}).start()
        saves_again(fits, "with a segment that fits")
        fits.stop()


@case
def a_read_only_mount():
    with mounted("a_read_only_mount", mib=24) as place:
        if place is None:
            return
        box = at(place, **{"ssd.bytes": "8MiB"}).start()
        prompts = stored_sessions(box, 4)
        box.stop()
        equal(os.system(f"mount -o remount,ro {place}"), 0, "remount,ro")
        refused(box, "read-only", box.state, "Read-only file system")
        equal(os.system(f"mount -o remount,rw {place}"), 0, "remount,rw")
        box.start()
        hits(box, prompts, "writable again")
        saves_again(box, "writable again")
        box.stop()


@case
def a_file_system_that_goes_away():
    """Every later write fails: saves are refused with that name, turns go on, the stop is a clean one,
    and when it is mounted again everything acknowledged is there."""
    with mounted("a_file_system_that_goes_away", mib=100) as place:
        if place is None:
            return
        box = at(place).start()
        prompts = stored_sessions(box, 6)
        root = os.open(place, os.O_RDONLY)
        fcntl.ioctl(root, GOING_DOWN, struct.pack("I", NOTHING_FLUSHED))
        os.close(root)
        client = box.client()
        # The first finds out, the second is told.
        for i, (code, reason) in enumerate((("UNAVAILABLE", "RESULT_UNKNOWN"),
                                            ("FAILED_PRECONDITION", "SSD_READ_ONLY"))):
            expect(client.session.OpenSession, pb.OpenSessionRequest(session_id=f"later{i}"),
                   code=code, reason=reason)
        check(box.logged("event=manifest_write_failed"), "the log says so")
        end = time.monotonic() + 5
        while "failed sync" not in box.stats().health and time.monotonic() < end:
            time.sleep(0.02)
        check("failed sync" in box.stats().health, f"health: {box.stats().health!r}")
        box.stop()
        check(box.logged("event=stopped"), "the log has the stop")
        os.system(f"umount {place}; mount -o loop {place}/../disk {place}")
        offset = len(box.log())
        box.start()
        equal(recovered(box, offset), (len(prompts), 0), "recovered and dropped when it is back")
        hits(box, prompts, "mounted again")
        saves_again(box, "mounted again")
        box.stop()


def unprivileged(flags=None):
    """A daemon of a user with no rights but its own files, in a directory of its own."""
    box = Box("synthetic", {**CROWDED, **(flags or {})})
    program = os.path.join(box.directory, "cached")
    shutil.copy(box.binary, program)
    box.binary = program
    whole = box.command
    box.command = lambda: ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
                           *whole()]
    os.chown(box.directory, NOBODY, NOBODY)
    os.chown(box.token_file, NOBODY, NOBODY)
    return box


@case
def permission_lost_before_a_start():
    if os.getuid() != 0:
        skip_case("permission_lost_before_a_start: needs root to run as somebody else")
        return
    box = unprivileged().start()
    prompts = stored_sessions(box, 4)
    box.stop()
    for path in ("", "ssd", "manifest", "superblock", "lock"):
        target = os.path.join(box.state, path)
        mode = os.stat(target).st_mode & 0o777
        os.chmod(target, 0)
        refused(box, f"no right to '{path}'", "Permission denied", box.state)
        os.chmod(target, mode)
    box.start()
    hits(box, prompts, "with its rights again")
    saves_again(box, "with its rights again")
    box.stop()


@case
def permission_lost_while_running():
    """No new segment can be made: saves are refused with a name when the present ones are full, turns
    and reads go on, and saves work again when the right is back."""
    if os.getuid() != 0:
        skip_case("permission_lost_while_running: needs root to run as somebody else")
        return
    box = unprivileged({"ssd.bytes": "8MiB"}).start()
    stored = stored_sessions(box, 3)
    folder = os.path.join(box.state, "ssd")
    os.chmod(folder, 0)
    client, reasons = box.client(), []
    for i in range(60):
        talk, prompt = Talk(client, f"more{i}"), tokens(400)
        got = patiently(talk.prefill, prompt)
        if got.save_reason == "":
            stored[talk.name] = prompt
            continue
        reasons.append(got.save_reason)
        resumed(talk.prefill(prompt + tokens(5)), EXACT, len(prompt), "a turn after a refused save")
        if len(reasons) == 3:
            break
    equal(len(reasons), 3, "saves refused without the right to make a segment")
    check(all(r in ("SSD_READ_ONLY", "SSD_FULL") for r in reasons), f"reasons: {reasons}")
    check(box.logged("Permission denied"), "the log says why")
    hits(box, stored, "without the right")
    well(box, what="without the right")
    os.chmod(folder, 0o700)
    saves_again(box, "with the right again")
    offset = len(box.log())
    box.crash()
    equal(recovered(box, offset)[1], 0, "dropped at the start after")
    hits(box, stored, "started again")
    box.stop()


@case
def doctor_on_a_disk_that_hangs():
    """The disk gives no answer: doctor says so within seconds, and so does who waits for its output."""
    with mounted("a disk that hangs", mib=64) as place:
        if place is None:
            return
        box = at(place, **{"ssd.bytes": "8MiB"}).start()
        stored_sessions(box, 2)
        ops = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
        done = subprocess.run(["fsfreeze", "-f", place], stderr=subprocess.PIPE, check=False)
        if done.returncode != 0:
            skip_case(f"fsfreeze is refused: {done.stderr.decode().strip()}")
            box.stop()
            return
        try:
            began = time.monotonic()
            said = ops.code(1, "doctor").stdout
            took = time.monotonic() - began
            check(took < 8, f"doctor took {took:.1f} s")
            check("gave no answer to a write for 3 s" in said, f"doctor: {said!r}")
            check("answers at" in said, "and it looked at the rest")
        finally:
            subprocess.run(["fsfreeze", "-u", place], check=True)
        check(not [n for n in os.listdir(box.state) if n.startswith("doctor.")],
              "nothing is left behind")
        said = ops.run("doctor").stdout
        check("4 KiB written past the page cache" in said, f"doctor again: {said!r}")
        box.stop()


# ---- Segments, under the daemon ----

def hurt_under_the_daemon(what, damage, told=None):
    """damage(path, box) to one segment in use.  What it hit is computed again, once; the rest hits."""
    box = Box("synthetic", CROWDED).start()
    box.page_bytes = box.stats().page_bytes
    prompts = stored_sessions(box, 42, 300, 500)  # 126 pages at least; memory holds 102.
    pages = pages_on_disk(box)
    used = sorted({page[0] for page in pages})
    check(len(used) >= 4, f"{what}: segments in use: {len(used)}")
    paths = damage(box, used)
    hurt, may_look = set(), set()
    for path, _, position, ids in pages:
        if path in paths:
            hurt |= owners(prompts, position, ids)
            may_look |= lookers(prompts, position)
    before = box.counter("cached_weakened_plans_total")
    weakened = come_back(box, prompts, hurt, what, may_look)
    equal(box.counter("cached_weakened_plans_total") - before, weakened, f"{what}: weakened plans")
    if told:
        told(box)
    well(box, what=what)
    offset = len(box.log())
    box.crash()
    found, dropped = recovered(box, offset)
    come_back(box, prompts, set(prompts) if dropped else set(), f"{what}, started again", set(prompts))
    box.no_wrong_bytes(what)
    box.stop()
    return weakened, dropped


@case
def segment_truncated_under_the_daemon():
    def cut(_, used):
        os.truncate(used[1], 8192)
        return [used[1]]
    def told(box):
        check(box.counter("cached_missing_pages_total", 'tier="ssd"') > 0, "missing pages are counted")
        equal(box.counter("cached_read_failures_total", 'tier="ssd"'), 0, "no read failed")
        check(box.logged('event=page_damaged where=read ssd_page='), "the log says it")
        check(box.logged('cause="its file ends before it" action=dropped'), "with the cause")
        check("event=page_read_failed" not in box.log(), "and not as an error of the device")
    weakened, _ = hurt_under_the_daemon("truncated", cut, told)
    check(weakened > 0, "the cut was noticed")


@case
def segment_deleted_under_the_daemon():
    """Its pages are served as long as the daemon lives; nothing more is acknowledged, because it would
    be lost with the daemon; a restart drops what is gone, and goes on."""
    box = Box("synthetic", CROWDED).start()
    prompts = stored_sessions(box, 24)
    acknowledged = box.stats().checkpoints
    for path in box.segments():
        os.unlink(path)
    client = box.client()
    reasons = [patiently(Talk(client, f"late{i}").prefill, tokens(300)).save_reason for i in range(3)]
    equal(reasons, ["SSD_READ_ONLY"] * 3, "saves after it")
    equal(box.stats().checkpoints, acknowledged, "nothing more is acknowledged")
    end = time.monotonic() + 5
    while "read-only" not in box.stats().health and time.monotonic() < end:
        time.sleep(0.02)
    check("read-only" in box.stats().health, f"health: {box.stats().health!r}")
    check("was deleted under the daemon" in box.tier("ssd").note, f"note: {box.tier('ssd').note!r}")
    hits(box, prompts, "what was stored before")
    well_enough = Talk(client, "late0").prefill(tokens(40), no_checkpoint=True)
    equal(well_enough.computed_tokens, 40, "turns go on")
    offset = len(box.log())
    box.restart()
    found, dropped = recovered(box, offset)
    equal(found + dropped, acknowledged, "recovered and dropped at the start after")
    # A file that the start made anew may have the name of one that is gone: read, it is found out.
    check(dropped >= acknowledged // 2, f"dropped {dropped} of {acknowledged}")
    come_back(box, prompts, set(prompts), "started without its segments")
    well(box, what="started without its segments")
    box.stop()


@case
def segments_swapped_under_the_daemon():
    """Pages of one in the other: the daemon holds both open, and every page is somebody else's."""
    def swap(_, used):
        one, two = used[1], used[2]
        with open(one, "rb") as f:
            first = f.read()
        with open(two, "rb") as f:
            second = f.read()
        overwrite(one, 4096, second[4096:])
        overwrite(two, 4096, first[4096:])
        return [one, two]
    weakened, _ = hurt_under_the_daemon("swapped", swap)
    check(weakened > 0, "the swap was noticed")


# ---- Records ----

def exchanged(value, other):
    """A page's record with the place and generation of another's."""
    return resealed_record(value[:9] + other[9:21] + value[21:])


@case
def records_that_name_anothers_page():
    """Index and data swapped: the record says a place and a generation, and both are right, but the
    page there is of another position, or of another user with the same tokens.  Only what stands in
    its header tells: the page is refused, and no byte of it is served."""
    box = Box("synthetic").start()
    block, same = tokens(PAGE), tokens(2 * PAGE)
    prompts = {("alice", "again"): 3 * block, ("alice", "same"): list(same), ("bob", "same"): list(same)}
    for (user, name), prompt in prompts.items():
        equal(Talk(box.client(user), name).prefill(prompt).save_reason, "", f"{user}/{name}: saved")
    box.stop()
    state = State(box.state)

    def page(label, position):
        tree = state.trees[state.session(label)]
        return next(p for p in tree.pages.values() if p.position == position)

    for one, two in ((page("alice/again", PAGE), page("alice/again", 2 * PAGE)),
                     (page("alice/same", 0), page("bob/same", 0))):
        state.put(one.key, exchanged(one.value, two.value))
        state.put(two.key, exchanged(two.value, one.value))
    box.start()
    for (user, name), prompt in prompts.items():
        got = Talk(box.client(user), name).prefill(prompt + tokens(5))
        most = PAGE if name == "again" else 0
        check(got.hit_tokens <= most, f"{user}/{name}: {got.hit_tokens} tokens of another "
              f"{'position' if name == 'again' else 'user'} were served")
        equal(got.reason, "CORRUPT", f"{user}/{name}: reason")
        equal(got.save_reason, "", f"{user}/{name}: stored again")
    refused_pages = sum(c.value for c in box.stats().counters
                        if c.name == "cached_checksum_failures_total" and 'tier="ssd"' in c.labels)
    check(refused_pages >= 3, f"pages refused: {refused_pages}")
    box.no_wrong_bytes("of pages that others' records name")
    box.stop()


# ---- A disk that hangs ----

def slow_but_served(box, what):
    end = time.monotonic() + 10
    while "does not answer" not in box.stats().health and time.monotonic() < end:
        time.sleep(0.02)
    check("does not answer" in box.stats().health, f"{what}: health {box.stats().health!r}")


def answers_again(box, what, seconds=5):
    end = time.monotonic() + seconds
    while box.stats().health != "serving" and time.monotonic() < end:
        time.sleep(0.02)
    equal(box.stats().health, "serving", f"{what}: within {seconds} s of the disk's answer")


@case
def a_disk_whose_reads_hang():
    """Turns that need the disk are answered within their deadline by computing; none waits once it is
    known; what is stored stays, and is used again when the disk answers."""
    calls = Calls()
    box = Box("synthetic", {**CROWDED, "io.backend": "pool"}, env=calls.env()).start()
    prompts = stored_sessions(box, 12, 300, 500)
    box.restart()  # Nothing is in memory.
    client = box.client()
    talks = {name: Talk(client, name) for name in (*prompts, "new")}  # Opening is recorded.
    points = {name: talk.get().checkpoints[-1].id for name, talk in talks.items() if name != "new"}
    calls.hang("read")
    slow = []
    for name in list(prompts)[:2]:  # Their ids are in the pages only: once waiting, once known.
        expect(talks[name].prefill, tokens(9), timeout=4, parent_checkpoint_id=points[name],
               code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND", value="READ_FAILED")
    for name, prompt in prompts.items():
        began = time.monotonic()
        got = talks[name].prefill(prompt + tokens(3), timeout=4, no_checkpoint=True)
        slow.append(time.monotonic() - began)
        resumed(got, MISS, 0, f"{name} while reads hang", reason="READ_FAILED")
        equal(got.computed_tokens, len(prompt) + 3, f"{name}: computed")
    check(max(slow) < 3, f"slowest turn of a deadline of 4 s: {max(slow):.2f} s")
    check(sum(slow) < 5, f"all of them: {sum(slow):.2f} s: others do not wait again")
    slow_but_served(box, "reads hang")
    check(box.counter("cached_ssd_late_total", 'op="read"') >= len(prompts), "counted")
    got = talks["new"].prefill(tokens(300), timeout=4)
    equal((got.outcome, got.save_reason), (MISS, "SSD_SLOW"), "a new session")
    equal(box.counter("cached_checkpoints_dropped_total"), 0, "dropped")
    calls.work()
    answers_again(box, "reads hung")
    box.restart()
    hits(box, prompts, "reads that hung")
    well(box, what="reads that hung")
    box.stop()


def a_disk_that_hangs(call):
    """Saves are not waited for: a turn is answered within its deadline with the level it has, the next
    turns go on in memory, and when the disk answers the save is there and new ones are made."""
    calls = Calls()
    box = Box("synthetic", {**CROWDED, "io.backend": "pool"}, env=calls.env()).start()
    client = box.client()
    talk, history = Talk(client, "s"), tokens(200)
    other = Talk(box.client("bob"), "new")
    talk.prefill(history)
    calls.hang(call)
    for turn in range(3):
        stored = len(history)
        history += tokens(40)
        began = time.monotonic()
        got = talk.prefill(history, timeout=6)
        took = time.monotonic() - began
        resumed(got, EXACT, stored, f"{call} hangs, turn {turn}")
        equal(got.save_reason, "SSD_SLOW", f"{call} hangs, turn {turn}: save_reason")
        check(took < (4 if turn == 0 else 1), f"{call} hangs, turn {turn}: {took:.2f} s of 6")
        check(all(c.rows_level < pb.LEVEL_SSD for c in got.checkpoints), "a level is claimed")
        answer = talk.decode(3, timeout=6)
        equal((len(answer.tokens), answer.end.save_reason), (3, "SSD_SLOW"), "its answer")
        history += answer.tokens[:-1]
    slow_but_served(box, f"{call} hangs")
    expect(talk.call.Checkpoint, pb.CheckpointRequest(session_id="s", level=pb.LEVEL_SSD),
           code="UNAVAILABLE", reason="SSD_SLOW", timeout=6)
    check(box.counter("cached_ssd_late_total", 'op="save"') >= 1, "counted")
    got = other.prefill(tokens(300), timeout=6)
    equal((got.outcome, got.save_reason), (MISS, "SSD_SLOW"), "somebody else's")
    calls.work()
    answers_again(box, f"{call} hung")
    saves_again(box, f"{call} hung")
    history += tokens(10)
    got = talk.prefill(history)
    equal((name_of(got.outcome), got.save_reason), ("EXACT", ""), "the next turn is stored")
    box.crash()
    got = Talk(box.client(), "s").prefill(history + tokens(5))
    resumed(got, REPLAY, even(len(history)), "all of it, after kill -9")
    box.no_wrong_bytes(f"{call} hung")
    box.stop()


@case
def a_disk_whose_writes_hang():
    a_disk_that_hangs("write")


@case
def a_disk_whose_flushes_hang():
    a_disk_that_hangs("flush")


@case
def damage_found_while_a_save_hangs():
    """Nothing that the save needs is dropped under it: the turn goes without the page, the save gets
    there, and the next turn drops what is hurt."""
    calls = Calls()
    box = Box("synthetic", {**CROWDED, "io.backend": "pool"}, env=calls.env()).start()
    box.page_bytes = box.stats().page_bytes
    client = box.client()
    talk, history = Talk(client, "s"), tokens(400)
    equal(talk.prefill(history).save_reason, "", "saved")
    full = [(path, offset) for path, offset, _, ids in pages_on_disk(box) if len(ids) == PAGE]
    equal(len(full), 3, "full pages")
    other = Talk(client, "other")  # Opening is recorded.
    calls.hang("flush")
    history += tokens(40)
    got = talk.prefill(history, timeout=4)
    equal(got.save_reason, "SSD_SLOW", "a save that hangs")
    for pages in range(int(box.tier("hbm").items_capacity), 0, -1):
        try:  # The largest that fits: nothing else stays in memory.
            other.prefill(tokens(PAGE * pages), timeout=4, no_checkpoint=True)
            break
        except grpc.RpcError:
            pass
    for path, offset in full:
        flip(path, offset + 3000)
    got = talk.prefill(history + tokens(5), timeout=4, no_checkpoint=True)
    check(got.hit_tokens < 3 * PAGE and got.reason == "CORRUPT",
          f"a turn that meets the damage: hit {got.hit_tokens}, {got.reason!r}")
    calls.work()
    answers_again(box, "flushes hung")
    check(box.is_up(), "the daemon is up")
    saves_again(box, "damage found beside a save")
    talk.close()
    got = talk.prefill(history + tokens(5))
    check(got.hit_tokens < 3 * PAGE, f"the next turn: hit {got.hit_tokens}")
    equal(got.save_reason, "", "which is stored")
    resumed(talk.prefill(history + tokens(5)), EXACT, len(history), "and the one after")
    well(box, what="damage found beside a save")
    box.stop()


# ---- Descriptors ----

@case
def too_few_descriptors_at_a_start():
    """Refused in one sentence, or it starts and serves; never anything between."""
    box = Box("synthetic", {**CROWDED, "ssd.bytes": "1MiB"})
    whole, started = box.command, []
    for limit in (16, 24, 32, 64, 128, 131, 132, 256):
        box.command = lambda limit=limit: ["prlimit", f"--nofile={limit}", *whole()]
        offset = len(box.log()) if os.path.exists(box.log_file) else 0
        try:
            box.start()
        except RuntimeError:
            equal(box.process.wait(5), 2, f"{limit} descriptors: exit code of a refused start")
            last = box.log(offset).strip().splitlines()[-1]
            check(last.startswith("cached: ") and "open files" in last,
                  f"{limit} descriptors: the sentence: {last!r}")
            box._forget()
            check(not started, f"{limit} descriptors: refused, and {started} were enough")
            continue
        started.append(limit)
        well(box, what=f"{limit} descriptors")
        box.stop()
    equal(started, [132, 256], "starts with 128 and one for each of 4 segments, and more")


@case
def too_few_descriptors_while_running():
    """Callers that come are refused or wait, saves that need a segment are refused with a name, and
    both work again when there are descriptors."""
    box = Box("synthetic", {**CROWDED, "ssd.bytes": "8MiB"}).start()
    prompts = stored_sessions(box, 3)
    client, pid = box.client(), box.process.pid
    talks = [Talk(client, f"more{i}") for i in range(60)]
    used = len(os.listdir(f"/proc/{pid}/fd"))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
    reasons = []
    for talk in talks:
        prompt = tokens(400)
        got = patiently(talk.prefill, prompt)
        if got.save_reason == "":
            prompts[talk.name] = prompt
            continue
        reasons.append(got.save_reason)
        resumed(talk.prefill(prompt + tokens(5)), EXACT, len(prompt), "a turn after a refused save")
        if len(reasons) == 3:
            break
    equal(len(reasons), 3, "saves refused without a descriptor for a segment")
    check(box.logged("Too many open files"), "the log says why")
    check(box.is_up(), "the daemon is up")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    saves_again(box, "with descriptors again")
    hits(box, prompts, "with descriptors again")
    well(box, what="with descriptors again")
    box.stop()


if __name__ == "__main__":
    run_cases("Bad luck of an operator.")
