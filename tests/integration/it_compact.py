"""Compact: the head moves to the deepest anchor, the branch it left stays for the time it was given."""

import time

from daemon import check, equal, expect, pb
from talk import (
    EXACT, MINUTE_MS, MISS, REPLAY, Talk, case, opened, positions, resumed, run_cases, tokens)


def compact(talk, **fields):
    return talk.call.Compact(pb.CompactRequest(session_id=talk.name, **fields))


def until(condition, what, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return check(False, what)
        time.sleep(0.01)
    return True


def conversation(talk):
    """Tools and system prompt end at 100; two turns behind it."""
    first = tokens(200)
    talk.prefill(first, anchors=[100])
    answer = talk.decode(9, forced=tokens(9)).tokens
    second = first + answer + tokens(300)
    talk.prefill(second)
    return second


def leaves(talk):
    return {c.position: c.leave_ms for c in talk.get().checkpoints}


@case
def to_the_deepest_anchor():
    box, talk = opened()
    history = conversation(talk)
    equal(positions(talk.get().checkpoints), [100, 200, 208, 509], "before")
    got = compact(talk, keep_old_for_ms=5 * MINUTE_MS)
    equal((got.head_position, got.epoch), (100, 2), "head and epoch")
    shown = talk.get()
    equal((shown.session.head_position, shown.epoch), (100, 2), "shown")
    equal([c.position for c in shown.checkpoints if c.id == shown.head_checkpoint_id], [100],
          "the head's checkpoint")
    left = leaves(talk)
    equal({p: ms > 0 for p, ms in left.items()}, {100: False, 200: True, 208: True, 509: True},
          "what goes")
    check(all(4 * MINUTE_MS < ms <= 5 * MINUTE_MS for p, ms in left.items() if p > 100), f"{left}")
    again = compact(talk, keep_old_for_ms=5 * MINUTE_MS)
    equal(again, got, "once more: nothing to do")
    again = compact(talk, keep_old_for_ms=5 * MINUTE_MS, epoch=1)
    equal(again, got, "once more, with the epoch it was sent with")
    # The summary behind the same tools and system prompt.
    summary = history[:100] + tokens(80)
    resumed(talk.prefill(summary, epoch=2), EXACT, 100, "the shorter history")
    expect(talk.prefill, summary, epoch=1, code="FAILED_PRECONDITION", reason="STALE_EPOCH")
    expect(compact, talk, epoch=1, code="FAILED_PRECONDITION", reason="STALE_EPOCH")
    resumed(talk.lookup(history + tokens(9)), EXACT, 509, "the old branch, meanwhile", replayed=0)
    box.advance(5 * MINUTE_MS + 1000)
    until(lambda: positions(talk.get().checkpoints) == [100, 180], "the old branch is still there")
    got = talk.lookup(history + tokens(9))
    equal((got.stored_tokens, got.diverged_at), (100, 100), "stored of it, and where it leaves")
    equal(box.counter("cached_evictions_total", 'tier="ssd",cause="rolled_back"'), 3,
          "removed as ROLLED_BACK")
    box.stop()


@case
def to_the_start_without_an_anchor():
    box, talk = opened()
    prompt = tokens(300)
    talk.prefill(prompt)
    got = compact(talk)
    equal((got.head_position, got.epoch), (0, 2), "head and epoch")
    equal(compact(talk), got, "once more")
    check(9 * MINUTE_MS < leaves(talk)[300] <= 10 * MINUTE_MS, "10 minutes, if nothing is said")
    expect(lambda: list(talk.stream(3)), code="FAILED_PRECONDITION", reason="HEAD_EMPTY")
    box.advance(10 * MINUTE_MS + 1000)
    until(lambda: not talk.get().checkpoints, "the old branch is still there")
    resumed(talk.prefill(prompt), MISS, 0, "the history that went", reason="ROLLED_BACK")
    equal(compact(talk, keep_old_for_ms=1).epoch, 3, "and again")
    box.advance(10)
    until(lambda: not talk.get().checkpoints, "kept for a millisecond")
    box.stop()


@case
def its_time_outlives_a_restart():
    """A kill -9 right behind the answer: head, epoch and time are what was answered, and the branch
    goes although nobody opens the session any more."""
    box, talk = opened()
    history = conversation(talk)
    compact(talk, keep_old_for_ms=3 * MINUTE_MS)
    box.crash()
    talk = Talk(box.client(), "s")
    shown = talk.get()
    equal((shown.session.head_position, shown.epoch), (100, 2), "after kill -9")
    check(0 < leaves(talk)[509] <= 3 * MINUTE_MS, f"{leaves(talk)}")
    resumed(talk.lookup(history + tokens(9)), REPLAY, 508, "the old branch is there")
    box.restart()
    box.advance(3 * MINUTE_MS + 1000)
    until(lambda: box.stats().checkpoints == 1, f"{box.stats().checkpoints} checkpoints")
    equal(positions(Talk(box.client(), "s").get().checkpoints), [100], "what is left")
    box.crash()
    equal(positions(Talk(box.client(), "s").get().checkpoints), [100], "and stays so")
    box.stop()


@case
def past_its_time_it_is_not_used():
    """The first call after the time meets nothing of it, whether a tick came or not."""
    box, talk = opened()
    prompt = tokens(400)
    talk.prefill(prompt)
    compact(talk, keep_old_for_ms=2 * MINUTE_MS)
    box.restart()
    box.advance(2 * MINUTE_MS + 1)
    resumed(Talk(box.client(), "s").prefill(prompt + tokens(5)), MISS, 0, "after its time",
            reason="ROLLED_BACK")
    box.stop()


@case
def come_back_to():
    """A Rollback to the old branch within its time makes it the session's own again."""
    box, talk = opened()
    history = conversation(talk)
    old = talk.get().head_checkpoint_id
    compact(talk, keep_old_for_ms=MINUTE_MS)
    back = talk.rollback(old)
    equal((back.head_position, back.epoch), (509, 3), "back")
    equal(set(leaves(talk).values()), {0}, "nothing goes any more")
    box.advance(2 * MINUTE_MS)
    equal(positions(talk.get().checkpoints), [100, 200, 208, 509], "still there")
    resumed(talk.prefill(history + tokens(9)), EXACT, 509, "and used")
    # What hangs on it keeps the way to it.
    compact(talk, keep_old_for_ms=MINUTE_MS)
    talk.prefill(history[:300] + [2] + tokens(50))
    box.advance(2 * MINUTE_MS)
    until(lambda: 518 not in positions(talk.get().checkpoints), "the end of it is still there")
    equal(talk.get().session.head_position, 351, "a turn that began on it stays")
    check({100, 351} <= set(positions(talk.get().checkpoints)), "with its way")
    box.no_wrong_bytes()
    box.stop()


@case
def beside_forks():
    """What a fork stands on stays, and what another session made; the rest of the branch goes."""
    box, talk = opened()
    history = conversation(talk)
    shown = {c.position: c.id for c in talk.get().checkpoints}
    talk.call.Fork(pb.ForkRequest(session_id="s", checkpoint_id=shown[208], new_session_id="f"))
    compact(talk, keep_old_for_ms=MINUTE_MS)
    fork = Talk.__new__(Talk)
    fork.call, fork.name = talk.call, "f"
    longer = history[:208] + tokens(60)
    fork.prefill(longer)
    box.advance(2 * MINUTE_MS)
    until(lambda: positions(talk.get().checkpoints) == [100, 200, 208, 268],
          f"{positions(talk.get().checkpoints)}")
    resumed(fork.prefill(longer + tokens(9)), EXACT, 268, "the fork goes on")
    # The fork compacts: what the other one made is not its to remove.
    got = compact(fork, keep_old_for_ms=MINUTE_MS)
    equal(got.head_position, 100, "its deepest anchor")
    box.advance(2 * MINUTE_MS)
    until(lambda: positions(talk.get().checkpoints) == [100, 200, 208],
          f"{positions(talk.get().checkpoints)}")
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
    equal(positions(fork.get().checkpoints), [100], "what the fork still stands on")
    resumed(fork.prefill(history[:100] + tokens(9)), EXACT, 100, "and uses")
    box.no_wrong_bytes()
    box.stop()


@case
def what_it_refuses():
    box, talk = opened("synthetic")
    most = 30 * 24 * 60 * MINUTE_MS
    expect(compact, talk, keep_old_for_ms=most + 1, code="INVALID_ARGUMENT", reason="TTL_INVALID",
           field="keep_old_for_ms", limit=str(most), value=str(most + 1))
    equal(compact(talk, keep_old_for_ms=most), pb.CompactResponse(epoch=1), "of an empty session")
    expect(talk.call.Compact, pb.CompactRequest(session_id="no"), code="NOT_FOUND",
           reason="SESSION_NOT_FOUND")
    talk.prefill(tokens(100))
    stream = talk.stream(60000)
    next(stream)
    expect(compact, talk, code="ABORTED", reason="SESSION_BUSY")
    stream.cancel()
    talk.close()
    talk.prefill(tokens(300), anchors=[50])
    compact(talk, keep_old_for_ms=MINUTE_MS)
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
    box.crash()
    box.advance(2 * MINUTE_MS)
    equal(box.stats().checkpoints, 0, "a deleted session leaves nothing")
    equal(box.stats().health, "serving", "health")
    box.stop()


if __name__ == "__main__":
    run_cases("Compact, through the real daemon.")
