"""Faults of disks, memory, clients and the machine, made on purpose against the real daemon.

Whatever happens: the daemon stays up (or refuses to start in one sentence), other users go on, what
was acknowledged and not hurt is found, and no wrong byte is ever used.  The synthetic engine compares
every byte it is given with what it made of the same tokens.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
import time

import daemon
import grpc
from daemon import Daemon, check, equal, expect, pack, pb, scratch
from it_symptoms import (
    EXACT, MISS, PAGE, POOL_TTL_MS, REPLAY, SSD_TTL_MS, WINDOW, Answer, Box, Talk, case, even, flip,
    name_of, overwrite, patiently, resumed, rng, run_cases, skip_case, together, tokens)

MIB = 1 << 20
with open(daemon.BINARY, "rb") as _binary:
    SANITIZED = b"__asan_init" in _binary.read()  # Its shadow and quarantine have no budget.
# Small enough that pages leave HBM and several segments are in use.
CROWDED = {"hbm.bytes": "2MiB", "ssd.segment_bytes": "256KiB", "engine.live_sessions": "4"}


def well(box, rss_before=None, what=""):
    """After a fault: another user's turn works, and memory is inside its budget."""
    if not check(box.is_up(), f"{what}: the daemon is up"):
        return
    name = f"well{rng.randrange(10**9)}"
    talk = Talk(box.client("bob"), name)
    prompt = tokens(90)
    resumed(patiently(talk.prefill, prompt), MISS, 0, f"{what}: another user's first turn")
    answer = patiently(talk.decode, 3)
    resumed(patiently(talk.prefill, prompt + answer.tokens + tokens(5)), EXACT, 92,
            f"{what}: another user's second turn")
    talk.close()
    stats = box.stats()
    within_budget(box, what)
    if rss_before is not None and not SANITIZED:
        check(stats.rss_bytes <= rss_before + 24 * MIB,
              f"{what}: RSS {stats.rss_bytes} is back near {rss_before}")
    if stats.engine_backend == "SYNTHETIC":
        equal(stats.wrong_bytes, 0, f"{what}: wrong bytes")


def within_budget(box, what):
    stats = box.stats()
    if not SANITIZED:
        check(stats.rss_bytes <= stats.rss_budget_bytes,
              f"{what}: RSS {stats.rss_bytes} within {stats.rss_budget_bytes}")


def stored_sessions(box, count, low=100, high=700):
    """Sessions with one acknowledged checkpoint each: {name: prompt}."""
    client = box.client()
    prompts = {f"s{i}": tokens(rng.randrange(low, high)) for i in range(count)}
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        equal(patiently(talk.prefill, prompt).save_reason, "", f"{name}: saved")
        talk.close()
    return prompts


def pages_on_disk(box):
    """Every page in the segment files: [(path, offset, position, its ids)]."""
    page_bytes = box.page_bytes
    found = []
    for path in box.segments():
        with open(path, "rb") as f:
            data = f.read()
        for offset in range(4096, len(data) - page_bytes + 1, 4096):
            if data[offset:offset + 8] != b"KVPAGE1\n":
                continue
            count, position = (int.from_bytes(data[offset + at:offset + at + 4], "little")
                               for at in (12, 16))
            ids = daemon.unpack(data[offset + 256:offset + 256 + 4 * min(count, PAGE)])
            found.append((path, offset, position, ids))
    return found


def owners(prompts, position, ids):
    """Sessions that may look into this page: one of their histories begins it (another may leave it
    further on, which is only known after looking)."""
    first = ids[:4]
    return {name for name, prompt in prompts.items()
            if len(prompt) > position
            and prompt[position:position + len(first)] == first[:len(prompt) - position]}


