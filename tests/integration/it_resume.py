"""How a turn resumes: each rule of ARCHITECTURE.md, "Rules of resume and of the tree", as a case.

The engine computes for real (backend cpu, model tiny) wherever bits are compared: a resume that says
EXACT has the logits of a session that never left memory.
"""

import time

import daemon
import grpc
from daemon import check, equal, expect, failure, pack, pb
from it_symptoms import (
    EXACT, MINUTE_MS, MISS, PAGE, POOL_TTL_MS, REPLAY, SPARE, SSD_TTL_MS, WINDOW, Answer, Box, Talk,
    case, even, name_of, patiently, resumed, rng, run_cases, together, tokens)


def opened(backend="cpu", flags=None):
    """A daemon, and a session of alice on it."""
    box = Box(backend, flags).start()
    return box, Talk(box.client(), "s")


def positions(checkpoints):
    return [c.position for c in checkpoints]


# ---- Resume ----

@case
def plan_is_exact_at_the_window_when_the_rows_reach_little_further():
    """R - E <= window: EXACT at E, it computes no more than a replay.  Else REPLAY at R."""
    box = Box().start()
    client = box.client()
    talks, prompts = {}, {}
    for further in (2, 8, 15, 16, 17, 18, 40):
        talk = talks[further] = Talk(client, f"further{further}")
        prompts[further] = tokens(300 + further)
        talk.prefill(prompts[further][:300])
        resumed(talk.prefill(prompts[further]), EXACT, 300, f"turn 2 of {further}")
        talk.close()
    box.advance(4 * MINUTE_MS)
    for further, talk in talks.items():
        first = talk.get().checkpoints[0]
        equal(first.position, 300, "position of the first checkpoint")
        got = talk.prefill(prompts[further][:300] + tokens(30), no_checkpoint=True)
        resumed(got, EXACT, 300, f"{further}: a resume through the first window")
        equal(got.resumed_checkpoint_id, first.id, f"{further}: whose window was used")
        talk.close()
    box.advance(2 * MINUTE_MS)  # The deeper window is gone, the first was renewed.
    for further, talk in talks.items():
        longer = prompts[further] + tokens(20)
        equal(talk.lookup(longer).stored_tokens, 300 + further, f"{further}: R")
        if further <= WINDOW:
            resumed(talk.lookup(longer), EXACT, 300, f"R - E = {further}")
            got = talk.prefill(longer)
            resumed(got, EXACT, 300, f"R - E = {further}", reason="")
            equal((got.computed_tokens, got.approximate), (further + 20, False),
                  f"R - E = {further}: (computed, approximate)")
        else:
            resumed(talk.lookup(longer), REPLAY, even(300 + further), f"R - E = {further}",
                    reason="EXPIRED")
            got = talk.prefill(longer)
            resumed(got, REPLAY, even(300 + further), f"R - E = {further}", reason="EXPIRED")
            equal((got.approximate, got.approx_from), (True, even(300 + further)),
                  f"R - E = {further}: mark")
    box.stop()


@case
def live_head_counts_as_a_checkpoint_with_a_window():
    box, talk = opened()
    prompt = tokens(200)
    equal(positions(talk.prefill(prompt, no_checkpoint=True).checkpoints), [], "checkpoints")
    prompt += tokens(31)
    got = talk.prefill(prompt, no_checkpoint=True)
    resumed(got, EXACT, 200, "no checkpoint, but live", reason="")
    equal(got.resumed_checkpoint_id, b"", "a live head is no checkpoint")
    answer = talk.decode(7, no_checkpoint=True)
    equal((answer.first, answer.end.head_position), (231, 237), "(first, head) of the answer")
    got = talk.prefill(prompt + answer.tokens + tokens(5))
    resumed(got, EXACT, 237, "after an answer without a checkpoint")
    equal(positions(talk.get().checkpoints), [243], "only the last call left one")
    box.stop()


@case
def live_and_restored_give_the_same_bits():
    """A live session uses only the rows that its image would hold."""
    box = Box().start()
    prompt, tail = tokens(300), tokens(9)
    for dropped in (0, 1, 2, 7, 15, 16, 17, 40):
        seen = []
        for way in ("live", "closed"):
            talk = Talk(box.client(), f"{way}{dropped}")
            talk.prefill(prompt)
            if way == "closed":
                talk.close()
            got = talk.prefill(prompt[:300 - dropped] + tail)
            seen.append((name_of(got.outcome), got.hit_tokens, got.replayed_tokens,
                         got.approximate, got.approx_from, talk.decode(5).bits))
        equal(seen[1], seen[0], f"{dropped} tokens dropped: restored against live")
    box.stop()


@case
def cut_of_the_last_tokens_is_exact_within_the_spare_rows():
    """A prompt that drops k <= spare tokens: EXACT at the even position below, else REPLAY there."""
    box = Box().start()
    client = box.client()
    for length in (300, 301):
        prompt = tokens(length)
        talk = Talk(client, f"length{length}")
        talk.prefill(prompt)
        for way in ("live", "closed"):
            if way == "closed":
                talk.close()
            for dropped in range(SPARE + 3):
                match = length - dropped
                other = [(prompt[match] + 1 if dropped else 7) % 500] + tokens(20)
                hit = length if dropped == 0 else even(match)
                exact = length - hit <= SPARE
                got = talk.lookup(prompt[:match] + other)
                resumed(got, EXACT if exact else REPLAY, hit, f"{way}, {length} - {dropped}",
                        reason="" if exact else "DIVERGED")
                equal((got.diverged, got.diverged_at if dropped else 0),
                      (dropped > 0, match if dropped else 0), f"{length} - {dropped}: divergence")
                equal(got.stored_tokens, match, f"{length} - {dropped}: stored")
    box.stop()


