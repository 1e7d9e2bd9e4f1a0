"""Who may call what: every role with every method, tokens of every shape, and no token in the log."""

import hashlib
import os
import socket

import grpc

import daemon as d
from daemon import admin_pb, check, equal, failure, pb

SESSION = {
    "OpenSession": pb.OpenSessionRequest(session_id="s"),
    "Lookup": pb.LookupRequest(session_id="s", tokens=d.pack([1])),
    "Prefill": pb.PrefillRequest(session_id="s", tokens=d.pack([1, 2])),
    "Decode": pb.DecodeRequest(session_id="s", max_tokens=1),
    "Checkpoint": pb.CheckpointRequest(session_id="s"),
    "WaitDurable": pb.WaitDurableRequest(session_id="s", checkpoint_id=bytes(16), level=3),
    "Rollback": pb.RollbackRequest(session_id="s", checkpoint_id=bytes(16)),
    "CloseSession": pb.CloseSessionRequest(session_id="s"),
    "ListSessions": pb.ListSessionsRequest(),
    "GetSession": pb.GetSessionRequest(session_id="s"),
}
ADMIN = {
    "GetStats": admin_pb.GetStatsRequest(),
    "GetConfig": admin_pb.GetConfigRequest(),
    "AdvanceClock": admin_pb.AdvanceClockRequest(ms=1),
}
ALLOWED = {
    "harness": set(SESSION),
    "ops": {"GetStats", "GetConfig", "AdvanceClock"},
    "stats": {"GetStats", "GetConfig"},
}


def outcome(call, request):
    """None when the call got past identity, else its failure."""
    try:
        answer = call(request)
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as error:
        got = d.Failure(error)
        return got if got.code in ("UNAUTHENTICATED", "PERMISSION_DENIED") else None
    return None


def matrix(daemon):
    clients = {"harness": daemon.client("alice"), "ops": daemon.client("ops"),
               "stats": daemon.client("stats"), "nobody": daemon.client(None),
               "stranger": daemon.client(None, token="not a token of anybody")}
    for role, client in clients.items():
        for stub, methods in ((client.session, SESSION), (client.admin, ADMIN)):
            for name, request in methods.items():
                got = outcome(getattr(stub, name), request)
                said = None if got is None else (got.code, got.reason)
                want = (("UNAUTHENTICATED", "TOKEN_MISSING") if role == "nobody" else
                        ("UNAUTHENTICATED", "TOKEN_UNKNOWN") if role == "stranger" else
                        None if name in ALLOWED[role] else ("PERMISSION_DENIED", "ROLE_DENIED"))
                equal(said, want, f"{role} calls {name}")
        equal(client.health.Check(d.health_pb2.HealthCheckRequest(), timeout=10).status, 1,
              f"{role} asks for health")


def identity_first(daemon):
    """Garbage from somebody without a token is answered by the token's absence."""
    nobody = daemon.client(None)
    for path in ("/cached.session.v1.SessionService/Prefill",
                 "/cached.admin.v1.AdminService/GetStats"):
        got = failure(nobody.raw, path, b"\xff\xff\xff")
        check(got is not None and got.reason == "TOKEN_MISSING", f"{path}: {got!r}")


def users_apart(daemon):
    """The user comes from the token: the same id names two sessions."""
    alice, bob = daemon.client("alice").session, daemon.client("bob").session
    alice.Prefill(pb.PrefillRequest(session_id="s", tokens=d.pack(range(9))))
    check(bob.OpenSession(pb.OpenSessionRequest(session_id="s")).created, "bob has an own `s`")
    equal(bob.GetSession(pb.GetSessionRequest(session_id="s")).session.head_position, 0,
          "it is empty")
    equal([s.session_id for s in bob.ListSessions(pb.ListSessionsRequest()).sessions], ["s"],
          "bob sees his own sessions")
    ident = alice.GetSession(pb.GetSessionRequest(session_id="s")).head_checkpoint_id
    got = failure(bob.Rollback, pb.RollbackRequest(session_id="s", checkpoint_id=ident))
    check(got is not None and (got.code, got.reason) == ("NOT_FOUND", "CHECKPOINT_NOT_FOUND"),
          f"a foreign checkpoint is unknown: {got!r}")
    found = bob.Lookup(pb.LookupRequest(session_id="s", tokens=d.pack(range(9))))
    equal((found.outcome, found.reason), (pb.OUTCOME_MISS, "NEVER_STORED"),
          "the same tokens of another user are a plain miss")