def come_back(box, prompts, hurt, what):
    """Every session's next turn works; those not hurt hit in full; the turn after hits for all."""
    client = box.client()
    weakened = 0
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        longer = prompt + tokens(12)
        got = patiently(talk.prefill, longer)
        weakened += got.weakened
        if name not in hurt:
            hit = even(len(prompt)) if even(len(prompt)) > WINDOW else 0
            check(got.hit_tokens >= hit, f"{what}: {name} was not hurt and hit {got.hit_tokens} "
                  f"of {len(prompt)}")
            equal(got.weakened, 0, f"{what}: {name} was not hurt; weakened plans")
        equal(got.save_reason, "", f"{what}: {name} is stored again")
        equal(got.computed_tokens + got.hit_tokens, len(longer), f"{what}: {name} adds up")
        talk.close()
        got = patiently(talk.prefill, longer + tokens(5))
        resumed(got, EXACT, len(longer), f"{what}: {name}, the turn after")
        equal(got.weakened, 0, f"{what}: {name}, the turn after; weakened plans")
        talk.close()
        prompts[name] = longer
    return weakened


def recovered(box, offset=0):
    """(recovered, dropped) as the log says at start."""
    found = re.findall(r"recovered (\d+) checkpoints, dropped (\d+)", box.log(offset))
    if not check(found, "the log says what was recovered"):
        return (None, None)
    said = tuple(map(int, found[-1]))
    stats = box.stats()
    equal((stats.recovered_checkpoints, stats.dropped_checkpoints), said,
          "GetStats against the log: (recovered, dropped)")
    return said


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
        hurt = set()
        for path, offset, position, ids in rng.sample(pages, 8):
            where = rng.choice((rng.randrange(256), rng.randrange(256, 768),
                                rng.randrange(768, box.page_bytes)))
            flip(path, offset + where)
            hurt |= owners(prompts, position, ids)
        offset = len(box.log())
        box.start()
        _, dropped = recovered(box, offset)
        before = box.counter("cached_weakened_plans_total")
        weakened = come_back(box, prompts, hurt, "flips while stopped")
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
    hurt = set()  # Of all rounds: a flip stays unseen while memory serves the page.
    for _ in range(3):
        pages = pages_on_disk(box)
        for path, offset, position, ids in rng.sample(pages, 12):
            flip(path, offset + rng.randrange(box.page_bytes))
            hurt |= owners(prompts, position, ids)
        come_back(box, prompts, hurt, "flips while running")
        failures = box.counter("cached_checksum_failures_total", 'tier="ssd"')
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
    """Turns go on in memory, stored sessions still hit, and room that comes back is used."""
    box = Box("synthetic", {"ssd.bytes": "1MiB", "ssd.segment_bytes": "256KiB",
                            "hbm.bytes": "4MiB"}).start()
    client = box.client()
    stored, refused = {}, {}
    for i in range(60):
        talk = Talk(client, f"s{i}")
        prompt = tokens(250)
        got = patiently(talk.prefill, prompt)
        resumed(got, MISS, 0, f"turn {i}")
        if got.save_reason == "":
            stored[talk.name] = prompt
            equal([c.rows_level for c in got.checkpoints], [pb.LEVEL_SSD], "level reached")
        else:
            equal(got.save_reason, "SSD_FULL", "save_reason")
            check(all(c.rows_level < pb.LEVEL_SSD for c in got.checkpoints), "no level SSD is claimed")
            refused[talk.name] = (talk, prompt)
            answer = talk.decode(4)
            equal((len(answer.tokens), answer.end.save_reason), (4, "SSD_FULL"), "an answer")
            history = prompt + answer.tokens
            got = talk.prefill(history + tokens(9))
            resumed(got, EXACT, len(history) - 1, "the next turn, in memory")
        if len(refused) == 5:
            break
    check(len(stored) >= 15, f"stored before it was full: {len(stored)}")
    check(len(refused) == 5, f"refused when full: {len(refused)}")
    expect(client.session.Checkpoint, pb.CheckpointRequest(session_id=next(iter(refused))),
           code="RESOURCE_EXHAUSTED", reason="SSD_FULL")
    tier = box.tier("ssd")
    check(tier.bytes_used <= tier.bytes_capacity, f"used {tier.bytes_used} of {tier.bytes_capacity}")
    folder = os.path.join(box.state, "ssd")
    check(sum(os.path.getsize(p) for p in box.segments()) <= MIB + 256 * 1024,
          f"files in {folder} hold to ssd.bytes and one segment")
    for name, prompt in stored.items():
        got = client.session.Lookup(pb.LookupRequest(session_id=name, tokens=pack(prompt + [5])))
        equal(got.hit_tokens, 250, f"{name} still hits")
    name = next(iter(stored))
    equal(Talk(client, name).prefill(stored[name] + tokens(3)).hit_tokens, 250, "and resumes")
    box.crash()
    equal(box.stats().dropped_checkpoints, 0, "dropped after kill -9 while full")
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
    for i in range(60):
        talk = Talk(client, f"fill{i}")
        got = patiently(talk.prefill, tokens(250))
        talk.close()
        if got.save_reason:
            break
    prompt += tokens(300)
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
        equal((got.code, got.reason), ("RESOURCE_EXHAUSTED", "HBM_FULL"), "an answer that outgrows")
    equal(len(untilfree(grown.decode, 2).tokens), 2, "a short answer after it")
    grown.close()
    for name, prompt in list(prompts.items())[:5]:
        got = patiently(Talk(client, name).prefill, prompt + tokens(3))
        equal(got.hit_tokens >= len(prompt) - 1, True, f"{name} is there afterwards")
    well(box, rss, "full HBM")
    box.stop()


