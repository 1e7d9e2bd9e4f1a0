"""Every call of SessionService is made, its connection is cut before the answer, and it is made
again on a new one with the same ids: answer and state are those of a single call.

The connection runs through a wire of this test, which can hold back what the daemon sends.  A call
is cut at two moments: as soon as its request is on the way, and when the daemon has answered it.
"""

import socket
import struct
import threading
import time

import daemon
import grpc
from daemon import check, equal, pb
from talk import Answer, Talk, case, opened, run_cases, tokens


class Wire:
    """A way to the daemon that can be held up and cut."""

    def __init__(self, port):
        self.port = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.held = threading.Event()
        self.pairs = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def target(self):
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.port))
            self.pairs.append((near, far))
            threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source, sink, is_answer):
        try:
            while data := source.recv(65536):
                if is_answer and self.held.is_set():
                    continue  # Taken from the daemon, and never seen by the client.
                sink.sendall(data)
        except OSError:
            pass

    def cut(self):
        """Both ends are reset."""
        self.listener.close()
        for pair in self.pairs:
            for end in pair:
                try:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                end.close()


def answered(box, method):
    """How many calls of this method the daemon has answered."""
    return sum(c.value for c in box.stats().counters
               if c.name == "cached_requests_total" and f'method="{method}",' in c.labels)


def send_and_lose(box, method, request, moment):
    """Makes the call on a connection that is cut before its answer."""
    wire = Wire(box.port)
    client = box.client(target=wire.target)
    grpc.channel_ready_future(client.channel).result(timeout=10)
    before = answered(box, method)
    wire.held.set()
    call = getattr(client.session._stub, method)
    if method == "Decode":
        future = call(request, metadata=client.metadata, timeout=30)
    else:
        future = call.future(request, metadata=client.metadata, timeout=30)
    end = time.monotonic() + 10
    while moment == "answered" and answered(box, method) == before and time.monotonic() < end:
        time.sleep(0.005)
    if moment == "answered" and method != "Decode":
        check(answered(box, method) == before + 1, f"{method}: the daemon answered")
    wire.cut()
    try:
        got = list(future) if method == "Decode" else future.result()
        check(False, f"{method}: an answer came through the cut: {got}")
    except grpc.RpcError:
        pass
    client.close()


def again(box, method, request):
    """As the .proto says: SESSION_BUSY means that the first one is still ending."""
    end = time.monotonic() + 20
    while True:
        call = getattr(box.client().session, method)
        try:
            return Answer(call(request)) if method == "Decode" else call(request)
        except grpc.RpcError as error:
            failure = daemon.Failure(error)
            if failure.reason != "SESSION_BUSY" or time.monotonic() > end:
                return failure
            time.sleep(0.01)


VOLATILE = {"times", "rows_expire_ms", "window_expire_ms", "age_ms", "idle_ms", "session_id",
            "expire_ms", "pin_expire_ms", "leave_ms", "next_page_token"}


def plain(message):
    """A message as a dictionary, without times and names."""
    if isinstance(message, Answer):
        return message.first, message.tokens, plain(message.end)
    if isinstance(message, daemon.Failure):
        return message.code, message.reason, message.field
    found = {}
    for field, value in message.ListFields():
        if field.name in VOLATILE:
            continue
        if field.message_type is None:
            found[field.name] = list(value) if field.label == field.LABEL_REPEATED else value
        elif field.label == field.LABEL_REPEATED:
            found[field.name] = [plain(v) for v in value]
        else:
            found[field.name] = plain(value)
    return found


def state_of(box, name):
    """What can be seen of a session, or that there is none."""
    try:
        got = box.client().session.GetSession(pb.GetSessionRequest(session_id=name))
    except grpc.RpcError as error:
        return daemon.Failure(error).reason
    return plain(got)


# ---- One entry for each call: what comes before it, and the call ----

PROMPT, LONGER = [], []  # Of the case that runs.
calls = {}


def retried(method):
    def mark(function):
        calls[method] = function
        return function
    return mark


def with_turn(box, name):
    """A session with two turns."""
    talk = Talk(box.client(), name)
    first = talk.prefill(PROMPT).checkpoints[0]
    answer = talk.decode(4, forced=[5, 6, 7, 8])
    return talk, first, answer.end.checkpoints[0]


