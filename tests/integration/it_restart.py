"""What a start reads: segment records instead of trees, and the trees where those cannot be relied
on; what it says of that; and that the daemon answers meanwhile.

Method: directories of the real daemon, read by state_files.py (docs/format.md) before and after
damage to the records, to the superblock's bit and to segment files.  Every directory that a daemon
had is right again by `kvdump verify`, and every checkpoint that was not hurt is served.
"""

import os
import re
import shutil
import struct
import subprocess
import threading
import time

import grpc

import daemon as d
from cli import Tool, token_file
from daemon import BUILD, admin_pb, check, equal, pack, pb
from state_files import State, resealed_record, sealed
from talk import MISS, REPLAY, Box, Talk, case, even, resumed, rng, run_cases, tokens

KVDUMP = os.path.join(BUILD, "tools", "kvdump")
FLAGS = {"ssd.segment_bytes": "256KiB", "ssd.compact_below": "0"}
HOUR_MS = 3600000


def verify_ok(box, what):
    done = subprocess.run([KVDUMP, "verify", box.state], capture_output=True, text=True, timeout=60,
                          check=False)
    return equal(done.returncode, 0, f"{what}: kvdump verify: {done.stdout}{done.stderr}")


def verify_lines(box, what):
    done = subprocess.run([KVDUMP, "verify", box.state], capture_output=True, text=True, timeout=60,
                          check=False)
    equal(done.returncode, 7, f"{what}: kvdump verify: {done.stdout}")
    return done.stdout.splitlines()[:-1]


_made = []


def made():
    """A stopped directory with eight sessions of three turns: (box, {label: prompt})."""
    if not _made:
        box = Box("synthetic", FLAGS).start()
        prompts = {}
        for user in ("alice", "bob"):
            for i in range(4):
                talk, prompt = Talk(box.client(user), f"s{i}"), tokens(rng.randrange(150, 400))
                for _ in range(3):
                    equal(talk.prefill(prompt).save_reason, "", "saved")
                    prompt = prompt + tokens(40)
                prompts[f"{user}/s{i}"] = prompt[:-40]
                talk.close()
        full = box.stats()  # Some segment is neither full nor empty, which some tests need.
        for i in range(8):
            ssd = next(t for t in full.tiers if t.name == "ssd")
            if ssd.items_used % 12 > 2:
                break
            Talk(box.client("bob"), f"more{i}").prefill(tokens(30))
            full = box.stats()
        box.stop()
        _made.append((box, prompts))
    template, prompts = _made[0]
    box = Box("synthetic", FLAGS)
    shutil.copytree(template.state, box.state)
    return box, dict(prompts)


def recovered(box, offset=0):
    """(checkpoints, dropped, why all trees were read) of the last start in the log."""
    lines = re.findall(r'recovered (\d+) checkpoints, dropped (\d+)"(.*)', box.log(offset))
    why = re.search(r'all_trees_read="([^"]*)"', lines[-1][2])
    return int(lines[-1][0]), int(lines[-1][1]), why.group(1) if why else None


def serves(box, prompts, what, hurt=()):
    """Each session is found whole, and used; those in hurt are less than that."""
    for label, prompt in prompts.items():
        user, name = label.split("/")
        got = Talk(box.client(user), name).prefill(prompt + tokens(9))
        if label in hurt:
            check(got.hit_tokens < even(len(prompt)), f"{what}: {label}: hit {got.hit_tokens}")
        else:
            resumed(got, REPLAY, even(len(prompt)), f"{what}: {label}")
    box.no_wrong_bytes(what)


def start(box, what, want_why, want_dropped=0):
    """Starts it: why it read all trees, or None.  The number recovered."""
    offset = len(box.log()) if os.path.exists(box.log_file) else 0
    box.start()
    count, dropped, why = recovered(box, offset)
    equal((dropped, why), (want_dropped, want_why), f"{what}: dropped, and why all trees were read")
    stats = box.stats()
    equal((stats.recovered_checkpoints, stats.dropped_checkpoints, stats.start_phase),
          (count, dropped, ""), f"{what}: what GetStats says of the start")
    equal(box.counter("cached_start_trees_read"), float(want_why is not None), f"{what}: counter")
    return count


def is_right(box, what):
    """Records of a stopped directory say of each other what is there."""
    state = State(box.state)
    equal((state.features & 1, state.doubt), (1, False), f"{what}: bit 0, doubt")
    equal(state.recorded(), {page.place for page in state.pages()}, f"{what}: places in use")
    for session, (_, name) in state.sessions.items():
        count, = struct.unpack_from("<I", state.records[b"S" + session], 73)
        tree = state.trees.get(session)
        equal(count, len(tree.nodes) if tree else 0, f"{what}: checkpoints of {name}")
    return verify_ok(box, what)