def untilfree(call, *args, seconds=5, **kwargs):
    """A call after one that broke: the daemon may still be ending that."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call(*args, **kwargs)
        except grpc.RpcError as error:
            if daemon.Failure(error).reason != "SESSION_BUSY" or time.monotonic() > end:
                raise
            time.sleep(0.01)


@case
def full_file_system():
    """Another program fills the file system: saves are refused with a name, turns go on, reads hit;
    when it frees the space saves work again, at the latest after a restart."""
    folder = scratch()
    disk = os.path.join(folder, "disk")
    mounted = os.path.join(folder, "mounted")
    os.mkdir(mounted)
    with open(disk, "wb") as f:
        f.truncate(24 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", disk], check=True)
    done = subprocess.run(["mount", "-o", "loop", disk, mounted], stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        skip_case(f"full_file_system: mount is refused: {done.stderr.decode().strip()}")
        return
    box = Box("synthetic", {"ssd.bytes": "1GiB", "ssd.segment_bytes": "1MiB",
                            "state.dir": os.path.join(mounted, "state")})
    box.state = box.flags["state.dir"]
    try:
        _fill_and_free(box, os.path.join(mounted, "filler"))
    finally:
        box.kill()
        subprocess.run(["umount", mounted], check=False)


def _fill_and_free(box, filler):
    box.start()
    client = box.client()
    stored = stored_sessions(box, 6, 200, 400)
    with open(filler, "wb", buffering=0) as f:
        try:
            while True:
                f.write(bytes(64 * 1024))
        except OSError:
            pass
    refused = []
    for i in range(60):  # What is prewritten already may still be used.
        talk = Talk(client, f"full{i}")
        prompt = tokens(600)
        got = patiently(talk.prefill, prompt)
        if got.save_reason == "":
            stored[talk.name] = prompt
            equal([c.rows_level for c in got.checkpoints], [pb.LEVEL_SSD], "level reached")
            continue
        check(got.save_reason in ("SSD_FULL", "SSD_READ_ONLY"), f"save_reason {got.save_reason}")
        answer = talk.decode(3)
        resumed(talk.prefill(prompt + answer.tokens + tokens(5)), EXACT, 602, "turns go on")
        refused.append(got.save_reason)
        if len(refused) == 4:
            break
    equal(len(refused), 4, "saves refused on a full file system")
    health = box.stats().health
    if "SSD_READ_ONLY" in refused:
        check(health != "serving", f"health names it: {health!r}")
    for name, prompt in stored.items():
        got = client.session.Lookup(pb.LookupRequest(session_id=name, tokens=pack(prompt + [5])))
        equal(got.stored_tokens, len(prompt), f"{name} still hits")
    well(box, what="full file system")
    os.unlink(filler)
    print(f"file system full: {refused}, health {health!r}", flush=True)
    if refused[-1] == "SSD_FULL":  # Only a failed write or flush is for ever.
        end = time.monotonic() + 5
        reason = "never tried"
        while reason and time.monotonic() < end:
            talk, prompt = Talk(client, f"free{time.monotonic_ns()}"), tokens(300)
            reason = talk.prefill(prompt).save_reason
            time.sleep(0.05)
        equal(reason, "", "saves work again within 5 s of the space")
        if not reason:
            stored[talk.name] = prompt
    offset = len(box.log())
    box.crash()
    equal(recovered(box, offset)[1], 0, "dropped at the start after")
    client = box.client()
    for name, prompt in stored.items():
        got = Talk(client, name).prefill(prompt + tokens(5))
        equal((got.hit_tokens, got.weakened), (even(len(prompt)), 0), f"{name} after the restart")
        equal(got.save_reason, "", f"{name}: saved after the restart")
    well(box, what="file system freed")


# ---- The machine and the clients ----

@case
def killed_at_random_times():
    """kill -9 among prefills, decodes and commits, 20 times: every acknowledged checkpoint is found
    again, nothing is dropped, no wrong byte."""
    box = Box("synthetic", {"hbm.bytes": "4MiB", "ssd.segment_bytes": "1MiB"}).start()
    acknowledged = {}  # session -> [(id, its tokens)]
    history = {}
    lock = threading.Lock()

    def write(client, name, seed):
        random = __import__("random").Random(seed)

        def some(count):
            return [random.randrange(3, 500) for _ in range(count)]

        talk = Talk(client, name)
        mine = history.get(name, [])
        while True:
            long = random.random() < 0.1 and len(mine) < 2000
            mine = mine + some(2000 if long else random.randrange(1, 200))
            got = patiently(talk.prefill, mine)
            with lock:
                for made in got.checkpoints:
                    acknowledged.setdefault(name, []).append((made.id, mine[:made.position]))
                history[name] = mine
            answer = talk.decode(random.randrange(1, 30))
            mine = mine + answer.tokens
            with lock:
                for made in answer.end.checkpoints:
                    acknowledged[name].append((made.id, mine[:made.position]))
                history[name] = mine
            if len(mine) > 3000:
                return

    found = 0
    for cycle in range(20):
        names = [f"cycle{cycle // 2}-{i}" for i in range(4)]  # Two cycles go on with the same ones.
        threads = []
        for name in names:
            def run(name=name, seed=rng.random(), client=box.client()):
                try:
                    write(client, name, seed)
                except (grpc.RpcError, RuntimeError, ValueError):
                    pass  # The daemon was killed, or the channel closed after it.
            threads.append(threading.Thread(target=run))
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0.01, 0.15))
        box.process.kill()
        for thread in threads:
            thread.join()
        equal(box.process.wait(), -signal.SIGKILL, "it ran until it was killed")
        box._forget()
        offset = len(box.log())
        box.start()
        total, dropped = recovered(box, offset)
        equal(dropped, 0, f"cycle {cycle}: dropped")
        check(total >= sum(len({i for i, _ in a}) for a in acknowledged.values()),
              f"cycle {cycle}: recovered {total}")
        client = box.client()
        for name in names:
            listed = {c.id: c.position for c in client.session.GetSession(
                pb.GetSessionRequest(session_id=name)).checkpoints} if name in acknowledged else {}
            for checkpoint, prompt in acknowledged.get(name, []):
                check(listed.get(checkpoint) == len(prompt),
                      f"cycle {cycle}: {name} at {len(prompt)} was acknowledged and is listed")
                found += 1
            for checkpoint, prompt in acknowledged.get(name, [])[-3:]:
                got = client.session.Lookup(pb.LookupRequest(
                    session_id=name, tokens=pack(prompt + [2])))
                check(got.stored_tokens >= len(prompt), f"{name}: {got.stored_tokens} of "
                      f"{len(prompt)} that were acknowledged")
            if name in acknowledged and cycle % 2:
                prompt = acknowledged[name][-1][1]
                talk = Talk(client, name)
                got = patiently(talk.prefill, prompt + [2] + tokens(5))
                check(got.hit_tokens >= (even(len(prompt)) if len(prompt) > WINDOW + 1 else 0),
                      f"{name}: hit {got.hit_tokens} of {len(prompt)}")
                equal(got.weakened, 0, f"{name}: weakened")
                talk.close()
        box.no_wrong_bytes(f"in cycle {cycle}")
    check(found >= 100, f"acknowledged checkpoints found: {found}")
    well(box, what="20 kills")
    box.stop()


@case
def stopped_for_five_seconds():
    """SIGSTOP in the middle of work: calls in flight end well, nothing expired."""
    box = Box(flags={"clock.mode": "real"}).start()
    client = box.client()
    prompts = {f"s{i}": tokens(150) for i in range(6)}
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        talk.prefill(prompt)
        talk.close()
    rss = box.stats().rss_bytes
    busy = Talk(client, "busy")
    busy.prefill(tokens(100))
    stream = busy.stream(600, timeout=30)
    next(stream)
    box.process.send_signal(signal.SIGSTOP)
    waiting = client.session._stub.Prefill.future(pb.PrefillRequest(
        session_id="s0", tokens=pack(prompts["s0"] + tokens(9))),
        metadata=client.metadata, timeout=30)
    time.sleep(5)
    check(not waiting.done(), "a call waits for a stopped daemon")
    box.process.send_signal(signal.SIGCONT)
    resumed(waiting.result(), EXACT, 150, "the call that waited")
    equal(Answer(stream).end.tokens, 600, "tokens of the answer in flight")
    for name, prompt in prompts.items():
        if name != "s0":
            resumed(Talk(client, name).lookup(prompt + [5]), EXACT, 150, f"{name} afterwards")
    well(box, rss, "SIGSTOP")
    box.stop()


def open_files(box):
    return len(os.listdir(f"/proc/{box.process.pid}/fd"))


@case
def two_hundred_connections():
    box = Box("synthetic").start()
    prompt = tokens(100)
    first = Talk(box.client(), "s")
    first.prefill(prompt)
    well(box, what="before")
    rss, files = box.stats().rss_bytes, open_files(box)
    clients = [None] * 200

    def connect(i):
        for j in range(i, 200, 8):
            clients[j] = box.client("alice" if j % 2 else "bob")
            talk = Talk(clients[j], f"c{j}")
            resumed(patiently(talk.prefill, [3 + j] * 40), MISS, 0, f"connection {j}")

    together(8, connect)
    check(open_files(box) >= files + 200, f"connections are open: {open_files(box)} files")
    for j in rng.sample(range(200), 20):
        equal(Talk(clients[j], f"c{j}").opened.created, False, f"connection {j} still works")
    resumed(first.prefill(prompt + tokens(5)), EXACT, 100, "the first client")
    within_budget(box, "200 connections open")
    for client in clients:
        client.close()
        box.clients.remove(client)
    end = time.monotonic() + 5
    while open_files(box) > files + 4 and time.monotonic() < end:
        time.sleep(0.02)
    check(open_files(box) <= files + 4, f"files after: {open_files(box)}, before: {files}")
    well(box, rss, "200 connections")
    box.stop()


@case
def slow_reader_disturbs_nobody():
    """A client that does not read its stream for 3 s neither delays its own decoding nor others."""
    box = Box("synthetic").start()
    client = box.client()
    slow, prompt = Talk(client, "slow"), tokens(100)
    slow.prefill(prompt)
    rss = box.stats().rss_bytes
    stream = slow.stream(30000, timeout=60)
    next(stream)
    times = []
    other, history = Talk(box.client("bob"), "other"), tokens(100)
    began = time.monotonic()
    while time.monotonic() - began < 3:
        start = time.monotonic()
        other.prefill(history)
        history += other.decode(5).tokens + tokens(3)
        times.append(time.monotonic() - start)
        time.sleep(0.02)
    times.sort()
    check(len(times) > 50, f"turns of the other session: {len(times)}")
    check(times[len(times) // 2] < 0.05, f"median turn {times[len(times) // 2]:.3f} s")
    check(times[-1] < 1, f"slowest turn {times[-1]:.3f} s")
    got = Answer(stream)
    equal((len(got.tokens) + got.first, got.end.tokens), (100 + 30000, 30000),
          "(last position, tokens) of the slow stream")
    resumed(slow.prefill(prompt + [0]), EXACT, 100, "its session is whole")
    well(box, rss, "slow reader")
    box.stop()


@case
def vanished_client_frees_its_session():
    """A connection that goes away in the middle of a Decode or Prefill ends the call at a step."""
    for call in ("Decode", "Prefill"):
        box = Box(flags={"engine.chunk_tokens": "16"}).start()
        prompt = tokens(200)
        steady = box.client()
        Talk(steady, "s").prefill(prompt)
        rss = box.stats().rss_bytes
        for turn in range(3):
            leaving = box.client()
            talk = Talk(leaving, "s")
            if call == "Decode":
                stream = talk.stream(5000, timeout=60)
                for _ in range(3):
                    next(stream)
            else:
                future = leaving.session._stub.Prefill.future(pb.PrefillRequest(
                    session_id="s", tokens=pack(prompt + tokens(6000))),
                    metadata=leaving.metadata, timeout=60)
                time.sleep(0.1)
                check(not future.done(), "the long prefill runs")
            leaving.close()
            box.clients.remove(leaving)
            began = time.monotonic()
            got = untilfree(Talk(steady, "s").prefill, prompt + [2 + turn] + tokens(9))
            check(time.monotonic() - began < 1, f"{call}: free after "
                  f"{time.monotonic() - began:.2f} s")
            check(got.hit_tokens >= 200, f"{call}: hit {got.hit_tokens}")
        equal(len(Talk(steady, "s").decode(3).tokens), 3, f"{call}: an answer")
        end = time.monotonic() + 2
        while box.stats().requests_inflight > 1 and time.monotonic() < end:
            time.sleep(0.02)
        check(box.stats().requests_inflight <= 1, f"in flight: {box.stats().requests_inflight}")
        well(box, rss, f"vanished in {call}")
        box.stop()


@case
def at_once_as_if_alone():
    """Sessions that run side by side get the logits they get alone."""
    prompts = [tokens(rng.randrange(100, 260)) for _ in range(4)]
    tails = [[tokens(rng.randrange(1, 60)) for _ in range(3)] for _ in prompts]

    def conversation(client, i, out):
        talk = Talk(client, f"s{i}")
        history = list(prompts[i])
        for tail in tails[i]:
            got = patiently(talk.prefill, history)
            answer = patiently(talk.decode, 8)
            out[i].append((name_of(got.outcome), got.hit_tokens, answer.bits))
            history = history + answer.tokens + tail

    box = Box().start()
    alone = [[] for _ in prompts]
    for i in range(len(prompts)):
        conversation(box.client(), i, alone)
    box.stop()
    for flags in ({"engine.chunk_tokens": "16"}, {"engine.live_sessions": "2", "hbm.bytes": "1MiB"}):
        box = Box(flags=flags).start()
        beside = [[] for _ in prompts]
        clients = [box.client("bob" if i % 2 else "alice") for i in range(len(prompts))]
        together(len(prompts), lambda i: conversation(clients[i], i, beside))
        for i in range(len(prompts)):
            equal(beside[i], alone[i], f"session {i} with {flags}: at once against alone")
        well(box, what="at once")
        box.stop()


@case
def waiters_whose_time_is_up_end():
    """A call that waits for another call's save ends at its deadline, and at a stop; nobody hangs."""
    box = Box("synthetic", {"hbm.bytes": "64MiB", "ssd.bytes": "1GiB"}).start()
    client, other = box.client(), box.client("bob")

    def accepted(prompt):
        """The waiter of the round before may still have to notice that it is over."""
        for _ in range(100):
            try:
                return talk.prefill(prompt, level=pb.LEVEL_ACCEPTED)
            except grpc.RpcError as error:
                equal(error.code(), grpc.StatusCode.ABORTED, "busy")
                time.sleep(0.05)
        raise RuntimeError("the session stays busy")

    talk = Talk(client, "s")
    Talk(other, "o").prefill(tokens(50))
    for _ in range(25):
        prompt = tokens(60000)
        accepted(prompt)
        try:
            client.session.Prefill(pb.PrefillRequest(session_id="s", tokens=pack(prompt + [3])),
                                   timeout=0.004)
        except grpc.RpcError as error:
            check(error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, f"it ends as {error.code()}")
        got = other.session.GetSession(pb.GetSessionRequest(session_id="o"), timeout=5)
        equal(got.session.head_position, 50, "another user's call is answered")
    accepted(tokens(60000))
    began = time.time()
    box.stop()
    check(time.time() - began < 10, "and the daemon stops")


