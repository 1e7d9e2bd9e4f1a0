"""Bad input through the real daemon: one clear error each, and the daemon goes on.

Every failure reason of kvstore/format/reason.c that a request can bring about is provoked here, on one
daemon; those of a daemon without room, or that is broken or ending, in it_no_room.py.
"""

import os
import random
import subprocess
import sys
import time

import grpc

import daemon as d
from daemon import admin_pb, check, equal, failure, pack, pb
from reasons import INVALID, VOCAB, World, account, case, decode, fails, prefill, provoked, run


# ---- names and ids ----

@case("SESSION_NOT_FOUND")
def session_not_found(w):
    calls = {
        "GetSession": pb.GetSessionRequest(session_id="nobody"),
        "CloseSession": pb.CloseSessionRequest(session_id="nobody"),
        "Lookup": pb.LookupRequest(session_id="nobody", tokens=pack([1])),
        "Prefill": prefill(session_id="nobody"),
        "Decode": decode(session_id="nobody"),
        "Checkpoint": pb.CheckpointRequest(session_id="nobody"),
        "WaitDurable": pb.WaitDurableRequest(
            session_id="nobody", checkpoint_id=bytes(16), level=pb.LEVEL_SSD),
        "Rollback": pb.RollbackRequest(session_id="nobody", checkpoint_id=bytes(16)),
        "DeleteSession": pb.DeleteSessionRequest(session_id="nobody"),
    }
    for name, request in calls.items():
        unknown = fails(getattr(w.alice, name), request, code="NOT_FOUND",
                        reason="SESSION_NOT_FOUND")
        # Alice's session, asked for by Bob: the same answer, but for the id that was sent.
        request.session_id = "s"
        foreign = failure(getattr(w.bob, name), request)
        if unknown is None or foreign is None:
            continue
        said = (foreign.code, foreign.reason, foreign.field, foreign.limit, foreign.message)
        equal(said, (unknown.code, unknown.reason, unknown.field, unknown.limit, unknown.message),
              f"{name}: a foreign session answers as an unknown one")
        check(unknown.value in (None, "nobody") and foreign.value in (None, "s"),
              f"{name}: the value is what was sent")


@case("SESSION_EXISTS")
def session_exists(w):
    fails(w.alice.OpenSession,
          pb.OpenSessionRequest(session_id="s", kind=pb.SESSION_KIND_EPHEMERAL),
          code="ALREADY_EXISTS", reason="SESSION_EXISTS")
    again = w.alice.OpenSession(pb.OpenSessionRequest(session_id="s"))
    check(not again.created, "opening again with the same fields finds it")


@case("SESSION_ID_INVALID")
def session_id_invalid(w):
    for bad in ("", "x" * 129, "a b", "a/b", "\u00e4", "a\n", "x" * 5000):
        for name, request in {
                "OpenSession": pb.OpenSessionRequest(session_id=bad),
                "GetSession": pb.GetSessionRequest(session_id=bad),
                "Prefill": prefill(session_id=bad)}.items():
            fails(getattr(w.alice, name), request, code=INVALID, reason="SESSION_ID_INVALID",
                  field="session_id")
    longest = "x" * 128
    check(w.alice.OpenSession(pb.OpenSessionRequest(session_id=longest)).created, "128 are fine")
    fails(w.alice.OpenSession, pb.OpenSessionRequest(
        session_id="sub", kind=pb.SESSION_KIND_SUB, parent_session_id="a b"),
        code=INVALID, reason="SESSION_ID_INVALID", field="parent_session_id")


@case("SESSION_KIND_INVALID")
def session_kind_invalid(w):
    fails(w.alice.OpenSession, pb.OpenSessionRequest(session_id="k", kind=9),
          code=INVALID, reason="SESSION_KIND_INVALID", field="kind", limit="3", value="9")
    fails(w.alice.OpenSession, pb.OpenSessionRequest(session_id="k", kind=pb.SESSION_KIND_SUB),
          code=INVALID, reason="SESSION_KIND_INVALID", field="parent_session_id")
    fails(w.alice.OpenSession, pb.OpenSessionRequest(session_id="k", parent_session_id="s"),
          code=INVALID, reason="SESSION_KIND_INVALID", field="parent_session_id")


@case("REQUEST_ID_INVALID")
def request_id_invalid(w):
    for bad in ("x" * 65, "a b", "\u00e4", "\x7f"):
        fails(w.alice.Prefill, prefill(request_id=bad), code=INVALID,
              reason="REQUEST_ID_INVALID", field="request_id")
        fails(w.alice.OpenSession, pb.OpenSessionRequest(session_id="r", request_id=bad),
              code=INVALID, reason="REQUEST_ID_INVALID", field="request_id")


