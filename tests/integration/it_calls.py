"""Calls beside and after each other: cancelled, repeated, waited for, cut off by kill -9."""

import errno
import os
import subprocess
import time

import daemon
import grpc
from daemon import check, equal, expect, expect_deadline, pack, pb
from talk import (
    EXACT, MISS, REPLAY, Answer, Box, Talk, case, name_of, opened, patiently, positions, resumed,
    rng, run_cases, together, tokens, untilfree)

LONG = {"engine.chunk_tokens": "16"}


def begun(call, box, tokens_run=64):
    """Waits until a call that was just sent computes."""
    end = time.monotonic() + 10
    while time.monotonic() < end and not call.done():
        if box.counter("cached_engine_prefill_tokens_total") >= begun.base + tokens_run:
            return
        time.sleep(0.005)
    check(False, "the call did not begin, or had ended already")


def prefill_later(box, talk, prompt):
    begun.base = box.counter("cached_engine_prefill_tokens_total")
    call = talk.call._stub.Prefill.future(pb.PrefillRequest(
        session_id=talk.name, tokens=pack(prompt)), metadata=talk.call._metadata, timeout=30)
    begun(call, box)
    return call


@case
def one_turn_at_a_time_per_session():
    """A second Prefill, Decode, Rollback or Compact gets ABORTED, SESSION_BUSY; the rest runs beside
    it."""
    box, talk = opened(flags=LONG)
    prompt = tokens(200)
    first = talk.prefill(prompt).checkpoints[0]
    call = prefill_later(box, talk, prompt + tokens(3000))
    for second in (lambda: talk.prefill(prompt + tokens(5)), lambda: list(talk.stream(2)),
                   lambda: talk.rollback(first.id),
                   lambda: talk.call.Compact(pb.CompactRequest(session_id="s"))):
        expect(second, code="ABORTED", reason="SESSION_BUSY")
    resumed(talk.lookup(prompt[:150] + [2] + tokens(9)), REPLAY, 150, "Lookup beside it")
    equal(positions(talk.get().checkpoints), [200], "GetSession beside it")
    equal(talk.call.WaitDurable(pb.WaitDurableRequest(
        session_id="s", checkpoint_id=first.id, level=pb.LEVEL_SSD)).rows_level, pb.LEVEL_SSD,
        "WaitDurable beside it")
    named = dict(session_id="s", checkpoint_id=first.id)
    check(talk.call.Touch(pb.TouchRequest(**named)).rows_expire_ms > 0, "Touch beside it")
    equal(talk.call.Pin(pb.PinRequest(ttl_ms=1000, **named)).expire_ms, 1000, "Pin beside it")
    check(talk.call.Fork(pb.ForkRequest(new_session_id="f", **named)).created,
          "Fork of a checkpoint beside it")
    other = Talk(box.client("bob"), "other")
    resumed(other.prefill(tokens(50)), MISS, 0, "another session beside it")
    check(not call.done(), "the long turn still ran meanwhile")
    equal(call.result().computed_tokens, 3000, "the long turn ends")
    box.stop()


@case
def cancelled_prefill_leaves_what_was_there():
    """Cancel, deadline and close stop at the next chunk; earlier checkpoints are untouched."""
    box, talk = opened(flags=LONG)
    client = box.client()
    prompt = tokens(200)
    for way in ("cancel", "deadline", "close"):
        talk = Talk(client, way)
        first = talk.prefill(prompt).checkpoints[0]
        long = prompt + tokens(4000)
        if way == "deadline":
            expect_deadline(talk.prefill, long, timeout=0.3)
        else:
            call = prefill_later(box, talk, long)
            if way == "cancel":
                call.cancel()
            else:
                talk.close()
                try:
                    call.result()
                    check(False, "a closed session's turn ended well")
                except grpc.RpcError as error:
                    got = daemon.Failure(error)
                    equal((got.code, got.reason), ("CANCELLED", "CANCELLED"), "the closed turn")
        began = time.monotonic()
        answer = untilfree(talk.prefill, prompt + tokens(30))
        check(time.monotonic() - began < 1, f"{way}: the session is free again at once")
        resumed(answer, EXACT, 200, f"after {way}")
        check(first.id in [c.id for c in talk.get().checkpoints], f"{way}: the first is listed")
        check(4200 not in positions(talk.get().checkpoints), f"{way}: the stopped turn left none")
        equal(len(talk.decode(3).tokens), 3, f"{way}: an answer")
    box.stop()


