"""Room on the SSD tier: what goes when it is full, whose, and what a full file system does.

Goal: a save is never refused while something may go, what goes is what the rules say (expired, above
the fair share, least recently used; nothing that is in use), the tier keeps to its limit at every
look, and what is left are the right bytes.  A file system that others fill costs saves only as long
as it is full.
"""

import json
import os
import subprocess
import threading
import time

import daemon
from cli import CACHECTL
from daemon import BUILD, check, equal, expect, pack, pb, scratch
from talk import MISS, Box, Talk, case, patiently, run_cases, skip_case, tokens

MIB = 1 << 20
PAGE_BYTES = 20480  # Of `tiny`, which SYNTHETIC takes its shape from.
SMALL = {"ssd.bytes": "4MiB", "ssd.segment_bytes": "1MiB", "engine.live_sessions": "4"}
SMALL_PAGES = 4 * ((MIB - 4096) // PAGE_BYTES)


def look(client, name, prompt):
    return client.session.Lookup(pb.LookupRequest(session_id=name, tokens=pack(prompt + [5])))


def save(client, name, count, prompts, **fields):
    """A session of `count` tokens, saved and closed; its answer."""
    talk, prompt = Talk(client, name, **fields), tokens(count)
    got = patiently(talk.prefill, prompt)
    talk.close()
    prompts[name] = prompt
    return got


def within(box, what):
    """The tier holds to its limit: pages in use, and files, which may be one segment more."""
    tier = box.tier("ssd")
    check(tier.bytes_used <= tier.bytes_capacity, f"{what}: {tier.bytes_used} pages' bytes used of "
          f"{tier.bytes_capacity}")
    files = sum(os.path.getsize(p) for p in box.segments())
    check(files <= tier.bytes_capacity + box.segment, f"{what}: {files} bytes of files")


def small(flags=None):
    box = Box("synthetic", dict(SMALL, **(flags or {})))
    box.segment = MIB
    return box.start()


def well(box, what):
    box.no_wrong_bytes(what)
    equal(box.counter("cached_io_errors_total"), 0, f"{what}: errors of the SSD")
    equal(box.counter("cached_checksum_failures_total", 'tier="ssd",where="read"'), 0, f"{what}: damaged pages")


@case
def the_oldest_goes_first():
    """Ten times what fits: no save is refused, and what is left are the newest sessions, whole.
    The same after a restart, when no tree is loaded."""
    box = small()
    client, prompts = box.client(), {}
    for i in range(200):
        got = save(client, f"s{i}", 1280, prompts)
        equal((got.save_reason, [c.rows_level for c in got.checkpoints]), ("", [pb.LEVEL_SSD]),
              f"s{i} is stored")
        box.advance(1000)
        if i % 10 == 0:
            within(box, f"s{i}")
        if i == 100:
            box.crash()
            box.advance(200000)  # Its clock begins anew.
            client = box.client()
    names = list(prompts)
    stored = [look(client, name, prompts[name]).stored_tokens for name in names]
    kept = [i for i, n in enumerate(stored) if n == 1280]
    check(len(kept) >= SMALL_PAGES // 10 - 3, f"{len(kept)} sessions of 10 pages are there whole")
    equal(kept, list(range(200 - len(kept), 200)), "the newest are the ones that are there whole")
    equal([n for n in stored[:200 - len(kept) - 1] if n], [], "those before them are gone")
    got = look(client, names[150], prompts[names[150]])
    equal((got.outcome, got.reason), (MISS, "CAPACITY"), "one that is gone says why")
    check(box.counter("cached_evictions_total", 'tier="ssd",cause="capacity"') > 60,
          "evictions are counted")
    freed = box.counter("cached_evicted_bytes_total", 'tier="ssd",cause="capacity"')
    check(freed > 60 * 10 * PAGE_BYTES, f"and their bytes: {freed}")
    for i in kept[-5:]:
        talk = Talk(client, names[i])
        got = talk.prefill(prompts[names[i]] + tokens(9))
        equal(got.hit_tokens, 1280, f"{names[i]} resumes")
    well(box, "after eviction")
    box.crash()
    equal(box.stats().dropped_checkpoints, 0, "dropped at a start after eviction")
    client = box.client()
    for i in kept[5:]:
        equal(look(client, names[i], prompts[names[i]]).stored_tokens, 1280,
              f"{names[i]} after a restart")
    box.stop()


@case
def expired_goes_before_anything_else():
    """What is past its time goes first, however recently another was used."""
    box = small({"pool.ttl": "1s"})
    client, prompts = box.client(), {}
    for i in range(8):
        save(client, f"short{i}", 1280, prompts, ttl_ms=600000)
    for i in range(8):
        save(client, f"long{i}", 1280, prompts)
    # Their time passes without a sweep: the clock stands still for it until AdvanceClock ends.
    box.advance(600001)
    for i in range(8):
        got = look(client, f"short{i}", prompts[f"short{i}"])
        equal((got.outcome, got.reason), (MISS, "EXPIRED"), f"short{i}")
    for i in range(10):
        equal(save(client, f"new{i}", 1280, prompts).save_reason, "", f"new{i}")
    for i in range(8):
        equal(look(client, f"long{i}", prompts[f"long{i}"]).stored_tokens, 1280, f"long{i} stays")
    equal(box.counter("cached_evictions_total", 'tier="ssd",cause="capacity"'), 0,
          "evicted for capacity")
    check(box.counter("cached_evictions_total", 'tier="ssd",cause="expired"') >= 8, "expired")
    well(box, "after expiry")
    box.stop()


@case
def who_fills_the_tier_pushes_out_his_own():
    """bob holds less than his share, long unused; alice floods.  Nothing of bob's goes."""
    box = small()
    alice, bob = box.client(), box.client("bob")
    his, hers = {}, {}
    for i in range(4):
        save(bob, f"b{i}", 1280, his)
    for i in range(100):
        box.advance(1000)
        equal(save(alice, f"a{i}", 1280, hers).save_reason, "", f"a{i}")
        if i == 50:
            box.restart()
            box.advance(200000)
            alice, bob = box.client(), box.client("bob")
    for name, prompt in his.items():
        equal(look(bob, name, prompt).stored_tokens, 1280, f"bob's {name}")
    # He comes to his share; then the two are as good as each other.
    for i in range(4, 30):
        box.advance(1000)
        equal(save(bob, f"b{i}", 1280, his).save_reason, "", f"b{i}")
    stored = [sum(look(c, n, p).stored_tokens for n, p in prompts.items()) // 128
              for c, prompts in ((alice, hers), (bob, his))]
    check(all(SMALL_PAGES // 2 - 22 <= n for n in stored), f"pages of alice and bob: {stored}")
    well(box, "after a flood")
    box.stop()


@case
def what_is_saved_is_not_its_own_victim():
    """One session alone in the tier: its old branches make room for its head, which never goes; when
    nothing else is left the save is refused with a name and the turn goes on."""
    box = small()
    client = box.client()
    talk, base = Talk(client, "s"), tokens(1280)
    equal(talk.prefill(base).save_reason, "", "the root")
    for i in range(40):  # Each leaves the last branch at the root.
        box.advance(1000)
        got = talk.prefill(base + tokens(1280))
        equal(got.save_reason, "", f"branch {i}")
        check(got.hit_tokens >= 1278, f"branch {i} stands on the root: {got.hit_tokens}")
    within(box, "branches")
    room = SMALL_PAGES * 128
    grown = base + tokens(room // 2)
    got = talk.prefill(grown)
    equal(got.save_reason, "", "half the tier, of one history")
    grown += tokens(room // 2)
    got = talk.prefill(grown)
    equal(got.save_reason, "SSD_FULL", "its own rows do not go for its next ones")
    expect(client.session.Checkpoint, pb.CheckpointRequest(session_id="s"),
           code="RESOURCE_EXHAUSTED", reason="SSD_FULL")
    answer = talk.decode(4)
    equal((len(answer.tokens), answer.end.save_reason), (4, "SSD_FULL"), "the turn goes on")
    check(box.counter("cached_saves_refused_total", 'cause="full"') >= 2, "counted")
    talk.close()
    got = talk.prefill(grown[:1280 + room // 2] + tokens(5))
    equal((got.save_reason, got.hit_tokens >= 1280 + room // 2 - 2), ("", True),
          "what was stored is there")
    well(box, "refused saves")
    box.stop()


@case
def calls_in_progress_keep_what_they_read():
    """Eight sessions take turns, each longer than an eighth of the tier, while others flood: no call
    fails, no wrong byte, every save is stored."""
    box = small({"engine.live_sessions": "8", "hbm.bytes": "8MiB"})
    history = {i: tokens(400) for i in range(8)}

    def turn(i):
        client = box.client()
        talk = Talk(client, f"t{i}")
        for k in range(12):
            got = patiently(talk.prefill, history[i])
            equal(got.save_reason, "", f"t{i} turn {k}")
            if k % 3 == 2:
                talk.close()
            history[i] += tokens(120)
            other = Talk(client, f"other{i}.{k}")
            equal(patiently(other.prefill, tokens(1500)).save_reason, "", f"other{i}.{k}")
            other.close()
    threads = [threading.Thread(target=turn, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        within(box, "under load")
        time.sleep(0.02)
    well(box, "under load")
    equal(box.counter("cached_failed_requests_total"), 0, "failed requests")
    box.restart()
    equal(box.stats().dropped_checkpoints, 0, "dropped at the start after")
    box.stop()


# ---- compaction ----

def verified(box):
    done = subprocess.run([os.path.join(BUILD, "tools", "kvdump"), "verify", box.state],
                          capture_output=True, text=True, check=False)
    equal(done.returncode, 0, f"kvdump verify: {done.stdout[-300:]}")


def fragmented(box, client, rounds=60):
    """Sessions of three kinds side by side; two of three expire.  Those that stay."""
    kept = {}
    for i in range(rounds):
        if i % 3:
            save(client, f"short{i}", 1280, {}, ttl_ms=600000)
        else:
            equal(save(client, f"long{i}", 1280, kept).save_reason, "", f"long{i}")
    box.advance(600001)
    return kept


def all_there(box, kept, what):
    client = box.client()
    for name, prompt in kept.items():
        equal(look(client, name, prompt).stored_tokens, 1280, f"{name} {what}")
    for name in list(kept)[::5]:
        got = Talk(client, name).prefill(kept[name] + tokens(7))
        equal((got.hit_tokens, got.weakened), (1280, 0), f"{name} resumes {what}")
    well(box, what)


@case
def compaction_empties_what_hardly_lives():
    """Two of three pages of every segment expire: what is left is written together, loaded or not,
    nobody loses anything, and a crash right behind it neither."""
    flags = {"ssd.bytes": "16MiB", "pool.ttl": "1s"}
    box = small(flags)
    kept = fragmented(box, box.client())
    before = box.tier("ssd").items_used
    end = time.monotonic() + 20
    while box.counter("cached_compactions_total") < 1 and time.monotonic() < end:
        time.sleep(0.1)
    moved = box.counter("cached_compacted_bytes_total") / PAGE_BYTES
    check(moved >= 50, f"{moved} pages were moved")
    equal(box.tier("ssd").items_used, before, "pages in use")
    box.crash()
    all_there(box, kept, "after a crash")
    box.stop()
    verified(box)

    box = small({**flags, "ssd.compact_below": "0"})
    fragmented(box, box.client())
    time.sleep(1)
    equal(box.counter("cached_compacted_bytes_total"), 0, "moved with compaction switched off")
    box.stop()


@case
def segments_beyond_every_life_go_as_a_whole():
    """A branch left behind in a session that goes on: nobody asks for it and the session is not due,
    but when its segments were not used for longer than the longest ttl they are free."""
    hour = 3600000
    box = small({"ssd.bytes": "16MiB"})
    client = box.client()
    talk, base = Talk(client, "s"), tokens(640)
    equal(talk.prefill(base).save_reason, "", "the root")
    equal(talk.prefill(base + tokens(128 * 100)).save_reason, "", "a branch of 100 pages")
    history = base + tokens(640)
    equal(talk.prefill(history).save_reason, "", "another one")
    talk.close()
    box.advance(50 * hour)
    got = talk.prefill(history + tokens(10))
    check(got.hit_tokens >= 1278, f"the session is used after 50 h: {got.hit_tokens}")
    talk.close()
    used = box.tier("ssd").items_used
    check(used >= 110, f"pages in use: {used}")
    box.advance(30 * hour)
    end = time.monotonic() + 15
    while box.tier("ssd").items_used > 20 and time.monotonic() < end:
        time.sleep(0.1)
    check(box.tier("ssd").items_used <= 20, f"pages in use: {box.tier('ssd').items_used}")
    check(box.logged("event=segments_expired"), "the log says so")
    got = talk.prefill(history + tokens(20))
    check(got.hit_tokens >= 1278, f"the rest is there: {got.hit_tokens}")
    box.crash()
    equal(box.stats().dropped_checkpoints, 0, "dropped after a crash")
    well(box, "after expiry of segments")
    box.stop()
    verified(box)


@case
def compaction_keeps_to_its_rate_and_gives_way():
    """At 1 MiB/s a megabyte takes a second, and saves that need the room have it at once."""
    box = small({"ssd.bytes": "16MiB", "pool.ttl": "1s", "ssd.compact_rate": "1MiB"})
    client = box.client()
    kept = fragmented(box, client, rounds=75)
    began, last = time.monotonic(), 0
    while time.monotonic() - began < 3:
        moved = box.counter("cached_compacted_bytes_total")
        allowed = (time.monotonic() - began + 6) * MIB + 32 * PAGE_BYTES
        check(moved <= allowed, f"{moved} bytes moved, {allowed} may have been")
        last = moved
        time.sleep(0.05)
    check(last > 0, "something was moved")
    more = {}
    for i in range(120):
        got = save(client, f"more{i}", 1280, more)
        equal(got.save_reason, "", f"more{i} while segments are emptied")
        within(box, f"more{i}")
    box.no_wrong_bytes("beside compaction")
    box.crash()
    equal(box.stats().dropped_checkpoints, 0, "dropped after a crash")
    client = box.client()
    stored = [name for name, p in {**kept, **more}.items()
              if look(client, name, p).stored_tokens == 1280]
    check(len(stored) > 60, f"{len(stored)} sessions are there")
    well(box, "after a crash")
    box.stop()
    verified(box)


# ---- file systems ----

class Mounted:
    """A file system of its own in a file; None where that is not possible."""

    def __init__(self, name, mib):
        folder = scratch()
        self.path = None
        disk, mounted = os.path.join(folder, "disk"), os.path.join(folder, "mounted")
        os.mkdir(mounted)
        with open(disk, "wb") as f:
            f.truncate(mib * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", disk], check=True)
        done = subprocess.run(["mount", "-o", "loop", disk, mounted], stderr=subprocess.PIPE,
                              check=False)
        if done.returncode != 0:
            skip_case(f"{name}: mount is refused: {done.stderr.decode().strip()}")
            return
        self.path = mounted
        self.filler = os.path.join(mounted, "filler")

    def fill(self):
        with open(self.filler, "wb", buffering=0) as f:
            for bytes_at_once in (MIB, 64 * 1024, 4096):
                try:
                    while True:
                        f.write(bytes(bytes_at_once))
                except OSError:
                    pass
            os.fsync(f.fileno())

    def free(self):
        os.unlink(self.filler)

    def close(self):
        if self.path:
            subprocess.run(["umount", self.path], check=False)


def segment_bytes(state):
    """(size, blocks) of the segment files together."""
    folder, size, blocks = os.path.join(state, "ssd"), 0, 0
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            info = os.stat(os.path.join(folder, name))
        except FileNotFoundError:
            continue
        size += info.st_size
        blocks += info.st_blocks * 512
    return size, blocks


@case
def far_more_than_fits_through_a_file_system_of_one_gib():
    """Default configuration (10 GiB) on 1 GiB: `bench fill` ends well, the manifest's reserve is left
    alone at every look, and everything that is left verifies."""
    gib = 2 if os.environ.get("CACHED_TEST_DIVISOR", "1") == "1" else 1
    disk = Mounted("bench fill", 1024)
    if disk.path is None:
        return
    state = os.path.join(disk.path, "state")
    try:
        run = subprocess.Popen([CACHECTL, "bench", "fill", "--dir", state, "--bytes", f"{gib}GiB",
                                "--json", "--daemon", daemon.BINARY], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
        least, most, du = 1 << 60, 0, 0
        while run.poll() is None:
            info = os.statvfs(disk.path)
            least = min(least, info.f_bavail * info.f_frsize)
            most, du = map(max, segment_bytes(state), (most, du))
            time.sleep(0.05)
        out, err = run.communicate()
        print(out + err, flush=True)
        equal(run.returncode, 0, "exit code of bench fill")
        if run.returncode == 0:
            got = json.loads(out)
            check(got["saved_bytes"] >= gib << 30, f"{gib} GiB were saved")
            equal((got["refused"], got["io_errors"]), (0, 0), "refused saves, errors")
            check(got["evicted_capacity"] > 0, "checkpoints were evicted")
            check(most <= got["limit_bytes"] + 64 * MIB,
                  f"files {most} of {got['limit_bytes']} at most, and one segment")
            check(abs(du - got["files_bytes_max"]) <= 64 * MIB, "du agrees within one segment")
        check(least > 16 * MIB, f"{least} bytes were free at least")
        done = subprocess.run([os.path.join(BUILD, "tools", "kvdump"), "verify", state],
                              capture_output=True, text=True, check=False)
        equal(done.returncode, 0, f"kvdump verify: {done.stdout[-300:]}")
    finally:
        disk.close()


@case
def others_fill_the_file_system_and_let_go():
    """Saves go on within the segments there are; one that needs more is refused with a name, health
    says why, turns go on; within 5 s of the space coming back it is stored."""
    disk = Mounted("full file system", 256)
    if disk.path is None:
        return
    box = Box("synthetic", {"ssd.bytes": None, "ssd.segment_bytes": "8MiB", "clock.mode": "real",
                            "hbm.bytes": "256MiB", "state.dir": os.path.join(disk.path, "state")})
    box.state, box.segment = box.flags["state.dir"], 8 * MIB
    try:
        box.start()
        check(box.logged("event=ssd_limited"), "the log says that the tier gets less than ssd.bytes")
        client, prompts = box.client(), {}
        for i in range(8):
            equal(save(client, f"first{i}", 12800, prompts).save_reason, "", f"first{i}")
        for cycle in range(2):
            disk.fill()
            there = segment_bytes(box.state)[0]
            for i in range(2 * there // (100 * PAGE_BYTES)):
                got = save(client, f"full{cycle}.{i}", 12800, prompts)
                equal(got.save_reason, "", f"full{cycle}.{i}: within the segments there are")
            equal(segment_bytes(box.state)[0], there, "no segment was made")
            within(box, "full file system")
            big = Talk(client, f"big{cycle}")
            prompt = tokens(there // PAGE_BYTES * 128 + 12800)
            got = patiently(big.prefill, prompt, timeout=60)
            equal(got.save_reason, "SSD_FULL", "one that needs more")
            equal(len(big.decode(3).tokens), 3, "its turn goes on")
            time.sleep(0.2)
            health = box.stats().health
            check("file system" in health and "full" in health, f"health says so: {health!r}")
            disk.free()
            began, reason = time.monotonic(), "never tried"
            while reason and time.monotonic() - began < 20:
                got = patiently(big.prefill, prompt + tokens(3), timeout=60)
                reason = got.save_reason
                time.sleep(0.05)
            took = time.monotonic() - began
            check(not reason and took <= 5, f"{reason or 'stored'} {took:.1f} s after the space")
            print(f"cycle {cycle}: stored {took:.1f} s after the space came back", flush=True)
            big.close()
            time.sleep(0.2)
            equal(box.stats().health, "serving", "health afterwards")
        well(box, "file system full and freed")
        last = {}
        for i in range(6):
            equal(save(client, f"last{i}", 12800, last).save_reason, "", f"last{i}")
        offset = len(box.log())
        box.crash()
        check(box.logged("dropped 0", offset), "nothing is dropped at the next start")
        client = box.client()
        for name, prompt in last.items():
            got = Talk(client, name).prefill(prompt + tokens(3))
            equal((got.hit_tokens, got.weakened), (12800, 0), f"{name} resumes after a crash")
        well(box, "after a crash")
        box.stop()
    finally:
        for made in Box.made:
            made.kill()
        disk.close()


if __name__ == "__main__":
    run_cases("Room on the SSD tier.")
