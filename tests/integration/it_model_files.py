"""Malformed checkpoints: each is refused, with its own sentence.

Goal: no damage to config, header, index, shards, values or compressed ids gets past the loader or
crashes it, and the sentence names file, tensor or field, what was expected and what was found.
Method: a table of damages, each done to a fresh copy of a good toy model; `cachectl model verify`
must leave with code 7 and print what the table says.  The daemon, if it runs the undamaged model, must
refuse to start with the same words.  Then single flipped bytes of a header.
"""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import time

import daemon as d
import grpc
from damage import (CACHECTL, CONFIG, FIRST, IDS, INDEX, SECOND, SINGLE, added, config, copy_of, entries,
                    finer, header, ids, index, make, moved, put, read, removed, retag, split, text, value,
                    verify, whole, widened, without)

EMBED = '"embed.weight":{"dtype":"BF16","shape":[512,128],"data_offsets":[0,131072]}'
NAN16, INF32 = b"\xc0\x7f", struct.pack("<f", float("inf"))
DEEP = b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}"

DTYPES = (r'tensor embed\.weight: dtype must be "F32", "BF16", "F8_E4M3", "F8_E8M0" or "I8", '
          r'found ')
CONTEXT = r"max_position_embeddings must be "


def context(positions):
    name = '"max_position_embeddings": '
    return config(name + "1048576", name + positions)


