"""ListSessions page by page while sessions come and go, and what OpenSession refuses."""

from daemon import check, equal, expect, pb
from talk import Box, Talk, case, rng, run_cases


def pages(client, size):
    """Names page by page; the caller may do something between two of them."""
    token = ""
    while True:
        got = client.session.ListSessions(pb.ListSessionsRequest(page_size=size, page_token=token))
        check(len(got.sessions) <= size, f"{len(got.sessions)} of at most {size}")
        yield [s.session_id for s in got.sessions]
        token = got.next_page_token
        if not token:
            return


def open_session(client, name, **fields):
    return client.session.OpenSession(pb.OpenSessionRequest(session_id=name, **fields))


@case
def stable_while_sessions_come_and_go():
    """Those that are there all the time are listed exactly once, in every round; others at most once;
    never another user's."""
    box = Box("synthetic").start()
    alice, bob = box.client(), box.client("bob")
    kept = {f"kept{i}" for i in range(60)}
    for name in kept:
        open_session(alice, name)
        open_session(bob, f"bobs-{name}")
    made = 0
    for size in (1, 7, 59, 60, 61):
        listed = []
        gone = [f"gone{size}-{i}" for i in range(20)]
        for name in gone:
            open_session(alice, name)
        for page in pages(alice, size):
            listed += page
            for name in [n for n in gone if rng.random() < 0.2]:
                alice.session.DeleteSession(pb.DeleteSessionRequest(session_id=name))
                gone.remove(name)
            made += 1
            open_session(alice, f"new{made}")
        equal(len(listed), len(set(listed)), f"pages of {size}: none is listed twice")
        equal(kept - set(listed), set(), f"pages of {size}: none is left out")
        check(not any(name.startswith("bobs") for name in listed), "nobody else's")
    box.crash()
    listed = [n for page in pages(box.client(), 10) for n in page]
    equal(kept - set(listed), set(), "after kill -9")
    box.stop()


@case
def pages_that_are_wrong():
    box = Box("synthetic").start()
    client = box.client()
    for i in range(3):
        open_session(client, f"s{i}")
    call = client.session.ListSessions
    expect(call, pb.ListSessionsRequest(page_size=1001), code="INVALID_ARGUMENT",
           reason="PAGE_SIZE_INVALID", field="page_size", limit="1000", value="1001")
    for bad in ("x", "0" * 31, "0" * 33, "A" * 32):
        expect(call, pb.ListSessionsRequest(page_token=bad), code="INVALID_ARGUMENT",
               reason="PAGE_TOKEN_INVALID", field="page_token")
    equal(len(call(pb.ListSessionsRequest(page_token="0" * 32)).sessions), 3, "from the start")
    equal(len(call(pb.ListSessionsRequest(page_token="f" * 32)).sessions), 0, "behind the end")
    box.stop()


@case
def differences_are_named():
    """An id that is there with other parameters: the first field that differs, and both values."""
    box = Box("synthetic").start()
    client = box.client()
    open_session(client, "main")
    open_session(client, "sub", kind=pb.SESSION_KIND_SUB, parent_session_id="main", ttl_ms=5000)
    again = open_session(client, "sub", kind=pb.SESSION_KIND_SUB, parent_session_id="main",
                         ttl_ms=5000)
    check(not again.created, "the same fields find it")
    open_session(client, "other")
    for fields, field, limit, value in (
            (dict(), "kind", "2", "1"),
            (dict(kind=pb.SESSION_KIND_SUB, parent_session_id="main"), "ttl_ms", "5000",
             str(72 * 3600 * 1000)),
            (dict(kind=pb.SESSION_KIND_SUB, parent_session_id="other", ttl_ms=5000),
             "parent_session_id", "main", "other")):
        expect(open_session, client, "sub", code="ALREADY_EXISTS", reason="SESSION_EXISTS",
               field=field, limit=limit, value=value, **fields)
    talk = Talk(client, "sub", kind=pb.SESSION_KIND_SUB, parent_session_id="main", ttl_ms=5000)
    equal((talk.get().session.parent_session_id, talk.get().session.ttl_ms), ("main", 5000),
          "shown as opened")
    box.stop()


@case
def parents_are_of_the_same_user():
    """A parent that is not there, or another user's: the same refusal; an id that is there is found
    although its parent went."""
    box = Box("synthetic").start()
    alice, bob = box.client(), box.client("bob")
    sub = dict(kind=pb.SESSION_KIND_SUB, parent_session_id="main")
    open_session(bob, "main")
    want = expect(open_session, alice, "sub", code="NOT_FOUND", reason="SESSION_NOT_FOUND",
                  field="parent_session_id", value="main", **sub)
    open_session(alice, "main")
    check(open_session(alice, "sub", **sub).created, "with its own")
    alice.session.DeleteSession(pb.DeleteSessionRequest(session_id="main"))
    check(not open_session(alice, "sub", **sub).created, "found without it")
    got = expect(open_session, alice, "sub2", code="NOT_FOUND", reason="SESSION_NOT_FOUND",
                 field="parent_session_id", value="main", **sub)
    equal((got.code, got.reason, got.message), (want.code, want.reason, want.message), "alike")
    box.stop()


@case
def sub_sessions_are_bounded():
    """64 for each main one; deleting one makes room; counted again after a restart; forks count."""
    box = Box("synthetic").start()
    client = box.client()
    talk = Talk(client, "main")
    made = talk.prefill(list(range(3, 50))).checkpoints[0]
    kinds = [dict(kind=pb.SESSION_KIND_SUB, parent_session_id="main"),
             dict(kind=pb.SESSION_KIND_EPHEMERAL)]
    for i in range(64):
        open_session(client, f"sub{i}", **kinds[i % 2])

    def refused(limit):
        for fields in kinds:
            expect(open_session, box.client(), "more", code="RESOURCE_EXHAUSTED",
                   reason="SUB_SESSIONS_FULL", field="sub and ephemeral sessions",
                   limit=str(limit), value=str(limit + 1), **fields)

    refused(64)
    fork = pb.ForkRequest(session_id="main", checkpoint_id=made.id, new_session_id="f",
                          kind=pb.SESSION_KIND_EPHEMERAL)
    expect(client.session.Fork, fork, code="RESOURCE_EXHAUSTED", reason="SUB_SESSIONS_FULL")
    check(not open_session(client, "sub0", **kinds[0]).created, "one that is there is found")
    box.crash()
    refused(64)
    client = box.client()
    client.session.DeleteSession(pb.DeleteSessionRequest(session_id="sub1"))
    check(client.session.Fork(fork).created, "a deleted one makes room")
    refused(64)
    check(open_session(client, "second").created, "main ones are not counted here")
    for i in range(64):
        open_session(client, f"of-second{i}", **kinds[i % 2])
    refused(128)
    check(open_session(box.client("bob"), "more", kind=pb.SESSION_KIND_EPHEMERAL).created,
          "of each user")
    box.stop()


if __name__ == "__main__":
    run_cases("Lists of sessions, and opening them, through the real daemon.")
