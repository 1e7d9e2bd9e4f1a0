"""exact = true: nothing approximate is used or made, and replays are as long as that takes.

`tiny` has a window of 16 tokens and 8 encoder layers, so an exact replay reruns 15 x 8 tokens.
"""

import daemon as d
from daemon import check, equal
from talk import MINUTE_MS, POOL_TTL_MS, Box, Talk, case, name_of, run_cases, tokens

REACH = 15 * 8


def opened():
    box = Box().start()
    return box, Talk(box.client(), "s")


def said(got):
    return (name_of(got.outcome), got.hit_tokens, got.replayed_tokens, got.approximate,
            got.approx_from)


@case
def exact_replay_has_the_bits_of_a_session_that_never_left():
    for first in (300, 301, 512):
        box, talk = opened()
        twin = Talk(box.client(), "twin")
        prompt = tokens(900)
        talk.prefill(prompt[:first])
        box.advance(POOL_TTL_MS + MINUTE_MS)
        even = first & ~1
        got = talk.prefill(prompt[:first + 40], exact=True)
        equal(said(got), ("REPLAY", even, REACH, False, 0), f"{first}: rerun, and no mark")
        twin.prefill(prompt[:first])
        twin.prefill(prompt[:first + 40])
        ids = {(c.position, c.id, c.approximate) for c in talk.get().checkpoints}
        check(ids >= {(c.position, c.id, c.approximate) for c in twin.get().checkpoints},
              f"{first}: the same checkpoints")
        equal(talk.decode(9).bits, twin.decode(9).bits, f"{first}: bits")
        talk.close()  # And what the image of it holds.
        for one in (talk, twin):
            got = one.prefill(prompt[:first + 40] + prompt[600:640])
            equal((name_of(got.outcome), got.approximate), ("EXACT", False), f"{first}: restored")
        equal(talk.decode(9).bits, twin.decode(9).bits, f"{first}: bits of the restored")
        box.stop()


@case
def marked_rows_are_not_used():
    box, talk = opened()
    prompt = tokens(500)
    talk.prefill(prompt[:300])
    box.advance(POOL_TTL_MS + MINUTE_MS)
    got = talk.prefill(prompt[:400])
    equal(said(got), ("REPLAY", 300, 16, True, 300), "the usual replay marks")
    found = talk.prefill(prompt[:420], no_checkpoint=True)
    equal(said(found)[3:], (True, 300), "the mark is inherited")
    got = talk.prefill(prompt[:420], exact=True)
    equal(said(got), ("REPLAY", 300, REACH, False, 0), "from before the mark, though it is live")
    equal(got.checkpoints[-1].approximate, False, "nor is its checkpoint marked")
    talk.close()
    got = talk.prefill(prompt[:424], exact=True)
    equal(said(got), ("EXACT", 420, 0, False, 0), "the unmarked one is there now")
    got = talk.prefill(prompt[:430])
    equal((name_of(got.outcome), got.approximate), ("EXACT", False), "the unmarked one is taken")
    box.stop()


@case
def short_histories_are_computed():
    box, talk = opened()
    prompt = tokens(200)
    talk.prefill(prompt[:REACH])
    box.advance(POOL_TTL_MS + MINUTE_MS)
    got = talk.prefill(prompt, exact=True)
    equal((said(got), got.reason), (("MISS", 0, 0, False, 0), "TOO_SHORT"), "no longer than a replay")
    box.stop()


@case
def only_marked_rows_have_a_reason_of_their_own():
    box, talk = opened()
    prompt = tokens(400)
    talk.prefill(prompt[:60])
    box.advance(POOL_TTL_MS + MINUTE_MS)
    got = talk.prefill(prompt[:300])
    equal(said(got), ("REPLAY", 60, 16, True, 60), "the mark")
    got = talk.prefill(prompt, exact=True)
    equal((said(got), got.reason), (("MISS", 0, 0, False, 0), "ONLY_APPROXIMATE"),
          "300 are stored, 60 of them usable and too few for a replay")
    got = talk.prefill(prompt + tokens(4), exact=True)
    equal((said(got), got.reason), (("EXACT", 400, 0, False, 0), ""), "its own is used")
    box.stop()


@case
def a_window_further_below_is_preferred():
    box, talk = opened()
    prompt = tokens(500)
    talk.prefill(prompt[:300])
    box.advance(4 * MINUTE_MS)
    talk.prefill(prompt[:300] + [2] + prompt[100:150])  # Renews the window at 300.
    talk.prefill(prompt[:400])
    talk.close()
    box.advance(2 * MINUTE_MS)
    got = talk.prefill(prompt[:440], exact=True)
    check(not got.approximate, "not marked")
    check(name_of(got.outcome) == "EXACT", f"{name_of(got.outcome)} at {got.hit_tokens}")
    box.stop()


@case
def other_kernels_are_not_used():
    box, talk = opened()
    prompt = tokens(400)
    talk.prefill(prompt[:300])
    box.stop()
    box.binary, box.arguments = d.TEST_BINARY, ["--plant", "kernels"]
    box.start()
    talk = Talk(box.client(), "s")
    got = talk.prefill(prompt, exact=True)
    equal((name_of(got.outcome), got.hit_tokens, got.approximate, got.other_kernels),
          ("MISS", 0, False, False), "computed")
    equal(got.reason, "ONLY_APPROXIMATE", "stored, but not for an exact call")
    got = talk.prefill(prompt + tokens(4), exact=True)
    equal((name_of(got.outcome), got.hit_tokens), ("EXACT", 400), "its own is used")
    box.stop()


run_cases(__doc__)
