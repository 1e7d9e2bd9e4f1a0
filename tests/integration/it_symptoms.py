"""Faults that users reported in systems like this one, shown to be absent through the real daemon.

One function per row, named after it; its comment says what was reported and what must be seen here.
"""

import os

import daemon
from daemon import check, equal, pack, pb
from talk import (
    EXACT, MISS, PAGE, POOL_TTL_MS, REPLAY, WINDOW, Box, Talk, case, even, find_pages, flip,
    name_of, patiently, resumed, rng, run_cases, together, tokens)


@case
def t1_clean_restart_hits_without_writing():
    """T1: files were on disk but the index only in RAM, so a restart computed and wrote it all
    again.  Here: after a clean stop and start a lookup hits, and nothing was written for it."""
    for backend in ("synthetic", "cpu"):
        box = Box(backend).start()
        prompts = {f"s{i}": tokens(rng.randrange(130, 400)) for i in range(8)}
        for name, prompt in prompts.items():
            Talk(box.client(), name).prefill(prompt)
        size = sum(os.stat(p).st_blocks for p in box.segments())
        box.restart()
        client = box.client()
        for name, prompt in prompts.items():
            got = client.session.Lookup(pb.LookupRequest(
                session_id=name, tokens=pack(prompt + tokens(20))))
            resumed(got, REPLAY, even(len(prompt)), f"{backend} {name} after the restart")
            equal(got.stored_tokens, len(prompt), f"{backend} {name}: stored")
        equal(box.counter("cached_save_bytes_total", 'tier="ssd"'), 0, "bytes written to SSD")
        equal(box.counter("cached_computed_tokens_total"), 0, "tokens computed")
        equal(sum(os.stat(p).st_blocks for p in box.segments()), size, "blocks of the segments")
        equal(box.stats().recovered_checkpoints, len(prompts), "checkpoints recovered")
        equal(box.stats().dropped_checkpoints, 0, "checkpoints dropped")
        got = Talk(client, "s0").prefill(prompts["s0"] + tokens(30))
        equal(got.computed_tokens, got.prompt_tokens - even(len(prompts["s0"])),
              "only the new tokens are computed")
        box.stop()


@case
def t2_kill_9_keeps_every_committed_session():
    """T2: after a restart of the master, data on SSD was there and unreachable.  Here: after
    kill -9 every session whose checkpoint was acknowledged at SSD is found, twice in a row."""
    box = Box("synthetic").start()
    client = box.client()
    prompts = {f"s{i}": tokens(rng.randrange(20, 500)) for i in range(40)}
    checkpoints = 0
    for name, prompt in prompts.items():
        talk = Talk(client, name)
        made = talk.prefill(prompt).checkpoints
        equal([c.rows_level for c in made], [pb.LEVEL_SSD], f"{name}: level acknowledged")
        checkpoints += len(made)
        if rng.random() < 0.5:
            answer = talk.decode(10)
            prompts[name] = prompt + answer.tokens[:-1]  # The last one is pending.
            checkpoints += len(answer.end.checkpoints)
    for _ in range(2):
        box.crash()
        client = box.client()
        equal((box.stats().recovered_checkpoints, box.stats().dropped_checkpoints),
              (checkpoints, 0), "(recovered, dropped)")
        for name, prompt in prompts.items():
            got = client.session.Lookup(pb.LookupRequest(
                session_id=name, tokens=pack(prompt + tokens(9))))
            equal((got.stored_tokens, got.hit_tokens), (len(prompt), even(len(prompt))),
                  f"{name} after kill -9: (stored, hit)")
    for name, prompt in prompts.items():
        resumed(Talk(client, name).prefill(prompt + tokens(9)), REPLAY, even(len(prompt)), name)
    box.no_wrong_bytes("after kill -9")
    box.stop()