@case("REQUEST_ID_REUSED")
def request_id_reused(w):
    w.alice.OpenSession(pb.OpenSessionRequest(session_id="again", request_id="x" * 64))
    fails(w.alice.OpenSession,
          pb.OpenSessionRequest(session_id="again", request_id="x" * 64, ttl_ms=5),
          code="ALREADY_EXISTS", reason="REQUEST_ID_REUSED", field="ttl_ms", limit="0", value="5")


@case("SUB_SESSIONS_FULL")
def sub_sessions_full(w):
    user = w.daemon.client("bob").session
    for i in range(64):
        user.OpenSession(pb.OpenSessionRequest(session_id=f"e{i}", kind=pb.SESSION_KIND_EPHEMERAL))
    fails(user.OpenSession, pb.OpenSessionRequest(
        session_id="e64", kind=pb.SESSION_KIND_EPHEMERAL), code="RESOURCE_EXHAUSTED",
        reason="SUB_SESSIONS_FULL", field="sub and ephemeral sessions", limit="64", value="65")
    for i in range(64):
        user.DeleteSession(pb.DeleteSessionRequest(session_id=f"e{i}"))


@case("PIN_INVALID")
def pin_invalid(w):
    fails(w.alice.Pin, pb.PinRequest(session_id="s", checkpoint_id=bytes(16), ttl_ms=600001),
          code=INVALID, reason="PIN_INVALID", field="ttl_ms", limit="600000", value="600001")


@case("PIN_LIMIT")
def pin_limit(w):
    w.alice.OpenSession(pb.OpenSessionRequest(session_id="pins"))
    for i in range(65):
        made = w.alice.Prefill(prefill(session_id="pins", tokens=pack(range(2 * i + 2))))
        request = pb.PinRequest(session_id="pins", checkpoint_id=made.checkpoints[0].id,
                                ttl_ms=600000)
        if i < 64:
            w.alice.Pin(request)
    fails(w.alice.Pin, request, code="RESOURCE_EXHAUSTED", reason="PIN_LIMIT", field="pins",
          limit="64", value="65")


@case("TTL_INVALID")
def ttl_invalid(w):
    most = 30 * 24 * 3600 * 1000
    fails(w.alice.OpenSession, pb.OpenSessionRequest(session_id="t", ttl_ms=most + 1),
          code=INVALID, reason="TTL_INVALID", field="ttl_ms", limit=str(most),
          value=str(most + 1))
    check(w.alice.OpenSession(pb.OpenSessionRequest(session_id="t", ttl_ms=most)).created,
          "30 days are fine")
    fails(w.alice.Compact, pb.CompactRequest(session_id="t", keep_old_for_ms=most + 1),
          code=INVALID, reason="TTL_INVALID", field="keep_old_for_ms", limit=str(most),
          value=str(most + 1))


@case("SESSION_BUSY")
def session_busy(w):
    w.alice.OpenSession(pb.OpenSessionRequest(session_id="busy"))
    w.alice.Prefill(prefill(session_id="busy"))
    stream = w.alice.Decode(decode(session_id="busy", max_tokens=65536, ignore_eos=True))
    next(stream)
    fails(w.alice.Prefill, prefill(session_id="busy"), code="ABORTED", reason="SESSION_BUSY")
    stream.cancel()


@case("SCRUB_INVALID")
def scrub_invalid(w):
    for fields, field in (({"action": 0}, "action"), ({"action": 5}, "action"),
                          ({"action": admin_pb.SCRUB_ACTION_RELEASE, "rate_bytes": 1 << 20},
                           "rate_bytes"),
                          ({"action": admin_pb.SCRUB_ACTION_START, "rate_bytes": 1}, "rate_bytes"),
                          ({"action": admin_pb.SCRUB_ACTION_STATUS, "rate_bytes": 1 << 20},
                           "rate_bytes")):
        fails(w.ops.Scrub, admin_pb.ScrubRequest(**fields), code=INVALID, reason="SCRUB_INVALID",
              field=field)


@case("ENCRYPTION_OFF")
def encryption_off(w):
    fails(w.ops.RotateKey, admin_pb.RotateKeyRequest(), code="FAILED_PRECONDITION",
          reason="ENCRYPTION_OFF", field="ssd.encryption", limit="on", value="off")


@case("MASTER_KEY_INVALID")
def master_key_invalid(w):
    directory = d.scratch()
    path = os.path.join(directory, "key")
    with open(path, "w", encoding="ascii") as f:
        os.chmod(path, 0o600)
        f.write("5a" * 32)
    box = d.Daemon({"ssd.encryption": "on", "ssd.master_key_file": path}, directory=directory)
    box.start()
    ops = box.client("ops").admin
    with open(path, "w", encoding="ascii") as f:
        f.write("5a" * 31)
    got = fails(ops.RotateKey, admin_pb.RotateKeyRequest(), code="FAILED_PRECONDITION",
                reason="MASTER_KEY_INVALID", field="ssd.master_key_file")
    check(got is not None and "has 62 bytes" in got.message, f"the sentence: {got!r}")
    box.stop()