# (what, model, damage, expected in the sentence).  `plain`: without Engram and drafting.
TABLE = [
    # The file as a whole.
    ("empty file", "plain", text(SINGLE, b""), r"0 bytes, expected at least 8: truncated"),
    ("7 bytes", "plain", text(SINGLE, b"1234567"), r"7 bytes, expected at least 8"),
    ("header length alone", "plain", whole(lambda b: b[:8]), r"header of \d+ bytes, expected at most 0"),
    ("truncated header", "plain", whole(lambda b: b[:5000]), r"header of \d+ bytes, expected at most 4992"),
    ("truncated data", "plain", whole(lambda b: b[:-1]),
     r"tensor layers\.15\S+: data_offsets \d+ to \d+, expected within \d+ bytes of data"),
    ("half a file", "plain", whole(lambda b: b[:len(b) // 2]), r"the file is truncated or damaged"),
    ("one byte more", "plain", whole(lambda b: b + b"x"), r"1 bytes after the last tensor layers\.15"),
    ("header length 2^64-1", "plain", whole(lambda b: b"\xff" * 8 + b[8:]),
     r"header of 18446744073709551615 bytes"),
    ("header length 2^64-8", "tiny", whole(lambda b: b"\xf8" + b"\xff" * 7 + b[8:]),
     r"header of 18446744073709551608 bytes"),
    ("header length 0", "plain", whole(lambda b: bytes(8) + b[8:]), r"header at byte 0: "),
    ("header length too short", "tiny", whole(lambda b: struct.pack("<Q", 100) + b[8:]),
     r"header at byte \d+, tensor embed\.weight"),
    ("header length 32 MiB + 1", "tiny",
     whole(lambda b: struct.pack("<Q", (32 << 20) + 1) + b[8:] + bytes(40 << 20)),
     r"header of 33554433 bytes, expected at most 33554432"),
    ("a directory in its place", "plain",
     lambda p: (os.unlink(os.path.join(p, SINGLE)), os.mkdir(os.path.join(p, SINGLE))),
     r"not a regular file"),
    ("a pipe in its place", "tiny",
     lambda p: (os.unlink(os.path.join(p, SINGLE)), os.mkfifo(os.path.join(p, SINGLE))),
     r"not a regular file"),
    # The header's text.
    ("header is a list", "plain", text(SINGLE, struct.pack("<Q", 2) + b"[]"),
     r"header must be a JSON object"),
    ("header nested too deep", "tiny", text(SINGLE, struct.pack("<Q", len(DEEP)) + DEEP),
     r"header at byte \d+.*depth"),
    ("header not UTF-8", "tiny", whole(lambda b: b.replace(b'"head.weight"', b'"head\x80weight"', 1)),
     r"header at byte \d+, tensor head: unable to decode byte 0x80"),
    ("duplicate key at the beginning", "tiny", header(EMBED, EMBED + "," + EMBED),
     r"header at byte \d+, tensor embed\.weight: duplicate object key"),
    ("duplicate key behind the metadata", "tiny",
     header('"__metadata__":{"made_by":"mkmodel"}', EMBED + ',"__metadata__":{"made_by":"mkmodel"}'),
     r"header at byte \d+, tensor embed\.weight: duplicate object key"),
    ("duplicate key in the metadata", "tiny",
     header('{"made_by":"mkmodel"', '{"made_by":"mkmodel","made_by":"me"'),
     r"header at byte \d+, __metadata__: duplicate object key"),
    ("duplicate key in an entry", "tiny", header('"shape":[512,128],"data_offsets":[131072',
                                                 '"dtype":"BF16","data_offsets":[131072'),
     r"header at byte \d+, tensor head\.weight: duplicate object key"),
    ("duplicate key", "plain", header('"head.weight"', '"embed.weight"'),
     r"tensor embed\.weight: duplicate object key"),
    ("control character in a name", "tiny", header('"head.weight"', '"head\\u001b[2J"'),
     r"tensor number \d+: its name must be printable ASCII"),
    ("zero in a name", "tiny", header('"head.weight"', '"head\\u0000weight"'), r"header at byte \d+"),
    ("entry without dtype", "plain", header('"dtype":"BF16",', ''),
     r"tensor embed\.weight: expected dtype, shape and data_offsets"),
    ("entry with a fourth field", "tiny", header('"dtype":"BF16",', '"dtype":"BF16","x":1,'),
     r"tensor embed\.weight: expected dtype, shape and data_offsets"),
    ("entry is a number", "tiny", header(EMBED, '"embed.weight":7'),
     r"tensor embed\.weight: expected dtype, shape and data_offsets"),
    ("metadata of numbers", "tiny", header('{"made_by":"mkmodel"}', '{"made_by":1}'),
     r"__metadata__ must be an object of strings"),
    # Dtypes and shapes.
    ("unknown dtype", "plain", header('"BF16"', '"BF17"'), 
     DTYPES + '"BF17"$'),
    ("dtype of other models", "tiny", header('"BF16"', '"I64"'), DTYPES + '"I64"$'),
    ("dtype is a number", "tiny", header('"BF16"', '16'), DTYPES + r'what is no string$'),
    ("shape product wraps to 0", "plain", header("[512,128]", "[4294967296,4294967296]"),
     r"tensor embed\.weight: shape\[1\] is not a positive size that fits"),
    ("shape product wraps to the size", "tiny", header("[512,128]", "[9223372036854775807,2]"),
     r"tensor embed\.weight: shape\[1\] is not a positive size that fits"),
    ("shape of 2^64", "tiny", header("[512,128]", "[18446744073709551616,1]"), r"header at byte \d+.*big"),
    ("negative extent", "plain", header("[512,128]", "[512,-128]"), r"shape\[1\] is not a positive size"),
    ("extent 0", "tiny", header("[512,128]", "[512,0]"), r"shape\[1\] is not a positive size"),
    ("no shape", "tiny", header("[512,128]", "[]"), r"expected a shape of 1 to 4 numbers"),
    ("five dimensions", "tiny", header("[512,128]", "[512,1,1,1,128]"), r"expected a shape of 1 to 4"),
    ("three dimensions", "plain", header("[512,128]", "[512,128,1]"),
     r"expected BF16 \[512,128\], found BF16 \[512,128,1\]"),
    ("transposed", "plain", header("[512,128]", "[128,512]"),
     r"tensor embed\.weight: expected BF16 \[512,128\], found BF16 \[128,512\]"),
    ("shape against offsets", "plain", header("[512,128]", "[512,127]"),
     r"shape asks for 130048 bytes, data_offsets hold 131072"),
    ("other dtype of the same size", "tiny", entries(lambda h: retag(h, "layers.0.attn.wq_a.weight", dtype="I8")),
     r"tensor layers\.0\.attn\.wq_a\.weight: expected F8_E4M3 \[64,128\], found I8 \[64,128\]"),
    ("a norm in F32", "plain", widened(r"^norm\.weight$"),
     r"tensor norm\.weight: expected BF16 \[128\], found F32 \[128\]"),
    ("a gate in bytes", "tiny", entries(lambda h: retag(
        h, "layers.3.ffn.gate.weight", dtype="I8", shape=[8, 256])),
     r"tensor layers\.3\.ffn\.gate\.weight: expected BF16 or F32 \[8,128\], found I8 \[8,256\]"),
    ("a gate in F32 of another shape", "tiny", lambda p: (
        widened(r"^layers\.3\.ffn\.gate\.weight$")(p),
        entries(lambda h: retag(h, "layers.3.ffn.gate.weight", shape=[16, 64]))(p)),
     r"tensor layers\.3\.ffn\.gate\.weight: expected BF16 or F32 \[8,128\], found F32 \[16,64\]"),
    ("NaN in a gate in F32", "tiny", lambda p: (
        widened(r"^layers\.3\.ffn\.gate\.weight$")(p),
        value("layers.3.ffn.gate.weight", 516, struct.pack("<f", float("nan")))(p)),
     r"tensor layers\.3\.ffn\.gate\.weight: value \[1,1\] is NaN or infinite"),
    # Offsets.
    ("offsets out of the file", "plain", header("[0,131072]", "[0,99999999999]"),
     r"tensor embed\.weight: data_offsets 0 to 99999999999, expected within"),
    ("negative offset", "tiny", header("[0,131072]", "[-131072,0]"), r"data_offsets -131072 to 0"),
    ("offsets swapped", "tiny", header("[0,131072]", "[131072,0]"), r"data_offsets 131072 to 0"),
    ("one offset", "tiny", header("[0,131072]", "[0]"), r"data_offsets must be two integers"),
    ("offset 2^63", "tiny", header("[0,131072]", "[0,9223372036854775808]"), r"header at byte \d+.*big"),
    ("offsets with a point", "tiny", header("[0,131072]", "[0.0,131072]"), r"must be two integers"),
    ("overlap", "plain", header("[131072,262144]", "[0,131072]"), r"tensor head\.weight: an overlap before it"),
    ("partial overlap", "tiny", header("[131072,262144]", "[131070,262142]"),
     r"tensor head\.weight: an overlap before it"),
    ("hole", "plain", header("[0,131072]", "[2,131074]"), r"tensor embed\.weight: a hole before it"),
    ("hole of one tensor", "tiny", header("," + '"head.weight":{"dtype":"BF16","shape":[512,128],'
                                          '"data_offsets":[131072,262144]}', ""),
     r"tensor norm\.weight: a hole before it"),
    # The list of tensors.
    ("missing tensor", "plain", without("layers.3.attn.wkv.scale"),
     r"tensor layers\.3\.attn\.wkv\.scale is missing"),
    ("missing Engram table", "tiny", without("layers.6.engram.embed.weight"),
     r"tensor layers\.6\.engram\.embed\.weight is missing"),
    ("missing draft head", "tiny", without("mtp.2.markov_head.head.weight"),
     r"tensor mtp\.2\.markov_head\.head\.weight is missing"),
    ("renamed tensor", "plain", header('"head.weight"', '"heads.weight"'), r"tensor head\.weight is missing"),
    ("extra tensor", "plain", added("layers.16.attn.sink"), r"tensor layers\.16\.attn\.sink is not part of this"),
    ("extra expert", "tiny", added("layers.0.ffn.experts.8.w1.weight"),
     r"tensor layers\.0\.ffn\.experts\.8\.w1\.weight is not part of this model"),
    ("almost an ignored name", "tiny", added("mtp.0.embeds.weight"), r"tensor mtp\.0\.embeds\.weight is not part"),
    ("no tensors", "plain", text(SINGLE, struct.pack("<Q", 2) + b"{}"), r"tensor embed\.weight is missing"),
    ("wgate on a ratio 1 layer", "tiny", added("layers.8.attn.compressor.wgate.weight"),
     r"layers\.8\.attn\.compressor\.wgate\.weight is not part of this model"),
    # Values.
    ("NaN scale", "tiny", value("layers.0.attn.wq_a.scale", 5, b"\xff"),
     r"tensor layers\.0\.attn\.wq_a\.scale: scale \[1,1\] is NaN"),
    ("NaN scale of an expert", "tiny", value("layers.15.ffn.experts.7.w2.scale", 3, b"\xff"),
     r"tensor layers\.15\.ffn\.experts\.7\.w2\.scale: scale \[1,1\] is NaN"),
    ("NaN scale of an Engram row", "tiny", value("layers.1.engram.embed.scale", 1617, b"\xff"),
     r"tensor layers\.1\.engram\.embed\.scale: scale \[1617,0\] is NaN"),
    ("NaN in fp8", "tiny", value("layers.2.attn.wo_b.weight", 64, b"\x7f"),
     r"tensor layers\.2\.attn\.wo_b\.weight: value \[1,0\] is NaN"),
    ("negative NaN in fp8", "tiny", value("mtp.0.main_proj.weight", 0, b"\xff"), r"value \[0,0\] is NaN"),
    ("NaN in bf16", "tiny", value("embed.weight", 512, NAN16), r"tensor embed\.weight: value \[2,0\] is NaN"),
    ("infinity in fp32", "tiny", value("layers.4.hc_ffn_base", 8, INF32),
     r"tensor layers\.4\.hc_ffn_base: value \[0,2\] is NaN or infinite"),
    # Sizes against the config.
    ("config asks for more layers", "tiny", config('"num_hidden_layers": 16', '"num_hidden_layers": 15'),
     r"compress_ratios must have 18 entries, found 19"),
    ("config with another width", "plain", config('"hidden_size": 128', '"hidden_size": 160'),
     r"tensor embed\.weight: expected BF16 \[512,160\], found BF16 \[512,128\]"),
    ("config with another head", "tiny", config('"head_dim": 64', '"head_dim": 96'),
     r"tensor layers\.0\.attn\.wq_b\.weight: expected F8_E4M3 \[384,64\], found F8_E4M3 \[256,64\]"),
    ("config with fewer experts", "tiny", config('"n_routed_experts": 8', '"n_routed_experts": 7'),
     r"tensor layers\.0\.ffn\.gate\.weight: expected BF16 or F32 \[7,128\], found BF16 \[8,128\]"),
    ("config with another rank", "tiny", config('"dspark_markov_rank": 32', '"dspark_markov_rank": 64'),
     r"tensor mtp\.2\.markov_head\.embed\.weight: expected BF16 \[512,64\]"),
    ("context of 0", "plain", context("0"), CONTEXT + r"1 to 2147483648, found 0"),
    ("no epsilon", "tiny", config('"rms_norm_eps": 1e-20', '"rms_norm_eps": 0'),
     r"rms_norm_eps must be a number 1e-30 to 1, found 0"),
    ("rotation of half a turn", "tiny", config('"rope_theta": ', '"rope_theta": 0.5, "x": '),
     r"rope_theta must be a number 1 to 1e\+09, found 0\.5"),
    ("negative context", "tiny", context("-1"), CONTEXT + r"1 to 2147483648, found -1"),
    ("context beyond 2^31", "tiny", context("2147483649"), CONTEXT + r"1 to 2147483648, found 2147483649"),
    ("context in words", "tiny", context('"1M"'), CONTEXT + r"an integer"),
    ("no context", "tiny", config('"max_position_embeddings": 1048576,', ''),
     r"field max_position_embeddings is missing"),
    ("config without drafting", "tiny", lambda p: (
        config('"num_nextn_predict_layers": 3', '"num_nextn_predict_layers": 0')(p),
        config("1, 0, 0, 0]", "1]")(p)), r"tensor mtp\.0\S+ is not part of this model"),
    ("config with other tables", "tiny", config("[1618, 1824]", "[1618, 1825]"),
     r"engram_num_embeddings\[1\] must be 1824, the sum of its 6 primes, found 1825"),
    ("config missing", "plain", removed(CONFIG), r"config\.json: No such file"),
    ("config is no JSON", "plain", text(CONFIG, b"{"), r"config\.json: line 1"),
    ("config is empty", "plain", text(CONFIG, b""), r"config\.json: line 1"),
    ("config over 1 MiB", "plain", text(CONFIG, b" " * ((1 << 20) + 1)),
     r"config\.json: 1048577 bytes, expected at most 1048576"),
    ("config of another model", "plain", config('"deepseek_v41"', '"llama"'),
     r'model_type must be "deepseek_v41", found "llama"'),
    ("text of another model", "plain", config('"deepseek_v41_text"', '"llama"'),
     r'text_config\.model_type must be "deepseek_v41_text", found "llama"'),
    ("config nested too deep", "tiny", config("{", '{"x": ' + 32 * "[" + 32 * "]" + ","),
     r"config\.json: nested 33 deep, at most 32"),
    ("config with a duplicate", "plain", config('"vocab_size": 512', '"vocab_size": 512, "vocab_size": 512'),
     r"config\.json: line \d+: duplicate object key"),
    ("candidates too few", "tiny", config('"candidate_topk_blocks": 4', '"candidate_topk_blocks": 2'),
     r"must reach index_topk"),
    ("taps in the encoder", "tiny", config("[13, 14, 15]", "[3, 14, 15]"), r"layers of the decoder"),
    # Index and shards.
    ("missing shard", "shards", removed(SECOND), r"shard " + re.escape(SECOND) + r" is missing"),
    ("index is no JSON", "shards", text(INDEX, b"weights"), r"index\.json: line 1"),
    ("index is a list", "shards", text(INDEX, b"[]"), r"index\.json: must be a JSON object"),
    ("index without weight_map", "shards", index(lambda x: {"metadata": {}}),
     r"weight_map must be an object"),
    ("index of nothing", "shards", index(lambda x: {"weight_map": {}}), r"weight_map names no tensor"),
    ("index leaves the directory", "shards", index(lambda x: moved(x, "embed.weight", "../x.safetensors")),
     r"tensor embed\.weight: expected the name of a \.safetensors file beside the index, "
     r"found \.\./x\.safetensors$"),
    ("index names a system file", "shards", index(lambda x: moved(x, "embed.weight", "../../etc/passwd")),
     r"beside the index, found \.\./\.\./etc/passwd$"),
    ("index with a strange name", "shards", index(lambda x: moved(x, "embed.weight", "\x1b[31mä\n" + 99 * "y")),
     r"beside the index, found \?\[31m\?\?\?y{40}\.\.\.$"),
    ("index names another kind of file", "shards", index(lambda x: moved(x, "embed.weight", "x.bin")),
     r"tensor embed\.weight: expected the name of a \.safetensors file"),
    ("index names a number", "shards", index(lambda x: moved(x, "embed.weight", 1)),
     r"tensor embed\.weight: expected the name of a"),
    ("tensor in another shard", "shards", index(lambda x: moved(x, "embed.weight", SECOND)),
     re.escape(SECOND) + r": tensor embed\.weight is missing, which the index says is here"),
    ("tensor not in the index", "shards", index(lambda x: x["weight_map"].pop("embed.weight") and None),
     re.escape(FIRST) + r": tensor embed\.weight: the index says it is in no shard"),
    ("tensor only in the index", "shards", index(lambda x: moved(x, "ghost.weight", FIRST)),
     re.escape(FIRST) + r": tensor ghost\.weight is missing, which the index says is here"),
    ("total_size", "shards", index(lambda x: x["metadata"].update(total_size=6219391)),
     r"metadata\.total_size is 6219391, the shards hold 6219390"),
    ("total_size is a text", "shards", index(lambda x: x["metadata"].update(total_size="6219390")),
     r"metadata\.total_size must be a positive integer"),
    ("duplicate in the index", "shards", whole(
        lambda b: b.replace(b'"head.weight"', b'"embed.weight"', 1), INDEX), r"duplicate object key"),
    ("two shards alike", "shards", lambda p: shutil.copy(os.path.join(p, FIRST), os.path.join(p, SECOND)),
     r"is missing, which the index says is here"),
    ("both forms", "shards", lambda p: shutil.copy(os.path.join(p, FIRST), os.path.join(p, SINGLE)),
     r"stands beside model\.safetensors; keep one of the two"),
    ("truncated shard", "shards", whole(lambda b: b[:-1], SECOND), re.escape(SECOND) + r": tensor \S+: data_off"),
    ("257 shards", "shards", index(lambda x: x["weight_map"].update(
        {f"t{i}": f"s{i}.safetensors" for i in range(257)})), r"more than 256 shards"),
    # Compressed ids.
    ("no ids", "tiny", removed(IDS), r"engram_ids\.bin: is missing; mkengramids makes it"),
    ("ids too few", "tiny", ids(lambda v: v[:-1]), r"expected 2048 bytes \(4 for each of 512 ids\), found 2044"),
    ("ids too many", "tiny", ids(lambda v: v + [0]), r"expected 2048 bytes .*, found 2052"),
    ("ids empty", "tiny", text(IDS, b""), r"expected 2048 bytes .*, found 0"),
    ("id too large", "tiny", ids(lambda v: put(v, 511, 486)), r"entry 511: expected an id below 486, found 486"),
    ("negative id", "tiny", ids(lambda v: put(v, 7, -1)), r"entry 7: expected an id below 486, found -1"),
    ("ids out of order", "tiny", ids(lambda v: put(v, 0, 1)), r"entry 0: expected at most 0"),
    ("an id left out", "tiny", ids(lambda v: put(v, 511, 0)), r"expected 486 different ids, found 485"),
    ("ids of another table", "tiny", ids(lambda v: list(range(512))), r"entry 486: expected an id below 486"),
]


def progress(directory):
    """What verify says from two seconds on; it is stopped for so long in the middle of its work."""
    lines = []
    for pause in [0.05 * n for n in range(1, 9)]:
        verifying = subprocess.Popen([CACHECTL, "model", "verify", directory], text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(pause)
        verifying.send_signal(signal.SIGSTOP)
        time.sleep(2.2)
        verifying.send_signal(signal.SIGCONT)
        out, talk = verifying.communicate(timeout=60)
        d.equal(verifying.returncode, 0, f"verify: {talk}")
        d.check(out.startswith("OK small sha256:"), out)
        lines = talk.splitlines()
        if lines:
            break
    print(f"verify says: {lines}")
    d.check(lines, "verify says how far it is")
    for line in lines:
        d.check(re.fullmatch(r"[\d.]+ [KM]iB of 23\d MiB read, [\d.]+ [KM]iB/s, \S+( \S+)* left", line), line)
    quiet = subprocess.run([CACHECTL, "--quiet", "model", "verify", directory], capture_output=True,
                           text=True, check=False)
    d.equal((quiet.returncode, quiet.stderr), (0, ""), "--quiet")


def test_good(models):
    for name, directory in models.items():
        got = verify(directory)
        d.equal(got.returncode, 0, f"verify {name}: {got.stderr}")
        d.check(re.match(r"OK tiny sha256:[0-9a-f]{64}\n", got.stdout), f"{name}: {got.stdout!r}")
    # Same seed, same bytes; another seed, others.
    again = make(os.path.join(d.scratch(), "again"), "--config", "tiny")
    for name in (SINGLE, IDS, CONFIG):
        d.equal(read(os.path.join(again, name)) == read(os.path.join(models["tiny"], name)), True,
                f"{name} of the same seed")
    other = make(os.path.join(d.scratch(), "other"), "--config", "tiny", "--seed", "4")
    d.check(verify(other).stdout != verify(again).stdout, "another seed is another model")
    small = make(os.path.join(d.scratch(), "small"), "--config", "small")
    d.equal(verify(small).returncode, 0, "small, with its 8166 compressed ids")
    progress(small)
    shutil.rmtree(small)
    # What a text engine has no use for is not in its way.
    copy = copy_of(models["tiny"])
    for tensor in ("vision.blocks.0.norm1.weight", "aligner.w1.bias", "image_start",
                   "mtp.1.embed.weight", "mtp.2.head.weight"):
        added(tensor)(copy)
    d.equal(verify(copy).returncode, 0, "vision tensors are passed over")


EITHER = r"\.ffn\.gate\.weight$|\.engram\.[qk]_weight$"


def dump_of(directory, *options):
    """Tensors of a run of 70 tokens, by name."""
    folder = d.scratch()
    ids, out = os.path.join(folder, "ids"), os.path.join(folder, "out")
    with open(ids, "wb") as f:
        f.write(d.pack([3 + i * 37 % 500 for i in range(70)]))
    done = subprocess.run([CACHECTL, "model", "run", directory, "--tokens", ids, "--dump", out,
                           *options], capture_output=True, text=True, check=False)
    d.equal(done.returncode, 0, f"run {options}: {done.stderr}")
    head, data = split(out)
    parsed = json.loads(head)
    return {name: data[slice(*entry["data_offsets"])] for name, entry in parsed.items()
            if name != "__metadata__"}


def test_either(models):
    """BF16 or F32 where the specification leaves it to the header: equal values, equal bits."""
    config_file = os.path.join(models["tiny"], CONFIG)
    got = verify(config_file)
    d.check(got.returncode == 7 and f"{config_file}: is a file; name the directory of the model"
            in got.stderr, f"verify of a file: {got.returncode} {got.stderr}")
    wide = copy_of(models["tiny"], widened(EITHER))
    dtypes = [entry["dtype"] for name, entry in json.loads(split(os.path.join(wide, SINGLE))[0]).items()
              if re.search(EITHER, name)]
    d.equal(dtypes, ["F32"] * (16 + 3 + 4), "gates of all layers and stages, q and k of two tables")
    got = verify(wide)
    d.equal(got.returncode, 0, f"verify: {got.stderr}")
    d.check(got.stdout != verify(models["tiny"]).stdout, "other bytes, another digest")
    for quant in ("on", "off"):
        d.check(dump_of(wide, "--quant", quant) == dump_of(models["tiny"], "--quant", quant),
                f"quant {quant}: the same values, the same bits")
    # All of an F32 is read, also what BF16 has no room for, and the oracle agrees.
    for tensor in ("layers.0.ffn.gate.weight", "layers.1.engram.q_weight"):
        fine = copy_of(wide, finer(tensor))
        before, after = dump_of(wide, "--quant", "off"), dump_of(fine, "--quant", "off")
        changed = [name for name in before if before[name] != after[name]]
        first = "stream." + tensor.split(".")[1]
        d.check(first in changed, f"{tensor}: changed are {changed[:5]}")
        oracle = subprocess.run(
            ["/usr/bin/python3", os.path.join(d.SOURCE, "tests", "oracle", "compare"), "--config", fine,
             "--lengths", "70", "--engine", CACHECTL], capture_output=True, text=True, check=False)
        d.equal(oracle.returncode, 0, f"the oracle on {tensor}: {oracle.stdout} {oracle.stderr}")


def test_table(models):
    daemons = 0
    runs = {base: daemon_runs(models[base]) for base in models}
    d.check(runs["plain"], "the daemon runs the plain model")
    d.check(len(TABLE) >= 60, f"{len(TABLE)} malformed models")
    for what, base, damage, expected in TABLE:
        copy = copy_of(models[base], damage)
        got = verify(copy)
        said = got.stderr.strip()
        code = 3 if what == "config missing" else 7
        d.equal(got.returncode, code, f"{what}: exit code ({said})")
        d.check(re.search(expected, said), f"{what}: {said!r}")
        d.equal(len(said.splitlines()), 1, f"{what}: one sentence")
        d.equal(got.stdout, "", f"{what}: nothing on stdout")
        if runs[base]:
            daemons += 1
            daemon_refuses(copy, what, expected)
        shutil.rmtree(os.path.dirname(copy))
    print(f"{len(TABLE)} malformed models refused, {daemons} of them by the daemon as well")


def daemon_of(directory):
    return d.Daemon({"engine.backend": "cpu", "engine.model_dir": directory})


def daemon_runs(directory):
    server = daemon_of(directory)
    try:
        server.start()
    except RuntimeError as error:
        print(f"not given to the daemon: {error}")
        return False
    server.stop()
    return True


def daemon_refuses(directory, what, expected):
    code, said = daemon_of(directory).refused()
    d.equal(code, 2, f"{what}: exit code of the daemon")
    d.check(re.search(expected, said), f"{what}: the daemon says {said!r}")


def answer(server, user, prompt):
    """Tokens and checksums of logits, or None when the call failed."""
    client = server.client(user, target="unix:" + server.socket)
    session = client.session
    try:
        session.OpenSession(d.pb.OpenSessionRequest(session_id="shrinks"))
        session.Prefill(d.pb.PrefillRequest(session_id="shrinks", tokens=d.pack(prompt)))
        pieces = list(session.Decode(d.pb.DecodeRequest(session_id="shrinks", max_tokens=8,
                                                        ignore_eos=True)))
    except grpc.RpcError as error:
        return None, d.Failure(error)
    return [d.unpack(b"".join(p.tokens for p in pieces)),
            [crc for p in pieces for crc in p.logits_crc]], None


def test_shrinks(models):
    """Weights cut off under a daemon: the right answer or none, and the daemon is there to say so."""
    for base in models:
        copy = copy_of(models[base])
        server = daemon_of(copy)
        try:
            server.start()
        except RuntimeError:
            continue
        prompt = [3 + i * 7 % 250 for i in range(60)]
        before, error = answer(server, "alice", prompt)
        d.check(before is not None, f"{base}: an answer: {error}")
        for name in os.listdir(copy):
            if name.endswith(".safetensors"):
                os.truncate(os.path.join(copy, name), 300000)
        for user in ("bob", "alice"):  # Bob's is computed anew, Alice's goes on.
            after, error = answer(server, user, prompt if user == "bob" else prompt + [9] * 20)
            if after is None:
                d.equal((error.code, error.reason, error.field),
                        ("UNAVAILABLE", "MODEL_LOST", "engine.model_dir"), f"{base}: {error}")
            elif user == "bob":
                d.equal(after, before, f"{base}: the same prompt, the same answer")
        d.check(server.is_up(), f"{base}: the daemon is up")
        d.equal(server.stop()[0], 0, f"{base}: and stops as always")


def test_flips(models):
    """One flipped byte anywhere in a header: refused, and a tensor is named, or the one before."""
    rng = random.Random(7)
    copy = copy_of(models["tiny"])
    path = os.path.join(copy, SINGLE)
    good = read(path)
    end = 8 + struct.unpack("<Q", good[:8])[0]
    # The spaces that round the length up belong to no tensor and may be others, and so do the words
    # of the metadata.
    begin = good.index(b'"embed.weight"')
    end = len(good[:end].rstrip(b" "))
    places = list(range(begin, begin + 80)) + [rng.randrange(begin, end) for _ in range(80)]
    for at in places:
        bit = 1 << rng.randrange(8)
        with open(path, "r+b") as f:
            f.seek(at)
            f.write(bytes([good[at] ^ bit]))
        got = verify(copy)
        d.equal(got.returncode, 7, f"byte {at} bit {bit}: exit code")
        d.check(re.search(r"tensor (\S*\w\S*)|, after __metadata__: ", got.stderr), f"byte {at} bit {bit}: {got.stderr!r}")
        with open(path, "r+b") as f:
            f.seek(at)
            f.write(good[at:at + 1])
    d.equal(verify(copy).returncode, 0, "and back")
    print(f"{len(places)} flipped bytes of a header refused")


def main():
    root = d.scratch()
    models = {
        "tiny": make(os.path.join(root, "tiny"), "--config", "tiny"),
        "plain": make(os.path.join(root, "plain"), "--config", "tiny", "--plain"),
        "shards": make(os.path.join(root, "shards"), "--config", "tiny", "--shards", "3"),
    }
    test_good(models)
    test_either(models)
    test_table(models)
    test_shrinks(models)
    test_flips(models)
    d.finish()


if __name__ == "__main__":
    main()
