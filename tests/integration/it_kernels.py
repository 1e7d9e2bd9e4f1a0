"""Kernel families: state that other kernels computed is used, said to be theirs, and marked.

Test builds have plants for it: `kernels` runs as if this machine's kernels were of another family,
`kernels_made` writes checkpoints that say so of themselves.  The bits are the same in both, so that
what was resumed can be compared.
"""

import os
import subprocess

import daemon as d
from daemon import check, equal, expect, pb
from talk import MISS, REPLAY, EXACT, Box, Talk, case, name_of, resumed, run_cases, tokens


def become(box, plant):
    """The same state, seen by a daemon of other kernels, or (None) of its own again."""
    box.stop()
    box.binary = d.TEST_BINARY
    box.arguments = ["--plant", plant] if plant else []
    box.start()
    return Talk(box.client(), "s")


def opened(plant=None):
    box = Box(binary=d.TEST_BINARY, arguments=["--plant", plant] if plant else []).start()
    return box, Talk(box.client(), "s"), box.stats().engine_family


def kernels_of(talk):
    return {(c.position, c.kernels) for c in talk.get().checkpoints}


@case
def another_family_is_named_and_marked():
    box, talk, ours = opened()
    prompt = tokens(600)
    got = talk.prefill(prompt[:300])
    equal((got.other_kernels, got.kernels), (False, ""), "nothing was there")
    equal(got.checkpoints[0].kernels, ours, "made by our kernels")

    talk = become(box, "kernels")
    found = talk.lookup(prompt[:340])
    equal((found.other_kernels, found.kernels), (True, ours), "Lookup says it before")
    got = talk.prefill(prompt[:340])
    equal((name_of(got.outcome), got.reason, got.hit_tokens), ("REPLAY", "OTHER_KERNELS", 300),
          "used, but not EXACT")
    equal((got.other_kernels, got.kernels), (True, ours), "whose it is")
    equal((got.approximate, got.approx_from), (True, 300), "marked from there")
    equal(kernels_of(talk), {(300, ours), (340, "planted")}, "the tree")
    got = talk.prefill(prompt[:360])
    equal((name_of(got.outcome), got.other_kernels, got.approx_from), ("EXACT", False, 300),
          "its own tokens again, the mark stays")
    talk.close()
    got = talk.prefill(prompt[:320] + tokens(30))
    equal((got.other_kernels, got.approx_from), (False, 300), "a cut above")
    got = talk.prefill(prompt[:200] + tokens(30))
    equal((name_of(got.outcome), got.hit_tokens, got.other_kernels, got.approx_from),
          ("REPLAY", 200, True, 200), "a cut below is other kernels' again")

    talk = become(box, None)
    got = talk.prefill(prompt[:400])
    equal((name_of(got.outcome), got.hit_tokens, got.other_kernels, got.kernels),
          ("REPLAY", 360, True, "planted"), "and the other way round")
    equal((got.approximate, got.approx_from), (True, 300), "the first mark")
    got = talk.prefill(prompt[:250] + tokens(20))
    equal((got.hit_tokens, got.other_kernels, got.kernels), (250, False, ""),
          "below the change it is ours")
    box.stop()


@case
def equal_tokens_of_two_families_are_two_checkpoints():
    """Too short to be worth a replay: computed again, by other kernels, beside what is there."""
    box, talk, ours = opened()
    prompt = tokens(14)
    first = talk.prefill(prompt).checkpoints[0]
    talk = become(box, "kernels")
    got = talk.prefill(prompt)
    equal((name_of(got.outcome), got.approximate, got.other_kernels), ("MISS", False, False),
          "computed from 0 is exact")
    check(got.checkpoints[0].id != first.id, "one id for the bits of two families")
    equal(kernels_of(talk), {(14, ours), (14, "planted")}, "side by side")
    long = talk.prefill(prompt + tokens(100))
    equal((name_of(long.outcome), long.other_kernels), ("EXACT", False), "our own is preferred")
    box.stop()


@case
def a_window_of_another_family_is_used_and_marked():
    """A window is restored as it is; what follows has its bits, and says from where it may not."""
    box, talk, _ = opened("kernels_made")
    plain = Box().start()
    twin = Talk(plain.client(), "s")
    prompt = tokens(200)
    talk.prefill(prompt[:101])
    twin.prefill(prompt[:101])
    talk.close()
    got = talk.prefill(prompt)
    twin.prefill(prompt)
    equal((name_of(got.outcome), got.reason, got.hit_tokens, got.replayed_tokens),
          ("REPLAY", "OTHER_KERNELS", 101, 0), "restored, nothing rerun")
    equal((got.other_kernels, got.kernels, got.approx_from), (True, "planted", 101), "and says so")
    equal(talk.decode(8).bits, twin.decode(8).bits, "the bits of the window")
    talk.close()
    answer = talk.decode(4)
    equal((name_of(answer.end.outcome), answer.end.other_kernels, answer.end.kernels),
          ("REPLAY", True, "planted"), "Decode on a stored head")
    equal(answer.bits, twin.decode(4).bits, "its bits")
    outcomes = []
    for _ in range(20):
        prompt = prompt[:40] + tokens(30)
        talk.prefill(prompt)
        talk.close()
        got = talk.prefill(prompt + tokens(4))
        outcomes.append(name_of(got.outcome))
        check(got.outcome != EXACT, "never claims to be exact")
        check(got.approximate or got.outcome == MISS, "marked, or computed from 0")
    check(outcomes.count("REPLAY") >= 15, f"most are used: {outcomes}")
    plain.stop()
    box.stop()


@case
def marks_that_find_no_room_compute_everything():
    """A checkpoint names 16 positions at most; with no_checkpoint they add up on one edge."""
    box, talk, _ = opened("kernels_made")
    prompt = tokens(60)
    talk.prefill(prompt)
    seen = set()
    for _ in range(20):
        prompt = prompt + tokens(4)
        got = talk.prefill(prompt, no_checkpoint=True)
        seen.add(got.outcome)
        check(got.outcome == MISS or got.approximate, "marked, or computed from 0")
    equal(seen, {REPLAY, MISS}, "both happened")
    box.stop()


@case
def another_model_is_no_damage():
    """A session of another model: Decode, the first call after the change, loses nothing of it."""
    box, talk, _ours = opened()
    prompt = tokens(300)
    talk.prefill(prompt)
    talk.decode(4)
    other = os.path.join(d.scratch(), "other")
    subprocess.run([os.path.join(d.BUILD, "tools", "mkmodel"), "--config", "tiny", "--seed", "2",
                    other], check=True, stdout=subprocess.DEVNULL)
    own = box.flags["engine.model_dir"]
    for model in (other, own):
        box.stop()
        box.flags["engine.model_dir"] = model
        box.start()
        talk = Talk(box.client(), "s")
        if model == other:
            for _ in range(2):
                failure = expect(lambda: talk.decode(4), code="FAILED_PRECONDITION",
                                 reason="HEAD_MOVED")
                check("another model" in failure.value, f"says why: {failure.value}")
            resumed(talk.lookup(prompt + tokens(5)), MISS, 0, "a miss", reason="MODEL_CHANGED")
    equal(talk.get().session.head_position, 303, "the head is where it was")
    resumed(talk.prefill(prompt + tokens(30)), REPLAY, 300, "and serves again")
    box.stop()


run_cases(__doc__)
