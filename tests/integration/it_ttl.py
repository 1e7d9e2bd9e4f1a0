"""How long rows live: as the session says, else as the plan of its user does, else ssd.ttl.

A plan's ttl counts for sessions opened without one of their own, from the moment it is set, at
lookup and for the sweep, over restarts.
"""

import os
import struct

import grpc
from cli import Tool, token_file
from daemon import Failure, admin_pb, check, equal, expect, pb
from state_files import State, kvdump, sealed
from talk import MISS, MINUTE_MS, SSD_TTL_MS, Box, Talk, case, resumed, run_cases, tokens

HOUR_MS = 60 * MINUTE_MS
OFF = {"quota.default_sessions": "0", "quota.default_turns": "0"}
PLAN_TTL = 128  # The bit of the superblock: sessions whose ttl_ms is 0.


def tool(box, user="ops"):
    return Tool("unix:" + box.socket, token_file(box.directory, user))


def limits(value):
    """A number, None for none, "plan" for what the plan says; of a plan: for none."""
    fields = {"unlimited": True} if value is None else \
        {"remove": True} if value == "plan" else {"limit": value}
    return [admin_pb.SetLimit(name="ttl_ms", **fields)]


def plan(box, value, name="default", **fields):
    return box.client("ops").admin.SetPlan(
        admin_pb.SetPlanRequest(name=name, limits=limits(value), **fields))


def own(box, value, user="alice", **fields):
    return box.client("ops").admin.SetQuota(
        admin_pb.SetQuotaRequest(user=user, limits=limits(value), **fields))


def ttl_of(box, user="alice"):
    """(ms, the user's own, not limited by plan or user)."""
    got = box.client("ops").admin.GetQuota(admin_pb.GetQuotaRequest(user=user))
    item = next(i for i in got.limits if i.name == "ttl_ms")
    return item.limit, item.own, item.unlimited


def stored(box, name, user="alice", **fields):
    talk = Talk(box.client(user), name, **fields)
    talk.prompt = tokens(300)
    equal(talk.prefill(talk.prompt, level=pb.LEVEL_SSD).save_reason, "", f"{name}: saved")
    return talk


def life(talk):
    got = talk.get().session
    return got.ttl_ms, got.ttl_of_plan


def is_gone(box, talk, limit, what, user="alice"):
    """A miss that says EXPIRED with age and limit, in every place that says why."""
    got = talk.lookup(talk.prompt + [5])
    resumed(got, MISS, 0, what, reason="EXPIRED")
    equal((got.removed.cause, got.removed.limit_name, got.removed.limit),
          ("EXPIRED", "ttl_ms", limit), f"{what}: removed")
    check(got.removed.value > limit, f"{what}: age {got.removed.value}")
    got = box.client("ops").admin.Why(admin_pb.WhyRequest(user=user, session_id=talk.name))
    equal((got.reason, got.removed.limit_name, got.removed.limit), ("EXPIRED", "ttl_ms", limit),
          f"{what}: why")


def again(box, talk):
    """The same session on a new connection, after a restart."""
    other = Talk(box.client(), talk.name)
    other.prompt = talk.prompt
    return other


def verified(box):
    box.stop()
    code, out, err = kvdump("verify", box.state)
    equal((code, err), (0, ""), f"kvdump verify says {out}")
    return State(box.state)


def recorded_ttl(state, label):
    return struct.unpack_from("<Q", state.records[b"S" + state.session(label)], 34)[0]


@case
def of_the_plan():
    """1 h: there after 59 minutes, EXPIRED after 61; a session's own ttl wins, either way."""
    box = Box("synthetic", OFF).start()
    equal(ttl_of(box), (SSD_TTL_MS, False, True), "without one ssd.ttl counts")
    plan(box, HOUR_MS)
    equal(ttl_of(box), (HOUR_MS, False, False), "the plan's")
    plain = stored(box, "plain")
    longer = stored(box, "longer", ttl_ms=3 * HOUR_MS)
    shorter = stored(box, "shorter", ttl_ms=10 * MINUTE_MS)
    equal([life(t) for t in (plain, longer, shorter)],
          [(HOUR_MS, True), (3 * HOUR_MS, False), (10 * MINUTE_MS, False)], "as shown")
    listed = box.client().session.ListSessions(pb.ListSessionsRequest()).sessions
    equal({s.session_id: (s.ttl_ms, s.ttl_of_plan) for s in listed},
          {"plain": (HOUR_MS, True), "longer": (3 * HOUR_MS, False),
           "shorter": (10 * MINUTE_MS, False)}, "as listed")
    left = plain.get().checkpoints[0].rows_expire_ms
    check(HOUR_MS - MINUTE_MS < left <= HOUR_MS, f"what is left of it: {left}")
    box.advance(59 * MINUTE_MS)
    equal(plain.lookup(plain.prompt + [5]).stored_tokens, 300, "after 59 minutes")
    is_gone(box, shorter, 10 * MINUTE_MS, "a shorter one of its own")
    box.advance(2 * MINUTE_MS)
    is_gone(box, plain, HOUR_MS, "after 61 minutes")
    said = tool(box).code(0, "why", "alice", "plain").stdout.splitlines()[0]
    check(said.startswith("EXPIRED age=1h 1m limit=1h 0m "), said)
    equal(longer.lookup(longer.prompt + [5]).stored_tokens, 300, "a longer one of its own")
    for how in (box.restart, box.crash):
        how()
        is_gone(box, again(box, plain), HOUR_MS, f"{how.__name__}: gone")
        equal(life(again(box, plain)), (HOUR_MS, True), f"{how.__name__}: still the plan's")
    state = verified(box)
    equal((recorded_ttl(state, "alice/plain"), recorded_ttl(state, "alice/longer")),
          (0, 3 * HOUR_MS), "as recorded")


