"""cachectl du: bytes by user, by session and by state, equal to what the file system says.

What is expected comes from tests/integration/state_files.py, which counts records and pages of a
stopped directory.
"""

import os

from cli import Tool, token_file
from daemon import admin_pb, check, equal, expect, failure, pb
from state_files import State
from talk import Box, Talk, case, flip, patiently, rng, run_cases, tokens

MIB = 1 << 20
SEGMENT = 256 << 10
FLAGS = {"ssd.segment_bytes": "256KiB", "ssd.bytes": "16MiB"}
STATES = ("live_bytes", "expired_bytes", "quarantined_bytes", "free_bytes", "overhead_bytes")


def tool(box, user="ops"):
    return Tool("unix:" + box.socket, token_file(box.directory, user))


def save(box, user, name, count, **fields):
    talk = Talk(box.client(user), name, **fields)
    got = patiently(talk.prefill, tokens(count), level=pb.LEVEL_SSD)
    equal(got.save_reason, "", "saved")
    talk.close()
    return talk


def blocks(box):
    """What the file system says of the segment files."""
    return sum(os.stat(path).st_blocks * 512 for path in box.segments())


def agrees(box, what):
    """States add up to the files, and the files to the file system, within one segment."""
    got = tool(box).json("du", "--json")
    equal(sum(got[name] for name in STATES), got["bytes_files"], f"{what}: the states add up")
    check(abs(got["bytes_files"] - blocks(box)) <= SEGMENT,
          f"{what}: du says {got['bytes_files']}, the file system {blocks(box)}")
    page = box.stats().page_bytes
    pages = sum((os.path.getsize(p) - 4096) // page for p in box.segments())
    used = box.tier("ssd").items_used
    equal(got["free_bytes"] // page + used + got["quarantined_bytes"] // page, pages,
          f"{what}: free + used + quarantined")
    equal(got["live_bytes"] + got["expired_bytes"] <= used * page, True, f"{what}: within used")
    return got


def by_name(document, key):
    return {row[key]: row for row in document["rows"]}


@case
def users_sessions_and_states():
    box = Box("synthetic", FLAGS).start()
    empty = agrees(box, "empty")
    equal((empty["rows"], empty["live_bytes"]), ([], 0), "nothing is stored")
    for i in range(5):
        save(box, "alice", f"a{i}", rng.randrange(200, 900))
    save(box, "bob", "b0", 500)
    for loaded in (True, False):
        if not loaded:
            box.restart()
        got = agrees(box, f"loaded {loaded}")
        users = by_name(got, "user")
        equal(sorted(users), ["alice", "bob"], "users")
        equal((users["alice"]["sessions"], users["bob"]["sessions"]), (5, 1), "sessions")
        equal(got["expired_bytes"], 0, "nothing has expired")
        sessions = by_name(tool(box).json("du", "alice", "--json"), "session_id")
        equal(sorted(sessions), [f"a{i}" for i in range(5)], "sessions of alice")
        equal(sum(r["live_bytes"] for r in sessions.values()), users["alice"]["live_bytes"],
              "they add up to her bytes")
        seen = (got["live_bytes"], users, sessions) if loaded else None
        if loaded:
            before = seen
        else:
            equal((got["live_bytes"], users, sessions), before, "from records as from memory")
            equal(box.counter("cached_index_nodes"), 0, "no tree was loaded for it")
    box.stop()
    state = State(box.state)
    for session, tree in state.trees.items():
        user, name = state.label(session).split("/")
        if user == "alice":
            equal((sessions[name]["live_bytes"], sessions[name]["checkpoints"]),
                  (len(tree.pages) * state.page_bytes, len(tree.nodes)), f"records of {name}")


@case
def expired_and_quarantined():
    box = Box("synthetic", FLAGS).start()
    save(box, "alice", "short", 700, ttl_ms=60000)
    save(box, "alice", "long", 700)
    save(box, "bob", "hurt", 400)
    before = agrees(box, "all live")
    box.stop()
    state = State(box.state)
    pages = [p for p in state.pages() if state.label(p.session) == "bob/hurt"]
    path, offset = state.where(pages[0])
    flip(path, offset + 900)
    box.start()
    box.operator.Scrub(admin_pb.ScrubRequest(action=admin_pb.SCRUB_ACTION_START))
    while box.operator.Scrub(admin_pb.ScrubRequest(action=1)).running:
        pass
    got = agrees(box, "one place is quarantined")
    equal(got["quarantined_bytes"], state.page_bytes, "its bytes")
    equal(before["live_bytes"] - got["live_bytes"], len(pages) * state.page_bytes,
          "the rest of its session's pages are free")
    box.stop()
    box.start()
    agrees(box, "after a restart")
    box.advance(61000)  # The sweep drops them before it answers.
    got = agrees(box, "one session has expired")
    names = by_name(tool(box).json("du", "alice", "--json"), "session_id")
    equal(sorted(names), ["long"], "the expired one has nothing any more")
    box.stop()


@case
def what_expires_is_counted_apart():
    """A session whose first checkpoints are past their time, seen before anything drops them."""
    box = Box("synthetic", FLAGS, binary=None).start()
    talk = Talk(box.client(), "mixed", ttl_ms=100000)
    first = patiently(talk.prefill, tokens(300), level=pb.LEVEL_SSD)
    box.advance(60000)
    # Another way: its branch is used later than the first one, which nobody uses any more.
    patiently(talk.prefill, tokens(500), level=pb.LEVEL_SSD)
    talk.close()
    equal(len(first.checkpoints), 1, "one checkpoint")
    all_live = by_name(tool(box).json("du", "alice", "--json"), "session_id")["mixed"]
    box.advance(60000)
    got = by_name(tool(box).json("du", "alice", "--json"), "session_id")["mixed"]
    equal(got["live_bytes"] + got["expired_bytes"],
          all_live["live_bytes"] + all_live["expired_bytes"], "all its pages are still there")
    equal(got["expired_bytes"], 3 * box.stats().page_bytes, "those of the first branch expired")
    box.restart()
    box.advance(60000)  # A start goes on where the last use was.
    again = by_name(tool(box).json("du", "alice", "--json"), "session_id")["mixed"]
    equal(again, got, "from records as from memory")
    agrees(box, "with expired pages")
    box.stop()


@case
def full_and_emptied():
    box = Box("synthetic", dict(FLAGS, **{"ssd.bytes": "2MiB"})).start()
    for i in range(60):
        talk = Talk(box.client(), f"f{i}", ttl_ms=60000)
        if patiently(talk.prefill, tokens(900), level=pb.LEVEL_SSD).save_reason:
            break
        talk.close()
    got = agrees(box, "full")
    # What eviction keeps free, and what its last victim, a session of 8 pages, gave beyond that.
    check(got["bytes_files"] <= 2 * MIB and got["free_bytes"] <= 16 * 20480, f"it is full: {got}")
    box.advance(61000)
    got = agrees(box, "empty again")
    equal(got["live_bytes"] + got["expired_bytes"], 0, "all is free")
    box.stop()


@case
def many_sessions_in_parts():
    """More sessions than one answer has rows."""
    box = Box("synthetic", dict(FLAGS, **{"ssd.bytes": "64MiB"})).start()
    client, count = box.client(), 1150
    for i in range(count):
        talk = Talk(client, f"m{i}")
        patiently(talk.prefill, tokens(24), level=pb.LEVEL_RAM)
        talk.close()
    save(box, "bob", "b", 200)
    box.restart()
    answer = box.operator.DiskUsage(admin_pb.DiskUsageRequest(user="alice"))
    equal((len(answer.rows), len(answer.next_page_token)), (1000, 32), "one answer, and a token")
    rest = box.operator.DiskUsage(admin_pb.DiskUsageRequest(
        user="alice", page_token=answer.next_page_token))
    names = {r.session_id for r in answer.rows} | {r.session_id for r in rest.rows}
    equal((len(rest.rows), len(names), rest.next_page_token), (count - 1000, count, ""), "the rest")
    got = tool(box).json("du", "alice", "--top", "5", "--json")
    equal((got["row_count"], len(got["rows"]), got["sessions"], got["live_bytes"]),
          (count, 5, count, count * 20480), "added up")
    text = tool(box).code(0, "du", "alice", "--top", "5").stdout
    check(f"({count - 5} others)" in text and "(all)" in text, text[-200:])
    equal(by_name(agrees(box, "many"), "user")["alice"]["sessions"], count, "by user")
    box.stop()


@case
def who_may_see_what():
    box = Box("synthetic", FLAGS).start()
    save(box, "alice", "mine", 300)
    save(box, "bob", "his", 300)
    got = tool(box, "alice").json("du", "--json")
    equal([r["session_id"] for r in got["rows"]], ["mine"], "a harness sees its own sessions")
    check("bytes_files" not in got, "and nothing of the tier")
    equal(tool(box, "alice").json("du", "alice", "--json")["rows"], got["rows"], "by name as well")
    denied = tool(box, "alice").code(4, "du", "bob")
    check("ROLE_DENIED" in denied.stderr, denied.stderr)
    never = tool(box, "alice").code(4, "du", "nobody")
    equal(never.stderr, denied.stderr, "existence is not told")
    tool(box, "stats").code(4, "du")
    unknown = tool(box).code(3, "du", "nobody")
    check("USER_NOT_FOUND" in unknown.stderr, unknown.stderr)
    text = tool(box).code(0, "du").stdout
    for word in ("USER", "alice", "bob", "STATE", "quarantined", "overhead", "(files)"):
        check(word in text, f"{word} in {text}")
    for bad in ("", "x" * 65, "a b", "a/b"):
        if bad:
            expect(box.operator.DiskUsage, admin_pb.DiskUsageRequest(user=bad),
                   code="INVALID_ARGUMENT", reason="USER_INVALID", field="user")
        expect(box.operator.DiskUsage, admin_pb.DiskUsageRequest(page_token=bad or "zz"),
               code="INVALID_ARGUMENT", reason="PAGE_TOKEN_INVALID", field="page_token")
    got = failure(box.client("stats").admin.DiskUsage, admin_pb.DiskUsageRequest())
    equal(got.code, "PERMISSION_DENIED", "role stats")
    box.stop()


if __name__ == "__main__":
    run_cases(__doc__)
