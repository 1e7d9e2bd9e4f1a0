"""How a turn resumes: each rule of ARCHITECTURE.md, "Rules of resume and of the tree", as a case.

The engine computes for real (backend cpu, model tiny) wherever bits are compared: a resume that says
EXACT has the logits of a session that never left memory.
"""

import ctypes
import mmap
import os

from daemon import check, equal, expect, pb
from talk import (
    EXACT, MINUTE_MS, MISS, PAGE, POOL_TTL_MS, REPLAY, SPARE, SSD_TTL_MS, WINDOW, Box, Talk, case,
    even, name_of, name_of_kind, opened, positions, resumed, rng, run_cases, tokens)


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
    for cut in rng.sample(sorted(set(cuts)), 4):
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


def cached_pages(path):
    """Pages of the file that the kernel holds in its cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                          ctypes.c_int, ctypes.c_long]
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, f.fileno(), 0)
    check(at not in (None, ctypes.c_void_p(-1).value), "mmap")
    seen = (ctypes.c_ubyte * ((size + 4095) // 4096))()
    done = libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), seen)
    equal(done, 0, "mincore")
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
    return sum(byte & 1 for byte in seen)


@case
def resumes_leave_the_page_cache_alone():
    """Rows are written to and read from SSD past the kernel's cache, on both I/O backends."""
    for backend in ("auto", "pool"):
        box = Box("synthetic", {"io.backend": backend}).start()
        prompts = {f"cold{i}": tokens(1500) for i in range(4)}
        for name, prompt in prompts.items():
            equal(Talk(box.client(), name).prefill(prompt).save_reason, "", "saved")
        box.restart()
        for name, prompt in prompts.items():
            got = Talk(box.client(), name).prefill(prompt + tokens(5), no_checkpoint=True)
            resumed(got, REPLAY, 1500, f"{name} with {backend}")
            equal(got.ssd_tokens, 1500, "tokens read from SSD")
        for path in box.segments():
            equal(cached_pages(path), 0, f"{backend}: pages of {os.path.basename(path)} in cache")
        with open(box.segments()[0], "rb") as f:
            f.read(1 << 20)
        check(cached_pages(box.segments()[0]) >= 256, "and it would have been seen")
        box.stop()


if __name__ == "__main__":
    run_cases("Resumes, through the real daemon.")