@case
def t6_corrupt_payload_fails_once_not_for_ever():
    """T6: after a kill -9 a file that was well formed but wrong inside made the prefill fail again
    and again.  Here: one weakened plan, the checkpoint is gone, and from the next turn on all is
    well.  No call fails at any point."""
    for backend in ("synthetic", "cpu"):
        box = Box(backend).start()
        box.page_bytes = box.stats().page_bytes
        prompt, other = tokens(400), tokens(300)
        Talk(box.client(), "hurt").prefill(prompt)
        Talk(box.client(), "whole").prefill(other)
        box.kill()
        pages = find_pages(box, prompt[PAGE:2 * PAGE])
        equal(len(pages), 1, "pages of the prompt's second 128 tokens on SSD")
        path, offset = pages[0]
        flip(path, offset + 256 + 512 + rng.randrange(box.page_bytes - 1024))
        box.start()
        talk = Talk(box.client(), "hurt")
        longer = prompt + tokens(40)
        first = talk.prefill(longer)
        equal(first.weakened, 1, f"{backend}: weakened plans")
        equal(first.reason, "CORRUPT", f"{backend}: reason")
        check(first.hit_tokens <= PAGE, f"{backend}: hit {first.hit_tokens} ends before the damage")
        equal(first.computed_tokens, len(longer) - first.hit_tokens, f"{backend}: computed")
        equal([c.position for c in first.checkpoints], [len(longer)], "checkpoint of the turn")
        equal(box.counter("cached_checksum_failures_total", 'tier="ssd",where="read"'), 1, "checksum failures")
        check(box.counter("cached_checkpoints_dropped_total") >= 1, "the checkpoint is dropped")
        check(all(c.position != len(prompt) for c in talk.get().checkpoints),
              "the damaged checkpoint is not listed")
        answer = talk.decode(6)
        for turn in range(3):  # Not for ever: each next turn resumes at the end of the last.
            history = longer + answer.tokens[:-1]
            longer = history + tokens(30)
            got = talk.prefill(longer)
            resumed(got, EXACT, len(history), f"{backend} turn {turn} after the damage")
            equal(got.weakened, 0, f"{backend} turn {turn}: weakened")
            answer = talk.decode(6)
        box.restart()
        got = Talk(box.client(), "hurt").prefill(longer + tokens(10))
        resumed(got, REPLAY, even(len(longer)), f"{backend} after one more restart")
        equal(got.weakened, 0, f"{backend} after one more restart: weakened")
        resumed(Talk(box.client(), "whole").prefill(other + tokens(10)), REPLAY, even(len(other)),
                f"{backend}: the session beside it")
        equal(box.counter("cached_failed_requests_total"), 0, "failed requests")
        if backend == "synthetic":
            box.no_wrong_bytes("beside a damaged page")
        box.stop()


@case
def t8_returning_sessions_get_their_own_state():
    """T8: a session that came back from disk was given another request's state.  Here: 64 sessions
    at once, far more than fits HBM, come back from SSD with their own: the synthetic engine compares
    each byte, and on cpu the logits are those of a daemon that never evicted."""
    small = {"hbm.bytes": "1MiB", "engine.live_sessions": "8", "pool.bytes": "16MiB"}
    box = Box("synthetic", small).start()
    _come_back(box, [tokens(rng.randrange(140, 380)) for _ in range(64)], turns=3)
    box.no_wrong_bytes("of 64 sessions")
    evicted = box.counter("cached_evictions_total", 'tier="hbm",cause="capacity"')
    check(evicted > 64, f"pages left HBM: {evicted}")
    check(box.counter("cached_load_bytes_total", 'tier="ssd"') > 0, "pages were read from SSD")
    box.stop()

    prompts = [tokens(rng.randrange(130, 180)) for _ in range(64)]
    tails = [tokens(8) for _ in prompts]
    box = Box("cpu", small).start()
    seen = _come_back(box, prompts, turns=1, tails=tails)
    check(box.counter("cached_load_bytes_total", 'tier="ssd"') > 0, "pages were read from SSD")
    box.stop()
    roomy = Box("cpu", {"engine.live_sessions": "64", "hbm.bytes": "64MiB"}).start()
    client = roomy.client()
    for i, prompt in enumerate(prompts):
        talk = Talk(client, f"s{i}")
        talk.prefill(prompt)
        talk.prefill(prompt + tails[i])
        equal(seen[i], talk.decode(2).bits, f"session {i}: logits of its own state")
    equal(roomy.counter("cached_load_bytes_total", 'tier="ssd"'), 0, "the reference read from SSD")
    roomy.stop()


def _come_back(box, prompts, turns, tails=None):
    """Each prompt in a session and on a thread of its own, then more turns; the last answers."""
    client = box.client()
    talks = [Talk(client, f"s{i}") for i in range(len(prompts))]
    history = [list(prompt) for prompt in prompts]
    seen = [None] * len(prompts)
    together(len(prompts), lambda i: patiently(talks[i].prefill, history[i]))

    def turn(i):
        stored = len(history[i])
        history[i] += tails[i] if tails else tokens(rng.randrange(1, 40))
        got = patiently(talks[i].prefill, history[i])
        resumed(got, EXACT, stored, f"session {i} comes back")
        equal(got.save_reason, "", f"session {i}: its prompt is stored")
        answer = patiently(talks[i].decode, 2)
        equal((answer.first, answer.end.save_reason), (len(history[i]), ""),
              f"session {i}: its answer follows the prompt, and is stored")
        history[i] += answer.tokens[:-1]
        seen[i] = answer.bits

    for _ in range(turns):
        together(len(prompts), turn)
    return seen


