"""Quotas: never above the limit, the user's own least recently used first, live, and durable.

All that is refused names limit, value and remedy; all that goes says QUOTA.
"""

import threading

import grpc
from cli import Tool, token_file
from daemon import Failure, admin_pb, check, equal, expect, pb
from state_files import State, kvdump
from talk import (
    EXACT, MISS, REPLAY, Box, Talk, case, patiently, resumed, run_cases, together, tokens)

OFF = {"quota.default_sessions": "0", "quota.default_turns": "0"}
PAGE_BYTES = 20480
LIMITS = ["sessions", "turns", "bytes_ssd", "requests_per_s", "tokens_per_s", "saves", "ttl_ms"]


def tool(box, user="ops"):
    return Tool("unix:" + box.socket, token_file(box.directory, user))


def put(box, user="alice", **limits):
    """Limits of a user: a number, None for none, "plan" for those of the plan."""
    items = []
    for name, value in limits.items():
        fields = {"unlimited": True} if value is None else \
            {"remove": True} if value == "plan" else {"limit": value}
        items.append(admin_pb.SetLimit(name=name, **fields))
    return box.client("ops").admin.SetQuota(admin_pb.SetQuotaRequest(user=user, limits=items))


def get(box, user="alice", by="ops"):
    return box.client(by).admin.GetQuota(admin_pb.GetQuotaRequest(user=user))


def limit(answer, name):
    return next(item for item in answer.limits if item.name == name)


def names(box, user="alice"):
    answer = box.client(user).session.ListSessions(pb.ListSessionsRequest(page_size=1000))
    return sorted(s.session_id for s in answer.sessions)


def why(box, name, position=None):
    fields = {} if position is None else {"has_position": True, "position": position}
    return box.client("ops").admin.Why(
        admin_pb.WhyRequest(user="alice", session_id=name, **fields))


def verified(box):
    box.stop()
    code, out, err = kvdump("verify", box.state)
    equal((code, err), (0, ""), f"kvdump verify says {out}")
    return State(box.state)


@case
def the_default_plan():
    """20 sessions and 10 turns, of the configuration."""
    box = Box("synthetic", {"quota.default_sessions": "20", "quota.default_turns": "10"}).start()
    got = get(box)
    equal((got.plan, got.found), ("default", False), "a user that is not there has the default plan")
    equal([l.name for l in got.limits], LIMITS, "all limits")
    equal((limit(got, "sessions").limit, limit(got, "turns").limit), (20, 10), "20 x 10")
    check(limit(got, "bytes_ssd").unlimited, "no limit of bytes")
    client = box.client()
    for i in range(23):
        Talk(client, f"s{i:02}").prefill(tokens(150))
        box.advance(1000)
        check(limit(get(box), "sessions").used <= 20, "never above the limit")
    equal(names(box), [f"s{i:02}" for i in range(3, 23)], "the least recently used went")
    for i in range(3):
        got = why(box, f"s{i:02}")
        equal((got.found, got.reason, got.removed.limit_name, got.removed.limit),
              (False, "QUOTA", "sessions", 20), f"s{i:02}")
        expect(client.session.GetSession, pb.GetSessionRequest(session_id=f"s{i:02}"),
               code="NOT_FOUND", reason="SESSION_NOT_FOUND", value="QUOTA")
    Talk(box.client("bob"), "his").prefill(tokens(100))
    equal(len(names(box)), 20, "another user's sessions take nothing of alice's")
    box.crash()
    equal(why(box, "s00").removed.limit, 20, "after kill -9")
    equal(limit(get(box), "sessions").used, 20, "counted again")
    verified(box)