@case("USER_INVALID")
def user_invalid(w):
    for bad in ("x" * 65, "a b", "a/b", "a:b"):
        for method, request in (("DiskUsage", admin_pb.DiskUsageRequest(user=bad)),
                                ("EraseUser", admin_pb.EraseUserRequest(user=bad))):
            fails(getattr(w.ops, method), request, code=INVALID, reason="USER_INVALID",
                  field="user")
    for call, request in ((w.ops.EraseUser, admin_pb.EraseUserRequest()),
                          (w.ops.Why, admin_pb.WhyRequest(session_id="s"))):
        fails(call, request, code=INVALID, reason="USER_INVALID", field="user")


@case("USER_NOT_FOUND")
def user_not_found(w):
    fails(w.ops.DiskUsage, admin_pb.DiskUsageRequest(user="nobody"), code="NOT_FOUND",
          reason="USER_NOT_FOUND", field="user", value="nobody")


@case("POSITION_INVALID")
def position_invalid(w):
    for fields, limit in (({"has_position": True, "position": 1 << 20}, (1 << 20) - 1),
                          ({"has_position": True, "position": (1 << 32) - 1}, (1 << 20) - 1),
                          ({"position": 1}, 0)):
        fails(w.ops.Why, admin_pb.WhyRequest(user="alice", session_id="s", **fields), code=INVALID,
              reason="POSITION_INVALID", field="position", limit=str(limit),
              value=str(fields["position"]))


def limits(*items):
    return [admin_pb.SetLimit(**item) for item in items]


@case("QUOTA_INVALID")
def quota_invalid(w):
    low, high = {"bytes_ssd": (1 << 20, 1 << 50)}, {}
    for name, most in (("sessions", 10**6), ("turns", 10**6), ("bytes_ssd", 1 << 50),
                       ("requests_per_s", 10**9), ("tokens_per_s", 10**9), ("saves", 10**6),
                       ("ttl_ms", 30 * 86400 * 1000)):
        least = low.get(name, (1, 0))[0]
        for bad in (0, least - 1, most + 1, (1 << 64) - 1):
            for call, request in (
                    (w.ops.SetQuota, admin_pb.SetQuotaRequest(user="alice", limits=limits(
                        {"name": name, "limit": bad}))),
                    (w.ops.SetPlan, admin_pb.SetPlanRequest(name="p", limits=limits(
                        {"name": name, "limit": bad})))):
                fails(call, request, code=INVALID, reason="QUOTA_INVALID", field=name,
                      limit=f"{least} to {most}, or none", value=str(bad))
    for bad in ([{"name": "session", "limit": 1}], [{"name": "", "limit": 1}],
                [{"name": "turns", "limit": 1}, {"name": "turns", "limit": 2}],
                [{"name": "turns", "limit": 1}, {"name": "turns", "remove": True}]):
        fails(w.ops.SetQuota, admin_pb.SetQuotaRequest(user="alice", limits=limits(*bad)),
              code=INVALID, reason="QUOTA_INVALID", field="limits.name", value=bad[0]["name"])
    for bad in ({"limit": 5, "unlimited": True}, {"limit": 5, "remove": True},
                {"unlimited": True, "remove": True}):
        fails(w.ops.SetQuota, admin_pb.SetQuotaRequest(user="alice", limits=limits(
            {"name": "turns", **bad})), code=INVALID, reason="QUOTA_INVALID", field="turns")
    for call, request in ((w.ops.SetQuota, admin_pb.SetQuotaRequest()),
                          (w.ops.GetQuota, admin_pb.GetQuotaRequest(user="a/b")),
                          (w.ops.DeleteQuota, admin_pb.DeleteQuotaRequest(user="x" * 65))):
        fails(call, request, code=INVALID, reason="USER_INVALID", field="user")
    fails(w.ops.ListUsers, admin_pb.ListUsersRequest(page_size=1001), code=INVALID,
          reason="PAGE_SIZE_INVALID", field="page_size", limit="1000", value="1001")
    fails(w.ops.ListUsers, admin_pb.ListUsersRequest(page_token="x"), code=INVALID,
          reason="PAGE_TOKEN_INVALID", field="page_token")


@case("PLAN_INVALID")
def plan_invalid(w):
    for bad in ("", "x" * 65, "a b", "a/b"):
        fails(w.ops.SetPlan, admin_pb.SetPlanRequest(name=bad), code=INVALID,
              reason="PLAN_INVALID", field="name", value=str(len(bad)))
    fails(w.ops.SetQuota, admin_pb.SetQuotaRequest(user="alice", plan="a b"), code=INVALID,
          reason="PLAN_INVALID", field="plan", value="3")


@case("PLAN_NOT_FOUND")
def plan_not_found(w):
    fails(w.ops.SetQuota, admin_pb.SetQuotaRequest(user="alice", plan="none"), code="NOT_FOUND",
          reason="PLAN_NOT_FOUND", field="plan", value="none")
    fails(w.ops.SetPlan, admin_pb.SetPlanRequest(name="none", remove=True), code="NOT_FOUND",
          reason="PLAN_NOT_FOUND", field="plan", value="none")