@case
def t16_rows_without_window_are_replayed():
    """T16: rows hit across requests and the window was taken from a ring that another request had
    left.  Here: rows whose window is gone are REPLAY, with the logits of a daemon in which no other
    session ever lived, while sessions with the same tokens are resident."""
    prompt, tail = tokens(290), tokens(12)

    alone = Box().start()
    talk = Talk(alone.client(), "mine")
    talk.prefill(prompt)
    alone.restart()  # The window is gone; no other session was ever there.
    talk = Talk(alone.client(), "mine")
    resumed(talk.prefill(prompt + tail), REPLAY, len(prompt), "alone")
    want = talk.decode(8).bits
    alone.stop()

    for neighbour in ("same tokens", "same tokens, other user", "other tokens"):
        box = Box(flags={"engine.live_sessions": "4"}).start()
        talk = Talk(box.client(), "mine")
        talk.prefill(prompt)
        talk.close()
        box.advance(POOL_TTL_MS + 1)  # Its window is gone,
        near = Talk(box.client("bob" if "user" in neighbour else "alice"), "near")
        near.prefill(prompt + tokens(5) if "same" in neighbour else tokens(290))  # another is there.
        near.decode(3)
        got = talk.prefill(prompt + tail)
        resumed(got, REPLAY, len(prompt), neighbour, reason="EXPIRED")
        equal((got.approximate, got.approx_from), (True, len(prompt)), f"{neighbour}: mark")
        equal(got.resumed_checkpoint_id, b"", f"{neighbour}: window used")
        equal(talk.decode(8).bits, want, f"{neighbour}: logits of the replay")
        box.stop()