def shapes(daemon):
    token = d.TOKENS["alice"][2]
    nobody = daemon.client(None).session
    ask = pb.GetSessionRequest(session_id="s")
    for header in (f"Bearer {token}", f"bearer {token}", f"BEARER   {token}"):
        nobody.GetSession(ask, metadata=(("authorization", header),))
        check(True, "accepted")
    for header in (f"Bearer {token} ", f"Bearer {token},", f"Bearer {token.upper()}",
                   "Bearer " + hashlib.sha256(token.encode()).hexdigest()):
        got = failure(nobody.GetSession, ask, metadata=(("authorization", header),))
        check(got is not None and got.code == "UNAUTHENTICATED", f"{header[-8:]!r}: {got!r}")
    # More metadata than 8 KiB: refused before we see it.
    got = failure(nobody.GetSession, ask, metadata=(
        ("authorization", f"Bearer {token}"), ("x-padding", "p" * 20000)))
    check(got is not None and got.code in ("RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE",
                                           "UNKNOWN"), f"large metadata: {got!r}")
    # gRPC may close that connection; the daemon goes on.
    daemon.client("alice").session.GetSession(ask)
    check(daemon.is_up(), "the daemon is up after large metadata")


def same_over_socket(daemon):
    over = daemon.client("alice", target=f"unix:{daemon.socket}").session
    over.GetSession(pb.GetSessionRequest(session_id="s"))
    got = failure(daemon.client(None, target=f"unix:{daemon.socket}").session.GetSession,
                  pb.GetSessionRequest(session_id="s"))
    check(got is not None and got.reason == "TOKEN_MISSING", "a local caller needs a token too")


def files():
    base = d.scratch()
    digest = hashlib.sha256(b"x").hexdigest()
    for mode, text, words in (
            (0o644, f"a harness {digest}\n", "chmod 600"),
            (0o604, f"a harness {digest}\n", "chmod 600"),
            (0o600, f"a root {digest}\n", ":1: roles are harness, ops and stats"),
            (0o600, f"# c\na harness {digest}1\n", ":2: a SHA-256 is 64 hex digits"),
            (0o600, f"a harness {digest}\nb ops {digest}\n", ":2: the token is in the file"),
            (0o600, "a harness\n", ":1: a line is"),
            (0o600, "\n", "there is no token")):
        daemon = d.Daemon({"server.token_file": os.path.join(base, "tokens")})
        with open(daemon.flags["server.token_file"], "w", encoding="ascii") as f:
            f.write(text)
        os.chmod(daemon.flags["server.token_file"], mode)
        code, said = daemon.refused()
        check(code == 2 and words in said and base in said, f"{oct(mode)} {text!r}: {said!r}")


def only_loopback(daemon):
    """No listener beyond the addresses asked for."""
    with socket.socket() as s:
        s.settimeout(2)
        try:
            s.connect((socket.gethostbyname(socket.gethostname()), daemon.port))
            reached = not s.getpeername()[0].startswith("127.")
        except OSError:
            reached = False
    check(not reached, "the port is not served on another address")


def main():
    daemon = d.Daemon({"log.level": "debug"}).start()
    matrix(daemon)
    identity_first(daemon)
    users_apart(daemon)
    shapes(daemon)
    same_over_socket(daemon)
    only_loopback(daemon)
    code, _ = daemon.stop()
    equal(code, 0, "exit code")
    log = daemon.log()
    for user, _, token in d.TOKENS.values():
        check(token not in log, f"no token of {user} in the log")
        check(hashlib.sha256(token.encode()).hexdigest() not in log, "nor its digest")
    check("not a token of anybody" not in log, "nor a wrong one")
    check("status=ROLE_DENIED" in log and "status=TOKEN_UNKNOWN" in log, "denials are logged")
    check("session=s " not in log, "session names are not in the log")
    files()
    d.finish()


main()
