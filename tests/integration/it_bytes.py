"""The rows "Bytes" of the semantics, each as a test of the real daemon.

| row | test |
|---|---|
| a page being filled | a_page_being_filled_is_written_as_it_was |
| a checkpoint that now points to a fuller page | a_fuller_page_takes_the_place_of_the_old_one_in_one_step |
| where reads land | a_load_does_not_wait_for_a_running_chunk |
| failed write or flush | a_failed_save_leaves_the_rows_usable; also t7 of it_symptoms_disk.py, SSD_READ_ONLY of it_no_room.py |
| session not in RAM | requests_of_a_session_not_in_memory_wait_for_one_scan |
| HBM too small | full_hbm_makes_room_and_refuses_only_what_never_fits of it_faults.py |
"""

import errno
import threading
import time

import daemon
import grpc
from daemon import check, equal, expect, pack, pb
from faults import CROWDED, Calls, well
from talk import (
    EXACT, PAGE, REPLAY, WINDOW, Box, Talk, case, even, resumed, rng, run_cases, together, tokens)


def with_calls(flags=None):
    calls = Calls()
    return Box("synthetic", {**CROWDED, "io.backend": "pool", **(flags or {})},
               env=calls.env()).start(), calls


@case
def a_page_being_filled_is_written_as_it_was():
    """The answer comes before the write, and the next call writes into the same page at once: every
    checkpoint has the bytes of its own moment, with the next tokens neither in it nor missing."""
    box = Box("synthetic", {"engine.live_sessions": "4"}).start()
    talk, history, points = Talk(box.client(), "s"), [], {}
    while len(history) < 3 * PAGE:
        history += tokens(rng.randrange(3, 30))
        for point in talk.prefill(history, level=pb.LEVEL_RAM).checkpoints:
            points[point.position] = list(history)
        answer = talk.decode(rng.randrange(1, 9), level=pb.LEVEL_RAM)
        history += answer.tokens
        points[answer.end.head_position] = list(history[:answer.end.head_position])
    last = talk.get().checkpoints[-1]
    talk.call.WaitDurable(pb.WaitDurableRequest(
        session_id="s", checkpoint_id=last.id, level=pb.LEVEL_SSD))
    box.crash()
    talk = Talk(box.client(), "s")
    check(len(points) > 20, f"checkpoints: {len(points)}")
    for position, ids in points.items():
        if even(position) <= WINDOW:
            continue
        longer = ids + tokens(3)
        shared = position  # Or further, when what was drawn is what the history has there.
        while history[shared:shared + 1] == longer[shared:shared + 1] != []:
            shared += 1
        got = talk.prefill(longer, no_checkpoint=True)
        resumed(got, REPLAY, even(min(shared, len(longer) - 1)), f"at {position}")
        equal(got.weakened, 0, f"at {position}: weakened")
    box.no_wrong_bytes("of pages that were being filled")
    box.stop()


@case
def a_fuller_page_takes_the_place_of_the_old_one_in_one_step():
    """While the commit that wrote it is not durable the older checkpoint has its old page, and a kill
    leaves that; afterwards one page is left of the two."""
    box, calls = with_calls()
    talk, prompt = Talk(box.client(), "s"), tokens(60)
    page = box.stats().page_bytes
    talk.prefill(prompt)
    equal(box.tier("ssd").bytes_used, page, "one page")
    longer = prompt + tokens(40)
    talk.prefill(longer)
    equal(box.tier("ssd").bytes_used, page, "still one, fuller")
    calls.hang("flush")
    longest = longer + tokens(20)
    talk.prefill(longest, level=pb.LEVEL_ACCEPTED)
    equal(box.tier("ssd").bytes_used, 2 * page, "old and new, until the new one is durable")
    box.process.kill()
    calls.work()
    box.crash()
    equal(box.tier("ssd").bytes_used, page, "the old one, after a kill before the flush")
    talk = Talk(box.client(), "s")
    for ids in (prompt, longer):
        resumed(talk.prefill(ids + tokens(3), no_checkpoint=True), REPLAY, len(ids), "after a kill")
    got = talk.prefill(longest)
    equal((got.hit_tokens, got.save_reason), (len(longer), ""), "and it goes on")
    equal(box.tier("ssd").bytes_used, page, "one page again")
    for ids in (prompt, longer, longest):
        got = talk.prefill(ids + tokens(3), no_checkpoint=True)
        equal((got.hit_tokens, got.weakened), (len(ids), 0), f"at {len(ids)}, all in one page")
    box.no_wrong_bytes("of a page that was written again")
    box.stop()


