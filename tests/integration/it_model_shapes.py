"""Models of other shapes than the three that come with the engine.

Goal: what config.json says of a model holds in every program that reads it.
Method: models made by mkmodel from configs changed here, given to cachectl and to the daemon.
"""

import json
import os
import subprocess

import daemon as d
from daemon import pb
from talk import case, run_cases

CACHECTL = os.path.join(d.BUILD, "tools", "cachectl")
MKMODEL = os.path.join(d.BUILD, "tools", "mkmodel")


def tiny(**fields):
    """The config of tiny, changed; a field of None is left out."""
    with open(os.path.join(d.SOURCE, "engine", "model", "configs", "tiny.json"),
              encoding="ascii") as f:
        config = json.load(f)
    config["text_config"].update(fields)
    for name in [name for name, value in fields.items() if value is None]:
        del config["text_config"][name]
    return config


def tool(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120,
                          check=False)


def make(config, *options):
    """The directory of the model, or what mkmodel said instead."""
    folder = d.scratch()
    path = os.path.join(folder, "config.json")
    with open(path, "w", encoding="ascii") as f:
        json.dump(config, f)
    directory = os.path.join(folder, "model")
    done = tool(MKMODEL, "--config", path, *options, directory)
    return (directory, None) if done.returncode == 0 else (None, done.stderr)


def run_model(directory, ids, *options):
    """cachectl model run: what it said, and the bytes of the dump."""
    folder = d.scratch()
    path, out = os.path.join(folder, "ids"), os.path.join(folder, "out")
    with open(path, "wb") as f:
        f.write(d.pack(ids))
    done = tool(CACHECTL, "model", "run", directory, "--tokens", path, "--dump", out, *options)
    if done.returncode != 0:
        return done, b""
    with open(out, "rb") as f:
        return done, f.read()


# ---- max_position_embeddings ----

CONTEXT = 200


@case
def context_of_the_tools():
    directory, said = make(tiny(max_position_embeddings=CONTEXT))
    d.equal(said, None, "a model of 200 positions")
    ids = [3 + i % 400 for i in range(CONTEXT + 1)]
    d.equal(run_model(directory, ids[:CONTEXT])[0].returncode, 0, "200 tokens run")
    done = run_model(directory, ids)[0]
    d.equal(done.returncode, 1, f"201 tokens: {done.stderr}")
    d.check(done.stderr.endswith(
        ": 201 tokens, the model takes at most 200 (max_position_embeddings)\n"), done.stderr)
    done = tool(CACHECTL, "bench", "prefill", "--quick", "--model", directory)
    d.equal(done.returncode, 1, f"bench: {done.stderr}")
    d.check("the model takes at most 200 (max_position_embeddings)" in done.stderr, done.stderr)
    said = tool(CACHECTL, "model", "inspect", directory).stdout
    d.check("\ncontext 200 tokens of 200 positions\n" in said, said)
    directory, said = make(tiny(max_position_embeddings=1 << 31))
    d.equal(said, None, "a model of 2^31 positions")
    shape = json.loads(tool(CACHECTL, "model", "inspect", "--json", directory).stdout)["shape"]
    d.equal((shape["positions"], shape["context_tokens"]), (1 << 31, 1 << 20), "inspect --json")


def too_long(call, request, value):
    d.expect(call, request, code="OUT_OF_RANGE", reason="PROMPT_TOO_LONG", field="tokens",
             limit=str(CONTEXT), value=str(value))


