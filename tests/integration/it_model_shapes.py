"""Models of other shapes than the three that come with the engine.

Goal: what config.json says of a model holds in every program that reads it; a shape that is allowed is
computed, whatever its sizes, and its neighbours that are not are refused in a sentence.
Method: models made by mkmodel from configs changed here, given to cachectl and to the daemon.  Of each
odd shape 60 tokens run in passes of 7 and of 64: every tensor of the two dumps is the same.
"""

import json
import os
import re
import shutil
import struct
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
    d.expect(session.Decode, pb.DecodeRequest(session_id="s", max_tokens=51),
             code="OUT_OF_RANGE", reason="CONTEXT_FULL", field="max_tokens", limit="50", value="51")
    d.expect(session.Decode, pb.DecodeRequest(session_id="s", max_tokens=1, from_position=201),
             code="OUT_OF_RANGE", reason="FROM_POSITION_INVALID", field="from_position",
             limit="200", value="201")
    # The whole of it, in two calls: the second one writes the first one's last token.
    for count in (20, 31):
        pieces = list(session.Decode(pb.DecodeRequest(session_id="s", max_tokens=count,
                                                      ignore_eos=True)))
        d.equal(sum(len(p.tokens) // 4 for p in pieces), count, "as far as the context goes")
    d.equal(pieces[-1].end.head_position, CONTEXT, "every position of the context is used")
    session.Prefill(pb.PrefillRequest(session_id="s", tokens=d.pack(ids[:CONTEXT])))
    d.expect(session.Decode, pb.DecodeRequest(session_id="s", max_tokens=1),
             code="OUT_OF_RANGE", reason="CONTEXT_FULL", field="max_tokens", limit="0", value="1")
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


# ---- odd shapes ----

def topology(ratios, sources, lists=(), draft=0):
    """Layers by their ratios, those that own rows, and those of the decoder that own a list."""
    last = sources[-1]
    return {
        "num_hidden_layers": len(ratios), "compress_ratios": ratios + [0] * draft,
        "kv_source_layer_ids": sources, "index_source_layer_ids": sources + list(lists),
        "candidate_source_layer_id": last, "num_nextn_predict_layers": draft,
        "dspark_target_layer_ids": list(range(last, min(len(ratios), last + 2))), **engram([]),
    }


def is_prime(n):
    return n > 1 and all(n % k for k in range(2, int(n ** 0.5) + 1))


def engram(layers, ngram=4, heads=2, base=257, **fields):
    """Tables of these layers: rows are sums of the next primes."""
    columns, at, rows = (ngram - 1) * heads, base, []
    for _ in layers:
        primes = []
        while len(primes) < columns:
            if is_prime(at):
                primes.append(at)
            at += 1
        rows.append(sum(primes))
    return {"engram_layer_ids": layers, "engram_num_embeddings": rows, "engram_n_heads": heads,
            "engram_max_ngram_size": ngram, "engram_vocab_size": base, **fields}


def stages(count, **fields):
    ratios = tiny()["text_config"]["compress_ratios"][:16]
    return {"num_nextn_predict_layers": count, "compress_ratios": ratios + [0] * count, **fields}


SHAPES = {
    # Layers and what they own.
    "2 layers": topology([2, 1], [0, 1]),
    "3 layers, an encoder without rows": topology([0, 1, 1], [1], draft=1),
    "5 layers": topology([2, 2, 0, 1, 1], [0, 3], [4], draft=2),
    "ratios 1, 2, 1": topology([1, 1, 2, 2, 1, 0, 1], [0, 2, 4], [6]),
    "a decoder of one layer": topology([0, 2, 2, 2, 2, 1], [1, 5], draft=3),
    "8 sources": topology([0] + [2] * 14 + [1] * 9, [1, 3, 5, 7, 9, 11, 13, 15], [18, 23]),
    "40 layers": topology([0] * 5 + [2] * 14 + [1] * 21, [5, 19], [30], draft=4),
    # Attention.
    "one head": {"num_attention_heads": 1, "o_groups": 1},
    "6 heads in 3 groups": {"num_attention_heads": 6, "o_groups": 3, "o_lora_rank": 96},
    "9 heads, each a group": {"num_attention_heads": 9, "o_groups": 9},
    "heads of 32": {"head_dim": 32, "qk_rope_head_dim": 2},
    "heads of 96": {"head_dim": 96, "qk_rope_head_dim": 32, "q_lora_rank": 96},
    "heads of 512": {"head_dim": 512, "num_attention_heads": 3, "o_groups": 1},
    "a window of 1": {"sliding_window": 1},
    "a window of 7": {"sliding_window": 7},
    "a window of 100": {"sliding_window": 100},
    # Lists.
    "top 1 of one candidate": {"index_topk": 1, "candidate_topk_blocks": 1},
    "top 13, blocks of 1": {"index_topk": 13, "candidate_topk_blocks": 13,
                            "candidate_block_size": 1},
    "top 65, blocks of 64": {"index_topk": 65, "candidate_topk_blocks": 2,
                             "candidate_block_size": 64},
    "top 25, blocks of 12": {"index_topk": 25, "candidate_topk_blocks": 3,
                             "candidate_block_size": 12},
    "top 16, blocks of 24": {"candidate_block_size": 24},
    "5 index heads of 96": {"index_n_heads": 5, "index_head_dim": 96},
    # Experts, widths and the vocabulary.
    "one expert": {"n_routed_experts": 1, "num_experts_per_tok": 1},
    "13 experts, 5 active": {"n_routed_experts": 13, "num_experts_per_tok": 5,
                             "moe_intermediate_size": 96},
    "all of 11 experts": {"n_routed_experts": 11, "num_experts_per_tok": 11,
                          "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 3},
    "hidden 32": {"hidden_size": 32, "moe_intermediate_size": 32, "hc_sinkhorn_iters": 1},
    "hidden 160": {"hidden_size": 160, "q_lora_rank": 32},
    "999 ids": {"vocab_size": 999, "engram_compressed_vocab_size": 999},
    "60 positions": {"max_position_embeddings": 60},
    # Engram.
    "no tables": engram([]),
    "bigrams of 5 heads": engram([0], ngram=2, heads=5),
    "trigrams in 4 layers": engram([0, 3, 5, 7], ngram=3, heads=1, base=31, engram_head_dim=96),
    # Drafting.
    "no draft stages": stages(0),
    "one stage, blocks of 1": stages(1, dspark_block_size=1, dspark_target_layer_ids=[8]),
    "2 stages, blocks of 16": stages(2, dspark_block_size=16, dspark_markov_rank=96),
    "3 stages, 4 taps": stages(3, dspark_target_layer_ids=[8, 9, 12, 15], dspark_block_size=5),
}


def parts_of(dump):
    """Tensors by name, and the metadata without what was asked for."""
    count = struct.unpack("<Q", dump[:8])[0]
    header = json.loads(dump[8:8 + count])
    meta = header.pop("__metadata__")
    del meta["chunk"]
    return meta, header, dump[8 + count:]


@case
def odd_shapes():
    ids = [3 + i * 37 % 500 for i in range(60)]
    for what, fields in SHAPES.items():
        directory, said = make(tiny(**fields))
        if not d.check(said is None, f"{what}: {said}"):
            continue
        verified = tool(CACHECTL, "model", "verify", directory)
        d.equal(verified.returncode, 0, f"{what}: verify: {verified.stderr}")
        shown = tool(CACHECTL, "model", "inspect", "--json", directory)
        d.equal(shown.returncode, 0, f"{what}: inspect: {shown.stderr}")
        layers = fields.get("num_hidden_layers", 16)
        d.equal(json.loads(shown.stdout)["shape"]["layers"], layers, f"{what}: layers shown")
        short, seven = run_model(directory, ids, "--chunk", "7")
        long, sixty = run_model(directory, ids, "--chunk", "64")
        d.equal((short.returncode, long.returncode), (0, 0),
                f"{what}: {short.stderr} {long.stderr}")
        if seven and sixty:
            d.check(parts_of(seven) == parts_of(sixty), f"{what}: chunks of 7 and of 64 differ")
        shutil.rmtree(os.path.dirname(directory))
    d.check(len(SHAPES) >= 25, f"{len(SHAPES)} shapes")
    print(f"{len(SHAPES)} odd shapes")


@case
def blocks_of_12():
    """More entries than are scored at once, where a block would not end with them: the oracle's choice."""
    directory, said = make(tiny(candidate_block_size=12, candidate_topk_blocks=4))
    d.equal(said, None, "a model with candidate blocks of 12")
    done = tool("/usr/bin/python3", os.path.join(d.SOURCE, "tests", "oracle", "compare"), "--config",
                directory, "--lengths", "17,540", "--quant", "off", "--engine", CACHECTL)
    d.equal(done.returncode, 0, f"the oracle: {done.stdout} {done.stderr}")
    compared = re.search(r"^candidates, off +(\d+) +0 ", done.stdout, re.M)
    d.check(compared and int(compared.group(1)) >= 540 - 48, f"candidates compared: {done.stdout}")


BROKEN = [
    ({"num_hidden_layers": 17}, r"compress_ratios must have 20 entries, found 19"),
    ({"num_hidden_layers": 65}, r"num_hidden_layers must be 2 to 64, found 65"),
    ({"num_hidden_layers": 1}, r"num_hidden_layers must be 2 to 64, found 1"),
    (topology([2, 2], [0, 1]), r"the last kv source must have compress ratio 1"),
    (topology([1, 1], [0]), r"the last kv source must leave an encoder"),
    (topology([0, 0, 1], [1, 2]), r"a kv source has compress ratio 0"),
    (topology([0, 2, 1, 1], [2]), r"a layer with a compress ratio stands before the first source"),
    (topology([2, 1, 1], [0, 2]), r"compress_ratios of a layer and of its kv source differ"),
    (topology([2] * 8 + [1] * 2, list(range(9))), r"kv_source_layer_ids must be a list of at most 8"),
    ({"kv_source_layer_ids": [4, 2, 6, 8]}, r"kv_source_layer_ids must ascend"),
    ({"index_source_layer_ids": [2, 4, 8]}, r"every kv source must also be an index source"),
    ({"index_source_layer_ids": [2, 3, 4, 6, 8]}, r"an encoder layer reindexes"),
    ({"num_attention_heads": 5}, r"num_attention_heads must be a multiple of 2, found 5"),
    ({"num_key_value_heads": 2}, r"num_key_value_heads must be 1, found 2"),
    ({"head_dim": 48}, r"head_dim must be a multiple of 32, found 48"),
    ({"head_dim": 544}, r"head_dim must be 32 to 512, found 544"),
    ({"qk_rope_head_dim": 3}, r"qk_rope_head_dim must be a multiple of 2, found 3"),
    ({"qk_rope_head_dim": 34}, r"qk_rope_head_dim exceeds head_dim or index_head_dim"),
    ({"sliding_window": 0}, r"sliding_window must be 1 to 4096, found 0"),
    ({"index_topk": 26}, r"must reach index_topk"),
    ({"candidate_block_size": 65}, r"candidate_block_size must be 1 to 64, found 65"),
    ({"candidate_block_size": 0}, r"candidate_block_size must be 1 to 64, found 0"),
    ({"vocab_size": 129280, "engram_compressed_vocab_size": 99091},
     r"engram_compressed_vocab_size must be 99092 with a vocab_size of 129280, found 99091"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok exceeds n_routed_experts"),
    ({"hidden_size": 48}, r"hidden_size must be a multiple of 32, found 48"),
    ({"vocab_size": 15}, r"vocab_size must be 16 to 1048576, found 15"),
    ({"hc_mult": 3}, r"hc_mult must be 4, found 3"),
    (engram([8]), r"engram_layer_ids must name layers of the encoder"),
    (engram([0], ngram=5), r"engram_max_ngram_size must be 2 to 4, found 5"),
    (stages(5), r"num_nextn_predict_layers must be 0 to 4, found 5"),
    (stages(3, dspark_block_size=17), r"dspark_block_size must be 1 to 16, found 17"),
    (stages(3, dspark_target_layer_ids=[7]), r"dspark_target_layer_ids must name layers of the"),
    ({"max_position_embeddings": 0}, r"max_position_embeddings must be 1 to 2147483648, found 0"),
]


@case
def their_neighbours():
    for fields, words in BROKEN:
        directory, said = make(tiny(**fields))
        if not d.check(directory is None, f"refused: {words}"):
            continue
        d.check(re.search(r"^mkmodel: \S+/config\.json: .*" + words, said), f"{words}: {said!r}")
        d.equal(len(said.splitlines()), 1, f"{words}: one sentence")
    print(f"{len(BROKEN)} broken shapes")


run_cases(__doc__)