@case
def a_load_does_not_wait_for_a_running_chunk():
    """Pages are read while the engine computes for somebody else."""
    box = Box("cpu", {"engine.chunk_tokens": "1024", "engine.threads": "1"}).start()
    prompt = tokens(1500)
    Talk(box.client(), "stored").prefill(prompt)
    box.restart()
    busy = threading.Event()

    def compute():
        talk = Talk(box.client("bob"), "long")
        busy.set()
        talk.prefill(tokens(3000), timeout=60)

    other = threading.Thread(target=compute)
    talk = Talk(box.client(), "stored")
    other.start()
    busy.wait()
    got = talk.prefill(prompt + tokens(5), timeout=60, no_checkpoint=True)
    resumed(got, REPLAY, len(prompt), "beside a long prefill")
    check(got.times.read_ms < got.times.total_ms / 2,
          f"read {got.times.read_ms:.1f} ms of {got.times.total_ms:.1f} ms")
    other.join()
    box.stop()


@case
def a_failed_save_leaves_the_rows_usable():
    """The rows stay in memory while the session is live, level SSD is refused, saves stay refused."""
    for call in ("write", "flush"):
        box, calls = with_calls()
        talk, prompt = Talk(box.client(), "s"), tokens(200)
        calls.fail(call, errno.EIO)
        got = talk.prefill(prompt)
        equal(got.save_reason, "SSD_READ_ONLY", f"{call}: save_reason")
        check(all(c.rows_level < pb.LEVEL_SSD for c in got.checkpoints), f"{call}: level")
        answer = talk.decode(5)
        longer = prompt + answer.tokens + tokens(30)
        resumed(talk.prefill(longer), EXACT, len(prompt) + 4, f"{call}: the next turn")
        calls.work()
        expect(talk.call.Checkpoint, pb.CheckpointRequest(session_id="s", level=pb.LEVEL_SSD),
               code="FAILED_PRECONDITION", reason="SSD_READ_ONLY")
        end = time.monotonic() + 2
        while "read-only" not in box.stats().health and time.monotonic() < end:
            time.sleep(0.02)
        check("read-only" in box.stats().health, f"{call}: health {box.stats().health!r}")
        well(box, what=f"{call} failed")
        box.stop()


@case
def requests_of_a_session_not_in_memory_wait_for_one_scan():
    """Many at once on a session that has to be loaded: each is answered, or refused for their number,
    with a time to try again; and other sessions go on."""
    box = Box("synthetic").start()
    prompt = tokens(300)
    for name in ("cold", "warm"):
        Talk(box.client(), name).prefill(prompt)
    for _ in range(3):
        box.restart()
        clients = [box.client() for _ in range(4)]
        Talk(clients[0], "warm").lookup(prompt + [5])
        refused, hits = [], []

        def look(i):
            name = "warm" if i % 10 == 0 else "cold"
            try:
                got = clients[i % 4].session.Lookup(pb.LookupRequest(
                    session_id=name, tokens=pack(prompt + [5])))
                hits.append((name, got.hit_tokens))
            except grpc.RpcError as error:
                refused.append((name, daemon.Failure(error)))

        together(100, look)
        equal(len(hits) + len(refused), 100, "answers")
        check(all(hit == 300 for _, hit in hits), f"hits: {set(hits)}")
        check(all(name == "cold" and got.code == "RESOURCE_EXHAUSTED" and got.retry_ms > 0
                  for name, got in refused), f"refused: {refused[:2]}")
        check(sum(name == "warm" for name, _ in hits) == 10, "others go on")
    box.stop()


if __name__ == "__main__":
    run_cases("Where bytes are, and when.")
