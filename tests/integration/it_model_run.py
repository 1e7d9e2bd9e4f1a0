"""cachectl model run on the toy model: names, shapes, positions, and what must not change a value.

Goal: the dump has the tensors its help lists, with the shapes that follow from config.json; chunk
size, threads and instruction set change no byte; a run resumed from an image has the values of the
uninterrupted one; bad input is one sentence and leaves no file.
"""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

ROOT = os.environ.get("CACHED_SOURCE_ROOT") or os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("CACHED_BUILD_ROOT") or os.path.join(ROOT, "build")
CACHECTL = os.environ.get("CACHECTL") or os.path.join(BUILD, "tools", "cachectl")
MKMODEL = os.environ.get("MKMODEL") or os.path.join(BUILD, "tools", "mkmodel")
SIZES = {"U8": 1, "BF16": 2, "I32": 4, "F32": 4, "I64": 8}
checks = 0


def check(ok, what):
    global checks
    checks += 1
    if not ok:
        sys.exit("expected: %s" % (what,))


def equal(got, want, what):
    check(got == want, "%s: got %r, want %r" % (what, got, want))


class Dump:
    """A safetensors file: no gaps, no overlap, nothing behind the last tensor."""

    def __init__(self, path):
        with open(path, "rb") as file:
            data = file.read()
        size = struct.unpack("<Q", data[:8])[0]
        equal(size % 8, 0, "header is padded")
        header = json.loads(data[8:8 + size])
        self.meta = header.pop("__metadata__")
        self.shape, self.bytes, self.dtype = {}, {}, {}
        at = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            equal(begin, at, name + " follows the one before")
            count = 1
            for n in entry["shape"]:
                count *= n
            equal(end - begin, count * SIZES[entry["dtype"]], "bytes of " + name)
            at = end
            self.shape[name], self.dtype[name] = entry["shape"], entry["dtype"]
            self.bytes[name] = data[8 + size + begin:8 + size + end]
        equal(8 + size + at, len(data), "end of the file")

    def values(self, name):
        code = {"I32": "i", "I64": "q", "F32": "f"}[self.dtype[name]]
        return list(struct.unpack("<%d%s" % (len(self.bytes[name]) // SIZES[self.dtype[name]],
                                             code), self.bytes[name]))

    def rows(self, name):
        """Position (or entry) to the bytes of its row."""
        count = self.shape[name][0]
        if count == 0:
            return {}
        width = len(self.bytes[name]) // count
        place = name[:-len(".weight")] if name.endswith(".weight") else name
        keys = self.values(place + ".pos") if place + ".pos" in self.shape else range(count)
        return {key: self.bytes[name][i * width:(i + 1) * width] for i, key in enumerate(keys)}


def parts(path):
    """The unfinished files beside `path`."""
    return [name for name in os.listdir(os.path.dirname(path))
            if name.startswith(os.path.basename(path) + ".part")]


class Runs:
    def __init__(self, folder):
        self.folder = folder
        self.model = os.path.join(folder, "model")
        self.ids = os.path.join(folder, "ids")
        subprocess.run([MKMODEL, "--config", "tiny", "--seed", "1", self.model], check=True,
                       stdout=subprocess.DEVNULL)
        with open(os.path.join(self.model, "config.json")) as file:
            whole = json.load(file)
        self.config = whole.get("text_config", whole)
        self.image_id = whole["image_token_id"]

    def write(self, ids):
        with open(self.ids, "wb") as file:
            file.write(struct.pack("<%dI" % len(ids), *ids))

    def call(self, *flags, ids=None, out=None):
        return subprocess.run(
            [CACHECTL, "model", "run", self.model, "--tokens", ids or self.ids, "--dump",
             out or os.path.join(self.folder, "out"), *flags],
            capture_output=True, text=True, timeout=120)

    def dump(self, *flags):
        got = self.call(*flags)
        equal(got.returncode, 0, "model run %s: %s" % (" ".join(flags), got.stderr))
        equal(got.stdout, "", "stdout")
        said = got.stderr.splitlines()[-1:]
        check(said and re.match(r"%s: \d+ tensors, %d bytes: tokens \d+ to \d+ of \d+ through tiny, "
                                % (re.escape(os.path.join(self.folder, "out")), os.path.getsize(
                                    os.path.join(self.folder, "out"))), said[0]), got.stderr)
        path = os.path.join(self.folder, "out")
        dump = Dump(path)
        os.unlink(path)
        equal(parts(path), [], "no .part file stays")
        return dump