@case
def a_fork_at_the_limit():
    """From the head, which is looked for again when another session has gone for it."""
    box = Box("synthetic", OFF).start()
    put(box, sessions=3)
    client = box.client()
    for i in range(3):
        Talk(client, f"s{i}").prefill(tokens(300), level=pb.LEVEL_SSD)
        box.advance(1000)
    for new, gone in (("f0", "s0"), ("f1", "s1")):
        got = client.session.Fork(pb.ForkRequest(session_id="s2", new_session_id=new))
        equal((got.created, got.head_position), (True, 300), f"{new} is made")
        check(gone not in names(box) and "s2" in names(box), f"{gone} went: {names(box)}")
        equal(len(names(box)), 3, "sessions")
        box.advance(1000)
    verified(box)


@case
def sessions_in_use_are_not_taken():
    """All are in use: refused with limit, value and remedy; sub and ephemeral do not count."""
    box = Box("cpu", OFF).start()
    put(box, sessions=2)
    client = box.client()
    streams = []
    for name in ("a", "b"):
        talk = Talk(client, name)
        talk.prefill(tokens(40))
        stream = talk.stream(20000, timeout=60)
        next(stream)
        streams.append(stream)
    got = expect(client.session.OpenSession, pb.OpenSessionRequest(session_id="c"),
                 code="RESOURCE_EXHAUSTED", reason="QUOTA_SESSIONS", field="sessions", limit="2",
                 value="2")
    check(got.retry_ms > 0, "when to try again")
    equal(got.quota, ("user:alice", "sessions limit=2 value=2"), "its QuotaFailure")
    Talk(client, "sub", kind=pb.SESSION_KIND_SUB, parent_session_id="a")
    Talk(client, "eph", kind=pb.SESSION_KIND_EPHEMERAL)
    equal(limit(get(box), "sessions").used, 2, "they do not count")
    for stream in streams:
        stream.cancel()
    patiently(Talk, client, "c")
    check("c" in names(box) and len(names(box)) == 4, f"one of them went: {names(box)}")
    box.stop()


