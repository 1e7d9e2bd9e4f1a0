"""Faults of disk tiers that users reported in systems like this one, shown to be absent here.

One function per row of the table, as in it_symptoms.py.  T36 (the default configuration on 1 GiB) is
in it_space.py, T39 (answers and progress while it starts) it_answers_while_it_starts in it_restart.py
and `cachectl bench restart`.
"""

import ctypes
import errno
import os
import signal
import struct
import threading
import time

from daemon import check, equal, expect, pb
from faults import CROWDED, MIB, Calls, recovered, stored_sessions, well
from talk import (
    EXACT, POOL_TTL_MS, REPLAY, SSD_TTL_MS, Box, Talk, case, even, patiently, resumed,
    rng, run_cases, tokens)


def with_calls(flags=None):
    calls = Calls()
    return Box("synthetic", {**CROWDED, "io.backend": "pool", **(flags or {})},
               env=calls.env()).start(), calls


@case
def t3_a_restart_after_the_pool_ttl_drops_nothing_on_ssd():
    """T3: a restart said it had restored everything, then dropped it all because restored leases were
    past.  Here: only windows are gone; what the log counts is what is served, also after sweeps."""
    box = Box("synthetic", CROWDED).start()
    prompts = stored_sessions(box, 20)
    box.advance(POOL_TTL_MS + 60000)
    for _ in range(2):
        offset = len(box.log())
        box.restart()
        equal(recovered(box, offset), (len(prompts), 0), "(recovered, dropped)")
        box.advance(POOL_TTL_MS + 60000)  # Waits for a whole sweep.
        client, served = box.client(), 0
        for name, prompt in prompts.items():
            got = Talk(client, name).lookup(prompt + [5])
            served += got.stored_tokens == len(prompt)
            resumed(got, REPLAY, even(len(prompt)), f"{name}: rows without window")
        equal(served, len(prompts), "served, of those the log counted")
        equal(box.counter("cached_checkpoints_dropped_total"), 0, "dropped later")
    box.stop()


@case
def t5_a_session_begun_after_another_is_there_after_a_stop():
    """T5: the checkpoint of a shutdown was never matched if its session had started after another one
    in the same process.  Here: A, then B, SIGTERM, start: both hit in full."""
    for backend in ("synthetic", "cpu"):
        box = Box(backend).start()
        history = {}
        for name in ("a", "b"):
            talk, history[name] = Talk(box.client(), name), tokens(300)
            talk.prefill(history[name])
            history[name] += talk.decode(9).tokens
        box.restart()
        for name in ("b", "a"):
            got = Talk(box.client(), name).prefill(history[name] + tokens(20))
            resumed(got, REPLAY, even(len(history[name]) - 1), f"{backend}: {name}")
        box.stop()


@case
def t7_a_failed_store_leaves_nothing_to_hit():
    """T7: after a store that failed the key was still visible, and hits returned garbage.  Here: with
    EIO and ENOSPC in the middle of a store, its checkpoint is not there: not at once, not after the
    session left memory, not after a restart; what was stored before is."""
    for call, code in (("write", errno.EIO), ("write", errno.ENOSPC), ("flush", errno.EIO),
                       ("flush", errno.ENOSPC)):
        what = f"{call} fails with {errno.errorcode[code]}"
        box, calls = with_calls()
        prompt = tokens(300)
        talk = Talk(box.client(), "s")
        equal(talk.prefill(prompt).save_reason, "", f"{what}: the first is stored")
        calls.fail(call, code)
        longer = prompt + tokens(300)
        got = talk.prefill(longer)
        equal(got.save_reason, "SSD_READ_ONLY", f"{what}: save_reason")
        check(all(c.rows_level < pb.LEVEL_SSD for c in got.checkpoints), f"{what}: a level is claimed")
        calls.work()
        talk.close()
        equal([c.position for c in talk.get().checkpoints], [len(prompt)], f"{what}: listed")
        got = talk.lookup(longer + [5])
        equal((got.stored_tokens, got.hit_tokens), (len(prompt), len(prompt)), f"{what}: found")
        box.crash()
        got = Talk(box.client(), "s").prefill(longer)
        resumed(got, REPLAY, len(prompt), f"{what}: after a restart")
        equal(got.save_reason, "", f"{what}: and it is stored now")
        well(box, what=what)
        box.stop()


