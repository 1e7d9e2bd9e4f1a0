"""Why: each reason that one machine can have, told by the answer, by GetSession and by `why`,
before and after a restart and a kill -9.

The history of removals on disk is read by tests/integration/state_files.py, by the offsets of
docs/format.md.
"""

import os
import struct
import subprocess

import daemon as d
from cli import Tool, token_file
from daemon import admin_pb, check, equal, expect, pb
from state_files import State, kvdump
from talk import (
    MISS, MINUTE_MS, POOL_TTL_MS, REPLAY, Box, Talk, case, find_pages,
    flip, model_dir, patiently, resumed, run_cases, together, tokens)

SMALL = {"ssd.segment_bytes": "1MiB", "ssd.bytes": "8MiB", "pool.ttl": "1s"}
CODES = {1: "EXPIRED", 2: "QUOTA", 3: "CAPACITY", 4: "ROLLED_BACK", 5: "DELETED", 6: "LOST_NODE",
         7: "CORRUPT", 8: "MODEL_CHANGED"}


def ask(box, name, position=None, user="alice", by="ops"):
    fields = {} if position is None else {"has_position": True, "position": position}
    return box.client(by).admin.Why(admin_pb.WhyRequest(user=user, session_id=name, **fields))


def said(box, name, position, reason, what, **removed):
    """Why says this, and what took it."""
    got = ask(box, name, position)
    equal((got.found, got.reason), (True, reason), f"{what}: why at {position}")
    for field, value in removed.items():
        equal(getattr(got.removed, field), value, f"{what}: removed.{field}")
    return got


def ways(box, check_it, name, **fields):
    """As it is, after a clean restart, after kill -9.  check_it(box, talk, what)"""
    for how in ("before", "restart", "kill -9"):
        if how == "restart":
            box.restart()
        if how == "kill -9":
            box.crash()
        check_it(Talk(box.client(), name, **fields), f"{name}, {how}")


def verified(box):
    """The stopped directory is whole."""
    box.stop()
    code, out, err = kvdump("verify", box.state)
    equal((code, err), (0, ""), f"kvdump verify says {out}")
    return State(box.state)


def history(state, label):
    """[(cause, rows kept, from, to, checkpoints, limit)] by docs/format.md."""
    value = state.trees[state.session(label)].history
    found = []
    for i in range(value[1] if value else 0):
        at = 4 + 40 * i
        start, end, count = struct.unpack_from("<III", value, at + 4)
        limit, = struct.unpack_from("<Q", value, at + 24)
        found.append((CODES[value[at]], value[at + 1] == 2, start, end, count, limit))
    return found


@case
def nothing_was_stored():
    box = Box("synthetic").start()
    talk = Talk(box.client(), "s")
    got = talk.lookup(tokens(100))
    resumed(got, MISS, 0, "a session without tokens", reason="NEVER_STORED")
    check(not got.HasField("removed"), "nothing took anything")
    said(box, "s", None, "NEVER_STORED", "empty")
    said(box, "s", 7, "NEVER_STORED", "empty")
    equal(talk.get().reason, "NEVER_STORED", "GetSession")
    prompt = tokens(300)
    talk.prefill(prompt)
    got = said(box, "s", 7, "", "stored")
    check(got.stored, "its rows are there")
    equal((got.head_position, got.checkpoints), (300, 1), "head, checkpoints")
    said(box, "s", 299, "", "the last one")
    said(box, "s", 300, "NEVER_STORED", "beyond the head")
    equal(talk.get().reason, "", "GetSession of a live session")
    got = talk.lookup(prompt + tokens(50))
    check(not got.HasField("removed"), "what goes on misses nothing")
    got = talk.lookup(prompt[:100] + tokens(50))
    equal((got.reason, got.diverged_at), ("DIVERGED", 100), "another text")
    box.stop()