@case("PLAN_IN_USE")
def plan_in_use(w):
    w.ops.SetPlan(admin_pb.SetPlanRequest(name="used"))
    w.ops.SetQuota(admin_pb.SetQuotaRequest(user="carol", plan="used"))
    fails(w.ops.SetPlan, admin_pb.SetPlanRequest(name="used", remove=True),
          code="FAILED_PRECONDITION", reason="PLAN_IN_USE", field="plan", limit="0", value="1")
    w.ops.DeleteQuota(admin_pb.DeleteQuotaRequest(user="carol"))
    w.ops.SetPlan(admin_pb.SetPlanRequest(name="used", remove=True))


@case("QUOTAS_FULL")
def quotas_full(w):
    for i in range(63):  # And the default one.
        w.ops.SetPlan(admin_pb.SetPlanRequest(name=f"p{i}"))
    fails(w.ops.SetPlan, admin_pb.SetPlanRequest(name="more"), code="RESOURCE_EXHAUSTED",
          reason="QUOTAS_FULL", field="plan", limit="64", value="more")
    w.ops.SetPlan(admin_pb.SetPlanRequest(name="p0", limits=limits({"name": "turns", "limit": 3})))
    for i in range(63):
        w.ops.SetPlan(admin_pb.SetPlanRequest(name=f"p{i}", remove=True))


def quota(w, user, **fields):
    w.ops.SetQuota(admin_pb.SetQuotaRequest(user=user, limits=limits(
        *({"name": name, "limit": value} for name, value in fields.items()))))


def no_quota(w, user):
    w.ops.DeleteQuota(admin_pb.DeleteQuotaRequest(user=user))


@case("QUOTA_SESSIONS")
def quota_sessions(w):
    w.bob.OpenSession(pb.OpenSessionRequest(session_id="held"))
    w.bob.Prefill(prefill(session_id="held"))
    quota(w, "bob", sessions=1)
    stream = w.bob.Decode(pb.DecodeRequest(session_id="held", max_tokens=60000, ignore_eos=True))
    next(stream)
    fails(w.bob.OpenSession, pb.OpenSessionRequest(session_id="more"), code="RESOURCE_EXHAUSTED",
          reason="QUOTA_SESSIONS", field="sessions", limit="1", value="1")
    stream.cancel()
    no_quota(w, "bob")


@case("QUOTA_BYTES_SSD")
def quota_bytes(w):
    w.bob.OpenSession(pb.OpenSessionRequest(session_id="wide"))
    quota(w, "bob", bytes_ssd=1 << 20)
    got = w.bob.Prefill(prefill(session_id="wide", tokens=pack([7] * 8000)))
    check(got.save_reason == "QUOTA_BYTES_SSD", f"a Prefill goes on: {got.save_reason}")
    fails(w.bob.Checkpoint, pb.CheckpointRequest(session_id="wide"), code="RESOURCE_EXHAUSTED",
          reason="QUOTA_BYTES_SSD")
    no_quota(w, "bob")


@case("QUOTA_REQUESTS")
def quota_requests(w):
    quota(w, "bob", requests_per_s=1)
    for _ in range(3):
        try:
            w.bob.GetSession(pb.GetSessionRequest(session_id="no"))
        except Exception:  # The last ones are refused for the reason that is asked for below.
            pass
    fails(w.bob.GetSession, pb.GetSessionRequest(session_id="no"), code="RESOURCE_EXHAUSTED",
          reason="QUOTA_REQUESTS", field="requests_per_s", limit="1")
    no_quota(w, "bob")


@case("QUOTA_TOKENS")
def quota_tokens(w):
    w.bob.OpenSession(pb.OpenSessionRequest(session_id="fast"))
    quota(w, "bob", tokens_per_s=10)
    w.bob.Prefill(prefill(session_id="fast", tokens=pack([5] * 300)))
    fails(w.bob.Prefill, prefill(session_id="fast"), code="RESOURCE_EXHAUSTED",
          reason="QUOTA_TOKENS", field="tokens_per_s", limit="10")
    no_quota(w, "bob")


@case("MODEL_INVALID")
def model_invalid(w):
    for bad in ("", "0123456", "0" * 65, "0123456G", "ABCDEF01", "others"):
        fails(w.ops.PurgeModel, admin_pb.PurgeModelRequest(model=bad), code=INVALID,
              reason="MODEL_INVALID", field="model", value=str(len(bad)))


@case("MODEL_IN_USE")
def model_in_use(w):
    served = w.ops.GetStats(admin_pb.GetStatsRequest()).model_fingerprint.hex()
    for digits in (served[:8], served[:16], served):
        fails(w.ops.PurgeModel, admin_pb.PurgeModelRequest(model=digits),
              code="FAILED_PRECONDITION", reason="MODEL_IN_USE", field="model", value=digits)