def put_features(box, features):
    path = os.path.join(box.state, "superblock")
    with open(path, "rb") as f:
        copy = f.read(4096)
    copy = sealed(copy[:48] + struct.pack("<Q", features) + copy[56:])
    with open(path, "r+b") as f:
        f.write(copy + copy)


# ---- the records ----

@case
def segment_records_follow_every_change():
    """After turns, a branch, expiry, kill -9 and a clean stop: a start reads no tree, and what is
    recorded is what is there.  A segment's time of use is in whole hours, never too early."""
    box, prompts = made()
    is_right(box, "made")
    now_ms = int(time.time() * 1000)
    for number, segment in State(box.state).segments.items():
        equal((segment.state, segment.used_ms % HOUR_MS), (1, 0), f"segment {number}: state, step")
        check(now_ms - 60000 < segment.used_ms <= now_ms + 2 * HOUR_MS, f"{segment.used_ms} used")
    count = start(box, "the first start", None)
    copy = os.path.join(d.scratch(), "copy")
    shutil.copytree(box.state, copy)
    equal(count, sum(len(t.nodes) for t in State(copy).trees.values()), "checkpoints recovered")
    serves(box, prompts, "the first start")
    talk = Talk(box.client("alice"), "s0")
    talk.prefill(prompts["alice/s0"][:170] + tokens(60))
    box.kill()
    is_right(box, "after kill -9")
    count = start(box, "after kill -9", None)
    equal(count, box.stats().checkpoints, "checkpoints are those recovered")
    box.advance(73 * HOUR_MS)
    equal(box.tier("ssd").bytes_used, 0, "all expired")
    box.kill()
    is_right(box, "all expired")
    equal(State(box.state).recorded(), set(), "no place is in use")
    equal(start(box, "all expired", None), 0, "nothing is recovered")
    box.stop()


@case
def a_directory_without_the_bit():
    """As an older build leaves it: no records, or stale ones.  One start reads all trees."""
    for stale in (False, True):
        box, prompts = made()
        state = State(box.state)
        for number, segment in state.segments.items():
            key = b"G" + struct.pack(">I", number)
            value = state.records[key]
            if stale:
                state.put(key, resealed_record(value[:14] + bytes(len(value) - 18) + value[-4:]))
                state.put(b"G" + struct.pack(">I", 77), resealed_record(value))
            else:
                state.delete(key)
        session = state.session("bob/s2")
        record = state.records[b"S" + session]
        state.put(b"S" + session, resealed_record(record[:73] + struct.pack("<I", 99) + record[77:]))
        put_features(box, 0)
        verify_ok(box, f"without the bit, stale: {stale}")
        count = start(box, "without the bit", "an older build wrote the directory")
        equal(count, sum(len(t.nodes) for t in state.trees.values()), "recovered without the bit")
        box.kill()
        is_right(box, "without the bit, after a start")
        start(box, "without the bit, again", None)
        serves(box, prompts, "without the bit, again")
        box.stop()
        is_right(box, "without the bit, at the end")


@case
def records_that_cannot_be_relied_on():
    """A damaged segment record, one of another shape, a doubt: trees are read, once."""
    box, prompts = made()
    state = State(box.state)
    key = b"G" + struct.pack(">I", 0)
    value = state.records[key]
    shorter = resealed_record(value[:10] + struct.pack("<I", 4) + b"\x0f" + value[-4:])
    for bad_key, bad, why in (
            (key, value[:9] + bytes([value[9] ^ 1]) + value[10:], "a segment record is damaged"),
            (key, shorter, "a segment record is damaged"),
            (b"G", resealed_record(b"\x01" + bytes(4)), "records did not fit together"),
            (b"G" + struct.pack(">I", 9999), value, "a segment file is gone")):
        state.put(bad_key, bad)
        if why == "a segment record is damaged":
            equal(verify_lines(box, why), ["manifest: a segment's record is damaged; the next start "
                                           "of a daemon counts again"], f"{why}: lines")
        start(box, why, why)
        box.kill()
        is_right(box, why)
        start(box, f"{why}, again", None)
        box.stop()
        state = State(box.state)
        value = state.records[key]
    box.start()
    serves(box, prompts, "in the end")
    box.stop()
    is_right(box, "in the end")