@case
def too_short_for_a_replay():
    box = Box("synthetic", {"pool.ttl": "1s"}).start()
    talk = Talk(box.client(), "s")
    prompt = tokens(14)
    talk.prefill(prompt)
    talk.close()
    box.advance(5000)

    def look(talk, what):
        resumed(talk.lookup(prompt + tokens(5)), MISS, 0, what, reason="TOO_SHORT")
        equal(talk.get().reason, "TOO_SHORT", f"{what}: GetSession")
        said(box, "s", None, "TOO_SHORT", what)
    ways(box, look, "s")
    box.stop()


@case
def expired():
    """The age and the limit are told as long as the session is known."""
    box = Box("synthetic").start()
    talk = Talk(box.client(), "s", ttl_ms=10 * MINUTE_MS)
    prompt = tokens(300)
    ids = [c.id for c in talk.prefill(prompt).checkpoints]
    box.advance(9 * MINUTE_MS)
    check(talk.lookup(prompt).stored_tokens == 300, "in its time")
    box.advance(4 * MINUTE_MS)
    age = {}

    def look(talk, what):
        got = talk.lookup(prompt + tokens(9))
        resumed(got, MISS, 0, what, reason="EXPIRED")
        equal((got.removed.cause, got.removed.limit_name, got.removed.limit),
              ("EXPIRED", "ttl_ms", 10 * MINUTE_MS), f"{what}: limit")
        check(10 * MINUTE_MS < got.removed.value <= 14 * MINUTE_MS, f"{what}: {got.removed.value}")
        equal(age.setdefault("value", got.removed.value), got.removed.value, f"{what}: the age stays")
        said(box, "s", None, "EXPIRED", what, limit=10 * MINUTE_MS)
        said(box, "s", 299, "EXPIRED", what, limit_name="ttl_ms")
        said(box, "s", 300, "NEVER_STORED", what)
        equal(talk.get().reason, "EXPIRED", f"{what}: GetSession")
        equal([(r.cause, getattr(r, "from"), r.to, r.checkpoints) for r in talk.get().removals],
              [("EXPIRED", 0, 300, 1)], f"{what}: the list")
        expect(talk.call.Rollback, pb.RollbackRequest(session_id="s", checkpoint_id=ids[0]),
               code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND", value="EXPIRED")
        expect(talk.call.Rollback, pb.RollbackRequest(session_id="s", checkpoint_id=b"x" * 16),
               code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND", value="NEVER_STORED")
    ways(box, look, "s", ttl_ms=10 * MINUTE_MS)
    state = verified(box)
    equal(history(state, "alice/s"), [("EXPIRED", False, 0, 300, 1, 10 * MINUTE_MS)], "on disk")
    box.start()
    talk = Talk(box.client(), "s", ttl_ms=10 * MINUTE_MS)
    talk.prefill(prompt)
    said(box, "s", 10, "", "stored again")
    equal(len(talk.get().removals), 1, "what was before stays in the list")
    box.advance(31 * 24 * 60 * MINUTE_MS)
    expect(talk.get, code="NOT_FOUND", reason="SESSION_NOT_FOUND", value="s")
    state = verified(box)
    equal(state.trees, {}, "of a session that is forgotten no history is left")


@case
def a_window_that_is_gone():
    """Rows are there, the window is not: by its time, then with the process."""
    box = Box("synthetic").start()
    talk = Talk(box.client(), "s")
    prompt = tokens(300)
    talk.prefill(prompt)
    talk.close()
    box.advance(POOL_TTL_MS + 1000)
    resumed(talk.lookup(prompt + tokens(9)), REPLAY, 300, "later", reason="EXPIRED")
    equal(talk.get().reason, "EXPIRED", "GetSession")
    said(box, "s", None, "EXPIRED", "the head")
    for again in (box.restart, box.crash):
        again()
        talk = Talk(box.client(), "s")
        resumed(talk.lookup(prompt + tokens(9)), REPLAY, 300, "after a start", reason="LOST_NODE")
        equal(talk.get().reason, "LOST_NODE", "GetSession")
        check(said(box, "s", None, "LOST_NODE", "the head").stored, "its rows are there")
    box.stop()


@case
def capacity():
    """The tier is full: the least recently used session goes, leaf by leaf."""
    box = Box("synthetic", SMALL).start()
    talk, prompt = Talk(box.client(), "old"), tokens(1280)
    patiently(talk.prefill, prompt[:640])
    box.advance(1000)
    patiently(talk.prefill, prompt)
    ids = [c.id for c in talk.get().checkpoints]
    talk.close()
    box.advance(2000)
    client, count = box.client(), 0
    while ask(box, "old").stored and count < 200:
        one = Talk(client, f"n{count}")
        patiently(one.prefill, tokens(1280))
        one.close()
        box.advance(1000)
        count += 1
    check(0 < count < 200, f"gone after {count} more sessions")

    def look(talk, what):
        got = talk.lookup(prompt)
        resumed(got, MISS, 0, what, reason="CAPACITY")
        equal((got.removed.cause, got.removed.limit_name, got.removed.limit),
              ("CAPACITY", "ssd_bytes", 8 << 20), what)
        check(0 < got.removed.value <= 8 << 20, f"{what}: in use {got.removed.value}")
        said(box, "old", 0, "CAPACITY", what, limit_name="ssd_bytes")
        said(box, "old", 1279, "CAPACITY", what)
        said(box, "old", 1280, "NEVER_STORED", what)
        for one in ids:
            expect(talk.call.Rollback, pb.RollbackRequest(session_id="old", checkpoint_id=one),
                   code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND", value="CAPACITY")
    ways(box, look, "old")
    state = verified(box)
    causes = {h[0] for h in history(state, "alice/old")}
    equal(causes, {"CAPACITY"}, "on disk")


@case
def a_part_that_is_gone():
    """The tail went: what is left serves, and the answer says what took the rest."""
    box = Box("synthetic").start()
    talk, prompt = Talk(box.client(), "s"), tokens(900)
    patiently(talk.prefill, prompt[:400])
    patiently(talk.prefill, prompt)
    talk.close()
    box.stop()
    box.page_bytes = 20480
    (path, offset), = find_pages(box, prompt[768:896])
    flip(path, offset + 300)
    box.start()
    talk = Talk(box.client(), "s")
    got = talk.prefill(prompt + tokens(20), no_checkpoint=True)
    equal((got.reason, got.hit_tokens), ("CORRUPT", 400), "the resume that meets it")
    talk.close()

    def look(talk, what):
        got = talk.lookup(prompt + tokens(20))
        equal((got.stored_tokens, got.removed.cause), (400, "CORRUPT"), what)
        equal((getattr(got.removed, "from"), got.removed.to), (400, 900), f"{what}: positions")
        check(ask(box, "s", 399).stored, f"{what}: what is left is stored")
        said(box, "s", 400, "CORRUPT", what)
        said(box, "s", 900, "NEVER_STORED", what)
        got = talk.lookup(prompt[:200] + tokens(20))
        check(not got.HasField("removed"), f"{what}: another text did not look for it")
    ways(box, look, "s")
    box.stop()


@case
def a_segment_that_is_gone():
    """What a start finds missing is told as well."""
    box = Box("synthetic", {"ssd.segment_bytes": "256KiB", "ssd.bytes": "8MiB"}).start()
    talk, prompt = Talk(box.client(), "s"), tokens(4000)
    patiently(talk.prefill, prompt[:1000])
    patiently(talk.prefill, prompt)
    box.stop()
    box.page_bytes = 20480
    (path, _), = find_pages(box, prompt[2048:2176])
    os.remove(path)
    box.start()
    check(box.stats().dropped_checkpoints > 0, "a checkpoint was dropped at the start")

    def look(talk, what):
        got = talk.lookup(prompt)
        equal((got.stored_tokens, got.removed.cause), (1000, "CORRUPT"), what)
        said(box, "s", 2048, "CORRUPT", what)
    ways(box, look, "s")
    box.stop()


@case
def deleted():
    """The session is gone, and says so; of an erased user nothing is left to say."""
    box = Box("synthetic").start()
    for name in ("a", "b"):
        talk = Talk(box.client(), name)
        patiently(talk.prefill, tokens(300), level=pb.LEVEL_SSD)
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="b"))
    for how in (None, box.restart, box.crash):
        if how:
            how()
        got = ask(box, "b", 10)
        equal((got.found, got.reason, got.removed.checkpoints), (False, "DELETED", 1), f"{how}")
        check(got.removed.removed_ms > 0, "when")
        expect(box.client().session.GetSession, pb.GetSessionRequest(session_id="b"),
               code="NOT_FOUND", reason="SESSION_NOT_FOUND", value="DELETED")
        check(ask(box, "a", 10).found, "the other one is there")
    talk = Talk(box.client(), "b")
    check(talk.opened.created, "it can begin again")
    said(box, "b", None, "NEVER_STORED", "then it is new")
    talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="b"))
    box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice"))
    for how in (None, box.crash):
        if how:
            how()
        for name in ("a", "b"):
            expect(ask, box, name, code="NOT_FOUND", reason="SESSION_NOT_FOUND", value=name)
    state = verified(box)
    equal([k for k in state.records if k[:1] in b"DTSU"], [], "no record of alice is left")