@case
def late_writers_are_fenced():
    """A Rollback raises the epoch: whoever still names the old one, or a later one, is refused by
    every call that takes one, and nothing changes; without one a call is as good as ever."""
    box, talk = opened()
    prompt = tokens(200)
    first = talk.prefill(prompt)
    equal(first.epoch, 1, "epoch of a new session")
    last = talk.decode(5, epoch=1).end.checkpoints[0]
    equal(talk.rollback(first.checkpoints[0].id, epoch=1, keep=True).epoch, 2, "after the rollback")
    before = talk.get()
    named = dict(session_id="s")
    for epoch in (1, 3, 2 ** 63):
        for call in (
                lambda: talk.prefill(prompt + tokens(5), epoch=epoch),
                lambda: list(talk.stream(3, epoch=epoch)),
                lambda: talk.call.Checkpoint(pb.CheckpointRequest(epoch=epoch, **named)),
                lambda: talk.rollback(last.id, epoch=epoch, keep=True),
                lambda: talk.call.Compact(pb.CompactRequest(epoch=epoch, **named)),
                lambda: talk.call.Fork(pb.ForkRequest(new_session_id="f", epoch=epoch, **named))):
            expect(call, code="FAILED_PRECONDITION", reason="STALE_EPOCH", field="epoch", limit="2",
                   value=str(epoch))
    after = talk.get()
    equal(([c.id for c in after.checkpoints], after.head_checkpoint_id, after.epoch),
          ([c.id for c in before.checkpoints], before.head_checkpoint_id, 2), "nothing changed")
    equal(talk.prefill(prompt + tokens(5), epoch=2).epoch, 2, "the present one")
    equal(talk.prefill(prompt + tokens(6)).epoch, 2, "none")
    box.crash()
    talk = Talk(box.client(), "s")
    equal(talk.opened.epoch, 2, "after kill -9")
    expect(talk.prefill, prompt, epoch=1, code="FAILED_PRECONDITION", reason="STALE_EPOCH")
    equal(talk.decode(3, epoch=2).end.epoch, 2, "and it goes on")
    box.stop()


@case
def a_cancelled_turn_leaves_the_last_one():
    """Cancelled in the prompt or in the answer: the turn before is whole, what follows has the bits
    it would have had, and all of it is there after kill -9."""
    box, talk = opened(flags=LONG)
    prompt = tokens(200)
    reference = Talk(box.client("bob"), "whole")
    reference.prefill(prompt)
    answer = reference.decode(6).tokens
    follows = prompt + answer + tokens(40)
    reference.prefill(follows)
    want = reference.decode(8)
    talk.prefill(prompt)
    made = talk.decode(6).end.checkpoints[0]
    call = prefill_later(box, talk, follows[:206] + tokens(4000))
    call.cancel()
    again = untilfree(talk.prefill, follows)
    equal(again.hit_tokens >= 204, True, f"hit {again.hit_tokens} after a cancelled prompt")
    stream = talk.stream(3000)
    next(stream)
    stream.cancel()
    untilfree(talk.rollback, made.id, keep=True)
    resumed(talk.prefill(follows), EXACT, 244, "the next turn, whose prompt is stored")
    equal(talk.decode(8).bits, want.bits, "its answer, to the bit")
    box.crash()
    talk = Talk(box.client(), "s")
    check(made.id in [c.id for c in talk.get().checkpoints], "the last turn's checkpoint")
    got = talk.lookup(follows + want.tokens)
    equal((got.stored_tokens, got.diverged), (246 + 7, False), "stored after kill -9")
    box.stop()


@case
def cancelled_decode_keeps_the_tokens_so_far():
    """The head stays at the last accepted token, and the next turn starts there."""
    box, talk = opened()
    prompt = tokens(200)
    talk.prefill(prompt)
    reference = Talk(box.client("bob"), "whole")
    reference.prefill(prompt)
    want = reference.decode(400).tokens
    stream = talk.stream(2000)
    seen = []
    for message in stream:
        seen += daemon.unpack(message.tokens)
        if len(seen) >= 20:
            break
    stream.cancel()
    equal(seen, want[:len(seen)], "tokens before the cancel")
    got = untilfree(talk.prefill, prompt + seen + [2] + tokens(9))
    check(got.hit_tokens >= len(prompt) + len(seen) - 2,
          f"hit {got.hit_tokens} of {len(prompt)} + {len(seen)}")
    equal(name_of(got.outcome), "EXACT", "plan")
    check(talk.get().checkpoints[0].position == 200, "the prompt's checkpoint is there")
    box.stop()


@case
def decode_again_after_a_lost_stream():
    """from_position: tokens generated already are sent again, then it goes on."""
    box, talk = opened()
    prompt = tokens(200)
    talk.prefill(prompt)
    reference = Talk(box.client("bob"), "whole")
    reference.prefill(prompt)
    want = reference.decode(40)
    first = talk.decode(10)
    again = talk.decode(14, from_position=202)
    equal(again.first, 202, "first position sent again")
    equal(again.tokens[:8], first.tokens[2:], "tokens sent again")
    equal(again.tokens, want.tokens[2:2 + len(again.tokens)], "and it goes on")
    check(len(again.tokens) > 8, f"it went on: {len(again.tokens)} tokens")
    expect(lambda: list(talk.stream(3, from_position=900)), code="OUT_OF_RANGE",
           reason="FROM_POSITION_INVALID")
    box.stop()