@case
def turns():
    """More turns than the quota: older checkpoints lose id and window, and no row."""
    box = Box("synthetic", OFF).start()
    put(box, turns=2)
    talk, prompt = Talk(box.client(), "s"), []
    made = []
    for i in range(5):
        prompt = prompt + tokens(70)
        made.append(patiently(talk.prefill, prompt, level=pb.LEVEL_SSD).checkpoints[0].id)
        answer = talk.decode(7, level=pb.LEVEL_SSD)
        prompt = prompt + answer.tokens
    left = talk.get().checkpoints
    turns_left = [c for c in left if c.kind == pb.CHECKPOINT_KIND_PREFILL_END]
    equal(len(turns_left), 2, f"turns left: {[c.position for c in left]}")

    def look(talk, what):
        got = why(box, "s", 10)
        equal((got.reason, got.removed.limit_name, got.removed.limit, got.removed.rows_kept,
               got.stored), ("QUOTA", "turns", 2, True, True), f"{what}: why")
        check(got.removed.removed_ms > 0, f"{what}: when")
        expect(talk.call.Rollback, pb.RollbackRequest(session_id="s", checkpoint_id=made[0]),
               code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND", value="QUOTA")
        for at in (50, 130, 201, 300):  # Any position of the history.
            got = talk.lookup(prompt[:at] + tokens(20))
            check(got.outcome in (EXACT, REPLAY), f"{what}: at {at}: {got.reason}")
            equal(got.stored_tokens, at, f"{what}: at {at}")
    look(talk, "live")
    box.restart()
    look(Talk(box.client(), "s"), "restart")
    box.crash()
    talk = Talk(box.client(), "s")
    look(talk, "kill -9")
    resumed(talk.prefill(prompt[:201] + tokens(33)), REPLAY, 200, "back to the middle")
    box.no_wrong_bytes("after joining edges")
    state = verified(box)
    check(len(state.trees[state.session("alice/s")].nodes) <= 8, "few nodes are left")


@case
def side_branches_of_old_turns():
    """They lose their rows; the branch that goes on keeps them."""
    box = Box("synthetic", OFF).start()
    talk, prompt = Talk(box.client(), "s"), tokens(200)
    patiently(talk.prefill, prompt, level=pb.LEVEL_SSD)
    beside = prompt + tokens(300)
    patiently(talk.prefill, beside, level=pb.LEVEL_SSD)
    put(box, turns=2)
    for _ in range(3):
        prompt = prompt + tokens(60)
        patiently(talk.prefill, prompt, level=pb.LEVEL_SSD)
    got = talk.lookup(beside)
    equal((got.stored_tokens, got.removed.cause), (200, "QUOTA"), "the side branch is gone")
    equal(talk.lookup(prompt + tokens(9)).stored_tokens, len(prompt), "the other one is whole")
    verified(box)


@case
def bytes_on_ssd():
    """Never above, with what is in flight; own sessions make room, then the save is refused."""
    box = Box("synthetic", OFF).start()
    most = 60 * PAGE_BYTES
    put(box, bytes_ssd=most)
    client, over, stop = box.client(), [], threading.Event()

    def watch():
        while not stop.is_set():
            used = limit(get(box), "bytes_ssd").used
            if used > most:
                over.append(used)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(12):
        talk = Talk(client, f"s{i:02}")
        got = patiently(talk.prefill, tokens(1280), level=pb.LEVEL_SSD)
        equal(got.save_reason, "", f"s{i:02} is saved")
        talk.close()
        box.advance(1000)
    check("s11" in names(box) and "s00" not in names(box), f"the oldest went: {names(box)}")
    equal(why(box, "s00").removed.limit_name, "bytes_ssd", "why")
    talk, before = Talk(client, "large"), names(box)
    got = talk.prefill(tokens(61 * 128), level=pb.LEVEL_SSD)
    equal((got.save_reason, len(got.checkpoints)), ("QUOTA_BYTES_SSD", 0), "more than all of it")
    equal(names(box), before, "nothing goes for what cannot fit")
    expect(talk.call.Checkpoint, pb.CheckpointRequest(session_id="large", level=pb.LEVEL_SSD),
           code="RESOURCE_EXHAUSTED", reason="QUOTA_BYTES_SSD")
    equal(talk.decode(3, no_checkpoint=True).end.tokens, 3, "it goes on in memory")
    stop.set()
    watcher.join()
    equal(over, [], "never above the limit")
    verified(box)


@case
def rates():
    box = Box("synthetic", OFF).start()
    talk = Talk(box.client(), "s")
    put(box, requests_per_s=5)
    refused = []
    for _ in range(20):
        try:
            talk.get()
        except grpc.RpcError as error:
            refused.append(Failure(error))
    check(len(refused) >= 10, f"{len(refused)} of 20 are refused")
    equal((refused[0].code, refused[0].reason, refused[0].limit),
          ("RESOURCE_EXHAUSTED", "QUOTA_REQUESTS", "5"), "how")
    check(0 < refused[0].retry_ms <= 1000, f"when: {refused[0].retry_ms}")
    Talk(box.client("bob"), "his")  # Another user is not held up.
    put(box, requests_per_s=None, tokens_per_s=100)
    patiently(talk.prefill, tokens(1000))  # Let through, and paid off afterwards.
    got = expect(talk.call.Prefill, pb.PrefillRequest(session_id="s", tokens=b"\1\0\0\0"),
                 code="RESOURCE_EXHAUSTED", reason="QUOTA_TOKENS", limit="100")
    check(5000 < got.retry_ms < 12000, f"the rest of 1000 tokens: {got.retry_ms}")
    put(box, tokens_per_s="plan")
    talk.prefill(tokens(20))
    box.stop()


@case
def live_and_durable():
    """Set, get, delete; plans; over kill -9."""
    box = Box("synthetic", OFF).start()
    ops = box.client("ops").admin
    put(box, sessions=7, bytes_ssd=1 << 30)
    ops.SetPlan(admin_pb.SetPlanRequest(name="small", limits=[
        admin_pb.SetLimit(name="sessions", limit=3), admin_pb.SetLimit(name="turns", limit=2)]))
    ops.SetQuota(admin_pb.SetQuotaRequest(user="bob", plan="small"))
    for how in (None, box.restart, box.crash):
        if how:
            how()
        ops = box.client("ops").admin
        got = get(box)
        equal((limit(got, "sessions").limit, limit(got, "sessions").own), (7, True), f"{how}: own")
        check(limit(got, "turns").unlimited and not limit(got, "turns").own, f"{how}: of the plan")
        got = get(box, "bob")
        equal((got.plan, limit(got, "sessions").limit, limit(got, "turns").limit), ("small", 3, 2),
              f"{how}: by plan")
        plans = ops.ListPlans(admin_pb.ListPlansRequest()).plans
        equal([(p.name, p.users) for p in plans], [("default", 1), ("small", 1)], f"{how}: plans")
        rows = ops.ListUsers(admin_pb.ListUsersRequest()).users
        equal(sorted((r.user, r.plan, r.own) for r in rows),
              [("alice", "default", True), ("bob", "small", False)], f"{how}: users")
    expect(ops.SetPlan, admin_pb.SetPlanRequest(name="small", remove=True),
           code="FAILED_PRECONDITION", reason="PLAN_IN_USE", value="1")
    expect(ops.SetPlan, admin_pb.SetPlanRequest(name="none", remove=True), code="NOT_FOUND",
           reason="PLAN_NOT_FOUND")
    expect(ops.SetQuota, admin_pb.SetQuotaRequest(user="bob", plan="none"), code="NOT_FOUND",
           reason="PLAN_NOT_FOUND", field="plan", value="none")
    check(ops.DeleteQuota(admin_pb.DeleteQuotaRequest(user="bob")).found, "deleted")
    check(not ops.DeleteQuota(admin_pb.DeleteQuotaRequest(user="bob")).found, "once")
    ops.SetPlan(admin_pb.SetPlanRequest(name="small", remove=True))
    ops.SetPlan(admin_pb.SetPlanRequest(name="default", limits=[
        admin_pb.SetLimit(name="sessions", limit=9)]))
    box.crash()
    equal(limit(get(box, "bob"), "sessions").limit, 9, "the default plan is set")
    ops = box.client("ops").admin
    ops.SetPlan(admin_pb.SetPlanRequest(name="default", remove=True))
    check(limit(get(box, "bob"), "sessions").unlimited, "and as configured again")
    equal(get(box, by="alice").plan, "default", "a harness sees its own")
    expect(get, box, "bob", "alice", code="PERMISSION_DENIED", reason="ROLE_DENIED")
    state = verified(box)
    equal(sorted(k[:1] for k in state.records if k[:1] in b"YB"), [b"B"], "records left")


@case
def lowered_below_use():
    """A dry run says what would go; the next that needs room takes it."""
    box = Box("synthetic", OFF).start()
    client = box.client()
    for i in range(6):
        Talk(client, f"s{i}").prefill(tokens(150), level=pb.LEVEL_SSD)
        box.advance(1000)
    lines = tool(box).code(0, "quota", "set", "alice", "--sessions", "4", "--dry-run").stdout
    goes = [line.split("\t")[1] for line in lines.splitlines() if line.endswith("\tgoes")]
    equal(goes, ["s0", "s1"], f"the dry run: {lines}")
    check(limit(get(box), "sessions").unlimited, "it has set nothing")
    document = tool(box).json("--json", "quota", "set", "alice", "--sessions", "4")
    equal([n["session_id"] for n in document["next"] if n["over"]], ["s0", "s1"], "--json")
    Talk(client, "new")
    equal(names(box), ["new", "s3", "s4", "s5"], "what was over went with the next one")
    box.stop()


@case
def as_a_program():
    box = Box("synthetic", OFF).start()
    ops, mine = tool(box), tool(box, "alice")
    Talk(box.client(), "s").prefill(tokens(200), level=pb.LEVEL_SSD)
    lines = ops.code(0, "quota", "set", "alice", "--turns", "2", "--bytes", "50GiB",
                     "--requests", "none").stdout.splitlines()
    equal(lines[0], "user alice, plan default", "whose")
    rows = [line.split("\t") for line in lines]
    check(["turns", "2", "-", "own"] in rows, rows)
    check(["bytes_ssd", "50.0 GiB", "40.0 KiB", "own"] in rows, rows)
    check(["requests_per_s", "none", "-", "own"] in rows, rows)
    check(any(row[:2] == ["1", "s"] for row in rows), f"what goes next: {rows}")
    equal(mine.code(0, "quota", "get", "alice").stdout.splitlines()[0], lines[0], "one's own")
    mine.code(4, "quota", "get", "bob")
    mine.code(4, "quota", "set", "alice", "--turns", "3")
    check("QUOTA_INVALID" in ops.code(2, "quota", "set", "alice", "--turns", "0").stderr, "range")
    ops.code(2, "quota", "set", "alice", "--turns", "many")
    ops.code(2, "quota", "set", "alice", "--bytes", "5 GiB")
    ops.code(2, "quota", "set")
    ops.code(0, "quota", "plan", "small", "--sessions", "20", "--turns", "10")
    ops.code(0, "quota", "set", "bob", "--plan", "small")
    rows = [line.split("\t") for line in ops.code(0, "quota", "plan").stdout.splitlines()]
    check(["small", "1", "20", "10", "none", "none", "none", "none", "3d 0h"] in rows, rows)
    rows = [line.split("\t") for line in ops.code(0, "quota", "list").stdout.splitlines()]
    check(["bob", "small", "0", "20", "0 B", "none"] in rows, rows)
    check("PLAN_IN_USE" in ops.code(1, "quota", "plan", "small", "--delete").stderr, "in use")
    equal(ops.code(0, "quota", "delete", "bob").stdout, "bob has the limits of the default plan now\n",
          "deleted")
    ops.code(0, "quota", "plan", "small", "--delete")
    ops.code(2, "quota", "plan", "--delete")
    box.stop()


@case
def races():
    """Many at once on one user: never above the limit at any look, exact at the end."""
    box = Box("synthetic", OFF).start()
    put(box, sessions=5, bytes_ssd=60 * PAGE_BYTES)
    over, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            got = get(box)
            used = limit(got, "sessions").used, limit(got, "bytes_ssd").used
            if used[0] > 5 or used[1] > 60 * PAGE_BYTES:
                over.append(used)
    watcher = threading.Thread(target=watch)
    watcher.start()
    clients = [box.client() for _ in range(16)]

    def work(index):
        call = clients[index].session
        for turn in range(12):
            name = f"r{(index * 5 + turn) % 9}"
            try:
                call.OpenSession(pb.OpenSessionRequest(session_id=name), timeout=20)
                ids = [1 + (turn * 7 + i) % 400 for i in range(50 + 40 * turn)]
                call.Prefill(pb.PrefillRequest(
                    session_id=name, tokens=b"".join(t.to_bytes(4, "little") for t in ids)),
                    timeout=20)
                if turn % 4 == 3:
                    call.DeleteSession(pb.DeleteSessionRequest(session_id=name), timeout=20)
            except grpc.RpcError as error:
                reason = Failure(error).reason
                if reason not in ("SESSION_BUSY", "QUOTA_SESSIONS", "SESSION_NOT_FOUND",
                                  "CANCELLED"):
                    raise
    together(16, work)
    stop.set()
    watcher.join()
    equal(over, [], "never above the limit")
    used = limit(get(box), "bytes_ssd").used
    rows = box.operator.DiskUsage(admin_pb.DiskUsageRequest()).rows
    equal(used, sum(r.live_bytes + r.expired_bytes for r in rows), "the sum is what du counts")
    equal(limit(get(box), "sessions").used, len(names(box)), "and the number of sessions")
    verified(box)


run_cases(__doc__)
