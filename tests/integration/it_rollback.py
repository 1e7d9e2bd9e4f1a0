"""Rollback: what goes and what stays, how a checkpoint is named, and how far back any position works."""

from daemon import admin_pb, check, equal, expect, failure, pb
from state_files import kvdump
from talk import (
    EXACT, MISS, REPLAY, WINDOW, Box, Talk, case, even, opened, resumed, rng, run_cases, tokens)

TURNS, TURN = 300, 30
BACK = (17, 85, 267)  # Turns; the first is the median of recorded conversations.


def live_bytes(box):
    rows = box.operator.DiskUsage(admin_pb.DiskUsageRequest()).rows
    return rows[0].live_bytes if rows else 0


def spots(talk):
    return [c.position for c in talk.get().checkpoints]


def turns(talk, count, length=200):
    """So many prompts, each going on from the last: the whole prompt, and a checkpoint for each."""
    prompt, made = [], []
    for _ in range(count):
        prompt = prompt + tokens(length)
        made.append(talk.prefill(prompt).checkpoints[-1])
    return prompt, made


def verified(box):
    code, out, errors = kvdump("verify", box.state)
    equal(code, 0, f"kvdump verify: {out[-300:]} {errors[-300:]}")


@case
def what_lies_behind_is_gone_at_the_answer():
    """Without keep: not listed, not found, its bytes are free, and so it stays over kill -9."""
    box, talk = opened()
    prompt, made = turns(talk, 4)
    before = live_bytes(box)
    got = talk.rollback(made[1].id, keep=False)
    equal((got.head_position, got.epoch), (400, 2), "the head")
    equal(spots(talk), [200, 400], "checkpoints left")
    check(live_bytes(box) < before, "bytes are free")
    resumed(talk.lookup(prompt), EXACT, 400, "the old prompt")
    got = expect(talk.rollback, made[3].id, code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    equal(got.value, "ROLLED_BACK", "why it is not there")
    again = talk.rollback(made[1].id, keep=False, epoch=1)
    equal((again.head_position, again.epoch), (400, 2), "the same again")
    box.crash()
    talk = Talk(box.client(), "s")
    equal((talk.opened.head_position, spots(talk)), (400, [200, 400]), "after kill -9")
    equal(box.stats().checkpoints, 2, "counted")
    resumed(talk.prefill(prompt[:400] + tokens(60)), REPLAY, 400, "it goes on from there")
    box.stop()
    verified(box)


@case
def kept_it_is_a_side_branch():
    """With keep both ways are found, and a later rollback may return."""
    box, talk = opened()
    prompt, made = turns(talk, 3)
    talk.rollback(made[0].id, keep=True)
    equal(spots(talk), [200, 400, 600], "all is left")
    talk.prefill(prompt[:200] + tokens(90))
    resumed(talk.lookup(prompt + [7]), EXACT, 600, "the kept branch")
    talk.rollback(made[2].id, keep=False)
    equal(sorted(spots(talk)), [200, 400, 600], "the other branch is gone")
    box.stop()
    verified(box)


@case
def what_others_share_stays():
    """Side branches, and what a fork stands on, keep the way to them."""
    box, talk = opened()
    prompt, made = turns(talk, 4)
    talk.prefill(prompt[:500] + tokens(50))  # Leaves the third turn in the middle.
    talk.rollback(made[3].id, keep=True)
    talk.rollback(made[0].id, keep=False)
    equal(sorted(spots(talk)), [200, 400, 500, 550], "up to where the side branch leaves")
    prompt, made = turns(Talk(box.client(), "t"), 4)
    talk = Talk(box.client(), "t")
    talk.call.Fork(pb.ForkRequest(session_id="t", checkpoint_id=made[2].id, new_session_id="f"))
    talk.rollback(made[0].id, keep=False)
    equal(spots(talk), [200, 400, 600], "up to the fork")
    fork = Talk(box.client(), "f")
    resumed(fork.lookup(prompt), EXACT, 600, "the fork's place")
    fork.prefill(prompt[:600] + tokens(80))
    equal(fork.rollback(made[0].id, keep=False).head_position, 200, "the fork goes back, too")
    equal(spots(talk), [200, 400, 600], "what the other session made stays its own")
    box.stop()
    verified(box)


@case
def by_position_and_digest():
    """A boundary is named by what it holds as well as by id; a turn number names nothing."""
    box, talk = opened()
    prompt, made = turns(talk, 3)
    got = talk.rollback(b"", position=400, digest=made[1].digest)
    equal(got.head_position, 400, "by position and digest")
    for fields, code, reason in (
            ({"position": 400, "digest": made[0].digest}, "NOT_FOUND", "CHECKPOINT_NOT_FOUND"),
            ({"position": 399, "digest": made[1].digest}, "NOT_FOUND", "CHECKPOINT_NOT_FOUND"),
            ({"position": 400}, "INVALID_ARGUMENT", "CHECKPOINT_ID_INVALID"),
            ({"position": 400, "digest": b"1" * 31}, "INVALID_ARGUMENT", "CHECKPOINT_ID_INVALID"),
            ({"digest": made[1].digest}, "INVALID_ARGUMENT", "CHECKPOINT_ID_INVALID"),
            ({"position": 1 << 21, "digest": made[1].digest}, "INVALID_ARGUMENT",
             "CHECKPOINT_ID_INVALID")):
        got = failure(talk.rollback, b"", **fields)
        check(got is not None and (got.code, got.reason) == (code, reason), f"{fields}: {got!r}")
    got = failure(talk.rollback, made[0].id, position=200, digest=made[0].digest)
    check(got is not None and got.reason == "CHECKPOINT_ID_INVALID", f"both: {got!r}")
    box.stop()


@case
def seventeen_and_more_turns_back():
    """300 turns of 30 tokens: 17, 85 and 267 turns back, at checkpoints and between them, live and
    after kill -9, in the session and in a fork of it."""
    box = Box("synthetic").start()
    talk = Talk(box.client(), "s")
    prompt, made = turns(talk, TURNS, TURN)
    equal(len(spots(talk)), TURNS, "checkpoints")
    middle = made[TURNS // 2]
    talk.call.Fork(pb.ForkRequest(session_id="s", checkpoint_id=middle.id, new_session_id="f"))
    marker = 499  # No prompt has it, and no two cuts are equal.
    for when in ("live", "after kill -9"):
        if when != "live":
            box.crash()
        for name in ("s", "f"):
            talk = Talk(box.client(), name)
            for back in BACK:
                marker += 1
                at = (TURNS - back) * TURN
                target = made[TURNS - back - 1]
                equal(target.position, at, "the checkpoint")
                what = f"{name}, {back} turns back, {when}"
                equal(talk.rollback(target.id, keep=True).head_position, at, what)
                got = talk.prefill(prompt[:at] + tokens(TURN))
                check(got.hit_tokens == even(at), f"{what}: hit {got.hit_tokens} of {at}")
                check(got.outcome != MISS, f"{what}: {got.outcome}")
                between = at - rng.randrange(1, TURN)
                got = talk.prefill(prompt[:between] + [marker] + tokens(TURN))
                equal(got.stored_tokens, between, f"{what}: rows for a cut at {between}")
                # A window that stands at most one window below computes no more than a replay.
                check(between - WINDOW <= got.hit_tokens <= between,
                      f"{what}: hit {got.hit_tokens} for a cut at {between}")
        box.no_wrong_bytes(when)
    talk = Talk(box.client(), "s")
    target = made[TURNS - BACK[2] - 1]
    talk.rollback(made[-1].id, keep=True)
    talk.rollback(target.id, keep=False)
    check(target.position <= max(spots(talk)), "the rest is what forks and side branches hold")
    box.no_wrong_bytes()
    box.stop()
    verified(box)


run_cases(__doc__.splitlines()[0])