@case
def rolled_back():
    """What a Rollback without keep took, by position and by id."""
    box = Box("synthetic").start()
    talk, prompt = Talk(box.client(), "s"), tokens(900)
    for end in (200, 500, 900):
        patiently(talk.prefill, prompt[:end], level=pb.LEVEL_SSD)
    ids = [c.id for c in talk.get().checkpoints]
    talk.rollback(ids[0], keep=False)

    def look(talk, what):
        got = talk.lookup(prompt)
        equal((got.stored_tokens, got.removed.cause), (200, "ROLLED_BACK"), what)
        equal((getattr(got.removed, "from"), got.removed.to, got.removed.checkpoints),
              (200, 900, 2), f"{what}: positions")
        said(box, "s", 200, "ROLLED_BACK", what)
        said(box, "s", 899, "ROLLED_BACK", what)
        said(box, "s", 900, "NEVER_STORED", what)
        check(ask(box, "s", 199).stored, f"{what}: what is left")
        for one in ids[1:]:
            expect(talk.call.Rollback, pb.RollbackRequest(session_id="s", checkpoint_id=one),
                   code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND", value="ROLLED_BACK")
            expect(talk.call.WaitDurable, pb.WaitDurableRequest(
                session_id="s", checkpoint_id=one, level=pb.LEVEL_SSD),
                   code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND", value="ROLLED_BACK")
        expect(talk.call.Rollback, pb.RollbackRequest(session_id="s", position=500,
                                                      digest=bytes(32)),
               code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND", value="ROLLED_BACK")
    ways(box, look, "s")
    state = verified(box)
    equal(history(state, "alice/s"), [("ROLLED_BACK", False, 200, 900, 2, 0)], "on disk")


@case
def of_forks():
    """Sessions that share a tree share what is known of it; the one that left says so."""
    box = Box("synthetic").start()
    talk, prompt = Talk(box.client(), "s", ttl_ms=10 * MINUTE_MS), tokens(600)
    patiently(talk.prefill, prompt[:200], level=pb.LEVEL_SSD)
    at = talk.get().head_checkpoint_id
    patiently(talk.prefill, prompt, level=pb.LEVEL_SSD)
    talk.call.Fork(pb.ForkRequest(session_id="s", checkpoint_id=at, new_session_id="f",
                                  ttl_ms=60 * MINUTE_MS))
    fork = Talk.__new__(Talk)
    fork.call, fork.name = talk.call, "f"
    box.advance(8 * MINUTE_MS)
    patiently(fork.prefill, prompt[:200] + tokens(90), level=pb.LEVEL_SSD)
    box.advance(5 * MINUTE_MS)
    for how in (None, box.restart, box.crash):
        if how:
            how()
            talk.call = fork.call = box.client().session
        got = talk.lookup(prompt)
        equal((got.stored_tokens, got.removed.cause), (200, "EXPIRED"), f"{how}: of the first one")
        said(box, "s", 599, "EXPIRED", f"{how}", limit=10 * MINUTE_MS)
        equal([r.cause for r in fork.get().removals], ["EXPIRED"], f"{how}: the fork's list")
        check(ask(box, "f", 199).stored, f"{how}: what the fork needs is there")
    delete = talk.call.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
    check(delete.deleted, "the first one leaves")
    box.crash()
    fork.call = box.client().session
    equal(ask(box, "s", 10).reason, "DELETED", "it says so")
    check(ask(box, "f", 199).stored, "and the fork is there")
    equal([r.cause for r in fork.get().removals], ["EXPIRED"], "with what was removed")
    fork.call.DeleteSession(pb.DeleteSessionRequest(session_id="f"))
    state = verified(box)
    equal([k for k in state.records if k[:1] == b"T"], [], "no record of the tree is left")


@case
def many_deleted():
    """The last 1,024 are known; older ones are as if they never were."""
    box = Box("synthetic").start()
    call = box.client().session

    def some(i):
        call.OpenSession(pb.OpenSessionRequest(session_id=f"n{i}"))
        call.DeleteSession(pb.DeleteSessionRequest(session_id=f"n{i}"))
    for i in range(6):
        some(i)  # The oldest, in this order.
    together(32, lambda t: [some(i) for i in range(6 + t * 32, 6 + t * 32 + 32)])
    for how in (None, box.crash):
        if how:
            how()
        for i, value in ((0, "n0"), (5, "n5"), (6, "DELETED"), (1029, "DELETED")):
            expect(box.client().session.GetSession, pb.GetSessionRequest(session_id=f"n{i}"),
                   code="NOT_FOUND", reason="SESSION_NOT_FOUND", value=value)
    state = verified(box)
    equal(len([k for k in state.records if k[:1] == b"D"]), 1024, "records")


@case
def another_model():
    box = Box().start()
    talk, prompt = Talk(box.client(), "s"), tokens(300)
    talk.prefill(prompt)
    other = os.path.join(d.scratch(), "other-why")
    subprocess.run([os.path.join(d.BUILD, "tools", "mkmodel"), "--config", "tiny", "--seed", "2",
                    other], check=True, stdout=subprocess.DEVNULL)
    box.stop()
    box.flags["engine.model_dir"] = other
    box.start()

    def look(talk, what):
        got = talk.lookup(prompt + tokens(9))
        resumed(got, MISS, 0, what, reason="MODEL_CHANGED")
        equal(got.removed.cause, "MODEL_CHANGED", what)
        equal(talk.get().reason, "MODEL_CHANGED", f"{what}: GetSession")
        said(box, "s", 10, "MODEL_CHANGED", what)
    ways(box, look, "s")
    box.stop()
    box.flags["engine.model_dir"] = model_dir()
    box.start()
    check(said(box, "s", 10, "", "its own model again").stored, "its rows are there")
    old = box.stats().model_fingerprint.hex()
    box.stop()
    box.flags["engine.model_dir"] = other
    box.start()
    talk = Talk(box.client(), "s")
    mine = tokens(300)
    talk.prefill(mine)
    talk.close()
    purge(box, old, prompt, mine)


def purge(box, old, prompt, mine):
    """cachectl purge: frees what the old model left, and nothing of the new one."""
    ops = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    new = box.stats().model_fingerprint.hex()
    used = box.tier("ssd").items_used
    check("--yes" in ops.code(2, "purge", "--model", old[:16]).stderr, "wants --yes")
    check("MODEL_IN_USE" in ops.code(1, "purge", "--yes", "--model", new[:16]).stderr, "in use")
    check("MODEL_INVALID" in ops.code(2, "purge", "--yes", "--model", "x").stderr, "no model")
    ops.code(2, "purge", "--yes")
    mine_only = Tool("unix:" + box.socket, token_file(box.directory, "alice"))
    check("ROLE_DENIED" in mine_only.code(4, "purge", "--yes", "--model", "other").stderr, "ops only")
    lines = ops.code(0, "purge", "--model", "other", "--dry-run").stdout.splitlines()
    check([old[:16], "1", "would go"] in [line.split("\t") for line in lines], lines)
    check([new[:16], "1", "served"] in [line.split("\t") for line in lines], lines)
    equal(lines[-1], "would purge 1 checkpoints, 60.0 KiB", "dry run")
    equal(box.tier("ssd").items_used, used, "it has done nothing")
    document = ops.json("--json", "purge", "--yes", "--model", old[:16])
    equal((document["checkpoints"], document["bytes"]), (1, 3 * 20480), "receipt")
    equal(used - box.tier("ssd").items_used, 3, "its places are free")
    equal(ops.json("--json", "purge", "--yes", "--model", "other")["checkpoints"], 0, "once more")
    box.crash()
    resumed(Talk(box.client(), "s").lookup(mine + tokens(9)), REPLAY, 300, "the new one's stays")
    state = verified(box)
    equal(history(state, "alice/s"), [("MODEL_CHANGED", False, 0, 300, 1, 0)], "on disk")
    box.flags["engine.model_dir"] = model_dir()
    box.start()
    talk = Talk(box.client(), "s")
    got = talk.lookup(prompt)
    equal((got.outcome, got.removed.cause), (MISS, "MODEL_CHANGED"), "the old model finds nothing")
    box.stop()


@case
def as_a_program():
    """cachectl why: the cause first; --json the same; exit codes."""
    box = Box("synthetic").start()
    talk = Talk(box.client(), "s", ttl_ms=10 * MINUTE_MS)
    talk.prefill(tokens(300))
    box.advance(13 * MINUTE_MS)
    ops = Tool("unix:" + box.socket, token_file(box.directory, "ops"))
    mine = Tool("unix:" + box.socket, token_file(box.directory, "alice"))
    his = Tool("unix:" + box.socket, token_file(box.directory, "bob"))
    for tool in (ops, mine):
        got = tool.code(0, "why", "alice", "s", "10")
        lines = got.stdout.splitlines()
        check(lines[0].startswith("EXPIRED age=") and " limit=10m 0s removed=20" in lines[0], lines[0])
        check(lines[1].startswith("alice/s: head at 0, 0 checkpoints"), lines[1])
        equal(lines[2], "position 10: no rows of it", "the position")
        check(any(line.split("\t")[:4] == ["EXPIRED", "0", "300", "1"] for line in lines), lines)
    document = ops.json("--json", "why", "alice", "s", "10")
    equal((document["reason"], document["removed"]["limit"], document["stored"]),
          ("EXPIRED", 10 * MINUTE_MS, False), "--json")
    equal(ops.json("--json", "why", "alice", "s", "300")["reason"], "NEVER_STORED", "beyond")
    got = his.code(4, "why", "alice", "s")
    check("ROLE_DENIED" in got.stderr, got.stderr)
    check("SESSION_NOT_FOUND" in ops.code(3, "why", "alice", "t").stderr, "unknown session")
    check("SESSION_NOT_FOUND" in ops.code(3, "why", "nobody", "s").stderr, "unknown user")
    check("USER_INVALID" in ops.code(2, "why", "a/b", "s").stderr, "no user's name")
    check("SESSION_ID_INVALID" in ops.code(2, "why", "alice", "a b").stderr, "no session's name")
    check("POSITION_INVALID" in ops.code(2, "why", "alice", "s", "1048576").stderr, "too far")
    ops.code(2, "why", "alice", "s", "-1")
    ops.code(2, "why", "alice")
    box.stop()


run_cases(__doc__)