@case
def verify_compares_bits_and_counts():
    """kvdump verify: a place too many, one too few, and a session that counts wrong."""
    box, _ = made()
    state = State(box.state)
    number = next(n for n, s in state.segments.items() if 1 < len(s.used) < s.pages)
    key = b"G" + struct.pack(">I", number)
    value = state.records[key]
    used, pages = state.segments[number].used, state.segments[number].pages
    free = next(p for p in range(pages) if p not in used)
    owner = state.label(next(p.session for p in state.pages()
                             if p.place == number * pages + min(used)))
    file = f"segment-{number:06}.kv"

    def turned(*places):
        bits = bytearray(value)
        for place in places:
            bits[14 + place // 8] ^= 1 << place % 8
        return resealed_record(bytes(bits))

    for places, line in (
            ([free], f"{file}: its record has page {free} in use, and no page record names it"),
            ([min(used)], f"{file}: its record has page {min(used)} free, and a page of session "
                          f"{owner} is there"),
            ([min(used), max(used)], f"{file}: its record has page {min(used)} free, and a page of "
                                     f"session {owner} is there; 1 more differ")):
        state.put(key, turned(*places))
        equal(verify_lines(box, line), [line], "lines")
    state.put(key, value)
    session = state.session("alice/s1")
    record = state.records[b"S" + session]
    count, = struct.unpack_from("<I", record, 73)
    state.put(b"S" + session,
              resealed_record(record[:73] + struct.pack("<I", count + 1) + record[77:]))
    equal(verify_lines(box, "count"), [f"session alice/s1: its record counts {count + 1} "
                                       f"checkpoints, {count} are there"], "lines")
    state.put(b"S" + session, record)
    verify_ok(box, "put back")


@case
def damage_found_when_a_tree_is_loaded():
    """A start does not see a damaged record of a tree.  Who loads it drops what needs it, and has
    the next start count again, which leaves no place behind."""
    for kind in ("page", "node"):
        box, prompts = made()
        state = State(box.state)
        tree = state.trees[state.session("alice/s2")]
        victim = (max(tree.pages.values(), key=lambda p: p.position) if kind == "page"
                  else max(tree.nodes.values(), key=lambda n: n.tokens))
        state.put(victim.key, victim.value[:20] + bytes([victim.value[20] ^ 1]) + victim.value[21:])
        start(box, f"a damaged {kind}", None)
        serves(box, prompts, f"a damaged {kind}", hurt=("alice/s2",))
        check(box.logged("event=record_damaged"), "the log tells")
        box.stop()
        state = State(box.state)
        check(state.doubt and victim.key not in state.records, f"a damaged {kind}: doubt, deleted")
        start(box, f"a damaged {kind}, again", "records did not fit together")
        box.stop()
        is_right(box, f"a damaged {kind}, in the end")


@case
def files_that_are_gone_are_counted_by_reason():
    """A segment file deleted: what needed it is dropped, and log, counters and status say why."""
    box, prompts = made()
    state = State(box.state)
    gone = [page for page in state.pages() if page.place // state.pages_per_segment == 1]
    hurt = {node for page in gone for node in state.trees[page.session].owners(page.uid)}
    listed = {node.id for tree in state.trees.values() for node in tree.nodes.values()
              if any(page.uid in node.uids for page in gone)}
    os.unlink(state.segment(1))
    count = start(box, "deleted", "a segment file is gone or was cut", want_dropped=len(listed))
    total = sum(len(t.nodes) for t in state.trees.values())
    equal(count, total - len(listed), "recovered")
    cause = 'what="checkpoints",cause="place_gone"'
    equal(box.counter("cached_start_dropped", cause), len(listed), cause)
    equal(box.counter("cached_start_dropped", 'what="bytes",cause="place_gone"'),
          len(gone) * state.page_bytes, "bytes dropped")
    check(box.logged(f'why="{len(listed)} need pages that have no place'), "the log says why")
    tool = Tool(f"unix:{box.socket}", token_file(box.directory, "ops"))
    said = tool.code(0, "status").stdout
    check(f"{count} checkpoints recovered (" in said and f"{len(listed)} dropped; all trees were read"
          in said and f"{len(listed)} need pages that are gone" in said, f"status: {said}")
    equal(tool.json("status", "--json")["sessions"]["dropped_bytes"],
          len(gone) * state.page_bytes, "status --json")
    sessions = {state.label(page.session) for page in gone}
    serves(box, prompts, "deleted", hurt=sessions)
    equal(box.stats().checkpoints >= total - len(hurt), True, "the rest is there")
    box.stop()
    is_right(box, "deleted")
    start(box, "deleted, again", None)
    box.stop()


@case
def the_whole_folder_of_segments_is_gone():
    """The start makes a new first segment: records of pages in the old one do not fit it."""
    box, prompts = made()
    shutil.rmtree(os.path.join(box.state, "ssd"))
    total = sum(len(t.nodes) for t in State(box.state).trees.values())
    equal(start(box, "no folder", "a segment file is gone or was cut", want_dropped=total), 0,
          "recovered")
    for label, prompt in prompts.items():
        user, name = label.split("/")
        equal(Talk(box.client(user), name).prefill(prompt).outcome, MISS, f"{label}: nothing is left")
    equal(box.counter("cached_tier_quarantined_bytes", 'tier="ssd"'), 0,
          "nothing is wrong with the new file")
    check("event=page_damaged" not in box.log(), "nothing is called damaged")
    box.no_wrong_bytes("no folder")
    box.stop()
    is_right(box, "no folder")
    start(box, "no folder, again", None)
    serves(box, prompts, "no folder, again")
    box.stop()


# ---- while it starts ----

def slow(state=None):
    box = d.Daemon({"server.listen": None, **FLAGS}, binary=d.TEST_BINARY,
                   arguments=["--plant", "slow_start"])
    if state is not None:
        shutil.copytree(state, box.state)
    return box


@case
def it_answers_while_it_starts():
    """Health NOT_SERVING, status and GetStats say what and how far, other calls are refused with a
    reason and a pause; then it serves, and nobody has to connect again."""
    template, prompts = made()
    put_features(template, 0)
    box = slow(template.state)
    starter = threading.Thread(target=box.start)
    began = time.monotonic()
    starter.start()
    client = box.client("alice", target=f"unix:{box.socket}")
    operator = box.client("ops", target=f"unix:{box.socket}").admin
    ask = admin_pb.GetStatsRequest()
    first = operator.GetStats(ask, wait_for_ready=True)
    check(first.start_phase != "" and first.start_percent <= 100, f"phase: {first.start_phase!r}")
    check(first.health.startswith(f"starting: {first.start_phase}, "), f"health: {first.health!r}")
    check(first.pid == box.process.pid and first.rss_bytes > 0 and first.checkpoints == 0, "the rest")
    equal(client.health.Check(d.health_pb2.HealthCheckRequest(), timeout=5).status, 2, "NOT_SERVING")
    check(len(operator.GetConfig(admin_pb.GetConfigRequest()).items) > 10, "GetConfig answers")
    got = d.failure(client.session.Prefill,
                    pb.PrefillRequest(session_id="s0", tokens=pack([5, 6, 7])))
    equal((got.code, got.reason, got.retry_ms > 0), ("UNAVAILABLE", "STARTING", True), "refused")
    check("starting: " in got.message, got.message)
    tool = Tool(f"unix:{box.socket}", token_file(box.directory, "ops"))
    said = tool.code(0, "status").stdout
    check("starting: " in said and " %" in said and "tiers" not in said, f"status: {said!r}")
    watch = client.health.Watch(d.health_pb2.HealthCheckRequest())
    equal(next(watch).status, 2, "a watcher: NOT_SERVING")
    phases = {first.start_phase}
    while starter.is_alive():
        stats = operator.GetStats(ask)
        phases.add(stats.start_phase)
        time.sleep(0.05)
    starter.join()
    equal(next(watch).status, 1, "the watcher: SERVING")
    watch.cancel()
    check({"reading trees", "reading sessions"} <= phases, f"phases: {phases}")
    check(box.logged("event=starting phase="), "the log tells how far it is")
    check(time.monotonic() - began > 3, "the plant slowed it down")
    resumed(Talk(client, "s0").prefill(prompts["alice/s0"] + tokens(9)), REPLAY,
            even(len(prompts["alice/s0"])), "served in the end")
    box.stop()


@case
def a_start_that_is_refused_stops_answering():
    """Clients that came early are let go, and the one sentence is all it says."""
    template, _ = made()
    state = State(template.state)
    store = state.records[b"M"]
    state.put(b"M", resealed_record(store[:1] + bytes(16) + store[17:]))
    box = slow(template.state)
    seen = []

    def ask():
        client = box.client("alice", target=f"unix:{box.socket}")
        try:
            client.health.Check(d.health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
            stream = client.health.Watch(d.health_pb2.HealthCheckRequest())
            seen.extend(answer.status for answer in stream)
        except grpc.RpcError as error:
            seen.append(error.code().name)

    asker = threading.Thread(target=ask)
    asker.start()
    began = time.monotonic()
    code, said = box.refused()
    asker.join(timeout=10)
    equal((code, said.count("\n")), (2, 1), f"refused: {said!r}")
    check("belongs to another state directory" in said, said)
    check(time.monotonic() - began < 8, "without waiting for those who watch")
    check(seen and seen[0] in (2, "UNAVAILABLE"), f"the watcher saw {seen}")


@case
def a_new_directory_has_the_bit():
    """And a session without a checkpoint: nothing to count."""
    box = Box("synthetic", FLAGS).start()
    equal(recovered(box), (0, 0, None), "a new directory")
    got = Talk(box.client("alice"), "empty").lookup(tokens(20))
    equal(got.outcome, MISS, "nothing there")
    box.stop()
    equal(State(box.state).features, 161, "features")
    is_right(box, "new")


run_cases(__doc__)