@case
def retries_by_content():
    """Without an id a Prefill is repeatable too: equal content, equal checkpoint."""
    box, talk = opened()
    prompt = tokens(200)
    made = talk.prefill(prompt)
    again = talk.prefill(prompt)
    equal([c.id for c in again.checkpoints], [c.id for c in made.checkpoints], "Prefill again")
    equal(talk.get().session.head_position, 200, "nothing was added")
    for bad in ("x" * 65, "a b", "a\tb"):
        expect(talk.prefill, prompt, request_id=bad, code="INVALID_ARGUMENT",
               reason="REQUEST_ID_INVALID")
    box.stop()


@case
def levels_are_reached_and_waited_for():
    """The answer is sent at the level asked; WaitDurable answers when one is reached."""
    box, talk = opened()
    client = box.client()
    for level in (pb.LEVEL_ACCEPTED, pb.LEVEL_RAM, pb.LEVEL_SSD, pb.LEVEL_UNSPECIFIED):
        talk = Talk(client, f"level{level}")
        made = talk.prefill(tokens(200), level=level).checkpoints[0]
        check(pb.LEVEL_ACCEPTED <= made.rows_level <= pb.LEVEL_SSD, f"level {made.rows_level}")
        if level in (pb.LEVEL_SSD, pb.LEVEL_UNSPECIFIED):
            equal(made.rows_level, pb.LEVEL_SSD, "level of the rows")
        for wanted in (pb.LEVEL_RAM, pb.LEVEL_SSD):
            got = talk.call.WaitDurable(pb.WaitDurableRequest(
                session_id=talk.name, checkpoint_id=made.id, level=wanted))
            check(got.rows_level >= wanted, f"level {got.rows_level} is at least {wanted}")
        equal(talk.get().checkpoints[0].rows_level, pb.LEVEL_SSD, "listed level")
        answer = talk.decode(3, level=level)
        got = talk.call.WaitDurable(pb.WaitDurableRequest(
            session_id=talk.name, checkpoint_id=answer.end.checkpoints[0].id, level=pb.LEVEL_SSD))
        equal(got.rows_level, pb.LEVEL_SSD, "level of the answer's checkpoint")
    box.crash()
    client = box.client()
    for level in (pb.LEVEL_ACCEPTED, pb.LEVEL_RAM, pb.LEVEL_SSD, pb.LEVEL_UNSPECIFIED):
        equal(positions(Talk(client, f"level{level}").get().checkpoints), [200, 202],
              "what was waited for survives kill -9")
    talk = Talk(client, "level0")
    for bad in (pb.LEVEL_UNSPECIFIED, pb.LEVEL_ACCEPTED, pb.LEVEL_NONE, 9):
        expect(talk.call.WaitDurable, pb.WaitDurableRequest(
            session_id="level0", checkpoint_id=made.id, level=bad),
            code="INVALID_ARGUMENT", reason="LEVEL_INVALID")
    expect(talk.call.WaitDurable, pb.WaitDurableRequest(
        session_id="level0", checkpoint_id=bytes(16), level=pb.LEVEL_SSD),
        code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    for bad in (pb.LEVEL_NONE, 77):
        expect(talk.prefill, tokens(5), level=bad, code="INVALID_ARGUMENT", reason="LEVEL_INVALID")
    box.stop()


# A fdatasync of segments that takes its time, or fails: FAULT_FILE holds milliseconds and an errno.
FLUSH_FAULT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
int fdatasync(int fd)
{
    char link[64], path[512] = "";
    long ms = 0;
    int code = 0;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof(path) - 1) > 0 && strstr(path, "/segment-") != NULL) {
        FILE *f = fopen(getenv("FAULT_FILE"), "re");
        if (f != NULL && fscanf(f, "%ld %d", &ms, &code) < 1) ms = 0;
        if (f != NULL) fclose(f);
        struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
        nanosleep(&pause, NULL);
        if (code != 0) {
            errno = code;
            return -1;
        }
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""


def box_with_flushes():
    """A box, and the file that says what its flushes do; None: no compiler."""
    place = daemon.scratch()
    library, trigger = os.path.join(place, "flush.so"), os.path.join(place, "now")
    made = subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"],
                          input=FLUSH_FAULT.encode(), check=False)
    if not check(made.returncode == 0, "the faulty fdatasync is built"):
        return None, None
    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    return Box("synthetic", {"io.backend": "pool"}, env={
        "LD_PRELOAD": library, "FAULT_FILE": trigger, "ASAN_OPTIONS": sanitizer}).start(), trigger


