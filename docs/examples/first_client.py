#!/usr/bin/python3
# A first client, with Debian's grpcio: two turns of one conversation.
#   CACHED_ENDPOINT=unix:/run/cached/cached.sock CACHED_TOKEN_FILE=my.token first_client.py
# Prints "turn 1 MISS NEVER_STORED" and "turn 2 EXACT hit=<tokens that were not computed again>".
import os, struct, sys, tempfile, uuid
import grpc
from grpc_tools import protoc

# Stubs, made when the program starts: nothing generated is kept in the repository.
proto = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../proto/cached/session/v1")
stubs = tempfile.TemporaryDirectory()
if protoc.main(["", "-I" + proto, "--python_out=" + stubs.name, "--grpc_python_out=" + stubs.name,
                os.path.join(proto, "session.proto")]) != 0:
    sys.exit("protoc failed")
sys.path.insert(0, stubs.name)
import session_pb2 as pb, session_pb2_grpc as rpc

def ids(text):  # The byte tokens of the tiny model: three ids are reserved, then the 256 bytes.
    return [3 + byte for byte in text.encode()]

def pack(tokens):  # Token lists travel as u32, little-endian.
    return struct.pack("<%dI" % len(tokens), *tokens)

def unpack(data):
    return list(struct.unpack("<%dI" % (len(data) // 4), data))

for name in "CACHED_ENDPOINT", "CACHED_TOKEN_FILE":
    if not os.environ.get(name):
        sys.exit(name + " is not set: after `deploy/quickstart --keep`, run `. .quickstart/env`")

with open(os.environ["CACHED_TOKEN_FILE"]) as file:
    auth = [("authorization", "Bearer " + file.read().strip())]
service = rpc.SessionServiceStub(grpc.insecure_channel(os.environ["CACHED_ENDPOINT"]))
chat = "first-client-" + uuid.uuid4().hex
service.OpenSession(pb.OpenSessionRequest(session_id=chat), metadata=auth, timeout=10)

def turn(number, prompt):
    """Sends the whole prompt, says what was reused, returns the tokens of the answer."""
    got = service.Prefill(pb.PrefillRequest(session_id=chat, tokens=pack(prompt)), metadata=auth,
                          timeout=60)
    outcome = pb.Outcome.Name(got.outcome).replace("OUTCOME_", "")
    print("turn", number, outcome, got.reason if outcome == "MISS" else "hit=%d" % got.hit_tokens)
    stream = service.Decode(pb.DecodeRequest(session_id=chat, max_tokens=16, ignore_eos=True),
                            metadata=auth, timeout=60)
    return [token for part in stream for token in unpack(part.tokens)]

prompt = ids("You are a patient assistant. Answer in one line. What does a cache keep, and for how "
             "long does it keep it?\n")
answer = turn(1, prompt)
turn(2, prompt + answer + ids("\nAnd if it is asked again tomorrow?\n"))