def tokens(count, image_id):
    """Text with image tokens: one alone, then several in a row."""
    state, ids = 7, []
    for i in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append(image_id if i in (9, 30, 31, 32) else (state >> 40) % 500)
    return ids


def want_tensors(c, total, first, decoder_first, quant):
    """Name to (dtype, shape), from config.json alone."""
    want = {"tokens": ("I32", [total])}
    encoder = c["candidate_source_layer_id"]
    layers, stages = c["num_hidden_layers"], c["num_nextn_predict_layers"]

    def rows(name, layer, dtype, *width):
        count = total - (first if layer < encoder else decoder_first)
        want[name] = (dtype, [count, *width])
        want[name + ".pos"] = ("I32", [count])

    def packed(codes, scales):
        return ("U8", codes + scales) if quant else ("F32", None)

    for layer in range(layers + stages):
        dtype, width = packed(c["head_dim"], c["head_dim"] // 32)
        rows("win.%d" % layer, layer, dtype, width or c["head_dim"])
        if layer >= layers:
            continue
        rows("stream.%d" % layer, layer, "BF16" if quant else "F32", 4, c["hidden_size"])
        rows("premix.%d" % layer, layer, "F32", 4)
        rows("experts.%d" % layer, layer, "I32", c["num_experts_per_tok"])
        rows("experts.%d.weight" % layer, layer, "F32", c["num_experts_per_tok"])
        if layer in c["index_source_layer_ids"]:
            rows("topk.%d" % layer, layer, "I32", c["index_topk"])
        if layer in c["engram_layer_ids"]:
            rows("engram.%d" % layer, layer, "I64",
                 (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"])
    for layer in c["kv_source_layer_ids"]:
        entries = total // c["compress_ratios"][layer]
        dtype, width = packed(c["head_dim"] // 2, c["head_dim"] // 16)
        want["rows.%d" % layer] = (dtype, [entries, width or c["head_dim"]])
        dtype, width = packed(c["index_head_dim"] // 2, c["index_head_dim"] // 32)
        want["keys.%d" % layer] = (dtype, [entries, width or c["index_head_dim"]])
    rows("candidates", encoder, "I32", c["candidate_topk_blocks"])
    rows("logits", encoder, "F32", c["vocab_size"])
    want["draft"] = ("I32", [c["dspark_block_size"]])
    want["draft.token"] = ("I32", [1])
    want["draft.logits"] = ("F32", [c["dspark_block_size"], c["vocab_size"]])
    want["draft.confidence"] = ("F32", [c["dspark_block_size"]])
    return want


def check_shapes(runs, dump, total, first=0, all_rows=False, quant=True):
    c = runs.config
    encoder = c["candidate_source_layer_id"]
    decoder_first = first if all_rows else max(first, total - c["sliding_window"])
    want = want_tensors(c, total, first, decoder_first, quant)
    equal(sorted(dump.shape), sorted(want), "names")
    for name, (dtype, shape) in want.items():
        equal((dump.dtype[name], dump.shape[name]), (dtype, shape), name)
        if name.endswith(".pos"):
            parts = name.split(".")
            is_encoder = len(parts) >= 3 and int(parts[1]) < encoder
            equal(dump.values(name), list(range(first if is_encoder else decoder_first, total)),
                  name)


def check_lists(runs, dump):
    """Ascending, then -1; as many as can be seen."""
    c = runs.config
    for layer in c["index_source_layer_ids"]:
        name, width = "topk.%d" % layer, c["index_topk"]
        for i, position in enumerate(dump.values(name + ".pos")):
            row = dump.values(name)[i * width:(i + 1) * width]
            seen = (position + 1) // c["compress_ratios"][layer]
            count = min(seen, width)
            check(row[:count] == sorted(set(row[:count])) and row[count:] == [-1] * (width - count),
                  "%s at %d: %r" % (name, position, row))
            check(all(0 <= n < seen for n in row[:count]), "%s at %d: visible" % (name, position))
    experts = dump.values("experts.0")
    check(all(0 <= n < c["n_routed_experts"] for n in experts), "experts")
    greedy = dump.values("logits")[-c["vocab_size"]:]
    equal(dump.values("draft.token"), [greedy.index(max(greedy))], "draft.token")
    block, vocab = c["dspark_block_size"], c["vocab_size"]
    for i, token in enumerate(dump.values("draft")):
        row = dump.values("draft.logits")[i * vocab:(i + 1) * vocab]
        equal(token, row.index(max(row)), "draft %d" % i)
    equal(len(dump.values("draft.confidence")), block, "confidences")


def expect_equal(a, b, what):
    equal(sorted(a.shape), sorted(b.shape), what + ": names")
    for name in a.shape:
        check(a.bytes[name] == b.bytes[name], "%s: %s is equal" % (what, name))


def expect_part(part, whole, what, but=()):
    """Every row of `part` is the row of `whole` at its position."""
    for name in part.shape:
        if name.endswith(".pos") or name in but:
            continue
        rows = whole.rows(name)
        for position, row in part.rows(name).items():
            if position in rows:
                check(row == rows[position], "%s: %s at %d is equal" % (what, name, position))


def run_instruction_sets(runs):
    """Those this machine has: the same bytes within a family, and for any chunk in each."""
    families = {}
    for isa in ("portable", "avx2", "avx512", "amx"):
        got = runs.call("--isa", isa)
        if got.returncode != 0:
            check("kernels '%s' cannot be used: " % isa in got.stderr, got.stderr)
            continue
        dump = runs.dump("--isa", isa)
        equal(dump.meta["isa"], isa, "meta")
        expect_equal(runs.dump("--isa", isa, "--chunk", "11"), dump, isa + ", chunk 11")
        first = families.setdefault(dump.meta["family"], dump)
        expect_equal(dump, first, "%s in its family" % isa)
    check("fp32" in families, "the portable family")


def run_values(runs):
    ids = tokens(75, runs.image_id)
    runs.write(ids)
    whole = runs.dump()
    check_shapes(runs, whole, 75)
    check_lists(runs, whole)
    equal(whole.values("tokens"), ids, "tokens")
    equal(whole.meta["prefill"], "ced", "meta")
    equal(whole.meta["model"], "tiny", "meta")
    for chunk in ("1", "7", "16", "17", "64", "4096"):
        expect_equal(runs.dump("--chunk", chunk), whole, "chunk " + chunk)
    expect_equal(runs.dump("--threads", "1"), whole, "one thread")
    run_instruction_sets(runs)
    everything = runs.dump("--prefill", "all")
    check_shapes(runs, everything, 75, all_rows=True)
    check_lists(runs, everything)
    for chunk in ("1", "13"):
        expect_equal(runs.dump("--prefill", "all", "--chunk", chunk), everything, "all " + chunk)
    encoder = {name for name in whole.shape if whole.shape[name][:1] == [75]}
    check(any(name.startswith("stream.7") for name in encoder), "encoder tensors")
    for name in encoder:
        check(whole.bytes[name] == everything.bytes[name] or name.split(".")[0] == "logits",
              name + " does not depend on the decoder")
    for count in (1, 2, 15, 16, 17):
        runs.write(ids[:count])
        check_shapes(runs, runs.dump(), count)
        check_shapes(runs, runs.dump("--quant", "off"), count, quant=False)
    return ids


def run_resumed(runs, ids):
    runs.write(ids)
    whole = runs.dump()
    everything = runs.dump("--prefill", "all")
    for at in (1, 16, 31, 32, 33, 48):
        resumed = runs.dump("--resume-at", str(at))
        check_shapes(runs, resumed, 75, first=at)
        expect_part(resumed, whole, "resumed at %d" % at)
        resumed = runs.dump("--resume-at", str(at), "--prefill", "all", "--chunk", "5")
        check_shapes(runs, resumed, 75, first=at, all_rows=True)
        expect_part(resumed, everything, "all, resumed at %d" % at)
    window = runs.config["sliding_window"]
    for at in (10, 16, 40, 41):
        first = max(0, at - window)
        replayed = runs.dump("--resume-at", str(at), "--replay")
        check_shapes(runs, replayed, 75, first=first)
        for layer in runs.config["kv_source_layer_ids"]:
            known = at // runs.config["compress_ratios"][layer]
            for name in ("rows.%d" % layer, "keys.%d" % layer):
                old, new = whole.rows(name), replayed.rows(name)
                check(all(old[n] == new[n] for n in range(known)), name + " is only read")
        for layer in runs.config["engram_layer_ids"]:
            name = "engram.%d" % layer
            check(all(row == whole.rows(name)[p] for p, row in replayed.rows(name).items()),
                  name + " looks behind the replay's start")
        if first == 0:
            expect_part(replayed, whole, "replayed from 0")
    runs.write(ids[:41])
    late = runs.dump("--resume-at", "40")  # The decoder goes on with the window of the image.
    check_shapes(runs, late, 41, first=40)


def run_refused(runs, ids):
    odd = os.path.join(runs.folder, "odd")
    cases = [
        (b"abcde", (), 1, "not a multiple of 4 bytes"),
        (b"", (), 1, "no tokens"),
        (struct.pack("<3I", 1, 512, 3), (), 1, "token 1 is id 512, the vocabulary has 512"),
        (bytes(4 * (1048576 + 1)), (), 1, "more than 1048576 tokens"),
        (bytes(16), ("--resume-at", "0"), 2, "--resume-at must be 1 to 3"),
        (bytes(16), ("--resume-at", "4"), 2, "--resume-at must be 1 to 3"),
        (bytes(16), ("--replay",), 2, "--replay needs --resume-at N"),
        (bytes(16), ("--prefill", "some"), 2, "--prefill takes ced or all"),
        (bytes(16), ("--quant", "maybe"), 2, "--quant takes on or off"),
        (bytes(16), ("--isa", "mmx"), 2, "--isa takes"),
        (bytes(16), ("--chunk", "x"), 2, "--chunk takes N"),
        (bytes(16), ("--chunk", "4097"), 2,
         "--chunk must be at most 4096, the most tokens of a pass; found 4097"),
        (bytes(16), ("--threads", "99999999"), 2, "--threads must be at most 256, found 99999999"),
    ]
    for data, flags, code, text in cases:
        with open(odd, "wb") as file:
            file.write(data)
        got = runs.call(*flags, ids=odd)
        equal(got.returncode, code, "%r: %s" % (flags, got.stderr))
        check(text in got.stderr and got.stderr.count("\n") == 1, "%r in %r" % (text, got.stderr))
        check(not os.path.exists(os.path.join(runs.folder, "out")), "no out")
        equal(parts(os.path.join(runs.folder, "out")), [], "parts")
    runs.write(ids)
    got = runs.call(ids=os.path.join(runs.folder, "none"))
    check(got.returncode == 1 and "No such file" in got.stderr, got.stderr)
    got = runs.call(out=runs.ids)
    check(got.returncode == 2 and "would replace the tokens" in got.stderr, got.stderr)
    got = runs.call(out=runs.folder)
    check(got.returncode == 2 and "not a regular file" in got.stderr, got.stderr)
    out = os.path.join(runs.folder, "none", "out")
    got = runs.call(out=out)
    check(got.returncode == 1 and f"make a file beside {out}: No such file" in got.stderr,
          got.stderr)
    full = subprocess.run(
        ["bash", "-c", "ulimit -f 64; exec \"$@\"", "bash", CACHECTL, "model", "run", runs.model,
         "--tokens", runs.ids, "--dump", os.path.join(runs.folder, "out")],
        capture_output=True, text=True, timeout=60)
    check(full.returncode == 1 and "no room for" in full.stderr
          and full.stderr.endswith(": File too large\n"), full.stderr)
    equal(parts(os.path.join(runs.folder, "out")), [], "parts after a file that may not grow")
    run_codes(runs)
    run_over_model(runs)
    run_interrupted(runs)
    run_changed(runs)
    equal(parts(os.path.join(runs.folder, "out")), [], "parts in the end")


def run_codes(runs):
    """The codes of `model verify`, and the document of --json."""
    kept, out = runs.model, os.path.join(runs.folder, "out")
    runs.model = os.path.join(runs.folder, "no-model")
    got = runs.call()
    check(got.returncode == 3 and "No such file" in got.stderr and got.stderr.count("\n") == 1,
          got.stderr)
    runs.model = make_model(os.path.join(runs.folder, "damaged"))
    os.truncate(os.path.join(runs.model, "model.safetensors"), 5000000)
    for flags in ((), ("--json",)):
        got = runs.call(*flags)
        verify = subprocess.run([CACHECTL, "model", "verify", runs.model], capture_output=True,
                                text=True, timeout=60)
        equal((got.returncode, got.stderr, got.stdout), (7, verify.stderr, ""), "as verify")
        check(not os.path.exists(out), "no dump of a damaged model")
    runs.model = kept
    equal(runs.call("--quiet").stderr, "", "--quiet")
    got = runs.call("--json", "--resume-at", "40", "--replay", "--chunk", "7")
    equal((got.returncode, got.stderr), (0, ""), "--json")
    told, dump = json.loads(got.stdout), Dump(out)
    equal(told.pop("milliseconds") >= 0, True, "milliseconds")
    equal(told, {
        "schema": 1, "model": "tiny", "directory": runs.model, "isa": dump.meta["isa"],
        "family": dump.meta["family"], "prefill": "ced", "quant": "on", "chunk": 7,
        "tokens": dump.shape["tokens"][0], "resume_at": 40, "replay": True,
        "first_computed": dump.values("stream.0.pos")[0], "dump": out,
        "tensors": len(dump.shape), "bytes": os.path.getsize(out)}, "the document")
    equal(json.loads(runs.call("--json").stdout)["resume_at"], None, "resume_at of a cold run")
    os.unlink(out)
    got = runs.call("--json", out=os.fsencode(out) + b"\xff")
    check(got.returncode == 2 and "UTF-8" in got.stderr and got.stdout == "", got.stderr)


def make_model(path, *flags):
    subprocess.run([MKMODEL, "--config", "tiny", "--seed", "1", *flags, path], check=True,
                   stdout=subprocess.DEVNULL)
    return path


def contents(folder):
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    return found


def run_over_model(runs):
    """No file of the model is replaced, by whatever name it is called."""
    kept = runs.model
    try:
        single = make_model(os.path.join(runs.folder, "single"))
        shards = make_model(os.path.join(runs.folder, "shards"), "--shards", "2")
        links = os.path.join(runs.folder, "links")  # Each file of it lies elsewhere.
        os.mkdir(links)
        for name in os.listdir(single):
            os.symlink(os.path.join(single, name), os.path.join(links, name))
        beside = os.path.join(runs.folder, "beside")
        os.symlink(single, beside)
        cases = [(single, single, name) for name in os.listdir(single)]
        cases += [(shards, shards, name) for name in os.listdir(shards)]
        cases += [(single, single, "model.safetensors.index.json"),  # Not there: it would be.
                  (shards, shards, "model.safetensors"),
                  (links, single, "model.safetensors"), (links, links, "config.json"),
                  (single, beside, "config.json"), (beside, single, "engram_ids.bin")]
        before = contents(single), contents(shards)
        for model, folder, name in cases:
            runs.model = model
            got = runs.call(out=os.path.join(folder, name))
            equal(got.returncode, 2, "%s of %s" % (name, model))
            check("--dump would replace the model's " + name in got.stderr
                  and got.stderr.count("\n") == 1, got.stderr)
        runs.model = single
        check(before == (contents(single), contents(shards)), "the models are as they were")
        inside = os.path.join(single, "out.safetensors")  # What is no file of the model may go.
        for _ in range(2):
            equal(runs.call(out=inside).returncode, 0, "a dump beside the model")
        got = runs.call("--dump", "")
        check(got.returncode == 2 and "--dump is empty" in got.stderr, got.stderr)
        got = runs.call("--tokens", "")
        check(got.returncode == 2 and "--tokens is empty" in got.stderr, got.stderr)
    finally:
        runs.model = kept


def run_changed(runs):
    """Weights that change under a run end it at its next pass, and the file is named."""
    model = make_model(os.path.join(runs.folder, "changed"))
    weights = os.path.join(model, "model.safetensors")
    size = os.path.getsize(weights)
    out = os.path.join(runs.folder, "out")
    runs.write([3] * 200000)
    for change, words in ((lambda: os.truncate(weights, size - 4096), "shrank while it was mapped"),
                          (lambda: os.utime(weights, (1, 1)), "changed while it was mapped")):
        make_model(model)
        process = subprocess.Popen([CACHECTL, "model", "run", model, "--tokens", runs.ids,
                                    "--dump", out, "--threads", "1"],
                                   stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not parts(out):
            time.sleep(0.01)
        change()
        began = time.monotonic()
        talk = process.communicate(timeout=60)[1]
        equal(process.returncode, 7, talk)
        check(weights + ": " + words in talk, talk)
        check(time.monotonic() - began < 3, "it ended after %.1f s" % (time.monotonic() - began))
        check(not os.path.exists(out), "no out")
        equal(parts(out), [], "parts of a run whose model changed")


def run_interrupted(runs):
    runs.write([3] * 60000)
    out = os.path.join(runs.folder, "out")
    process = subprocess.Popen([CACHECTL, "model", "run", runs.model, "--tokens", runs.ids,
                                "--dump", out, "--prefill", "all", "--threads", "1"],
                               stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not parts(out):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    talk = process.communicate(timeout=60)[1]
    check(process.returncode == 130 and "interrupted" in talk, talk)
    check(not os.path.exists(out), "an interrupted run leaves no dump")
    equal(parts(out), [], "parts of an interrupted run")


def run_at_once(runs):
    """Runs that write one file: each is whole, the last one's stays, a user's .part is his own."""
    out = os.path.join(runs.folder, "same")
    mine = out + ".part"
    with open(mine, "w") as file:
        file.write("mine")
    lists = []
    for count in (40, 300, 600):
        lists.append(tokens(count, runs.image_id))
        with open(runs.ids + str(count), "wb") as file:
            file.write(struct.pack("<%dI" % count, *lists[-1]))
    for _ in range(3):
        running = [subprocess.Popen(
            [CACHECTL, "model", "run", runs.model, "--tokens", runs.ids + str(len(ids)), "--dump",
             out, "--threads", "1"], stderr=subprocess.PIPE, text=True) for ids in lists]
        for process in running:
            talk = process.communicate(timeout=120)[1]
            equal(process.returncode, 0, talk)
        dump = Dump(out)
        whole = dump.values("tokens")
        check(whole in lists, "the tokens of one run")
        check_shapes(runs, dump, len(whole))
        os.unlink(out)
        runs.write(whole)
        expect_equal(dump, runs.dump("--threads", "1"), "of three at once")
    equal(parts(out), ["same.part"], "parts")
    with open(mine) as file:
        equal(file.read(), "mine", "a user's own .part")
    os.unlink(mine)
    # A name that is taken is not: another one is.
    hold = ("for n in '' .1 .2; do echo mine >%s.part.$$$n; done; exec %s model run %s --tokens %s "
            "--dump %s" % (out, CACHECTL, runs.model, runs.ids, out))
    got = subprocess.run(["bash", "-c", hold], capture_output=True, text=True, timeout=60)
    equal(got.returncode, 0, got.stderr)
    equal(len(parts(out)), 3, "the files of those names stay")
    for name in parts(out):
        with open(os.path.join(runs.folder, name)) as file:
            equal(file.read(), "mine\n", name)
        os.unlink(os.path.join(runs.folder, name))
    os.unlink(out)


def run_help():
    got = subprocess.run([CACHECTL, "model", "run", "--help"], capture_output=True, text=True,
                         timeout=60)
    equal(got.returncode, 0, "help")
    for name in ("tokens", "stream.L", "premix.L", "win.L", "rows.S", "keys.S", "topk.L",
                 "candidates", "experts.L", "experts.L.weight", "engram.L", "logits", "draft",
                 "draft.token", "draft.logits", "draft.confidence"):
        check("\n  %s " % name in got.stdout, "help names " + name)


def main():
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder)
        run_help()
        ids = run_values(runs)
        run_resumed(runs, ids)
        run_at_once(runs)
        run_refused(runs, ids)
    print("%d checks" % checks)


if __name__ == "__main__":
    main()
