"""DeleteSession and EraseUser: gone at the answer, from every tier, and never back.

What is left on disk comes from tests/integration/state_files.py, which reads a stopped directory by
the offsets of docs/format.md.
"""

import threading
import time

from cli import Tool, token_file
import grpc
from daemon import Failure, admin_pb, check, equal, expect, failure, pack, pb
from faults import Calls
from state_files import State, kvdump
from talk import (
    EXACT, MISS, REPLAY, Box, Talk, case, even, patiently, resumed, run_cases, tokens)

FLAGS = {"ssd.segment_bytes": "256KiB", "ssd.bytes": "8MiB"}


def tool(box, user="alice"):
    return Tool("unix:" + box.socket, token_file(box.directory, user))


def save(box, user, name, count=500, **fields):
    talk = Talk(box.client(user), name, **fields)
    prompt = tokens(count)
    patiently(talk.prefill, prompt[:count // 2], level=pb.LEVEL_SSD)
    equal(patiently(talk.prefill, prompt, level=pb.LEVEL_SSD).save_reason, "", "saved")
    return talk, prompt


def delete(talk, **fields):
    return talk.call.DeleteSession(pb.DeleteSessionRequest(session_id=talk.name, **fields))


def calls(talk):
    name = talk.name
    return {
        "GetSession": pb.GetSessionRequest(session_id=name),
        "CloseSession": pb.CloseSessionRequest(session_id=name),
        "Lookup": pb.LookupRequest(session_id=name, tokens=pack([1])),
        "Prefill": pb.PrefillRequest(session_id=name, tokens=pack([1, 2, 3])),
        "Decode": pb.DecodeRequest(session_id=name, max_tokens=1),
        "Checkpoint": pb.CheckpointRequest(session_id=name),
        "WaitDurable": pb.WaitDurableRequest(session_id=name, checkpoint_id=bytes(16),
                                             level=pb.LEVEL_SSD),
        "Rollback": pb.RollbackRequest(session_id=name, checkpoint_id=bytes(16)),
    }


def is_gone(talk, value, what):
    """Every call that names it says so."""
    for method, request in calls(talk).items():
        expect(getattr(talk.call, method), request, code="NOT_FOUND", reason="SESSION_NOT_FOUND",
               field="session_id", value=value)
    names = [s.session_id for s in talk.call.ListSessions(pb.ListSessionsRequest()).sessions]
    check(talk.name not in names, f"{what}: it is not listed")


def holds_nothing(box, label, what):
    """No record of the session in the stopped directory."""
    state = State(box.state)
    check(label not in [state.label(s) for s in state.sessions], f"{what}: no record of {label}")
    equal([s.hex() for s in state.trees if s not in state.sessions], [], f"{what}: no tree is left")
    code, out, err = kvdump("verify", box.state)
    equal((code, err), (0, ""), f"{what}: kvdump verify says {out}")
    return state


def are_free(box, used, freed, what):
    """So many bytes fewer are in use; a page that is being moved has two places for a moment."""
    end = time.monotonic() + 10
    while used - box.tier("ssd").items_used != freed // 20480 and time.monotonic() < end:
        time.sleep(0.02)
    equal((used - box.tier("ssd").items_used) * 20480, freed, what)


@case
def one_session():
    for loaded in (True, False):
        box = Box("synthetic", FLAGS).start()
        talk, prompt = save(box, "alice", "go")
        other, kept = save(box, "alice", "stay")
        stranger, his = save(box, "bob", "go")
        used = box.tier("ssd").items_used
        if not loaded:
            box.restart()
            talk = Talk(box.client(), "go")
            other, stranger = Talk(box.client(), "stay"), Talk(box.client("bob"), "go")
        checkpoints = len(talk.get().checkpoints)
        stored = box.stats().checkpoints
        dry = delete(talk, dry_run=True)
        equal((dry.deleted, dry.checkpoints), (True, checkpoints), "dry run")
        check(talk.lookup(prompt).stored_tokens > 0, "it has done nothing")
        got = delete(talk)
        equal((got.deleted, got.checkpoints, got.bytes), (True, checkpoints, dry.bytes), "receipt")
        are_free(box, used, got.bytes, "its places are free")
        equal(stored - box.stats().checkpoints, checkpoints, "checkpoints counted")
        equal(box.counter("cached_sessions_deleted_total"), 1, "sessions counted")
        is_gone(talk, "DELETED", f"loaded {loaded}")
        again = delete(talk)
        equal((again.deleted, again.bytes, again.checkpoints), (False, 0, 0), "once more")
        resumed(other.prefill(kept + tokens(4)), EXACT if loaded else REPLAY, even(len(kept)),
                "the other one")
        check(stranger.lookup(his).stored_tokens > 0, "bob's session of the same name stays")
        box.crash()
        is_gone(_named(box, "go"), "DELETED", "after kill -9")
        box.stop()
        holds_nothing(box, "alice/go", f"loaded {loaded}")


def _named(box, name, user="alice"):
    """A Talk that does not open its session."""
    talk = Talk.__new__(Talk)
    talk.call, talk.name = box.client(user).session, name
    return talk


@case
def a_new_one_of_the_same_name():
    """It is empty: equal tokens have equal digests, and yet the old rows do not serve it."""
    box = Box("cpu", FLAGS).start()
    talk, prompt = save(box, "alice", "again")
    delete(talk)
    fresh = Talk(box.client(), "again")
    check(fresh.opened.created, "it is created")
    resumed(fresh.lookup(prompt), MISS, 0, "lookup")
    got = patiently(fresh.prefill, prompt, level=pb.LEVEL_SSD)
    resumed(got, MISS, 0, "prefill")
    box.crash()
    check(_named(box, "again").lookup(prompt).stored_tokens > 0, "the new one survives")
    box.stop()
    equal(kvdump("verify", box.state)[0], 0, "kvdump verify")


@case
def a_running_call_is_cancelled():
    box = Box("synthetic", FLAGS).start()
    talk, _ = save(box, "alice", "busy")
    stream = talk.stream(60000, no_checkpoint=True, timeout=30)
    next(stream)
    began = time.monotonic()
    equal(delete(talk).deleted, True, "deleted while it decodes")
    check(time.monotonic() - began < 5, "at once")
    got = failure(lambda: list(stream))
    equal((got.code, got.reason), ("CANCELLED", "CANCELLED"), "the stream hears of it")
    is_gone(talk, "DELETED", "after a running call")

    # One that waits, and one that only looks.
    talk, prompt = save(box, "alice", "busy2")
    stream = talk.stream(60000, no_checkpoint=True, timeout=30)
    next(stream)
    lost = []

    def look():
        while not lost:
            try:
                _named(box, "busy2").lookup(prompt + tokens(300))
            except Exception as error:  # NOT_FOUND or SESSION_BUSY, in the end.
                lost.append(error)
    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    equal(delete(talk).deleted, True, "deleted while others look at it")
    for thread in threads:
        thread.join()
    check(all(e.code().name in ("NOT_FOUND", "ABORTED") for e in lost), f"{lost}")
    box.no_wrong_bytes()
    box.stop()
    holds_nothing(box, "alice/busy2", "after running calls")


@case
def many_at_once():
    """Deletions, openings and turns of many sessions beside each other; places are used again."""
    box = Box("synthetic", dict(FLAGS, **{"ssd.bytes": "2MiB"})).start()
    errors, deleted = [], []

    def work(index):
        try:
            client = box.client(("alice", "bob")[index % 2])
            for turn in range(12):
                talk = Talk(client, f"w{index}-{turn}")
                history = tokens(200)
                for _ in range(3):
                    patiently(talk.prefill, history, level=pb.LEVEL_SSD)
                    history += tokens(50)
                if turn % 3 != 2:
                    equal(delete(talk).deleted, True, "deleted")
                    deleted.append((index % 2, talk.name))
        except Exception as error:  # Told by the main thread.
            errors.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(not errors, f"{errors}")
    equal(len(deleted), 32, "deletions")
    box.no_wrong_bytes()
    box.crash()
    for user in (0, 1):
        names = {s.session_id for s in box.client(("alice", "bob")[user]).session.ListSessions(
            pb.ListSessionsRequest(page_size=1000)).sessions}
        check(not names & {n for u, n in deleted if u == user}, "none of them is back")
        equal(len(names), 8, "the others are there")
    box.stop()
    equal(kvdump("verify", box.state)[0], 0, "kvdump verify")


@case
def kill_right_after_the_answer():
    box = Box("synthetic", FLAGS).start()
    for i in range(8):
        talk, _ = save(box, "alice", f"k{i}", 300)
        delete(talk)
        box.kill()
        box.start()
        is_gone(_named(box, f"k{i}"), "DELETED", f"kill {i}")
    equal(box.stats().checkpoints, 0, "nothing is left")
    equal(box.tier("ssd").items_used, 0, "no place is taken")
    box.stop()


@case
def a_user():
    box = Box("synthetic", FLAGS).start()
    mine = [save(box, "alice", f"s{i}") for i in range(4)]
    bobs, his = save(box, "bob", "b")
    used = box.tier("ssd").items_used
    dry = box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice", dry_run=True))
    equal((dry.found, dry.sessions, dry.checkpoints), (True, 4, 8), "dry run")
    check(mine[0][0].lookup(mine[0][1]).stored_tokens > 0, "it has done nothing")
    got = box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice"))
    equal((got.found, got.sessions, got.checkpoints, got.bytes), (True, 4, 8, dry.bytes), "receipt")
    are_free(box, used, got.bytes, "places are free")
    for talk, _ in mine:
        is_gone(talk, talk.name, "erased, as if it never was")
    again = box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice"))
    equal((again.found, again.sessions, again.bytes), (False, 0, 0), "once more")
    check(bobs.lookup(his).stored_tokens > 0, "bob's stay")
    names = [r.user for r in box.operator.DiskUsage(admin_pb.DiskUsageRequest()).rows]
    equal(names, ["bob"], "du knows bob only")
    box.crash()
    equal([r.user for r in box.operator.DiskUsage(admin_pb.DiskUsageRequest()).rows], ["bob"],
          "after kill -9 as well")
    box.stop()
    state = holds_nothing(box, "alice/s0", "erased")
    equal(list(state.users.values()), ["bob"], "no record of the user")
    box.start()
    fresh, prompt = save(box, "alice", "s0")
    check(fresh.opened.created, "alice can begin anew")
    box.crash()
    check(_named(box, "s0").lookup(prompt).stored_tokens > 0, "and it lasts")
    box.stop()


@case
def a_user_in_the_middle_of_things():
    box = Box("synthetic", FLAGS).start()
    talk, _ = save(box, "alice", "one")
    save(box, "alice", "two")
    stream = talk.stream(60000, no_checkpoint=True, timeout=30)
    next(stream)
    got = box.operator.EraseUser(admin_pb.EraseUserRequest(user="alice"), timeout=20)
    equal((got.found, got.sessions), (True, 2), "with a call running")
    equal(failure(lambda: list(stream)).code, "CANCELLED", "which is cancelled")
    box.stop()
    equal(State(box.state).users, {}, "nobody is left")


def removed_beside_a_dry_run(what, remove, looks):
    """A dry run waits for records; the removal begins; the dry run ends; the removal is written and not
    yet durable: `looks` of alice are refused all the time."""
    faults = Calls()
    box = Box("synthetic", {**FLAGS, "io.backend": "pool"}, env=faults.env()).start()
    talk = Talk(box.client(), "go")
    prompt = tokens(600)
    for end in range(60, 600, 6):  # Records of several blocks, none of which is cached after a start.
        patiently(talk.prefill, prompt[:end], level=pb.LEVEL_SSD)
    box.restart()
    talk = Talk(box.client(), "go")
    looker = box.client()
    answers = {}

    def call(name, function, *args, **kwargs):
        try:
            answers[name] = function(*args, **kwargs)
        except grpc.RpcError as error:
            answers[name] = Failure(error)

    faults.hang("read", ".sst")
    dry = threading.Thread(target=call, args=("dry", box.operator.EraseUser,
                                              admin_pb.EraseUserRequest(user="alice", dry_run=True)),
                           kwargs={"timeout": 1})
    dry.start()
    time.sleep(0.2)
    gone = threading.Thread(target=call, args=("removal", *remove(box, talk)),
                            kwargs={"timeout": 30})
    gone.start()
    dry.join()
    equal(answers["dry"].code, "DEADLINE_EXCEEDED", f"{what}: the dry run waited for records")
    faults.hang("flush", ".log")
    time.sleep(0.3)
    for _ in range(3):
        expect(*looks(looker), code="ABORTED", reason="SESSION_BUSY", timeout=2)
    faults.work()
    gone.join()
    check(not isinstance(answers["removal"], Failure), f"{what}: {answers['removal']}")
    check(box.is_up(), f"{what}: the daemon is up")
    is_gone(talk, "DELETED" if what == "DeleteSession" else "go", what)
    box.stop()
    return holds_nothing(box, "alice/go", what)


@case
def a_dry_run_that_ends_early():
    """It has taken nothing out of reach, so it puts nothing back: a removal that has begun meanwhile
    goes on, and nobody is let in before it is done."""
    removed_beside_a_dry_run(
        "DeleteSession",
        lambda box, talk: (talk.call.DeleteSession, pb.DeleteSessionRequest(session_id="go")),
        lambda client: (client.session.Lookup,
                        pb.LookupRequest(session_id="go", tokens=pack([1, 2]))))
    state = removed_beside_a_dry_run(
        "EraseUser",
        lambda box, talk: (box.operator.EraseUser, admin_pb.EraseUserRequest(user="alice")),
        lambda client: (client.session.OpenSession, pb.OpenSessionRequest(session_id="new")))
    equal(list(state.users.values()), [], "no record of the user")


@case
def the_commands():
    box = Box("synthetic", FLAGS).start()
    talk, _ = save(box, "alice", "chat")
    refused = tool(box).code(2, "session", "delete", "chat")
    check("--yes" in refused.stderr and "--dry-run" in refused.stderr, refused.stderr)
    dry = tool(box).json("session", "delete", "chat", "--dry-run", "--json")
    equal((dry["session"], dry["dry_run"], dry["deleted"], dry["checkpoints"]),
          ("chat", True, False, 2), "dry run")
    said = tool(box).code(0, "session", "delete", "chat", "--yes").stdout
    check(said.startswith("deleted chat: 1 sessions, 2 checkpoints, "), said)
    said = tool(box).code(0, "session", "delete", "chat", "--yes").stdout
    equal(said, "session chat is gone already\n", "once more")
    tool(box).code(3, "session", "delete", "never", "--yes")
    tool(box).code(2, "session", "delete", "a b", "--yes")
    tool(box).code(2, "session", "delete")
    tool(box, "ops").code(4, "session", "delete", "chat", "--yes")
    save(box, "alice", "one")
    save(box, "alice", "two")
    tool(box).code(4, "user", "erase", "alice", "--yes")
    refused = tool(box, "ops").code(2, "user", "erase", "alice")
    check("--yes" in refused.stderr, refused.stderr)
    dry = tool(box, "ops").json("user", "erase", "alice", "--dry-run", "--json")
    equal((dry["user"], dry["deleted"], dry["sessions"]), ("alice", False, 2), "dry run")
    got = tool(box, "ops").json("user", "erase", "alice", "--yes", "--json")
    equal((got["deleted"], got["sessions"], got["checkpoints"]), (True, 2, 4), "--json")
    said = tool(box, "ops").code(0, "user", "erase", "alice", "--yes").stdout
    equal(said, "user alice is gone already\n", "once more")
    tool(box, "ops").code(2, "user", "erase", "a b", "--yes")
    box.stop()


if __name__ == "__main__":
    run_cases(__doc__)