@case
def changed_live():
    """Raised before the time is up: still there.  Lowered below the age: gone at the next lookup,
    without any time passing."""
    box = Box("synthetic", OFF).start()
    plan(box, HOUR_MS)
    talk, other = stored(box, "s"), stored(box, "t")
    his = stored(box, "his", user="bob")
    box.advance(50 * MINUTE_MS)
    plan(box, 5 * HOUR_MS)
    equal(life(talk), (5 * HOUR_MS, True), "shown at once")
    box.advance(2 * HOUR_MS)
    for how in (box.restart, box.crash):
        equal(talk.lookup(talk.prompt + [5]).stored_tokens, 300, "raised before its time was up")
        how()
        talk = again(box, talk)
        equal(ttl_of(box), (5 * HOUR_MS, False, False), f"{how.__name__}: the plan's")
    his_prompt, his = his.prompt, Talk(box.client("bob"), "his")
    his.prompt = his_prompt
    box.advance(3 * HOUR_MS)  # A virtual clock does not go on over a restart.
    # Those two differ from here: alice has one of her own, and it goes before the plan's.
    own(box, HOUR_MS)
    equal((ttl_of(box), ttl_of(box, "bob")),
          ((HOUR_MS, True, False), (5 * HOUR_MS, False, False)), "alice's own")
    is_gone(box, again(box, other), HOUR_MS, "lowered")
    equal(his.lookup(his.prompt + [5]).stored_tokens, 300, "another user's is as it was")
    kept = stored(box, "kept")
    own(box, "plan")
    equal(life(kept), (5 * HOUR_MS, True), "the plan's again")
    plan(box, 30 * MINUTE_MS, name="short")
    box.client("ops").admin.SetQuota(admin_pb.SetQuotaRequest(user="alice", plan="short"))
    equal(life(kept), (30 * MINUTE_MS, True), "of another plan")
    box.client("ops").admin.DeleteQuota(admin_pb.DeleteQuotaRequest(user="alice"))
    equal(life(kept), (5 * HOUR_MS, True), "of the default plan")
    own(box, None)
    equal((life(kept), ttl_of(box)), ((SSD_TTL_MS, True), (SSD_TTL_MS, True, True)),
          "none of her own: ssd.ttl")
    box.advance(6 * HOUR_MS)
    equal(kept.lookup(kept.prompt + [5]).stored_tokens, 300, "longer than the plan")
    is_gone(box, his, 5 * HOUR_MS, "bob's by the plan", user="bob")
    verified(box)


@case
def the_sweep_frees_space():
    """A lower ttl of the plan gives back what is past it, though nobody asks for those sessions."""
    box = Box("synthetic", OFF).start()
    for i in range(6):
        stored(box, f"s{i}").close()
    keeps = stored(box, "own", ttl_ms=48 * HOUR_MS)
    box.advance(2 * HOUR_MS)
    used = box.tier("ssd").bytes_used
    equal(box.stats().checkpoints, 7, "all there")
    plan(box, HOUR_MS)
    box.advance(1)  # Waits for one whole sweep.
    equal(box.stats().checkpoints, 1, "what has its own ttl is left")
    check(box.tier("ssd").bytes_used < used, "its space is free")
    equal(keeps.lookup(keeps.prompt + [5]).stored_tokens, 300, "that one is whole")
    verified(box)