@case
def t9_a_failed_load_is_a_miss_with_a_cause():
    """T9: a retrieve that failed was treated as loaded.  Here: pages cut off under the daemon, and
    reads that fail, are not used: the answer says how much less it is, why, and a counter rises."""
    box, calls = with_calls()
    box.page_bytes = box.stats().page_bytes
    prompts = stored_sessions(box, 60, 300, 500)  # More than memory holds.
    names = list(prompts)
    client = box.client()
    calls.fail("read", errno.EIO)
    failed = 0
    for name in names[:20]:
        got = patiently(Talk(client, name).prefill, prompts[name] + tokens(3), no_checkpoint=True)
        failed += got.reason == "READ_FAILED"
        check(got.reason == "READ_FAILED" or got.hit_tokens >= even(len(prompts[name])),
              f"{name}: hit {got.hit_tokens}, reason {got.reason}")
    check(failed > 0, "no read failed")
    check(box.counter("cached_read_failures_total", 'tier="ssd"') >= failed, "counted")
    calls.work()
    for path in box.segments():
        os.truncate(path, 4096 + 3 * box.page_bytes + 4096)  # In the middle of a page.
    weaker = 0
    for name in names[20:40]:
        got = patiently(Talk(client, name).prefill, prompts[name] + tokens(3), no_checkpoint=True)
        equal(got.hit_tokens + got.computed_tokens, len(prompts[name]) + 3, f"{name}: adds up")
        if got.hit_tokens >= even(len(prompts[name])):
            continue
        weaker += 1
        equal(got.reason, "CORRUPT", f"{name}: reason")
        check(got.weakened > 0, f"{name}: weakened {got.weakened}")
    check(weaker > 0, "no page that was cut off was asked for")
    well(box, what="loads that failed")
    box.stop()


@case
def t28_eviction_frees_what_is_needed_and_no_more():
    """T28: how much to evict was reckoned from all objects, those on SSD only as well: 92 % of the pool
    went instead of 5 %.  Here: with many more checkpoints on SSD than windows in the pool, each new
    window evicts one."""
    box = Box("synthetic", {"pool.bytes": "1MiB", "ssd.bytes": "256MiB"}).start()
    room = box.tier("pool").items_capacity
    count = 8 * room
    client = box.client()
    for i in range(count):
        talk = Talk(client, f"s{i}")
        patiently(talk.prefill, tokens(40))
        talk.close()
        used = box.tier("pool").items_used if i % 20 == 0 else None
        if used is not None:
            check(used >= min(i + 1, room) - 1, f"{used} windows after {i + 1} checkpoints")
    evicted = box.counter("cached_evictions_total", 'tier="pool",cause="capacity"')
    check(count - room <= evicted <= count - room + 1, f"evicted {evicted} of {count}, room {room}")
    equal(box.stats().checkpoints, count, "checkpoints on SSD")
    box.stop()


@case
def t29_a_full_budget_wastes_no_write():
    """T29: with the budget used up a file was stored and unlinked in the same second.  Here: the newest
    turn is stored and stays, or it is refused before a byte is written."""
    box = Box("synthetic", {"ssd.bytes": "1MiB", "ssd.segment_bytes": "256KiB",
                            "hbm.bytes": "4MiB"}).start()
    client, stored, refused = box.client(), {}, 0
    for i in range(60):
        before = box.counter("cached_save_bytes_total", 'tier="ssd"')
        talk, prompt = Talk(client, f"s{i}"), tokens(250)
        got = patiently(talk.prefill, prompt)
        wrote = box.counter("cached_save_bytes_total", 'tier="ssd"') - before
        talk.close()
        if got.save_reason:
            refused += 1
            equal((got.save_reason, wrote), ("SSD_FULL", 0), f"turn {i}: (reason, bytes written)")
            continue
        check(wrote > 0, f"turn {i}: stored without a write")
        stored[f"s{i}"] = prompt
        looked = Talk(client, f"s{i}").lookup(prompt + [5])
        equal(looked.stored_tokens, 250, f"turn {i}: the newest is there")
    check(len(stored) >= 15, f"stored: {len(stored)}")
    newest = list(stored)[-1]
    box.crash()
    equal(Talk(box.client(), newest).lookup(stored[newest] + [5]).stored_tokens, 250,
          "the newest, after kill -9")
    print(f"T29: {len(stored)} stored, {refused} refused", flush=True)
    box.stop()