@case
def refused_save_keeps_the_mark():
    """REPLAY while SSD is full: what follows says approximate, whether it was stored or not."""
    box = Box("synthetic", {"ssd.bytes": "1MiB", "ssd.segment_bytes": "256KiB"}).start()
    client = box.client()
    talk = Talk(client, "s")
    base = tokens(700)
    equal(talk.prefill(base).save_reason, "", "stored")
    for size in (1024, 100):
        for i in range(200):
            if Talk(client, f"fill{size}.{i}").prefill(tokens(size)).save_reason:
                break
    box.advance(POOL_TTL_MS + 1000)
    prompt = base[:600] + tokens(40)
    got = talk.prefill(prompt)
    equal((got.outcome, got.save_reason), (REPLAY, "SSD_FULL"), "a replay that is not stored")
    mark = got.approx_from
    got = talk.prefill(prompt + tokens(10))
    equal((got.outcome, got.approximate, got.approx_from), (EXACT, True, mark), "the next turn")
    box.stop()


@case
def refused_prefill_costs_nothing():
    """A prompt that never fits: the head, its parent id and other live sessions stay; no retry."""
    box = Box("synthetic", {"hbm.bytes": "4MiB"}).start()
    client = box.client()
    other = Talk(client, "other")
    other.prefill(tokens(90))
    talk = Talk(client, "s")
    made = talk.prefill(tokens(300)).checkpoints[-1]
    talk.close()
    expect(talk.prefill, tokens(400000), code="RESOURCE_EXHAUSTED", reason="HBM_FULL")
    equal(talk.get().session.head_position, 300, "the head")
    check(other.get().session.live, "another session keeps its memory")
    got = client.session.Prefill(pb.PrefillRequest(
        session_id="s", tokens=pack([5, 6, 7]), parent_checkpoint_id=made.id))
    equal(got.hit_tokens, 300, "its checkpoint is a parent as before")
    equal(len(talk.decode(3).tokens), 3, "and it decodes")
    box.stop()