@case
def a_dry_run_says_what_would_go():
    box = Box("synthetic", OFF).start()
    for name in ("a", "b"):
        stored(box, name).close()
    stored(box, "own", ttl_ms=48 * HOUR_MS).close()
    box.advance(2 * HOUR_MS)
    stored(box, "new").close()
    stored(box, "his", user="bob").close()
    box.advance(1)
    got = own(box, HOUR_MS, dry_run=True)
    equal(({n.session_id for n in got.next if n.over}, got.expired_sessions), ({"a", "b"}, 2),
          "of a user")
    equal(own(box, 3 * HOUR_MS, dry_run=True).expired_sessions, 0, "nothing is that old")
    equal(plan(box, HOUR_MS, dry_run=True).expired_sessions, 2, "of a plan")
    equal(plan(box, HOUR_MS, name="nobodys", dry_run=True).expired_sessions, 0, "of another one")
    own(box, 48 * HOUR_MS)
    equal(plan(box, HOUR_MS, dry_run=True).expired_sessions, 0, "who has his own follows no plan")
    own(box, "plan")
    said = tool(box).code(0, "quota", "plan", "default", "--ttl", "1h", "--dry-run").stdout
    check("2 sessions go unused longer than that ttl" in said, said)
    said = tool(box).json("--json", "quota", "set", "alice", "--ttl", "1h", "--dry-run")
    equal(said["expired_sessions"], 2, "--json")
    equal(box.stats().checkpoints, 5, "nothing has gone")
    equal(ttl_of(box), (SSD_TTL_MS, False, True), "and nothing is set")
    own(box, HOUR_MS)
    box.advance(1)
    equal(box.stats().checkpoints, 3, "then what was said goes")
    box.stop()


@case
def forks_follow_too():
    """A fork without a ttl follows the plan if its source does, else it has the source's."""
    box = Box("synthetic", OFF).start()
    plan(box, HOUR_MS)
    for name, fields, want in (("s", {}, (HOUR_MS, True)),
                               ("t", {"ttl_ms": 2 * HOUR_MS}, (2 * HOUR_MS, False))):
        talk = stored(box, name, **fields)
        made = talk.get().checkpoints[0].id
        for _ in range(2):  # A call that comes again is the same call.
            talk.call.Fork(pb.ForkRequest(session_id=name, checkpoint_id=made,
                                          new_session_id=name + "f"))
        got = talk.call.GetSession(pb.GetSessionRequest(session_id=name + "f")).session
        equal((got.ttl_ms, got.ttl_of_plan), want, name)
    # What a longer fork stands on outlives its maker, by whatever says so.
    talk = stored(box, "u")
    made = talk.get().checkpoints[0].id
    talk.call.Fork(pb.ForkRequest(session_id="u", checkpoint_id=made, new_session_id="uf",
                                  ttl_ms=3 * HOUR_MS))
    box.advance(2 * HOUR_MS + MINUTE_MS)
    equal(talk.lookup(talk.prompt + [5]).stored_tokens, 300, "its fork keeps it")
    box.advance(HOUR_MS)
    is_gone(box, talk, 3 * HOUR_MS, "then it goes")
    verified(box)


@case
def opened_again():
    """Without a ttl a session is found that follows the plan, whatever that says meanwhile."""
    box = Box("synthetic", OFF).start()
    talk = stored(box, "s")
    for value in (HOUR_MS, 2 * HOUR_MS, None):
        plan(box, value)
        check(not Talk(box.client(), "s").opened.created, f"{value}: found")
    expect(talk.call.OpenSession, pb.OpenSessionRequest(session_id="s", ttl_ms=HOUR_MS),
           code="ALREADY_EXISTS", reason="SESSION_EXISTS", field="ttl_ms", limit="0",
           value=str(HOUR_MS))
    plan(box, 2 * HOUR_MS)
    stored(box, "own", ttl_ms=HOUR_MS)
    expect(talk.call.OpenSession, pb.OpenSessionRequest(session_id="own"), code="ALREADY_EXISTS",
           reason="SESSION_EXISTS", field="ttl_ms", limit=str(HOUR_MS), value=str(2 * HOUR_MS))
    plan(box, HOUR_MS)
    check(not Talk(box.client(), "own").opened.created, "the same life: found")
    plan(box, 3 * HOUR_MS)
    equal(Talk(box.client(), "own", ttl_ms=HOUR_MS).get().session.ttl_of_plan, False,
          "and it keeps its own")
    # ssd.ttl itself may be another one after a restart.
    plan(box, None)
    box.stop()
    box.flags["ssd.ttl"] = "10h"
    box.start()
    equal(life(Talk(box.client(), "s")), (10 * HOUR_MS, True), "as the configuration says now")
    verified(box)


def without_bit(box):
    """As a build before this left it."""
    features = State(box.state).features
    equal(features & PLAN_TTL, PLAN_TTL, "a new directory has the bit")
    with open(os.path.join(box.state, "superblock"), "r+b") as file:
        copy = file.read(4096)
        copy = sealed(copy[:48] + struct.pack("<Q", features & ~PLAN_TTL) + copy[56:])
        file.seek(0)
        file.write(copy + copy)