@case
def t21_names_are_not_glued_together():
    """T21: an adapter's name equal to another's salt gave the same key.  Here: user "ab" with
    session "c" and user "a" with session "bc" hold the same tokens and know nothing of each other."""
    users = {"ab": "c", "a": "bc"}
    secrets = {user: f"token-of-{user}-0123456789abcdef0123" for user in users}
    box = Box("synthetic")
    daemon.write_tokens(box.token_file, [(u, "harness", secrets[u]) for u in users] +
                        [daemon.TOKENS["ops"]])
    box.start()
    prompt = tokens(300)
    seen = {}
    for user, session in users.items():
        client = box.client(token=secrets[user])
        talk = Talk(client, session)
        check(talk.opened.created, f"{user}/{session} is new")
        resumed(talk.lookup(prompt), MISS, 0, f"{user}/{session}", reason="NEVER_STORED")
        made = talk.prefill(prompt)
        resumed(made, MISS, 0, f"{user}/{session}", reason="NEVER_STORED")
        seen[user] = made.checkpoints[0]
    check(seen["ab"].id != seen["a"].id, "equal checkpoint ids of two users")
    check(seen["ab"].digest != seen["a"].digest, "equal digests of two users")
    box.restart()
    for user, session in users.items():
        client = box.client(token=secrets[user])
        other = next(u for u in users if u != user)
        names = [s.session_id for s in client.session.ListSessions(
            pb.ListSessionsRequest()).sessions]
        equal(names, [session], f"sessions of {user}")
        for name in (users[other], user + session, other + users[other]):
            daemon.expect(client.session.GetSession, pb.GetSessionRequest(session_id=name),
                          code="NOT_FOUND", reason="SESSION_NOT_FOUND")
        daemon.expect(client.session.Rollback, pb.RollbackRequest(
            session_id=session, checkpoint_id=seen[other].id),
            code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    box.stop()


@case
def t65_restored_is_reused():
    """T65: a restore reported success and the next request reused nothing.  Here: the hit of the
    next request equals what was saved, whatever brought the session out of memory."""
    for backend in ("synthetic", "cpu"):
        for length in (300, 301, PAGE, 2 * PAGE + 1):
            box = Box(backend).start()
            talk = Talk(box.client(), "s")
            prompt = tokens(length)
            saved = talk.prefill(prompt).checkpoints[-1].position
            equal(saved, length, "saved")
            equal(talk.close().was_live, True, "was live")
            equal(talk.close().was_live, False, "was live, closed twice")
            prompt += tokens(7)
            got = talk.prefill(prompt)
            resumed(got, EXACT, saved, f"{backend} {length}: closed and restored")
            saved = got.checkpoints[-1].position
            box.restart()
            talk = Talk(box.client(), "s")
            equal(talk.opened.created, False, "the session is known")
            equal(talk.get().checkpoints[-1].position, saved, "listed after the restart")
            prompt += tokens(7)
            got = talk.prefill(prompt)
            resumed(got, REPLAY, even(saved), f"{backend} {length}: restarted")
            equal(got.hbm_tokens + got.ssd_tokens, got.hit_tokens, "hit tokens by tier")
            equal(got.ssd_tokens, got.hit_tokens, "after a restart all rows are from SSD")
            equal(got.computed_tokens, len(prompt) - even(saved), "computed")
            if backend == "synthetic":
                box.no_wrong_bytes()
            box.stop()


@case
def t81_answer_is_part_of_the_hit():
    """T81: only prompt tokens were in the key, the answer was computed again.  Here: the hit of turn
    2 is prompt 1 and answer 1 but for at most 2 tokens, live, restored and restarted."""
    for backend in ("synthetic", "cpu"):
        for count in (1, 2, 17, 40):
            for way in ("live", "closed", "restarted"):
                box = Box(backend).start()
                talk = Talk(box.client(), "s")
                prompt = tokens(rng.randrange(200, 270))
                talk.prefill(prompt)
                answer = talk.decode(count)
                equal(len(answer.tokens), count, "tokens of the answer")
                history = prompt + answer.tokens
                if way == "closed":
                    talk.close()
                elif way == "restarted":
                    box.restart()
                    talk = Talk(box.client(), "s")
                got = talk.prefill(history + tokens(25))
                what = f"{backend} {way}, {len(prompt)} + {count}"
                check(len(history) - 2 <= got.hit_tokens <= len(history),
                      f"{what}: hit {got.hit_tokens}")
                equal(got.diverged, False, f"{what}: diverged")
                equal(name_of(got.outcome), "REPLAY" if way == "restarted" else "EXACT", what)
                box.stop()


@case
def t86_odd_sizes_round_trip():
    """T86: views of blocks were not aligned and O_DIRECT refused them.  Here: prompts of every size
    from 1 to 300 tokens, and a session that grows by odd steps over page ends, come back from SSD
    after a restart with every byte."""
    box = Box("synthetic", {"hbm.bytes": "2MiB"}).start()
    client = box.client()
    prompts = {size: tokens(size) for size in range(1, 301)}
    for size, prompt in prompts.items():
        talk = Talk(client, f"size{size}")
        resumed(patiently(talk.prefill, prompt), MISS, 0, f"size {size}")
        talk.close()
    grown, steps = [], []
    talk = Talk(client, "grown")
    while len(grown) < 700:
        grown += tokens(rng.choice((1, 3, 5, 7, 31, 63, 127)))
        steps.append(len(grown))
        equal(talk.prefill(grown).checkpoints[-1].position, len(grown), "position")
    box.restart()
    equal((box.stats().recovered_checkpoints, box.stats().dropped_checkpoints),
          (300 + len(steps), 0), "(recovered, dropped)")
    client = box.client()
    for size, prompt in prompts.items():
        talk = Talk(client, f"size{size}")
        got = patiently(talk.prefill, prompt + tokens(3))
        long_enough = even(size) > WINDOW
        resumed(got, REPLAY if long_enough else MISS, even(size) if long_enough else 0,
                f"size {size} after the restart", reason=None if long_enough else "TOO_SHORT")
        equal(got.stored_tokens, size, f"size {size}: stored")
        equal(got.weakened, 0, f"size {size}: weakened")
        talk.close()
    for step in steps:  # From the middle of pages that were written again, fuller.
        got = Talk(client, "grown").lookup(grown[:step] + tokens(3))
        equal(got.hit_tokens, even(step) if even(step) > WINDOW else 0, f"hit at step {step}")
    for step in rng.sample([s for s in steps if even(s) > WINDOW], 5):
        got = Talk(client, "grown").prefill(grown[:step] + tokens(3))
        equal(got.hit_tokens, even(step), f"hit at step {step}")
        equal(got.weakened, 0, f"step {step}: weakened")
    box.no_wrong_bytes("of odd sizes")
    equal(box.counter("cached_io_errors_total"), 0, "I/O errors")
    box.stop()


if __name__ == "__main__":
    run_cases("Symptoms seen elsewhere, absent here.")