@case
def no_cut_to_or_below_the_last_clipped_replay():
    """After a replay at 300 the window at 306 serves 302 and 304; 300 and less is replayed again,
    because a window rebuilt by a clipped replay is not stored at its own position."""
    for way in ("live", "closed"):
        box, talk = opened()
        prompt = tokens(306)
        talk.prefill(prompt[:300])
        talk.close()
        box.advance(POOL_TTL_MS + 1)
        got = talk.prefill(prompt)
        resumed(got, REPLAY, 300, "after the window's time", reason="EXPIRED")
        equal([(c.position, c.approximate, c.approx_from) for c in got.checkpoints],
              [(306, True, 300)], "the checkpoint above the replay")
        if way == "closed":
            talk.close()
        for match, plan, hit in ((306, EXACT, 306), (305, EXACT, 304), (304, EXACT, 304),
                                 (303, EXACT, 302), (302, EXACT, 302), (301, REPLAY, 300),
                                 (300, REPLAY, 300), (299, REPLAY, 298)):
            other = [(prompt[match] + 1 if match < 306 else 7) % 500] + tokens(20)
            resumed(talk.lookup(prompt[:match] + other), plan, hit, f"{way}, cut to {match}")
        box.stop()


@case
def odd_checkpoint_with_and_without_its_window():
    """With its window an odd position resumes there; without, one below."""
    box, talk = opened()
    prompt = tokens(301)
    equal(positions(talk.prefill(prompt).checkpoints), [301], "an odd checkpoint")
    talk.close()
    tail = tokens(6)
    resumed(talk.prefill(prompt + tail), EXACT, 301, "with its window")
    seen = talk.decode(5).bits
    reference = Talk(box.client("bob"), "live")
    reference.prefill(prompt)
    reference.prefill(prompt + tail)
    equal(seen, reference.decode(5).bits, "logits above an odd checkpoint")
    talk.close()
    box.advance(POOL_TTL_MS + 1)
    resumed(talk.prefill(prompt + tokens(30)), REPLAY, 300, "without its window")
    box.stop()


@case
def cut_inside_an_edge_is_a_replay_at_the_even_position_below():
    """The answer names the first position that differs, whether the tokens are in memory or only
    in the pages."""
    box, talk = opened("synthetic", {"hbm.bytes": "1MiB"})
    prompt = tokens(1500)
    talk.prefill(prompt)
    cuts = [19, 126, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 1400]
    cuts += [rng.randrange(20, 1480) for _ in range(12)]
    for way in ("live", "closed", "restarted"):
        if way == "closed":
            talk.close()
        if way == "restarted":
            box.restart()
            talk = Talk(box.client(), "s")
        for cut in cuts:
            got = talk.lookup(prompt[:cut] + [(prompt[cut] + 1) % 500] + tokens(30))
            resumed(got, REPLAY, even(cut), f"{way}, cut at {cut}", reason="DIVERGED")
            equal((got.diverged, got.diverged_at, got.stored_tokens), (True, cut, cut),
                  f"{way}, cut at {cut}: (diverged, at, stored)")
    for cut in rng.sample(cuts, 4):
        got = talk.prefill(prompt[:cut] + [(prompt[cut] + 1) % 500] + tokens(30))
        resumed(got, REPLAY, even(cut), f"cut at {cut}", reason="DIVERGED")
        equal((got.diverged, got.diverged_at), (True, cut), f"cut at {cut}: divergence")
        equal((got.approximate, got.approx_from), (True, even(cut)), f"cut at {cut}: mark")
    resumed(talk.lookup(prompt + tokens(5)), REPLAY, 1500, "the first branch is still there")
    box.no_wrong_bytes()
    box.stop()


@case
def whole_prompt_stored_gives_the_bits_of_the_first_time():
    """H <= N - 1 always: EXACT at even(N - 1), and the answer to it is the first one."""
    box = Box().start()
    for length in (300, 301, PAGE, PAGE + 1):
        prompt = tokens(length)
        first = Talk(box.client("bob"), f"first{length}")
        first.prefill(prompt)
        want = first.decode(6).bits
        for way in ("live", "closed"):
            talk = Talk(box.client(), f"{way}{length}")
            made = talk.prefill(prompt).checkpoints[0]
            if way == "closed":
                talk.close()
            resumed(talk.lookup(prompt), EXACT, even(length - 1), f"{way} {length}")
            got = talk.prefill(prompt)
            resumed(got, EXACT, even(length - 1), f"{way} {length}", reason="")
            equal(got.stored_tokens, length, f"{way} {length}: stored")
            equal(got.diverged, False, f"{way} {length}: diverged")
            equal([c.id for c in got.checkpoints], [made.id], f"{way} {length}: the same checkpoint")
            equal(talk.decode(6).bits, want, f"{way} {length}: bits of the first time")
    box.stop()