@case("STALE_EPOCH")
def stale_epoch(w):
    w.alice.OpenSession(pb.OpenSessionRequest(session_id="epoch"))
    first = w.alice.Prefill(prefill(session_id="epoch"))
    w.alice.Prefill(prefill(session_id="epoch", tokens=pack([1, 2, 3, 4, 5, 6, 7, 8])))
    moved = w.alice.Rollback(pb.RollbackRequest(
        session_id="epoch", checkpoint_id=first.checkpoints[-1].id))
    check(moved.epoch > first.epoch, "Rollback raises the epoch")
    fails(w.alice.Prefill, prefill(session_id="epoch", epoch=first.epoch),
          code="FAILED_PRECONDITION", reason="STALE_EPOCH")


@case("CHECKPOINT_NOT_FOUND")
def checkpoint_not_found(w):
    unknown = bytes(range(16))
    fails(w.alice.WaitDurable, pb.WaitDurableRequest(
        session_id="s", checkpoint_id=unknown, level=pb.LEVEL_SSD),
        code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    fails(w.alice.Rollback, pb.RollbackRequest(session_id="s", checkpoint_id=unknown),
          code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")
    fails(w.alice.Prefill, prefill(parent_checkpoint_id=unknown),
          code="NOT_FOUND", reason="CHECKPOINT_NOT_FOUND")


@case("CHECKPOINT_OTHER_BRANCH")
def checkpoint_other_branch(w):
    w.alice.OpenSession(pb.OpenSessionRequest(session_id="branch"))
    left = w.alice.Prefill(prefill(session_id="branch", tokens=pack([1] * 40 + [2] * 40)))
    w.alice.Prefill(prefill(session_id="branch", tokens=pack([1] * 40 + [3] * 40)))
    fails(w.alice.Prefill, prefill(
        session_id="branch", tokens=pack([4]), parent_checkpoint_id=left.checkpoints[-1].id),
        code="FAILED_PRECONDITION", reason="CHECKPOINT_OTHER_BRANCH")


@case("CHECKPOINT_ID_INVALID")
def checkpoint_id_invalid(w):
    for size in (0, 1, 15, 17, 1000):
        fails(w.alice.Rollback, pb.RollbackRequest(session_id="s", checkpoint_id=bytes(size)),
              code=INVALID, reason="CHECKPOINT_ID_INVALID", field="checkpoint_id",
              value=str(size))
        if size > 0:
            fails(w.alice.Prefill, prefill(parent_checkpoint_id=bytes(size)), code=INVALID,
                  reason="CHECKPOINT_ID_INVALID", field="parent_checkpoint_id", value=str(size))


@case("CHECKPOINT_KIND_INVALID")
def checkpoint_kind_invalid(w):
    fails(w.alice.Checkpoint, pb.CheckpointRequest(session_id="s", kind=5), code=INVALID,
          reason="CHECKPOINT_KIND_INVALID", field="kind", limit="4", value="5")


@case("LEVEL_INVALID")
def level_invalid(w):
    ident = w.prefill.checkpoints[-1].id
    for level in (0, 1, 4, 77):
        fails(w.alice.WaitDurable, pb.WaitDurableRequest(
            session_id="s", checkpoint_id=ident, level=level),
            code=INVALID, reason="LEVEL_INVALID", field="level", value=str(level))
    for level in (4, 99):
        fails(w.alice.Prefill, prefill(level=level), code=INVALID, reason="LEVEL_INVALID")
        fails(w.alice.Decode, decode(level=level), code=INVALID, reason="LEVEL_INVALID")


@case("PAGE_TOKEN_INVALID")
def page_token_invalid(w):
    for token in ("x", "0" * 31, "G" * 32, "A" * 32, "0" * 33):
        fails(w.alice.ListSessions, pb.ListSessionsRequest(page_token=token), code=INVALID,
              reason="PAGE_TOKEN_INVALID", field="page_token")


@case("PAGE_SIZE_INVALID")
def page_size_invalid(w):
    fails(w.alice.ListSessions, pb.ListSessionsRequest(page_size=1001), code=INVALID,
          reason="PAGE_SIZE_INVALID", field="page_size", limit="1000", value="1001")
    w.alice.ListSessions(pb.ListSessionsRequest(page_size=1000))


# ---- tokens ----

@case("TOKENS_EMPTY")
def tokens_empty(w):
    fails(w.alice.Prefill, prefill(tokens=b""), code=INVALID, reason="TOKENS_EMPTY",
          field="tokens")
    fails(w.alice.Lookup, pb.LookupRequest(session_id="s"), code=INVALID, reason="TOKENS_EMPTY",
          field="tokens")


@case("TOKENS_MALFORMED")
def tokens_malformed(w):
    for size in (1, 2, 3, 5, 4097):
        fails(w.alice.Prefill, prefill(tokens=bytes(size)), code=INVALID,
              reason="TOKENS_MALFORMED", field="tokens", value=str(size))
    fails(w.alice.Decode, decode(forced_tokens=b"abc"), code=INVALID, reason="TOKENS_MALFORMED",
          field="forced_tokens", value="3")


@case("TOKEN_OUT_OF_VOCAB")
def token_out_of_vocab(w):
    for bad in (VOCAB, VOCAB + 1, 2**31, 2**32 - 1):
        fails(w.alice.Prefill, prefill(tokens=pack([0, VOCAB - 1, bad, bad])), code=INVALID,
              reason="TOKEN_OUT_OF_VOCAB", field="tokens[2]", limit=str(VOCAB), value=str(bad))
    fails(w.alice.Decode, decode(forced_tokens=pack([1, VOCAB])), code=INVALID,
          reason="TOKEN_OUT_OF_VOCAB", field="forced_tokens[1]")
    fails(w.alice.Lookup, pb.LookupRequest(session_id="s", tokens=pack([VOCAB])), code=INVALID,
          reason="TOKEN_OUT_OF_VOCAB", field="tokens[0]")


@case("PROMPT_TOO_LONG")
def prompt_too_long(w):
    most = 1048576
    for name, request in {"Prefill": prefill(tokens=bytes(4 * (most + 1))),
                          "Lookup": pb.LookupRequest(session_id="s",
                                                     tokens=bytes(4 * (most + 1)))}.items():
        fails(getattr(w.alice, name), request, code="OUT_OF_RANGE", reason="PROMPT_TOO_LONG",
              field="tokens", limit=str(most), value=str(most + 1))
    found = w.alice.Lookup(pb.LookupRequest(session_id="s", tokens=bytes(4 * most)))
    check(found.outcome != 0, "a prompt of the longest length is looked up")


@case("STABLE_TOKENS_INVALID")
def stable_tokens_invalid(w):
    fails(w.alice.Prefill, prefill(stable_tokens=5), code=INVALID,
          reason="STABLE_TOKENS_INVALID", field="stable_tokens", limit="4", value="5")


@case("ANCHORS_INVALID")
def anchors_invalid(w):
    for anchors in ([1, 2, 3, 4, 4], [2, 1], [1, 1], [0], [5], [1, 2, 3, 4, 5]):
        fails(w.alice.Prefill, prefill(anchors=anchors), code=INVALID, reason="ANCHORS_INVALID",
              field="anchors")


@case("MAX_TOKENS_INVALID")
def max_tokens_invalid(w):
    for most in (0, 65537, 2**32 - 1):
        fails(w.alice.Decode, decode(max_tokens=most), code=INVALID,
              reason="MAX_TOKENS_INVALID", field="max_tokens", value=str(most))
    fails(w.alice.Decode, decode(max_tokens=1, forced_tokens=pack([1, 2])), code=INVALID,
          reason="MAX_TOKENS_INVALID", field="forced_tokens", limit="1", value="2")


@case("SAMPLING_INVALID")
def sampling_invalid(w):
    nan, inf = float("nan"), float("inf")
    for bad in (-0.1, 10.5, nan, inf, -inf):
        fails(w.alice.Decode, decode(temperature=bad), code=INVALID, reason="SAMPLING_INVALID",
              field="temperature")
    for bad in (-0.1, 1.5, nan, inf):
        fails(w.alice.Decode, decode(top_p=bad), code=INVALID, reason="SAMPLING_INVALID",
              field="top_p")


@case("STOP_TOKENS_INVALID")
def stop_tokens_invalid(w):
    fails(w.alice.Decode, decode(stop_tokens=range(17)), code=INVALID,
          reason="STOP_TOKENS_INVALID", field="stop_tokens", limit="16", value="17")
    fails(w.alice.Decode, decode(stop_tokens=[VOCAB]), code=INVALID,
          reason="STOP_TOKENS_INVALID", field="stop_tokens", limit=str(VOCAB), value=str(VOCAB))


@case("FROM_POSITION_INVALID")
def from_position_invalid(w):
    for bad in (1048577, 2**32 - 1, 100000):
        fails(w.alice.Decode, decode(from_position=bad), code="OUT_OF_RANGE",
              reason="FROM_POSITION_INVALID", field="from_position", value=str(bad))


@case("HEAD_EMPTY")
def head_empty(w):
    fails(w.alice.Decode, decode(session_id="empty"), code="FAILED_PRECONDITION",
          reason="HEAD_EMPTY")


@case("HEAD_MOVED")
def head_moved(w):
    w.alice.OpenSession(pb.OpenSessionRequest(session_id="moved"))
    w.alice.Prefill(prefill(session_id="moved"))
    w.alice.Prefill(prefill(session_id="moved", tokens=pack(range(3, 90)), no_checkpoint=True))
    w.alice.CloseSession(pb.CloseSessionRequest(session_id="moved"))
    fails(w.alice.Decode, decode(session_id="moved"), code="FAILED_PRECONDITION",
          reason="HEAD_MOVED")


# ---- transport and identity ----

@case("MESSAGE_MALFORMED")
def message_malformed(w):
    rng = random.Random(1)
    client = w.daemon.client("alice")
    ops = w.daemon.client("ops")
    # A length beyond the end; a group; a field number 0; an endless varint; random bytes.
    sure = [b"\x0a\x7f", b"\x0b\x0c", b"\x02\x00", b"\xff" * 11, b"\x0a", b"\x12\x05ab"]
    methods = [(client, f"/cached.session.v1.SessionService/{m}", m == "Decode") for m in (
        "OpenSession", "Lookup", "Prefill", "Decode", "Checkpoint", "WaitDurable", "Rollback",
        "CloseSession", "ListSessions", "GetSession")]
    methods += [(ops, f"/cached.admin.v1.AdminService/{m}", False)
                for m in ("GetStats", "AdvanceClock")]
    for who, path, stream in methods:
        for message in sure:
            fails(who.raw, path, message, stream=stream, code=INVALID,
                  reason="MESSAGE_MALFORMED", field="message")
        for _ in range(20):
            message = rng.randbytes(rng.randrange(1, 200))
            try:
                answer = who.raw(path, message, stream=stream)
                if stream:
                    list(answer)
            except grpc.RpcError as error:
                got = d.Failure(error)
                check(got.reason is not None and got.code != "INTERNAL",
                      f"{path}: random bytes have a reason: {got!r}")
    # More than a token list may come with.
    padding = b"\xa2\x06" + b"\x80\x80\x08" + bytes(131072)
    fails(client.raw, "/cached.session.v1.SessionService/Prefill",
          prefill().SerializeToString() + padding, code=INVALID, reason="MESSAGE_MALFORMED",
          limit="65536")
    for path in ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"):
        fails(client.raw, path, b"\x0a\x7f", stream=path.endswith("Watch"), code=INVALID,
              reason="MESSAGE_MALFORMED")
    # A text with a NUL inside would silently be another.
    for message in (pb.OpenSessionRequest(session_id="nul\0x"),
                    pb.OpenSessionRequest(session_id="n", parent_session_id="\0abc"),
                    pb.OpenSessionRequest(session_id="n", request_id="\0abc")):
        fails(w.alice.OpenSession, message, code=INVALID, reason="MESSAGE_MALFORMED",
              limit="no NUL")
    # Fields of a later version are none of our business.
    later = prefill().SerializeToString() + b"\xa2\x06\x03abc\xa8\x06\x05"
    client.raw("/cached.session.v1.SessionService/Prefill", later)


@case("MESSAGE_TOO_LARGE")
def message_too_large(w):
    fails(w.alice.Prefill, prefill(tokens=bytes(8 << 20)), code="RESOURCE_EXHAUSTED",
          reason="MESSAGE_TOO_LARGE", field="message", limit=str(8 << 20))
    far = failure(w.alice.Prefill, prefill(tokens=bytes(12 << 20)))
    check(far is not None and far.code == "RESOURCE_EXHAUSTED", f"far too large: {far!r}")


@case("TOKEN_MISSING")
def token_missing(w):
    nobody = w.daemon.client(None)
    token = d.TOKENS["alice"][2]
    for metadata in ((), (("authorization", token),), (("authorization", "Bearer "),),
                     (("authorization", f"Basic {token}"),),
                     (("authorization", f"Bearer {token}"),) * 2):
        fails(nobody.session.GetSession, pb.GetSessionRequest(session_id="s"),
              metadata=metadata, code="UNAUTHENTICATED", reason="TOKEN_MISSING",
              field="authorization")


@case("TOKEN_UNKNOWN")
def token_unknown(w):
    for token in ("x", d.TOKENS["alice"][2] + "x", d.TOKENS["alice"][2][:-1], "y" * 3000):
        stranger = w.daemon.client(None, token=token)
        fails(stranger.session.GetSession, pb.GetSessionRequest(session_id="s"),
              code="UNAUTHENTICATED", reason="TOKEN_UNKNOWN", field="authorization")


@case("ROLE_DENIED")
def role_denied(w):
    fails(w.daemon.client("ops").session.GetSession, pb.GetSessionRequest(session_id="s"),
          code="PERMISSION_DENIED", reason="ROLE_DENIED", field="role", value="ops")


@case("NOT_IMPLEMENTED")
def not_implemented(w):
    client = w.daemon.client("alice")
    served = {"OpenSession", "Lookup", "Prefill", "Decode", "Checkpoint", "WaitDurable",
              "Rollback", "CloseSession", "ListSessions", "GetSession", "GetStats", "GetConfig",
              "AdvanceClock", "Scrub", "DiskUsage",
              "DeleteSession", "EraseUser", "Compact", "Pin", "Touch", "GetUsage",
              "RotateKey", "Fork", "Why", "PurgeModel",
              "SetQuota", "GetQuota", "DeleteQuota", "SetPlan", "ListPlans", "ListUsers"}
    from cached.transfer.v1 import transfer_pb2 as transfer_pb
    count = 0
    for module, service in ((pb, "SessionService"), (admin_pb, "AdminService"),
                            (transfer_pb, "TransferService")):
        described = module.DESCRIPTOR.services_by_name[service]
        for method in described.methods:
            path = f"/{described.full_name}/{method.name}"
            if method.name in served:
                continue
            got = fails(client.raw, path, b"", code="UNIMPLEMENTED", reason="NOT_IMPLEMENTED")
            check(got is not None and method.name in got.message, f"{path}: the text names it")
            count += 1
    check(count == 11, f"11 methods of later versions, not {count}")


@case("UNKNOWN_METHOD")
def unknown_method(w):
    client = w.daemon.client("alice")
    for path in ("/cached.session.v1.SessionService/Nothing", "/a.b.C/D", "/x", "/",
                 "/cached.session.v1.SessionService/prefill", "/" + "x" * 3000):
        began = time.monotonic()
        fails(client.raw, path, b"abc", code="UNIMPLEMENTED", reason="UNKNOWN_METHOD")
        check(time.monotonic() - began < 2, f"{path[:40]}: answered at once")


@case("UNKNOWN_SERVICE")
def unknown_service(w):
    fails(w.daemon.client(None).health.Check, d.health_pb2.HealthCheckRequest(service="x.Y"),
          code="NOT_FOUND", reason="UNKNOWN_SERVICE")


@case("CLOCK_NOT_VIRTUAL")
def clock_not_virtual(w):
    fails(w.ops.AdvanceClock, admin_pb.AdvanceClockRequest(ms=1000),
          code="FAILED_PRECONDITION", reason="CLOCK_NOT_VIRTUAL")


@case("CLOCK_STEP_INVALID")
def clock_step_invalid(w):
    most = 365 * 24 * 3600 * 1000
    for bad in (0, most + 1, 2**64 - 1):
        fails(w.ops.AdvanceClock, admin_pb.AdvanceClockRequest(ms=bad), code=INVALID,
              reason="CLOCK_STEP_INVALID", field="ms", value=str(bad))


# ---- seen in the log only: the caller has gone by then ----

def logged(w, offset, reason):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if f"status={reason}" in w.daemon.log(offset):
            provoked.add(reason)
            return True
        time.sleep(0.02)
    return False


# A caller that stands still: its own timer does not run, so the daemon is the first to notice.
FROZEN = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import grpc
from cached.session.v1 import session_pb2 as pb, session_pb2_grpc as pb_grpc
stub = pb_grpc.SessionServiceStub(grpc.insecure_channel(sys.argv[2]))
stream = stub.Decode(pb.DecodeRequest(session_id="late", max_tokens=65536, ignore_eos=True),
                     metadata=(("authorization", "Bearer " + sys.argv[3]),), timeout=0.08)
next(stream)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@case("DEADLINE")
def deadline(w):
    w.alice.OpenSession(pb.OpenSessionRequest(session_id="late"))
    w.alice.Prefill(prefill(session_id="late"))
    began = time.monotonic()
    got = failure(w.alice.Decode, decode(session_id="late", max_tokens=65536, ignore_eos=True),
                  timeout=0.03)
    check(got is not None and got.code == "DEADLINE_EXCEEDED", f"the deadline passed: {got!r}")
    check(time.monotonic() - began < 2, "the deadline is kept")

    offset = len(w.daemon.log().encode())
    frozen = subprocess.Popen([sys.executable, "-c", FROZEN, d.PROTO,
                               f"127.0.0.1:{w.daemon.port}", d.TOKENS["alice"][2]])
    try:
        check(logged(w, offset, "DEADLINE"), "the daemon ended it for its deadline")
    finally:
        frozen.kill()
        frozen.wait()


@case("CANCELLED")
def cancelled(w):
    w.alice.OpenSession(pb.OpenSessionRequest(session_id="gone"))
    w.alice.Prefill(prefill(session_id="gone"))
    offset = len(w.daemon.log().encode())
    stream = w.alice.Decode(decode(session_id="gone", max_tokens=65536, ignore_eos=True))
    next(stream)
    stream.cancel()
    check(logged(w, offset, "CANCELLED"), "the daemon noticed that the caller has gone")


def main():
    w = World()
    run(w)
    inflight = 1
    for _ in range(100):
        inflight = w.ops.GetStats(admin_pb.GetStatsRequest()).requests_inflight
        if inflight == 0:
            break
        time.sleep(0.02)
    equal(inflight, 0, "requests in flight after all of it")
    check(w.alice.GetSession(pb.GetSessionRequest(session_id="s")).session.session_id == "s",
          "the session is there")
    code, seconds = w.daemon.stop()
    equal(code, 0, "exit code")
    check(seconds < 10, f"stopped in {seconds:.1f} s")
    account("it_bad_input.py")
    d.finish()


main()