@case
def head_that_was_never_saved_refuses_decode():
    """Gone from memory and not stored: Decode says so instead of answering from elsewhere."""
    box = Box(flags={"engine.live_sessions": "1"}).start()
    client = box.client()
    talk = Talk(client, "s")
    base = tokens(200)
    talk.prefill(base)
    talk.prefill(base + tokens(60), no_checkpoint=True)
    Talk(client, "other").prefill(tokens(50))
    expect(lambda: list(talk.stream(3)), code="FAILED_PRECONDITION", reason="HEAD_MOVED")
    talk.prefill(base + tokens(60))
    equal(len(talk.decode(3).tokens), 3, "after the prompt was sent again")
    # The window stands at stable_tokens, the head beyond it: known over a restart, too.
    stable = Talk(client, "stable")
    stable.prefill(base, stable_tokens=150)
    box.crash()
    stable = Talk(box.client(), "stable")
    expect(lambda: list(stable.stream(3)), code="FAILED_PRECONDITION", reason="HEAD_MOVED")
    got = stable.prefill(base)
    equal(got.hit_tokens, 150, "what was stored is used")
    equal(len(stable.decode(3).tokens), 3, "and it goes on")
    box.stop()


if __name__ == "__main__":
    run_cases("Faults made on purpose, through the real daemon.")