@case
def decode_on_a_restored_head_gives_the_bits_of_the_first_time():
    """Without a pending token the last tokens are computed again, for logits to sample from."""
    box = Box().start()
    for length in (300, 301):
        prompt = tokens(length)
        first = Talk(box.client("bob"), f"first{length}")
        first.prefill(prompt)
        want = first.decode(6)
        talk = Talk(box.client(), f"closed{length}")
        talk.prefill(prompt)
        talk.close()
        got = talk.decode(6)
        equal(name_of(got.end.outcome), "EXACT", f"{length}: outcome")
        equal(got.first, length, f"{length}: first position")
        equal(got.bits, want.bits, f"{length}: bits of the first time")
    box.stop()


@case
def whole_prompt_stored_without_its_window_names_the_cause():
    """The reason says why it was not EXACT: the window's time passed.  Nothing diverged."""
    box, talk = opened()
    prompt = tokens(300)
    talk.prefill(prompt)
    talk.close()
    box.advance(POOL_TTL_MS + 1)
    got = talk.lookup(prompt)
    resumed(got, REPLAY, 298, "whole prompt, window expired", reason="EXPIRED")
    equal(got.diverged, False, "diverged")
    got = talk.prefill(prompt)
    resumed(got, REPLAY, 298, "whole prompt, window expired", reason="EXPIRED")
    box.stop()


@case
def hit_within_one_window_is_too_short():
    """H <= window without a window: MISS, computing from 0 costs no more and is exact."""
    box = Box().start()
    lengths = (2, 15, 16, 17, 18, 19)
    prompts = {n: tokens(n) for n in lengths}
    for n, prompt in prompts.items():
        talk = Talk(box.client(), f"n{n}")
        talk.prefill(prompt)
        talk.close()
        resumed(talk.lookup(prompt + tokens(9)), EXACT, n, f"{n} with its window")
    box.advance(POOL_TTL_MS + 1)
    for n, prompt in prompts.items():
        talk = Talk(box.client(), f"n{n}")
        longer = prompt + tokens(9)
        if even(n) <= WINDOW:
            resumed(talk.lookup(longer), MISS, 0, f"{n} without", reason="TOO_SHORT")
            got = talk.prefill(longer)
            resumed(got, MISS, 0, f"{n} without", reason="TOO_SHORT")
            equal((got.stored_tokens, got.computed_tokens, got.approximate), (n, n + 9, False),
                  f"{n}: (stored, computed, approximate)")
            reference = Talk(box.client("bob"), f"n{n}")
            reference.prefill(longer)
            equal(talk.decode(4).bits, reference.decode(4).bits, f"{n}: exact")
        else:
            resumed(talk.prefill(longer), REPLAY, even(n), f"{n} without", reason="EXPIRED")
    box.stop()