@case
def an_older_directory():
    """Builds before this recorded every ttl in full: those sessions keep theirs, and are found
    without one; the bit is set when the directory is opened."""
    box = Box("synthetic", OFF).start()
    talk = stored(box, "old", ttl_ms=SSD_TTL_MS)
    box.stop()
    without_bit(box)
    box.start()
    talk = again(box, talk)
    equal((talk.opened.created, life(talk)), (False, (SSD_TTL_MS, False)), "found, with its own")
    plan(box, HOUR_MS)
    fresh = stored(box, "fresh")
    box.advance(2 * HOUR_MS)
    equal(talk.lookup(talk.prompt + [5]).stored_tokens, 300, "it follows no plan")
    is_gone(box, fresh, HOUR_MS, "a new one does")
    state = verified(box)
    equal(state.features & PLAN_TTL, PLAN_TTL, "the bit is set")
    equal((recorded_ttl(state, "alice/old"), recorded_ttl(state, "alice/fresh")),
          (SSD_TTL_MS, 0), "as recorded")


@case
def an_older_directory_that_cannot_be_marked():
    """Its superblock cannot be written: sessions get the ttl that their plan says then, in full."""
    box = Box("synthetic", OFF).start()
    box.stop()
    without_bit(box)
    os.mkdir(os.path.join(box.state, "superblock.new"))  # Where the next one would be written.
    box.start()
    check("event=plan_ttl_not_kept" in box.log(), "the log says so")
    talk = stored(box, "s")
    equal(life(talk), (SSD_TTL_MS, False), "recorded in full")
    check(not again(box, talk).opened.created, "found without one")
    box.stop()
    state = State(box.state)
    equal((state.features & PLAN_TTL, recorded_ttl(state, "alice/s")), (0, SSD_TTL_MS), "on disk")
    os.rmdir(os.path.join(box.state, "superblock.new"))
    offset = len(box.log())
    box.start()
    check("event=plan_ttl_not_kept" not in box.log(offset), "marked now")
    equal(life(again(box, talk)), (SSD_TTL_MS, False), "it keeps its own")
    plan(box, HOUR_MS)
    equal(life(stored(box, "new")), (HOUR_MS, True), "a new one follows")
    equal(verified(box).features & PLAN_TTL, PLAN_TTL, "the bit is set")


@case
def as_a_program():
    box = Box("synthetic", OFF).start()
    ops = tool(box)
    stored(box, "s")

    def row(*args):
        lines = ops.code(0, *args).stdout.splitlines()
        return next(line.split("\t") for line in lines if line.startswith("ttl_ms\t"))
    equal(row("quota", "get", "alice"), ["ttl_ms", "3d 0h", "-", "ssd.ttl"], "of the configuration")
    equal(row("quota", "plan", "default", "--ttl", "24h"), ["ttl_ms", "1d 0h", "-", "plan"], "plan")
    equal(row("quota", "get", "alice"), ["ttl_ms", "1d 0h", "-", "plan"], "of the plan")
    equal(row("quota", "set", "alice", "--ttl", "90min"), ["ttl_ms", "1h 30m", "-", "own"], "own")
    equal(row("quota", "set", "alice", "--ttl", "none"), ["ttl_ms", "3d 0h", "-", "ssd.ttl"],
          "none: ssd.ttl")
    equal(row("quota", "set", "alice", "--ttl", "plan"), ["ttl_ms", "1d 0h", "-", "plan"],
          "the plan's again")
    rows = [line.split("\t") for line in ops.code(0, "quota", "plan").stdout.splitlines()]
    equal((rows[0][-1], rows[1][-1]), ("TTL", "1d 0h"), "in the list of plans")
    listed = tool(box, "alice").json("--json", "session", "list")["sessions"]
    equal([(s["ttl_ms"], s["ttl_of_plan"]) for s in listed], [(24 * HOUR_MS, True)], "--json")
    lines = tool(box, "alice").code(0, "session", "list").stdout.splitlines()
    check("1d 0h (plan)" in lines[1].split("\t"), lines)
    shown = tool(box, "alice").code(0, "session", "show", "s").stdout
    check("1d 0h (plan)" in shown, shown)
    for bad in ("0", "5", "1 h", "-1h", "1y", "h", "99999999999999999999h"):
        said = ops.code(2, "quota", "set", "alice", "--ttl", bad).stderr
        check("ttl" in said and said.count("\n") == 1, said)
    for bad in ("0h", "721h"):
        said = ops.code(2, "quota", "plan", "default", "--ttl", bad).stderr
        check("QUOTA_INVALID" in said and "1 to 2592000000" in said, said)
    equal(ttl_of(box), (24 * HOUR_MS, False, False), "nothing of that is set")
    try:
        own(box, HOUR_MS, user="alice/x")
        check(False, "no such user name")
    except grpc.RpcError as error:
        equal(Failure(error).reason, "USER_INVALID", "user")
    box.stop()


run_cases(__doc__)
