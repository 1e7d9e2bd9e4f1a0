"""What was removed is erased: within ssd.erase_within no segment file holds a token run or a row of it.

The files are read as they are, byte by byte; where pages lie comes from state_files.py, which reads
a stopped directory by the offsets of docs/format.md.
"""

import os
import time

from daemon import admin_pb, check, equal, pack, pb
from it_resume import cached_pages
from state_files import State, kvdump
from talk import (
    MINUTE_MS, REPLAY, Box, Talk, case, even, patiently, resumed, run_cases, tokens)

FLAGS = {"ssd.segment_bytes": "256KiB", "ssd.bytes": "8MiB"}
RUN = 6  # Tokens in a row that nobody else has.


def save(box, user, name, count=700, **fields):
    talk = Talk(box.client(user), name, **fields)
    prompt = tokens(count)
    for part in (count // 3, count // 3 + 40, count):  # Pages are rewritten, fuller.
        equal(patiently(talk.prefill, prompt[:part], level=pb.LEVEL_SSD).save_reason, "", "saved")
    return talk, prompt


def runs_of(prompt):
    """Each stretch of its ids as it stands in a page; none across two pages."""
    return [pack(prompt[at:at + RUN]) for at in range(0, len(prompt) - RUN, RUN)
            if at // 128 == (at + RUN - 1) // 128]


def rows_of(box, label):
    """Bytes of the rows of a session, from the pages of a stopped directory."""
    state = State(box.state)
    found = []
    for page in state.trees[state.session(label)].pages.values():
        data = state.read(page)
        for at in range(768, 768 + 100 * page.count, 1000):
            piece = data[at:at + 24]
            if len(set(piece)) > 8:
                found.append(piece)
    check(len(found) > 10, f"rows of {label}: {len(found)}")
    return found


def hits(box, needles):
    """How many of them stand in any segment file; the kernel's cache is left as it was."""
    count = 0
    for path in box.segments():
        with open(path, "rb") as f:
            data = f.read()
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        count += sum(needle in data for needle in needles)
    return count


def unerased(box):
    return box.counter("cached_ssd_unerased_bytes")


def settled(box, seconds=20):
    """Whatever the clock says is to be erased is."""
    end = time.monotonic() + seconds
    while unerased(box) > 0 and time.monotonic() < end:
        time.sleep(0.02)
    return equal(unerased(box), 0, "bytes that are not erased")


def time_passes(box, ms):
    """In steps, each with a moment for the disk."""
    for _ in range(40):
        box.advance(ms / 40)
        time.sleep(0.005)


@case
def a_deleted_session():
    """Its runs and rows, also those of pages that were written again fuller, are gone in time; what
    is stored stays, and the page cache is not used for it."""
    for backend in ("auto", "pool"):
        box = Box("synthetic", {**FLAGS, "io.backend": backend}).start()
        talk, prompt = save(box, "alice", "go")
        other, kept = save(box, "bob", "stay")
        box.stop()
        gone = runs_of(prompt) + rows_of(box, "alice/go")
        stay = runs_of(kept) + rows_of(box, "bob/stay")
        box.start()
        talk, other = Talk(box.client(), "go"), Talk(box.client("bob"), "stay")
        check(hits(box, gone) == len(gone), f"{hits(box, gone)} of {len(gone)} found before")
        check(talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="go")).deleted, "deleted")
        check(hits(box, gone) > 0, "no sooner than it must be")
        time_passes(box, 10 * MINUTE_MS)
        settled(box)
        equal(hits(box, gone), 0, f"{backend}: runs and rows of the deleted session")
        equal(hits(box, stay), len(stay), f"{backend}: those of the other one")
        check(box.counter("cached_ssd_pages_total", 'place="erased"') > 0, "counted")
        for path in box.segments():
            equal(cached_pages(path), 0, f"{backend}: pages of {os.path.basename(path)} in cache")
        resumed(other.prefill(kept + tokens(5)), REPLAY, even(len(kept)), "the other one")
        box.stop()
        equal(kvdump("verify", box.state)[0], 0, "kvdump verify")


@case
def erased_users_and_expired_rows():
    box = Box("synthetic", FLAGS).start()
    _, first = save(box, "alice", "one")
    _, second = save(box, "alice", "two")
    _, short = save(box, "bob", "short", ttl_ms=5 * MINUTE_MS)
    _, kept = save(box, "bob", "stay")
    got = box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice"))
    equal(got.sessions, 2, "receipt")
    time_passes(box, 10 * MINUTE_MS)
    time_passes(box, 15 * MINUTE_MS)  # The other one is due meanwhile, and swept.
    settled(box)
    for what, prompt in (("one", first), ("two", second), ("short", short)):
        equal(hits(box, runs_of(prompt)), 0, f"runs of {what}")
    equal(hits(box, runs_of(kept)), len(runs_of(kept)), "runs of what is stored")
    box.stop()


@case
def after_kill_9():
    """Nobody remembers what was free: the next start erases all of it, within the same time."""
    box = Box("synthetic", FLAGS).start()
    talk, prompt = save(box, "alice", "go")
    other, kept = save(box, "bob", "stay")
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="go"))
    box.kill()
    check(hits(box, runs_of(prompt)) > 0, "it was killed before anything was erased")
    box.start()
    time_passes(box, 10 * MINUTE_MS)
    settled(box)
    equal(hits(box, runs_of(prompt)), 0, "runs of the deleted session")
    other = Talk(box.client("bob"), "stay")
    resumed(other.prefill(kept + tokens(5)), REPLAY, even(len(kept)), "the other one")
    for _ in range(5):  # In the middle of it.
        talk, prompt = save(box, "alice", "go")
        talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="go"))
        box.advance(5 * MINUTE_MS)
        box.crash()
        other = Talk(box.client("bob"), "stay")
        resumed(other.prefill(kept + tokens(5)), REPLAY, even(len(kept)), "in the middle of it")
        box.no_wrong_bytes()
    time_passes(box, 10 * MINUTE_MS)
    settled(box)
    equal(hits(box, runs_of(prompt)), 0, "runs after all of that")
    box.stop()
    equal(kvdump("verify", box.state)[0], 0, "kvdump verify")


@case
def in_real_time_and_never():
    """By the configured time on a clock that runs; 0 leaves it to whoever writes there next."""
    box = Box("synthetic", {**FLAGS, "clock.mode": "real", "ssd.erase_within": "2s"}).start()
    talk, prompt = save(box, "alice", "go")
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="go"))
    freed = time.monotonic()
    check(hits(box, runs_of(prompt)) > 0, "stored")
    settled(box, 10)
    took = time.monotonic() - freed
    equal(hits(box, runs_of(prompt)), 0, "runs of the deleted session")
    check(took < 4, f"after {took:.1f} s of 2 s")
    box.stop()

    box = Box("synthetic", {**FLAGS, "ssd.erase_within": "0"}).start()
    talk, prompt = save(box, "alice", "go")
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="go"))
    time_passes(box, 60 * MINUTE_MS)
    check(hits(box, runs_of(prompt)) > 0, "0: it stays")
    equal(box.counter("cached_ssd_pages_total", 'place="erased"'), 0, "0: nothing was erased")
    check(unerased(box) > 0, "0: and is said to be there")
    again, other = save(box, "alice", "next")
    check(hits(box, runs_of(prompt)) < len(runs_of(prompt)), "0: until others write there")
    equal(again.prefill(other + tokens(3)).hit_tokens, even(len(other)), "and these are right")
    box.no_wrong_bytes()
    box.stop()


if __name__ == "__main__":
    run_cases("Erasure.")
