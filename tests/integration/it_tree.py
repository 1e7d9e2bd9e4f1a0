"""Checkpoints: their ids, marks, windows and lifetimes, rollback, and how they are listed.

The engine computes for real (backend cpu, model tiny) wherever bits are compared: a resume that says
EXACT has the logits of a session that never left memory.
"""

from daemon import check, equal, expect, failure, pack, pb
from talk import (
    EXACT, MINUTE_MS, MISS, POOL_TTL_MS, REPLAY, SSD_TTL_MS, Box, Talk, case, name_of, name_of_kind,
    opened, positions, resumed, rng, run_cases, tokens)


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


if __name__ == "__main__":
    run_cases("Trees of checkpoints, through the real daemon.")
