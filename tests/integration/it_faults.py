"""Faults of disks and memory, made on purpose against the real daemon.

Whatever happens: the daemon stays up (or refuses to start in one sentence), other users go on, what
was acknowledged and not hurt is found, and no wrong byte is ever used.  The synthetic engine
compares every byte it is given with what it made of the same tokens.
"""

import os
import re
import shutil
import subprocess
import time

import daemon
import grpc
from daemon import check, equal, expect, pack, pb, scratch
from cli import Tool, token_file
from faults import (
    CROWDED, MIB, come_back, lookers, owners, pages_on_disk, recovered, stored_sessions, well)
from state_files import sealed
from talk import (
    EXACT, MISS, PAGE, REPLAY, SSD_TTL_MS, Box, Talk, case, even, flip, overwrite,
    patiently, resumed, rng, run_cases, skip_case, together, tokens, untilfree)

# ---- Records on disk ----

def lost_in(log):
    found = re.findall(r"event=records_lost batches=(\d+)", log)
    return [int(count) for count in found]


@case
def damaged_record_in_the_log_of_rocksdb():
    """What was recorded behind it is gone, and everything says so until the next start."""
    box = Box("synthetic", CROWDED).start()
    prompts = stored_sessions(box, 12)
    acknowledged = box.stats().checkpoints
    equal((box.counter("cached_lost_batches"), lost_in(box.log())), (0, []), "before")
    box.kill()
    folder = os.path.join(box.state, "manifest")
    logs = [os.path.join(folder, n) for n in os.listdir(folder) if n.endswith(".log")]
    path = max(logs, key=os.path.getsize)
    flip(path, os.path.getsize(path) // 2)
    done = subprocess.run([os.path.join(daemon.BUILD, "tools", "kvdump"), "verify", box.state],
                          capture_output=True, text=True, timeout=60, check=False)
    offset = len(box.log())
    box.start()
    found, _ = recovered(box, offset)
    lost = box.counter("cached_lost_batches")
    equal(done.returncode, 7, f"kvdump verify: {done.stdout}{done.stderr}")
    for words in ("a daemon reads what is in front of it, and so does this",
                  f"manifest: lacks the last {lost:.0f} batches of records", f" of {found} checkpoints"):
        check(words in done.stdout, f"kvdump verify says {words!r}: {done.stdout!r}")
    check(0 < found < acknowledged, f"recovered {found} of {acknowledged}")
    equal(lost_in(box.log(offset)), [lost], "batches the log says are lost, and the counter")
    check(0 < lost, f"lost batches: {lost}")
    check("acknowledged records were lost" in box.stats().health, f"health: {box.stats().health}")
    tool = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    said = tool.code(0, "status").stdout
    check(f"{lost:.0f} batches of acknowledged records" in said, f"status: {said!r}")
    equal(tool.json("status", "--json")["sessions"]["lost_batches"], lost, "status --json")
    well(box, what="with records lost")
    client = box.client()
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        equal(patiently(talk.prefill, prompt + tokens(7)).save_reason, "", f"{name}: goes on")
        talk.close()
    box.kill()
    offset = len(box.log())
    box.start()
    equal((box.counter("cached_lost_batches"), lost_in(box.log(offset)), box.stats().health),
          (0, [], "serving"), "the start after")
    box.stop()


@case
def acknowledged_absent_damaged_or_of_another():
    """Nothing is said of a loss, a damaged file is, and it is there again."""
    box = Box("synthetic", CROWDED).start()
    prompts = stored_sessions(box, 3)
    path = os.path.join(box.state, "acknowledged")
    for what in ("absent", "damaged", "foreign", "a folder"):
        box.kill()
        with open(path, "rb") as f:
            data = f.read()
        if what in ("absent", "a folder"):
            os.unlink(path)
        if what == "damaged":
            overwrite(path, 0, bytes(b ^ 1 for b in data))
        if what == "foreign":
            overwrite(path, 0, sealed(data[:16] + bytes(16) + data[32:4096])
                      + sealed(data[4096:4112] + bytes(16) + data[4128:]))
        if what == "a folder":
            os.mkdir(path)
        offset = len(box.log())
        box.start()
        equal(lost_in(box.log(offset)), [], f"{what}: lost")
        equal("event=acknowledged_unknown" in box.log(offset), what != "absent",
              f"{what}: the log says that it cannot be said")
        equal(box.stats().health, "serving", f"{what}: health")
        come_back(box, prompts, set(), what)
    box.stop()


# ---- Bytes on disk ----

@case
def flipped_bits_in_segments_of_a_stopped_daemon():
    """Each one is detected or harmless; the sessions it hit compute again, once."""
    box = Box("synthetic", CROWDED).start()
    box.page_bytes = box.stats().page_bytes
    prompts = stored_sessions(box, 24)
    for _ in range(3):
        box.kill()
        pages = pages_on_disk(box)
        check(len(pages) >= 24, f"pages on disk: {len(pages)}")
        hurt, may_look = set(), set()
        for path, offset, position, ids in rng.sample(pages, 8):
            where = rng.choice((rng.randrange(256), rng.randrange(256, 768),
                                rng.randrange(768, box.page_bytes)))
            flip(path, offset + where)
            hurt |= owners(prompts, position, ids)
            may_look |= lookers(prompts, position)
        offset = len(box.log())
        box.start()
        _, dropped = recovered(box, offset)
        before = box.counter("cached_weakened_plans_total")
        weakened = come_back(box, prompts, hurt, "flips while stopped", may_look)
        equal(box.counter("cached_weakened_plans_total") - before, weakened, "weakened plans")
        check(dropped > 0 or weakened > 0 or not hurt, f"damage to {sorted(hurt)} was noticed")
    well(box, what="flips while stopped")
    box.stop()


@case
def flipped_bits_in_segments_of_a_running_daemon():
    box = Box("synthetic", CROWDED).start()
    box.page_bytes = box.stats().page_bytes
    prompts = stored_sessions(box, 30)
    failures = 0
    hurt, may_look = set(), set()  # Of all rounds: unseen while memory serves the page.
    for _ in range(3):
        pages = pages_on_disk(box)
        for path, offset, position, ids in rng.sample(pages, 12):
            flip(path, offset + rng.randrange(box.page_bytes))
            hurt |= owners(prompts, position, ids)
            may_look |= lookers(prompts, position)
        come_back(box, prompts, hurt, "flips while running", may_look)
        failures = box.counter("cached_checksum_failures_total", 'tier="ssd",where="read"')
    check(failures > 0, "no flip was read")
    well(box, what="flips while running")
    box.stop()


@case
def swapped_and_old_pages_are_not_served():
    """A page of the same user at another's place, and an older write of a page: well formed, wrong."""
    box = Box("synthetic", CROWDED).start()
    box.page_bytes = box.stats().page_bytes
    prompts = stored_sessions(box, 12, 260, 500)
    box.kill()
    full = [p for p in pages_on_disk(box) if p[2] == PAGE and len(p[3]) == PAGE]
    (path1, at1, pos1, ids1), (path2, at2, pos2, ids2) = rng.sample(full, 2)
    with open(path1, "rb") as f:
        f.seek(at1)
        one = f.read(box.page_bytes)
    with open(path2, "rb") as f:
        f.seek(at2)
        two = f.read(box.page_bytes)
    overwrite(path1, at1, two)
    overwrite(path2, at2, one)
    hurt = owners(prompts, pos1, ids1) | owners(prompts, pos2, ids2)
    box.start()
    client = box.client()
    for name in hurt:
        got = Talk(client, name).lookup(prompts[name] + tokens(5))
        check(got.stored_tokens in (0, PAGE, len(prompts[name])), f"stored {got.stored_tokens}")
    weakened = come_back(box, prompts, hurt, "swapped pages")
    check(weakened >= 1 or box.stats().dropped_checkpoints >= 1, "the swap was noticed")
    well(box, what="swapped pages")
    box.stop()


@case
def segment_file_deleted():
    _segment_file("deleted")


@case
def segment_file_truncated():
    _segment_file("truncated")


@case
def segment_file_emptied():
    _segment_file("emptied")


@case
def segment_file_without_its_header():
    _segment_file("header gone")


def _segment_file(damage):
    """Checkpoints in it are dropped and counted at start, the others are there; what is stored
    afterwards is found by the start after."""
    box = Box("synthetic", CROWDED).start()
    box.page_bytes = box.stats().page_bytes
    prompts = stored_sessions(box, 24)
    box.stop()
    used = sorted({page[0] for page in pages_on_disk(box)})
    check(len(used) >= 4, f"segments in use: {len(used)}")
    path = rng.choice(used[:-1])
    keep = {"truncated": os.path.getsize(path) // 2 // 4096 * 4096, "emptied": 0}.get(damage)
    hurt = set()
    for p, at, position, ids in pages_on_disk(box):
        if p == path and (keep is None or at + box.page_bytes > keep):
            hurt |= owners(prompts, position, ids)
    if damage == "deleted":
        os.unlink(path)
    elif damage == "header gone":
        overwrite(path, 0, bytes(4096))
    else:
        os.truncate(path, keep)
    offset = len(box.log())
    try:
        box.start()
    except RuntimeError:
        check(False, f"{damage}: it serves what is left, instead of refusing to start")
        refused_in_one_sentence(box, offset, damage)
        os.unlink(path)  # As its sentence advises.
        offset = len(box.log())
        hurt |= {name for name in prompts}
        box.start()
    found, dropped = recovered(box, offset)
    equal(found + dropped if found is not None else None, len(prompts),
          f"{damage}: recovered and dropped")
    if damage != "header gone" and len(hurt) < len(prompts):  # The pages are there; each is verified when it is read.
        equal(dropped, len(hurt), f"{damage}: dropped at start, of those that were hurt")
    come_back(box, prompts, hurt, damage)
    well(box, what=damage)
    offset = len(box.log())
    box.restart()
    equal(recovered(box, offset)[1], 0, f"{damage}: dropped at the start after")
    come_back(box, prompts, set(), f"{damage}, restarted")
    box.no_wrong_bytes(damage)
    box.stop()


def refused_in_one_sentence(box, offset, what):
    """It did not start: exit 2, the last line says why, and nothing of a crash."""
    equal(box.process.wait(5), 2, f"{what}: exit code of a refused start")
    said = box.log(offset)
    check("ssertion" not in said and "Sanitizer" not in said, f"{what}: it crashed: {said}")
    last = said.strip().splitlines()[-1]
    check(20 < len(last) < 400, f"{what}: one sentence: {last!r}")
    box._forget()


@case
def damaged_manifest():
    """RocksDB's directory removed or damaged: refused in one sentence, or started with what is
    left; never a crash, never a wrong byte, and what is saved afterwards comes back."""
    def removed(folder):
        shutil.rmtree(folder)

    def file_like(folder, pattern):
        names = sorted(n for n in os.listdir(folder) if re.fullmatch(pattern, n))
        sizes = [(os.path.getsize(os.path.join(folder, n)), n) for n in names]
        return os.path.join(folder, max(sizes)[1]) if sizes else None

    def flipped(pattern):
        def damage(folder):
            path = file_like(folder, pattern)
            for _ in range(5):
                flip(path, rng.randrange(os.path.getsize(path)))
        return damage

    def cut(pattern):
        def damage(folder):
            path = file_like(folder, pattern)
            os.truncate(path, os.path.getsize(path) // 2)
        return damage

    def gone(pattern):
        return lambda folder: os.unlink(file_like(folder, pattern))

    kinds = {
        "removed": removed, "a table flipped": flipped(r"\d+\.sst"), "a table gone": gone(r"\d+\.sst"),
        "log flipped": flipped(r"\d+\.log"), "log cut": cut(r"\d+\.log"),
        "MANIFEST flipped": flipped(r"MANIFEST-\d+"), "MANIFEST cut": cut(r"MANIFEST-\d+"),
        "CURRENT gone": gone("CURRENT"), "CURRENT wrong": flipped("CURRENT"),
        "LOCK gone": gone("LOCK"),
    }
    template = Box("synthetic", CROWDED).start()
    prompts = stored_sessions(template, 8)
    template.restart()  # Records in a table, and more in the log.
    prompts.update({f"t{n}": p for n, p in stored_sessions(template, 0).items()})
    client = template.client()
    for i in range(8):
        prompt = prompts[f"late{i}"] = tokens(rng.randrange(100, 500))
        talk = Talk(client, f"late{i}")
        patiently(talk.prefill, prompt)
        talk.close()
    template.kill()
    started = refused = 0
    for what, damage in kinds.items():
        box = Box("synthetic", CROWDED)
        shutil.copytree(template.state, box.state)
        damage(os.path.join(box.state, "manifest"))
        try:
            box.start()
        except RuntimeError:
            refused += 1
            refused_in_one_sentence(box, 0, what)
            continue
        started += 1
        found, dropped = recovered(box)
        if what == "LOCK gone":
            equal((found, dropped), (16, 0), f"{what}: (recovered, dropped)")
        mine = {name: list(prompt) for name, prompt in prompts.items()}
        come_back(box, mine, set(mine), what)
        well(box, what=what)
        offset = len(box.log())
        box.crash()
        equal(recovered(box, offset)[1], 0, f"{what}: dropped at the next start")
        come_back(box, mine, set(), f"{what}, restarted")
        box.no_wrong_bytes(what)
        box.stop()
    print(f"manifests: {started} started, {refused} refused", flush=True)


# ---- Room ----

@case
def full_ssd_refuses_saves_and_goes_on():
    """A save larger than the tier: turns go on in memory, stored sessions still hit, and what fits is
    stored again."""
    box = Box("synthetic", {"ssd.bytes": "1MiB", "ssd.segment_bytes": "256KiB",
                            "hbm.bytes": "8MiB"}).start()
    client = box.client()
    stored = {}
    for i in range(6):
        talk, prompt = Talk(client, f"s{i}"), tokens(250)
        equal(talk.prefill(prompt).save_reason, "", f"s{i} is stored")
        stored[talk.name] = prompt
    for i in range(5):
        talk, prompt = Talk(client, f"large{i}"), tokens(7000)
        got = patiently(talk.prefill, prompt)
        resumed(got, MISS, 0, f"large{i}")
        equal(got.save_reason, "SSD_FULL", "save_reason")
        check(all(c.rows_level < pb.LEVEL_SSD for c in got.checkpoints), "no level SSD is claimed")
        answer = talk.decode(4)
        equal((len(answer.tokens), answer.end.save_reason), (4, "SSD_FULL"), "an answer")
        history = prompt + answer.tokens
        got = patiently(talk.prefill, history + tokens(9))
        resumed(got, EXACT, len(history) - 1, "the next turn, in memory")
    expect(client.session.Checkpoint, pb.CheckpointRequest(session_id="large4"),
           code="RESOURCE_EXHAUSTED", reason="SSD_FULL")
    tier = box.tier("ssd")
    check(tier.bytes_used <= tier.bytes_capacity, f"used {tier.bytes_used} of {tier.bytes_capacity}")
    for name, prompt in stored.items():
        got = client.session.Lookup(pb.LookupRequest(session_id=name, tokens=pack(prompt + [5])))
        equal(got.hit_tokens, 250, f"{name} still hits")
    name = next(iter(stored))
    equal(Talk(client, name).prefill(stored[name] + tokens(3)).hit_tokens, 250, "and resumes")
    box.crash()
    equal(box.stats().dropped_checkpoints, 0, "dropped after kill -9")
    client = box.client()
    for name, prompt in stored.items():
        got = client.session.Lookup(pb.LookupRequest(session_id=name, tokens=pack(prompt + [5])))
        equal(got.stored_tokens, 250, f"{name} after kill -9")
    box.advance(SSD_TTL_MS + 60000)
    for i in range(10):
        got = Talk(client, f"later{i}").prefill(tokens(250))
        equal(got.save_reason, "", "saved into the room that expiry left")
    well(box, what="full SSD")
    box.stop()


@case
def full_ssd_moves_no_head_back():
    """A turn whose save was refused was acknowledged all the same: when others need the engine, an
    answer follows that turn, or is refused; it never follows an older one and says OK."""
    box = Box("synthetic", {"ssd.bytes": "1MiB", "ssd.segment_bytes": "256KiB",
                            "hbm.bytes": "4MiB", "engine.live_sessions": "2"}).start()
    client = box.client()
    mine, prompt = Talk(client, "mine"), tokens(250)
    equal(mine.prefill(prompt).save_reason, "", "the first turn is stored")
    prompt += tokens(7000)  # More than the tier holds.
    got = patiently(mine.prefill, prompt)
    resumed(got, EXACT, 250, "the second turn")
    equal(got.save_reason, "SSD_FULL", "the second turn is not")
    for i in range(4):
        try:
            Talk(box.client("bob"), f"other{i}").prefill(tokens(100))
        except grpc.RpcError as error:
            equal(daemon.Failure(error).code, "RESOURCE_EXHAUSTED", "another session's turn")
    try:
        answer = mine.decode(3)
        equal(answer.first, len(prompt), "first position of an answer after a refused save")
    except grpc.RpcError as error:
        got = daemon.Failure(error)
        check(got.code in ("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED"), f"{got!r}")
    got = patiently(mine.prefill, prompt + tokens(5))
    check(got.hit_tokens >= 250, f"the next turn hits {got.hit_tokens}")
    well(box, what="refused saves")
    box.stop()


@case
def full_pool_evicts_the_oldest():
    box = Box("synthetic", {"pool.bytes": "1MiB"}).start()
    room = box.tier("pool").items_capacity
    prompts = stored_sessions(box, room + 20, 100, 200)
    names = list(prompts)
    client = box.client()

    def look(name):
        return client.session.Lookup(pb.LookupRequest(
            session_id=name, tokens=pack(prompts[name] + [5])))

    for name in names[:20]:
        resumed(look(name), REPLAY, even(len(prompts[name])), f"{name}: oldest", reason="CAPACITY")
    for name in names[-(room - 1):]:
        resumed(look(name), EXACT, len(prompts[name]), f"{name}: newest")
    evicted = box.counter("cached_evictions_total", 'tier="pool",cause="capacity"')
    check(20 <= evicted <= 21, f"evicted {evicted}")
    check(box.tier("pool").items_used <= room, "items in the pool")
    well(box, what="full pool")
    box.stop()


@case
def full_hbm_makes_room_and_refuses_only_what_never_fits():
    box = Box("synthetic", {"hbm.bytes": "1MiB", "engine.live_sessions": "4"}).start()
    room = box.tier("hbm").items_capacity * PAGE
    client = box.client()
    rss = box.stats().rss_bytes
    prompts = stored_sessions(box, 40, 300, 500)
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        resumed(patiently(talk.prefill, prompt + tokens(3)), EXACT, len(prompt), f"{name} comes back")
    huge = Talk(client, "huge")
    kept = tokens(200)
    patiently(huge.prefill, kept)
    expect(huge.prefill, kept + tokens(room), code="RESOURCE_EXHAUSTED", reason="HBM_FULL")
    resumed(patiently(huge.prefill, kept + tokens(9)), EXACT, 200, "after a prompt that never fits")
    big = {f"big{i}": tokens(room * 3 // 5) for i in range(3)}  # One at a time fits.
    talks = {name: Talk(client, name) for name in big}

    def turn(i):
        name = f"big{i}"
        resumed(patiently(talks[name].prefill, big[name]), MISS, 0, name)
        talks[name].close()

    together(3, turn)
    for name in big:
        resumed(patiently(talks[name].prefill, big[name] + tokens(5)), EXACT, len(big[name]),
                f"{name} comes back")
        talks[name].close()
    grown = Talk(client, "grown")
    patiently(grown.prefill, tokens(room - 300))
    try:
        answer = grown.decode(2000)
        check(False, f"an answer of {len(answer.tokens)} tokens fitted")
    except grpc.RpcError as error:
        got = daemon.Failure(error)
        equal((got.code, got.reason, got.limit), ("RESOURCE_EXHAUSTED", "HBM_FULL", str(room)),
              "an answer that outgrows names the limit")
    equal(len(untilfree(grown.decode, 2).tokens), 2, "a short answer after it")
    grown.close()
    for name, prompt in list(prompts.items())[:5]:
        got = patiently(Talk(client, name).prefill, prompt + tokens(3))
        equal(got.hit_tokens >= len(prompt) - 1, True, f"{name} is there afterwards")
    well(box, rss, "full HBM")
    box.stop()


def _on_small_disk(name, body):
    """body(box, filler) with the state on a file system of 24 MiB; filler: a file to fill it with."""
    folder = scratch()
    disk = os.path.join(folder, "disk")
    mounted = os.path.join(folder, "mounted")
    os.mkdir(mounted)
    with open(disk, "wb") as f:
        f.truncate(24 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", disk], check=True)
    done = subprocess.run(["mount", "-o", "loop", disk, mounted], stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        skip_case(f"{name}: mount is refused: {done.stderr.decode().strip()}")
        return
    box = Box("synthetic", {"ssd.bytes": "1GiB", "ssd.segment_bytes": "1MiB",
                            "state.dir": os.path.join(mounted, "state")})
    box.state = box.flags["state.dir"]
    try:
        body(box, os.path.join(mounted, "filler"))
    finally:
        box.kill()
        subprocess.run(["umount", mounted], check=False)


def _fill(filler):
    with open(filler, "wb", buffering=0) as f:
        for bytes_at_once in (64 * 1024, 4096):
            try:
                while True:
                    f.write(bytes(bytes_at_once))
            except OSError:
                pass


@case
def full_file_system():
    """Another program fills the file system: saves are refused with a name, turns go on, reads hit;
    when it frees the space saves work again, at the latest after a restart."""
    _on_small_disk("full_file_system", _fill_and_free)


@case
def full_file_system_at_a_start_after_kill():
    """Killed, and the file system is full when it starts again: one sentence that says so; with
    space it starts as if nothing had been."""
    _on_small_disk("full_file_system_at_a_start_after_kill", _start_while_full)


def _start_while_full(box, filler):
    box.start()
    stored = stored_sessions(box, 4, 200, 400)
    box.kill()
    _fill(filler)
    code, said = box.refused()
    equal(code, 2, f"a start on a full file system: {said}")
    check("bytes free on this file system" in said, f"and says so: {said}")
    os.unlink(filler)
    box.start()
    client = box.client()
    for name, prompt in stored.items():
        got = client.session.Lookup(pb.LookupRequest(session_id=name, tokens=pack(prompt + [5])))
        equal(got.stored_tokens, len(prompt), f"{name} is there")
    box.stop()


def _fill_and_free(box, filler):
    box.start()
    client = box.client()
    stored = stored_sessions(box, 6, 200, 400)
    _fill(filler)
    refused = []
    for i in range(10):  # Within the segments there are, older sessions making room for newer ones.
        talk = Talk(client, f"full{i}")
        equal(patiently(talk.prefill, tokens(600)).save_reason, "", f"full{i} is stored")
        talk.close()
    pages = box.tier("ssd").bytes_capacity // box.stats().page_bytes
    for i in range(2):  # More than they hold.
        talk, prompt = Talk(client, f"large{i}"), tokens(128 * pages + 200)
        got = patiently(talk.prefill, prompt)
        equal(got.save_reason, "SSD_FULL", f"large{i} is not")
        answer = talk.decode(3)
        resumed(patiently(talk.prefill, prompt + answer.tokens + tokens(5)), EXACT, len(prompt) + 2,
                "turns go on")
        refused.append(got.save_reason)
        talk.close()
    health = box.stats().health
    for name, prompt in list(stored.items()):
        got = client.session.Lookup(pb.LookupRequest(session_id=name, tokens=pack(prompt + [5])))
        if got.stored_tokens == 0:
            equal(got.reason, "CAPACITY", f"{name} made room")
            del stored[name]
        else:
            equal(got.stored_tokens, len(prompt), f"{name} still hits")
    well(box, what="full file system")
    os.unlink(filler)
    print(f"file system full: {refused}, health {health!r}", flush=True)
    end = time.monotonic() + 5
    reason = "never tried"
    while reason and time.monotonic() < end:
        talk, prompt = Talk(client, f"free{time.monotonic_ns()}"), tokens(128 * pages + 200)
        reason = patiently(talk.prefill, prompt).save_reason
        time.sleep(0.05)
    equal(reason, "", "saves work again within 5 s of the space")
    stored = {talk.name: prompt} if not reason else {}
    offset = len(box.log())
    box.crash()
    equal(recovered(box, offset)[1], 0, "dropped at the start after")
    client = box.client()
    for name, prompt in stored.items():
        got = Talk(client, name).prefill(prompt + tokens(5))
        equal((got.hit_tokens, got.weakened), (even(len(prompt)), 0), f"{name} after the restart")
        equal(got.save_reason, "", f"{name}: saved after the restart")
    well(box, what="file system freed")


if __name__ == "__main__":
    run_cases("Faults of disks and memory.")