@case
def context_of_the_daemon():
    directory, said = make(tiny(max_position_embeddings=CONTEXT))
    d.equal(said, None, "a model of 200 positions")
    server = d.Daemon({"engine.backend": "cpu", "engine.model_dir": directory}).start()
    session = server.client().session
    opened = session.OpenSession(pb.OpenSessionRequest(session_id="s"))
    d.equal(opened.context_tokens, CONTEXT, "OpenSession says so")
    stats = server.client("ops").admin.GetStats(d.admin_pb.GetStatsRequest())
    d.equal(stats.context_tokens, CONTEXT, "GetStats says so")
    ids = [3 + i % 400 for i in range(CONTEXT + 1)]
    for name, request in (("Prefill", pb.PrefillRequest), ("Lookup", pb.LookupRequest)):
        too_long(getattr(session, name), request(session_id="s", tokens=d.pack(ids)), CONTEXT + 1)
    done = session.Prefill(pb.PrefillRequest(session_id="s", tokens=d.pack(ids[:150])))
    parent = done.checkpoints[-1].id
    too_long(session.Prefill, pb.PrefillRequest(session_id="s", parent_checkpoint_id=parent,
                                                tokens=d.pack(ids[150:])), CONTEXT + 1)
    d.expect(session.Decode, pb.DecodeRequest(session_id="s", max_tokens=50),
             code="INVALID_ARGUMENT", reason="MAX_TOKENS_INVALID", field="max_tokens", limit="49",
             value="50")
    d.expect(session.Decode, pb.DecodeRequest(session_id="s", max_tokens=1, from_position=201),
             code="OUT_OF_RANGE", reason="FROM_POSITION_INVALID", field="from_position",
             limit="200", value="201")
    pieces = list(session.Decode(pb.DecodeRequest(session_id="s", max_tokens=49, ignore_eos=True)))
    d.equal(sum(len(p.tokens) // 4 for p in pieces), 49, "as far as the context goes")
    session.Prefill(pb.PrefillRequest(session_id="s", tokens=d.pack(ids[:CONTEXT])))
    d.expect(session.Decode, pb.DecodeRequest(session_id="s", max_tokens=1),
             code="INVALID_ARGUMENT", reason="MAX_TOKENS_INVALID", field="max_tokens", limit="0",
             value="1")
    d.check(server.is_up(), "the daemon is up")
    d.equal(server.stop()[0], 0, "and stops")


# ---- Engram ----

def engram_rows(server):
    """What `cachectl stats` shows, to programs and to people."""
    name = "cached_engine_engram_rows_total"
    token = os.path.join(server.directory, "ops.token")
    with open(token, "w", encoding="ascii") as f:
        f.write(d.TOKENS["ops"][2])
    flags = ("--endpoint", "unix:" + server.socket, "--token-file", token)
    counters = json.loads(tool(CACHECTL, "stats", "--json", *flags).stdout)["counters"]
    value = {c["name"]: c["value"] for c in counters}[name]
    lines = [line.split("\t") for line in tool(CACHECTL, "stats", *flags).stdout.splitlines()]
    shown = [line[2] for line in lines if line[0] == name]
    d.equal(shown, [str(int(value))], "the table shows the same")
    return value


@case
def engram_rows_are_counted():
    """Each token the encoder runs over reads one row per table, n-gram order and head."""
    for fields, rows in (({}, 2 * 3 * 2),
                         ({"engram_layer_ids": [1], "engram_num_embeddings": [1618]}, 3 * 2),
                         ({"engram_layer_ids": [], "engram_num_embeddings": []}, 0)):
        directory, said = make(tiny(**fields))
        d.equal(said, None, f"a model with {fields}")
        server = d.Daemon({"engine.backend": "cpu", "engine.model_dir": directory,
                           "engine.draft": "off"}).start()
        session = server.client().session
        d.equal(engram_rows(server), 0, "nothing is read before there is something to compute")
        session.OpenSession(pb.OpenSessionRequest(session_id="s"))
        session.Prefill(pb.PrefillRequest(session_id="s", tokens=d.pack(range(3, 103))))
        d.equal(engram_rows(server), 100 * rows, f"rows of 100 tokens with {fields}")
        list(session.Decode(pb.DecodeRequest(session_id="s", max_tokens=8, ignore_eos=True)))
        # The last token sampled is not processed yet.
        d.equal(engram_rows(server), 107 * rows, f"and of 7 decoded with {fields}")
        d.equal(server.stop()[0], 0, "a clean stop")


run_cases(__doc__)