def flushes(trigger, ms, code=0):
    with open(trigger + ".new", "w", encoding="ascii") as f:
        f.write(f"{ms} {code}")
    os.rename(trigger + ".new", trigger)


@case
def early_answer_is_waited_for_over_another_connection():
    """ACCEPTED, the connection is lost, and another one waits: until its deadline, until the
    checkpoint is durable, and then at once."""
    box, trigger = box_with_flushes()
    if box is None:
        return
    equal(patiently(Talk(box.client(), "early").prefill, tokens(20)).save_reason, "", "saved")
    flushes(trigger, 2500)
    first = box.client()
    talk = Talk(first, "early")
    prompt = tokens(300)
    began = time.monotonic()
    made = patiently(talk.prefill, prompt, level=pb.LEVEL_ACCEPTED).checkpoints[0]
    check(time.monotonic() - began < 2, "the early answer does not wait for the flush")
    check(made.rows_level < pb.LEVEL_SSD, "its level")
    first.close()
    wait = pb.WaitDurableRequest(session_id="early", checkpoint_id=made.id, level=pb.LEVEL_SSD)
    again = box.client()
    late = daemon.failure(again.session.WaitDurable, wait, timeout=0.3)
    equal(late and late.code, "DEADLINE_EXCEEDED", "a wait that ends before the flush")
    got = again.session.WaitDurable(wait, timeout=20)
    equal(got.rows_level, pb.LEVEL_SSD, "level after the wait")
    check(time.monotonic() - began > 2.4, "not before the flush was over")
    equal(again.session.WaitDurable(wait, timeout=20).rows_level, pb.LEVEL_SSD, "once more")
    flushes(trigger, 0)
    box.crash()
    equal(box.client().session.WaitDurable(wait, timeout=20).rows_level, pb.LEVEL_SSD,
          "after kill -9")
    resumed(patiently(Talk(box.client(), "early").prefill, prompt + tokens(3)), REPLAY, 300,
            "what was waited for")
    box.stop()


@case
def early_answer_that_cannot_become_durable():
    """The flush fails after the early answer: whoever waits, then or later, is told that the tier
    keeps nothing more; reads go on."""
    box, trigger = box_with_flushes()
    if box is None:
        return
    talk = Talk(box.client(), "early")
    kept = tokens(200)
    equal(patiently(talk.prefill, kept).save_reason, "", "saved")
    flushes(trigger, 1500, errno.EIO)
    first = box.client()
    made = patiently(Talk(first, "early").prefill, kept + tokens(100),
                     level=pb.LEVEL_ACCEPTED).checkpoints[0]
    first.close()
    wait = pb.WaitDurableRequest(session_id="early", checkpoint_id=made.id, level=pb.LEVEL_SSD)
    again = box.client()
    for when in ("while it is under way", "afterwards"):
        expect(again.session.WaitDurable, wait, code="FAILED_PRECONDITION",
               reason="SSD_READ_ONLY", field="level")
        print(f"told {when}")
    end = time.monotonic() + 5
    while "read-only" not in box.stats().health and time.monotonic() < end:
        time.sleep(0.02)
    check("read-only" in box.stats().health, box.stats().health)
    equal(patiently(talk.prefill, kept + tokens(5)).save_reason, "SSD_READ_ONLY", "a later save")
    flushes(trigger, 0)
    equal(patiently(talk.prefill, kept + tokens(6)).save_reason, "SSD_READ_ONLY",
          "and until a restart")
    box.restart()
    equal(patiently(Talk(box.client(), "early").prefill, kept + tokens(7)).save_reason, "",
          "after it")
    box.stop()


@case
def accepted_then_killed_is_whole_or_absent():
    """ACCEPTED does not survive the daemon: each one is there whole, or not there."""
    box = Box("synthetic").start()
    for _ in range(3):
        client = box.client()
        prompts = {f"s{rng.randrange(10**9)}": tokens(rng.randrange(100, 900)) for _ in range(12)}
        talks = {name: Talk(client, name) for name in prompts}
        together(len(prompts), lambda i: patiently(
            list(talks.values())[i].prefill, list(prompts.values())[i], level=pb.LEVEL_ACCEPTED))
        box.crash()
        client = box.client()
        for name, prompt in prompts.items():
            talk = Talk(client, name)
            got = talk.lookup(prompt + tokens(5))
            check(got.stored_tokens in (0, len(prompt)), f"{got.stored_tokens} of {len(prompt)}")
            got = patiently(talk.prefill, prompt + tokens(5))
            equal(got.weakened, 0, "weakened plans")
            talk.close()
        equal(box.stats().dropped_checkpoints, 0, "dropped")
        box.no_wrong_bytes("after kill -9")
    box.stop()


if __name__ == "__main__":
    run_cases("Calls, through the real daemon.")