@retried("OpenSession")
def open_session(_box, name):
    return pb.OpenSessionRequest(session_id=name, ttl_ms=100000, request_id="1")


@retried("Lookup")
def lookup(box, name):
    with_turn(box, name)
    return pb.LookupRequest(session_id=name, tokens=daemon.pack(PROMPT + [9, 9]))


@retried("Prefill")
def prefill(box, name):
    with_turn(box, name)
    return pb.PrefillRequest(session_id=name, tokens=daemon.pack(PROMPT + [5, 6, 7, 8] + LONGER),
                             anchors=[300], request_id="1")


@retried("Decode")
def decode(box, name):
    with_turn(box, name)
    return pb.DecodeRequest(session_id=name, max_tokens=800, ignore_eos=True, request_id="1")


@retried("Checkpoint")
def checkpoint(box, name):
    talk, _, _ = with_turn(box, name)
    talk.decode(5, forced=[9, 9, 9, 9, 9], no_checkpoint=True)
    return pb.CheckpointRequest(session_id=name, request_id="1")


@retried("WaitDurable")
def wait_durable(box, name):
    _, _, last = with_turn(box, name)
    return pb.WaitDurableRequest(session_id=name, checkpoint_id=last.id, level=pb.LEVEL_SSD)


@retried("Rollback")
def rollback(box, name):
    _, first, _ = with_turn(box, name)
    return pb.RollbackRequest(session_id=name, checkpoint_id=first.id, epoch=1, keep=True,
                              request_id="1")


@retried("Fork")
def fork(box, name):
    _, first, _ = with_turn(box, name)
    return pb.ForkRequest(session_id=name, checkpoint_id=first.id, new_session_id=name + ".fork",
                          request_id="1")


@retried("CloseSession")
def close_session(box, name):
    with_turn(box, name)
    return pb.CloseSessionRequest(session_id=name, request_id="1")


@retried("DeleteSession")
def delete_session(box, name):
    with_turn(box, name)
    return pb.DeleteSessionRequest(session_id=name, request_id="1")


@retried("ListSessions")
def list_sessions(box, name):
    with_turn(box, name)
    return pb.ListSessionsRequest(page_size=1)


@retried("GetSession")
def get_session(box, name):
    with_turn(box, name)
    return pb.GetSessionRequest(session_id=name)


@retried("Compact")
def compact(box, name):
    with_turn(box, name)
    return pb.CompactRequest(session_id=name, epoch=1, request_id="1")


@retried("Pin")
def pin(box, name):
    _, _, last = with_turn(box, name)
    return pb.PinRequest(session_id=name, checkpoint_id=last.id, ttl_ms=60000)


@retried("Touch")
def touch(box, name):
    _, _, last = with_turn(box, name)
    return pb.TouchRequest(session_id=name, checkpoint_id=last.id)


@retried("GetUsage")
def get_usage(_box, _name):
    return pb.GetUsageRequest()


# Calls of later versions: the day one is served, it needs an entry.
LATER = set()


@case
def every_call_has_an_entry():
    box, _ = opened("synthetic")
    service = pb.DESCRIPTOR.services_by_name["SessionService"]
    equal({m.name for m in service.methods}, set(calls) | LATER, "calls with an entry")
    for method in sorted(LATER):
        got = daemon.failure(box.client().raw, f"/{service.full_name}/{method}", b"")
        equal(got and got.code, "UNIMPLEMENTED", f"{method} is not served yet")
    box.stop()


def entry_case(method):
    def run():
        global PROMPT, LONGER
        PROMPT, LONGER = tokens(200), tokens(700)
        box, _ = opened()
        request = calls[method](box, "once")
        want = plain(again(box, method, request))
        state = state_of(box, "once")
        for moment in ("sent", "answered"):
            name = f"twice.{moment}"
            request = calls[method](box, name)
            send_and_lose(box, method, request, moment)
            equal(plain(again(box, method, request)), want, f"{method}, cut when {moment}: answer")
            equal(state_of(box, name), state, f"{method}, cut when {moment}: state")
        box.stop()
    run.__name__ = "cut_" + method
    run.__module__ = "__main__"
    return run


if __name__ == "__main__":
    for entry in calls:
        case(entry_case(entry))
    run_cases("Every call repeated after its connection was cut, through the real daemon.")