@case
def t34_durable_means_on_ssd_whatever_leaves_memory():
    """T34: what was written through lost the parts that were evicted before they were backed up.  Here:
    with memory for a few pages only, and every session pushing out the others', each checkpoint that
    was acknowledged at SSD is whole after kill -9."""
    box = Box("synthetic", {"hbm.bytes": "1MiB", "engine.live_sessions": "2",
                            "ssd.segment_bytes": "256KiB"}).start()
    client, acknowledged = box.client(), {}
    for i in range(40):
        talk, prompt = Talk(client, f"s{i}"), tokens(rng.randrange(300, 900))
        got = patiently(talk.prefill, prompt, level=pb.LEVEL_SSD)
        equal([c.rows_level for c in got.checkpoints], [pb.LEVEL_SSD], f"s{i}: level")
        talk.close()
        acknowledged[f"s{i}"] = prompt
    check(box.counter("cached_evictions_total", 'tier="hbm",cause="capacity"') > 40, "evictions")
    box.crash()
    client = box.client()
    for name, prompt in acknowledged.items():
        talk = Talk(client, name)
        got = patiently(talk.prefill, prompt + tokens(3), no_checkpoint=True)
        resumed(got, REPLAY, even(len(prompt)), f"{name} after kill -9")
        equal(got.weakened, 0, f"{name}: weakened")
        talk.close()
    box.no_wrong_bytes("after kill -9")
    box.stop()