@case
def parent_id_and_new_tokens():
    """The daemon knows the tokens up to the parent; an unknown parent is NOT_FOUND with the cause."""
    box, talk = opened()
    client = box.client()
    prompt = tokens(300)
    first = talk.prefill(prompt).checkpoints[0]
    tail = tokens(40)
    got = talk.prefill(tail, parent_checkpoint_id=first.id)
    resumed(got, EXACT, 300, "on the head")
    equal((got.prompt_tokens, got.computed_tokens), (340, 40), "(prompt, computed)")
    second = got.checkpoints[0]
    resumed(talk.lookup(prompt + tail + tokens(3)), EXACT, 340, "as if the whole had been sent")
    seen = talk.decode(5).bits
    reference = Talk(box.client("bob"), "whole")
    reference.prefill(prompt)
    reference.prefill(prompt + tail)
    equal(seen, reference.decode(5).bits, "bits, by parent against whole prompts")

    talk.close()
    got = talk.prefill(tokens(10), parent_checkpoint_id=first.id)  # An older one of this branch.
    resumed(got, EXACT, 300, "on an earlier checkpoint, restored")
    equal(got.prompt_tokens, 310, "prompt")
    expect(talk.prefill, tokens(5), parent_checkpoint_id=second.id,
           code="FAILED_PRECONDITION", reason="CHECKPOINT_OTHER_BRANCH")
    talk.rollback(second.id)
    resumed(talk.prefill(tokens(5), parent_checkpoint_id=second.id), EXACT, 340, "rolled back to it")

    stranger = Talk(client, "stranger")
    for unknown in (bytes(16), first.id[:-1] + bytes([first.id[-1] ^ 1])):
        expect(talk.prefill, tail, parent_checkpoint_id=unknown,
               code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    expect(stranger.prefill, tail, parent_checkpoint_id=first.id,
           code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    for bad in (first.id[:15], first.id + b"x"):
        expect(talk.prefill, tail, parent_checkpoint_id=bad,
               code="INVALID_ARGUMENT", reason="CHECKPOINT_ID_INVALID")
    box.restart()
    talk = Talk(box.client(), "s")
    got = talk.prefill(tokens(8), parent_checkpoint_id=talk.get().head_checkpoint_id)
    resumed(got, REPLAY, even(got.prompt_tokens - 8), "by parent after a restart")
    box.advance(SSD_TTL_MS + 1)
    expect(talk.prefill, tail, parent_checkpoint_id=first.id,
           code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    box.stop()


@case
def stable_tokens_split_the_call():
    """As if sent as two prefills: the window stands at the stable position, the rest comes after."""
    box, talk = opened()
    prompt, tail = tokens(300), tokens(25)
    got = talk.prefill(prompt, stable_tokens=271)
    resumed(got, MISS, 0, "first turn")
    equal([(c.position, name_of_kind(c), c.window_level) for c in got.checkpoints],
          [(271, "PREFILL_END", pb.LEVEL_RAM)], "below N: the one checkpoint")
    equal(talk.get().session.head_position, 300, "head")
    seen = talk.decode(5).bits
    reference = Talk(box.client("bob"), "two")
    reference.prefill(prompt[:271])
    reference.prefill(prompt)
    equal(seen, reference.decode(5).bits, "bits of one split call against two calls")
    talk.close()
    resumed(talk.lookup(prompt[:271] + tail), EXACT, 271, "the next turn shares that much")

    talk = Talk(box.client(), "at-n")
    equal(positions(talk.prefill(prompt, stable_tokens=300).checkpoints), [300], "at N")
    got = talk.prefill(prompt + tail, stable_tokens=200)
    resumed(got, EXACT, 300, "stable below H")
    equal([(c.position, c.window_level) for c in got.checkpoints], [(200, pb.LEVEL_NONE)],
          "below H: rows only, nothing is computed for it")
    equal(got.computed_tokens, 25, "computed")
    got = talk.prefill(prompt + tail + tail, stable_tokens=300)
    resumed(got, EXACT, 325, "stable at an older checkpoint")
    equal([(c.position, c.window_level) for c in got.checkpoints], [(300, pb.LEVEL_RAM)],
          "the one there is renewed")
    equal(positions(talk.get().checkpoints), [200, 300], "no second one")
    for bad in (301, 1 << 31):
        expect(talk.prefill, prompt, stable_tokens=bad, code="INVALID_ARGUMENT",
               reason="STABLE_TOKENS_INVALID", field="stable_tokens")
    box.stop()


def name_of_kind(checkpoint):
    names = {v: k.replace("CHECKPOINT_KIND_", "") for k, v in pb.CheckpointKind.items()}
    return names.get(checkpoint.kind, f"kind {checkpoint.kind} is not in the .proto")


@case
def anchors_split_the_call():
    box, talk = opened()
    prompt = tokens(420)
    got = talk.prefill(prompt, anchors=[64, 129, 200, 333], stable_tokens=410)
    equal([(c.position, name_of_kind(c), c.window_level) for c in got.checkpoints],
          [(p, "ANCHOR", pb.LEVEL_RAM) for p in (64, 129, 200, 333)] +
          [(410, "PREFILL_END", pb.LEVEL_RAM)], "checkpoints of the call")
    tree = talk.get().checkpoints
    equal([(c.position, c.parent_id) for c in tree],
          list(zip((64, 129, 200, 333, 410), [b""] + [c.id for c in tree[:-1]])), "one chain")
    seen = talk.decode(4).bits
    reference = Talk(box.client("bob"), "pieces")
    for end in (64, 129, 200, 333, 410, 420):
        reference.prefill(prompt[:end])
    equal(seen, reference.decode(4).bits, "bits of one split call against its pieces")
    talk.close()
    for anchor in (64, 129, 200, 333):
        resumed(talk.lookup(prompt[:anchor] + [2] + tokens(30)), EXACT, anchor, f"at {anchor}")
    got = talk.prefill(prompt + tokens(10), anchors=[100, 425], stable_tokens=428)
    equal([(c.position, c.window_level) for c in got.checkpoints],
          [(100, pb.LEVEL_NONE), (425, pb.LEVEL_RAM), (428, pb.LEVEL_RAM)],
          "below H rows only, above H with a window")
    for bad in ([200, 100], [100, 100], [0, 5], [421], [1, 2, 3, 4, 5]):
        expect(talk.prefill, prompt, anchors=bad, code="INVALID_ARGUMENT",
               reason="ANCHORS_INVALID", field="anchors")
    box.stop()


@case
def pending_token_is_in_the_image():
    """Decode continues from the sampled token that is not yet processed; without the image it is
    sampled again."""
    box = Box().start()
    prompt = tokens(300)
    whole = Talk(box.client("bob"), "whole")
    whole.prefill(prompt)
    want = whole.decode(20)
    equal((want.first, want.end.head_position), (300, 319), "(first, head) in one go")
    for way in ("live", "closed"):
        talk = Talk(box.client(), way)
        talk.prefill(prompt)
        got = talk.decode(9)
        equal(got.end.head_position, 308, f"{way}: the last token is pending")
        if way == "closed":
            talk.close()
        more = talk.decode(11)
        equal((more.first, more.end.head_position, name_of(more.end.outcome)), (309, 319, "EXACT"),
              f"{way}: (first, head, plan) of the rest")
        equal(got.bits + more.bits, want.bits, f"{way}: bits in two parts")
    for way in ("expired", "restarted"):
        talk = Talk(box.client(), f"gone-{way}")
        talk.prefill(prompt)
        got = talk.decode(9)
        if way == "expired":
            talk.close()
            box.advance(POOL_TTL_MS + 1)
        else:
            box.restart()
            talk = Talk(box.client(), f"gone-{way}")
        more = talk.decode(5)
        equal((more.first, more.end.head_position), (308, 312),
              f"{way}: the pending token is sampled again")
        equal(name_of(more.end.outcome), "REPLAY", f"{way}: plan")
        equal(len(more.crcs), 5, f"{way}: one number for each token")
    box.stop()


@case
def prefill_ignores_the_pending_token():
    """It is neither in t nor in the digest: another token at its place is no divergence."""
    box, talk = opened()
    prompt = tokens(200)
    talk.prefill(prompt)
    answer = talk.decode(5)
    history = prompt + answer.tokens[:-1] + [(answer.tokens[-1] + 1) % 500] + tokens(20)
    got = talk.prefill(history)
    resumed(got, EXACT, 204, "another token than the pending one")
    equal(got.diverged, False, "diverged")
    box.stop()


@case
def sampling_does_not_depend_on_resumes():
    """The random number of a position is a function of (seed, position)."""
    box = Box().start()
    prompt = tokens(160)
    how = {"temperature": 1.2, "top_p": 0.95, "top_k": 200, "seed": 1 + rng.randrange(1 << 40)}
    whole = Talk(box.client(), "whole")
    whole.prefill(prompt)
    want = whole.decode(24, **how)
    parts = Talk(box.client(), "parts")
    parts.prefill(prompt)
    got = []
    for count in (1, 6, 3, 14):
        got += parts.decode(count, **how).bits
        parts.close()
    equal(got, want.bits, "sampled in parts, restored between them")
    other = Talk(box.client(), "other")
    other.prefill(prompt)
    check(other.decode(24, **dict(how, seed=how["seed"] + 1)).tokens != want.tokens,
          "another seed gave the same 24 tokens")
    box.restart()
    again = Talk(box.client(), "after")
    again.prefill(prompt)
    equal(again.decode(24, **how).bits, want.bits, "after a restart, from the start")
    box.stop()


# ---- Tree and marks ----

@case
def equal_content_has_equal_ids():
    """The id is content: retries, other sessions and restarts give the same one; other users not."""
    box, talk = opened()
    prompt = tokens(222)
    first = talk.prefill(prompt).checkpoints[0]
    twin = Talk(box.client(), "twin").prefill(prompt).checkpoints[0]
    equal((twin.id, twin.digest), (first.id, first.digest), "in another session")
    other = Talk(box.client("bob"), "s").prefill(prompt).checkpoints[0]
    check(other.id != first.id and other.digest != first.digest, "two users share an id")
    again = talk.call.Checkpoint(pb.CheckpointRequest(session_id="s", kind=pb.CHECKPOINT_KIND_MANUAL))
    equal(again.checkpoint.id, first.id, "Checkpoint of the same head")
    equal(talk.prefill(prompt).checkpoints[0].id, first.id, "the same prompt again")
    equal([(c.position, name_of_kind(c)) for c in talk.get().checkpoints], [(222, "PREFILL_END")],
          "one checkpoint")
    box.restart()
    talk = Talk(box.client(), "s")
    equal([c.id for c in talk.get().checkpoints], [first.id], "after a restart")
    third = Talk(box.client(), "third").prefill(prompt).checkpoints[0]
    equal(third.id, first.id, "computed again after a restart")
    got = talk.prefill(prompt)  # A replay: other rows from 220 on, so another id.
    equal(got.approximate, True, "replayed")
    check(got.checkpoints[0].id != first.id, "an approximate checkpoint has the id of an exact one")
    equal(got.checkpoints[0].digest, first.digest, "the digest is of the tokens alone")
    box.stop()


@case
def commit_of_a_known_id_renews_it():
    """The node lives on from now, and its window is there again."""
    box, talk = opened()
    prompt = tokens(150)
    talk.prefill(prompt)
    box.advance(4 * MINUTE_MS)
    talk.prefill(prompt)
    talk.close()
    box.advance(4 * MINUTE_MS)
    resumed(talk.lookup(prompt + tokens(5)), EXACT, 150, "8 minutes old, renewed after 4")
    box.stop()


@case
def approximate_mark_is_inherited_and_shed():
    """Children inherit it; a cut at or below approx_from sheds it."""
    box, talk = opened()
    prompt = tokens(440)
    talk.prefill(prompt[:300])
    talk.prefill(prompt[:360])
    talk.close()
    box.advance(4 * MINUTE_MS)
    resumed(talk.prefill(prompt[:300] + [2] + tokens(30)), EXACT, 300, "renews the window at 300")
    talk.close()
    box.advance(2 * MINUTE_MS)
    got = talk.prefill(prompt[:400])
    resumed(got, REPLAY, 360, "the deeper window is gone", reason="EXPIRED")
    equal((got.approximate, got.approx_from), (True, 360), "mark of the replay")
    for way in ("live", "closed"):
        if way == "closed":
            talk.close()
        got = talk.prefill(prompt)
        equal((name_of(got.outcome), got.approximate, got.approx_from), ("EXACT", True, 360),
              f"{way}: a child inherits")
        equal([(c.approximate, c.approx_from) for c in got.checkpoints], [(True, 360)],
              f"{way}: its checkpoint")
    answer = talk.decode(3)
    equal([(c.approximate, c.approx_from) for c in answer.end.checkpoints], [(True, 360)],
          "the answer's checkpoint")
    got = talk.prefill(prompt[:380] + [2] + tokens(9))
    resumed(got, REPLAY, 380, "a cut above the mark")
    equal((got.approximate, got.approx_from), (True, 360), "a cut above keeps the first mark")
    got = talk.prefill(prompt[:300] + [3] + tokens(9))
    resumed(got, EXACT, 300, "a cut below the mark")
    equal((got.approximate, got.approx_from, got.checkpoints[0].approximate), (False, 0, False),
          "a cut below sheds it")
    marks = {c.position: (c.approximate, c.approx_from) for c in talk.get().checkpoints
             if c.position in (300, 360, 400, 440)}
    equal(marks, {300: (False, 0), 360: (False, 0), 400: (True, 360), 440: (True, 360)}, "the tree")
    box.restart()
    marks_after = {c.position: (c.approximate, c.approx_from)
                   for c in Talk(box.client(), "s").get().checkpoints if c.position in marks}
    equal(marks_after, marks, "the tree after a restart")
    box.stop()


@case
def superseded_windows_go_first():
    """When the pool is full, windows of earlier turns go before another session's only one; both
    windows of the newest turn stay."""
    box = Box("synthetic", {"pool.bytes": "1MiB"}).start()
    client = box.client()
    room = box.tier("pool").items_capacity
    oldest = Talk(client, "oldest")
    single = tokens(100)
    oldest.prefill(single)
    oldest.close()
    long = Talk(client, "long")
    history, ends = tokens(200), []
    for _ in range(3):
        made = long.prefill(history).checkpoints
        answer = long.decode(10)
        ends.append(tuple(positions(made) + positions(answer.end.checkpoints)))
        last = list(history)
        history = history + answer.tokens + tokens(60)
    long.close()
    used = box.tier("pool").items_used
    equal(used, 7, "windows in the pool: 1 and 3 turns of 2")
    for i in range(room - used + 3):
        one = Talk(client, f"fill{i}")
        one.prefill(tokens(60))
        one.close()
    equal(box.counter("cached_evictions_total", 'tier="pool",cause="capacity"'), 3, "evicted")
    resumed(oldest.lookup(single + tokens(9)), EXACT, 100, "the least recent session")
    windows = {c.position for c in long.get().checkpoints if c.window_level == pb.LEVEL_RAM}
    check(set(ends[2]) <= windows, f"both windows of the newest turn {ends[2]} in {windows}")
    equal(len(windows), 3, f"windows left of {ends}: {windows}")
    resumed(long.lookup(last[:len(last)] + [2] + tokens(9)), EXACT, len(last), "newest turn")
    box.no_wrong_bytes()
    box.stop()


@case
def windows_expire_at_lookup():
    """TTL is enforced when asked, before any sweep; a lookup does not renew, a resume does."""
    box, talk = opened()
    prompt = tokens(300)
    talk.prefill(prompt)
    talk.close()
    box.advance(POOL_TTL_MS - 1)
    resumed(talk.lookup(prompt + tokens(9)), EXACT, 300, "1 ms before its time")
    listed = talk.get().checkpoints[0]
    equal((listed.window_level, listed.window_expire_ms), (pb.LEVEL_RAM, 1), "1 ms left")
    box.advance(1)
    resumed(talk.lookup(prompt + tokens(9)), REPLAY, 300, "at its time, looked up before",
            reason="EXPIRED")
    listed = talk.get().checkpoints[0]
    equal((listed.window_level, listed.window_expire_ms), (pb.LEVEL_NONE, 0), "listed as gone")
    talk = Talk(box.client(), "renewed")
    talk.prefill(prompt)
    for _ in range(3):
        talk.close()
        box.advance(POOL_TTL_MS - 1000)
        resumed(talk.prefill(prompt + [2] + tokens(9), no_checkpoint=True), EXACT, 300,
                "renewed by each resume")
    box.stop()


@case
def rows_expire_at_lookup():
    """72 hours from last use, or the session's own time: MISS with the cause."""
    box, talk = opened()
    client = box.client()
    prompt = tokens(300)
    talk.prefill(prompt)
    hour = Talk(client, "hour", ttl_ms=60 * MINUTE_MS)
    hour.prefill(prompt)
    kept = Talk(client, "kept", ttl_ms=60 * MINUTE_MS)
    kept.prefill(prompt)
    for one in (talk, hour, kept):
        one.close()
    box.advance(50 * MINUTE_MS)
    resumed(hour.lookup(prompt + tokens(9)), REPLAY, 300, "lookups renew nothing")
    resumed(kept.prefill(prompt + tokens(9)), REPLAY, 300, "a resume renews")
    kept.close()
    box.advance(10 * MINUTE_MS + 1)
    resumed(hour.lookup(prompt + tokens(9)), MISS, 0, "an hour old", reason="EXPIRED")
    resumed(kept.lookup(prompt + tokens(9)), REPLAY, 300, "renewed at 50 minutes")
    got = hour.prefill(prompt + tokens(9))
    resumed(got, MISS, 0, "an hour old", reason="EXPIRED")
    equal(positions(hour.get().checkpoints), [309], "only the new one is listed")
    box.advance(49 * MINUTE_MS)
    resumed(kept.lookup(prompt + tokens(9)), REPLAY, 300, "a parent stays while its child does")
    box.advance(MINUTE_MS + 1)
    resumed(kept.lookup(prompt + tokens(9)), MISS, 0, "parent and child", reason="EXPIRED")
    box.advance(SSD_TTL_MS - 110 * MINUTE_MS - 3)
    resumed(talk.lookup(prompt + tokens(9)), REPLAY, 300, "1 ms before 72 h")
    box.advance(2)
    resumed(talk.lookup(prompt + tokens(9)), MISS, 0, "72 h", reason="EXPIRED")
    box.restart()
    box.advance(SSD_TTL_MS + 1)  # The virtual clock starts at the wall's again.
    talk = Talk(box.client(), "s")
    resumed(talk.lookup(prompt + tokens(9)), MISS, 0, "72 h, restarted")
    resumed(talk.prefill(prompt), MISS, 0, "computed again")
    box.stop()


@case
def rollback_moves_the_head():
    """The epoch is raised and fences older writers; the same target again is OK; the branch that was
    left stays."""
    box, talk = opened()
    history, ends = tokens(200), []
    for _ in range(3):
        ends += talk.prefill(history).checkpoints
        answer = talk.decode(8)
        ends += answer.end.checkpoints
        full = history + answer.tokens[:-1]
        history = history + answer.tokens + tokens(40)
    epoch = talk.get().epoch
    target = ends[0]
    got = talk.rollback(target.id)
    equal(got.head_position, target.position, "head")
    check(got.epoch > epoch, f"epoch {got.epoch} is above {epoch}")
    again = talk.rollback(target.id)
    equal(again.head_position, target.position, "head, the same target again")
    seen = talk.get()
    equal((seen.session.head_position, seen.head_checkpoint_id), (target.position, target.id),
          "GetSession")
    stale = {"epoch": epoch}
    for call in (lambda: talk.prefill(full, **stale), lambda: list(talk.stream(1, **stale)),
                 lambda: talk.rollback(ends[1].id, **stale),
                 lambda: talk.call.Checkpoint(pb.CheckpointRequest(session_id="s", **stale))):
        expect(call, code="FAILED_PRECONDITION", reason="STALE_EPOCH")
    epoch = seen.epoch
    first = talk.decode(8, epoch=epoch)
    equal(first.first, target.position, "an answer goes on from the target")
    reference = Talk(box.client("bob"), "never-went-on")
    reference.prefill(full[:target.position])
    equal(first.bits, reference.decode(8).bits, "bits after a rollback")
    resumed(talk.prefill(full[:target.position] + [2] + tokens(20), epoch=epoch), EXACT,
            target.position, "another turn from there")
    got = talk.prefill(full + tokens(9))
    resumed(got, EXACT, len(full), "the branch that was left is still stored")
    for unknown in (bytes(16), b"\xff" * 16):
        expect(talk.rollback, unknown, code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    expect(talk.rollback, b"short", code="INVALID_ARGUMENT", reason="CHECKPOINT_ID_INVALID")
    talk.rollback(target.id)
    before = talk.get()
    box.crash()
    after = Talk(box.client(), "s").get()
    equal((after.session.head_position, after.epoch), (target.position, before.epoch),
          "(head, epoch) after kill -9: a rollback is synced before its answer")
    box.stop()


@case
def tree_lists_parents_before_children():
    box, talk = opened("synthetic")
    history = tokens(100)
    ends = []
    for turn in range(12):
        talk.prefill(history)
        answer = talk.decode(4)
        ends.append(history + answer.tokens[:-1])
        history = list(rng.choice(ends)) + [2 + turn] + tokens(20)
    for _ in range(2):
        got = talk.get()
        seen = set()
        for c in got.checkpoints:
            check(c.parent_id == b"" or c.parent_id in seen, f"parent of {c.position} comes first")
            seen.add(c.id)
        equal(len(seen), len(got.checkpoints), "no id twice")
        equal(len(seen), got.session.checkpoints, "their number")
        check(got.head_checkpoint_id in seen, "the head's checkpoint is listed")
        by_id = {c.id: c for c in got.checkpoints}
        for c in got.checkpoints:
            check(c.parent_id == b"" or by_id[c.parent_id].position < c.position,
                  f"the parent of {c.position} lies below it")
        for end in ends:
            check(any(c.position == len(end) for c in got.checkpoints), f"the end at {len(end)}")
        equal(got.session.head_position, len(ends[-1]), "head")
        tree = sorted((c.position, c.id, c.parent_id, c.kind) for c in got.checkpoints)
        box.crash()
        talk = Talk(box.client(), "s")
        after = sorted((c.position, c.id, c.parent_id, c.kind) for c in talk.get().checkpoints)
        equal(after, tree, "the tree after kill -9")
    box.stop()


@case
def listing_in_pages_is_stable():
    box = Box("synthetic").start()
    client = box.client()
    names = [f"s{rng.randrange(10**9)}" for _ in range(33)]
    for name in names:
        Talk(client, name)
    Talk(box.client("bob"), "of-bob")

    def listed(size, between=None):
        seen, token = [], ""
        while True:
            got = client.session.ListSessions(pb.ListSessionsRequest(
                page_size=size, page_token=token))
            seen += [s.session_id for s in got.sessions]
            check(len(got.sessions) <= (size or 100), f"sessions of a page: {len(got.sessions)}")
            token = got.next_page_token
            if not token:
                return seen
            if between is not None:
                between(len(seen))

    whole = listed(0)
    equal(sorted(whole), sorted(names), "all of one user, none of another")
    for size in (1, 7, 32, 33, 34, 1000):
        equal(listed(size), whole, f"in pages of {size}")
    more = listed(5, lambda n: Talk(client, f"late{n}"))
    equal([n for n in more if not n.startswith("late")], whole, "with sessions opened meanwhile")
    equal(len(set(more)), len(more), "none twice")
    box.restart()
    client = box.client()
    equal([n for n in listed(9) if not n.startswith("late")], whole, "after a restart")
    for bad in ("x", "zzzz", "\x01" * 200):
        expect(client.session.ListSessions, pb.ListSessionsRequest(page_token=bad),
               code="INVALID_ARGUMENT", reason="PAGE_TOKEN_INVALID")
    expect(client.session.ListSessions, pb.ListSessionsRequest(page_size=1001),
           code="INVALID_ARGUMENT", reason="PAGE_SIZE_INVALID")
    box.stop()


@case
def foreign_session_looks_like_an_unknown_one():
    """Same status, message and details, whether it is another's or nobody's."""
    box = Box("synthetic").start()
    hers = Talk(box.client(), "hers")
    checkpoint = hers.prefill(tokens(200)).checkpoints[0]
    bob = box.client("bob").session
    calls = {
        "Lookup": lambda s: bob.Lookup(pb.LookupRequest(session_id=s, tokens=pack([5, 6]))),
        "Prefill": lambda s: bob.Prefill(pb.PrefillRequest(session_id=s, tokens=pack([5, 6]))),
        "Decode": lambda s: list(bob.Decode(pb.DecodeRequest(session_id=s, max_tokens=1))),
        "Checkpoint": lambda s: bob.Checkpoint(pb.CheckpointRequest(session_id=s)),
        "WaitDurable": lambda s: bob.WaitDurable(pb.WaitDurableRequest(
            session_id=s, checkpoint_id=checkpoint.id, level=pb.LEVEL_SSD)),
        "Rollback": lambda s: bob.Rollback(pb.RollbackRequest(
            session_id=s, checkpoint_id=checkpoint.id)),
        "CloseSession": lambda s: bob.CloseSession(pb.CloseSessionRequest(session_id=s)),
        "GetSession": lambda s: bob.GetSession(pb.GetSessionRequest(session_id=s)),
    }

    def told(call, session):
        got = failure(call, session)
        return repr(got).replace(session, "NAME") if got else None

    for name, call in calls.items():
        theirs, nobodys = told(call, "hers"), told(call, "none")
        equal(theirs, nobodys, f"{name}: of another against of nobody")
        check(theirs and theirs.startswith("NOT_FOUND SESSION_NOT_FOUND"), f"{name}: {theirs}")
    box.restart()
    bob = box.client("bob").session
    equal(told(calls["GetSession"], "hers"), told(calls["GetSession"], "none"), "after a restart")
    equal(Talk(box.client("bob"), "hers").opened.created, True, "the name is free for bob")
    equal(Talk(box.client(), "hers").get().checkpoints[0].id, checkpoint.id, "hers is untouched")
    box.stop()


# ---- Calls ----

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
    """A second Prefill, Decode or Rollback gets ABORTED, SESSION_BUSY; the rest runs beside it."""
    box, talk = opened(flags=LONG)
    prompt = tokens(200)
    first = talk.prefill(prompt).checkpoints[0]
    call = prefill_later(box, talk, prompt + tokens(3000))
    for second in (lambda: talk.prefill(prompt + tokens(5)), lambda: list(talk.stream(2)),
                   lambda: talk.rollback(first.id)):
        expect(second, code="ABORTED", reason="SESSION_BUSY")
    resumed(talk.lookup(prompt[:150] + [2] + tokens(9)), REPLAY, 150, "Lookup beside it")
    equal(positions(talk.get().checkpoints), [200], "GetSession beside it")
    equal(talk.call.WaitDurable(pb.WaitDurableRequest(
        session_id="s", checkpoint_id=first.id, level=pb.LEVEL_SSD)).rows_level, pb.LEVEL_SSD,
        "WaitDurable beside it")
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
            expect(talk.prefill, long, timeout=0.3, code="DEADLINE_EXCEEDED", reason=None)
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


def untilfree(call, *args, **kwargs):
    """A call after a cancelled one: the daemon may still be ending that."""
    end = time.monotonic() + 5
    while True:
        try:
            return call(*args, **kwargs)
        except grpc.RpcError as error:
            if daemon.Failure(error).reason != "SESSION_BUSY" or time.monotonic() > end:
                raise
            time.sleep(0.01)


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
def checkpoint_while_decoding():
    """Not taken at a step boundary yet: refused as busy, and decoding goes on undisturbed."""
    box, talk = opened()
    prompt = tokens(200)
    talk.prefill(prompt)
    reference = Talk(box.client("bob"), "alone")
    reference.prefill(prompt)
    want = reference.decode(300).bits
    stream = talk.stream(300)
    head = []
    for message in stream:
        head += list(zip(daemon.unpack(message.tokens), message.logits_crc))
        if len(head) >= 5:
            break
    expect(talk.call.Checkpoint, pb.CheckpointRequest(session_id="s", level=pb.LEVEL_SSD),
           code="ABORTED", reason="SESSION_BUSY")
    rest = Answer(stream)
    equal(head + rest.bits, want, "decoding went on with the same bits")
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
def retries_by_content_and_by_id():
    """Prefill is repeatable by content; Decode is not, and says so when it is given an id."""
    box, talk = opened()
    prompt = tokens(200)
    made = talk.prefill(prompt, request_id="turn-1")
    again = talk.prefill(prompt, request_id="turn-1")
    equal([c.id for c in again.checkpoints], [c.id for c in made.checkpoints], "Prefill again")
    expect(lambda: list(talk.stream(6, request_id="answer-1")), code="UNIMPLEMENTED",
           reason="NOT_IMPLEMENTED")
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
    run_cases("Rows of the design's semantics, through the real daemon.")