@case
def t37_the_directory_holds_to_its_limit():
    """T37: a limit was only counted: of 4 TB, 14 TB were used.  Here: at no time do the files of the
    tier take more of the file system than the limit and one segment."""
    limit, segment = 2 * MIB, 256 * 1024
    box = Box("synthetic", {"ssd.bytes": f"{limit}", "ssd.segment_bytes": f"{segment}",
                            "hbm.bytes": "4MiB", "ssd.ttl": "10min"}).start()
    most, over = [0], threading.Event()

    def watch():
        folder = os.path.join(box.state, "ssd")
        while not over.is_set():
            used = 0
            for name in os.listdir(folder):
                try:
                    used += os.stat(os.path.join(folder, name)).st_blocks * 512
                except FileNotFoundError:
                    pass
            most[0] = max(most[0], used)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    client = box.client()
    for i in range(120):
        talk = Talk(client, f"s{i}")
        patiently(talk.prefill, tokens(rng.randrange(100, 600)))
        talk.close()
        if i % 40 == 39:
            box.advance(11 * 60000)  # All of it expires, and is used again.
    over.set()
    watcher.join()
    check(limit // 2 < most[0] <= limit + segment, f"most {most[0]} of {limit}")
    box.stop()


def without_io_uring():
    """In the child: io_uring_setup is refused, as containers do."""
    libc = ctypes.CDLL(None, use_errno=True)
    # ld nr; jeq io_uring_setup; ret EPERM; ret ALLOW.
    code = struct.pack("<HBBI", 0x20, 0, 0, 0) + struct.pack("<HBBI", 0x15, 0, 1, 425) + \
        struct.pack("<HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM) + \
        struct.pack("<HBBI", 0x06, 0, 0, 0x7fff0000)
    program = ctypes.create_string_buffer(code)
    filters = struct.pack("<HxxxxxxQ", 4, ctypes.addressof(program))
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, ctypes.create_string_buffer(filters)) != 0:
        os._exit(99)


@case
def t50_without_io_uring_it_says_so_and_works():
    """T50: without the fast way to the disk, loading hung, with no fallback and no warning.  Here: where
    a container forbids io_uring the daemon says so once, status names the backend, and everything
    works.  (Without O_DIRECT it refuses to start: it_badluck.py.)"""
    box = Box("synthetic", CROWDED)
    box.preexec = without_io_uring
    box.start()
    prompts = stored_sessions(box, 10)
    equal(box.stats().io_backend, "pool", "backend")
    equal(box.log().count("io=pool"), 1, "lines of the log that name it")
    box.crash()
    for name, prompt in prompts.items():
        got = Talk(box.client(), name).prefill(prompt + tokens(3))
        equal((got.hit_tokens, got.save_reason), (even(len(prompt)), ""), name)
    well(box, what="without io_uring")
    box.stop()


@case
def t56_time_is_up_before_any_sweep():
    """T56: expires_at was stored and never enforced.  Here: when its time is up a lookup misses, although
    nothing has been removed yet: a session whose save hangs on the disk is left alone by the sweep."""
    box, calls = with_calls()
    talk, prompt = Talk(box.client(), "s"), tokens(300)
    equal(talk.prefill(prompt).save_reason, "", "stored")
    calls.hang("flush")
    talk.prefill(prompt + tokens(100), level=pb.LEVEL_ACCEPTED)
    resumed(talk.lookup(prompt + [5]), EXACT, len(prompt), "before its time is up")
    box.advance(SSD_TTL_MS + 60000)
    check(len(talk.get().checkpoints) >= 2, "the sweep took it: this shows nothing")
    got = talk.lookup(prompt + [5])
    equal((got.hit_tokens, got.reason), (0, "EXPIRED"),
          "a checkpoint older than its life was found by a lookup: (hit, reason)")
    calls.work()
    box.stop()


@case
def t88_nothing_is_durable_before_the_flush_is():
    """T88: completions came before the data was on the medium.  Here: while the flush of the segment
    hangs no level SSD is claimed, nothing is in the manifest, and a kill leaves nothing of it; when the
    flush is over it is acknowledged.  (Power cuts: tests/crash/powercut.c, tests/seam/crashimage.c.)"""
    box, calls = with_calls()
    talk, prompt = Talk(box.client(), "s"), tokens(300)
    made = box.counter("cached_manifest_syncs_total")
    calls.hang("flush")
    got = talk.prefill(prompt, level=pb.LEVEL_ACCEPTED)
    equal([c.rows_level for c in got.checkpoints], [pb.LEVEL_RAM], "level while the flush hangs")
    point = got.checkpoints[0].id
    wait = pb.WaitDurableRequest(session_id="s", checkpoint_id=point, level=pb.LEVEL_SSD)
    began = time.monotonic()
    expect(box.client().session.WaitDurable, wait, code="DEADLINE_EXCEEDED", reason=None, timeout=0.5)
    check(time.monotonic() - began < 2, "WaitDurable ends by its deadline")
    check(box.counter("cached_manifest_syncs_total") <= made + 1, "only the session is recorded")
    calls.work()
    talk.call.WaitDurable(wait)
    equal([c.rows_level for c in talk.get().checkpoints], [pb.LEVEL_SSD], "level after the flush")
    calls.hang("flush")
    talk.prefill(prompt + tokens(50), level=pb.LEVEL_ACCEPTED)
    offset = len(box.log())
    box.process.send_signal(signal.SIGKILL)
    calls.work()
    box.crash()
    equal(recovered(box, offset), (1, 0), "(recovered, dropped)")
    resumed(Talk(box.client(), "s").lookup(prompt + tokens(5)), REPLAY, 300, "the durable one")
    box.stop()


if __name__ == "__main__":
    run_cases("Faults of disk tiers seen elsewhere, absent here.")
