"""tools/mkengramids on a small made-up tokenizer, one case per rule.

Goal: the table of compressed ids is what section 2.8, rule 1 of the model's specification says, and
what is no tokenizer is refused in one sentence.
Method: tokens in pairs or alone, each with the id it must share, written down by hand; then the tool
as a program, its checks, and its table read back by `cachectl model verify`.
"""

import json
import os
import shutil
import struct
import subprocess

import daemon as d

TOOL = os.path.join(d.SOURCE, "tools", "mkengramids")
CACHECTL = os.path.join(d.BUILD, "tools", "cachectl")
MKMODEL = os.path.join(d.BUILD, "tools", "mkmodel")


def byte_level(data):
    """Bytes as byte-level tokenizers write them; from the definition, not from the tool."""
    keep = set(range(0x21, 0x7f)) | set(range(0xa1, 0xad)) | set(range(0xae, 0x100))
    moved = {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in keep)}
    return "".join(chr(moved.get(byte, byte)) for byte in data)


# (what, raw token, compressed id): the id is that of its first appearance.
CASES = [
    ("plain", "a", 0),
    ("lower case", "A", 0),
    ("leading space is stripped", byte_level(b" a"), 0),
    ("another letter", "b", 1),
    ("accent of one character", byte_level("é".encode()), 2),
    ("without it", "e", 2),
    ("accent as a combining mark", byte_level("E\u0301".encode()), 2),
    ("full width by NFKC", byte_level("Ａ".encode()), 0),
    ("ligature by NFKC", byte_level("ﬁ".encode()), 3),
    ("its letters", "fi", 3),
    ("half a character: the raw token", byte_level(b"\xc3"), 4),
    ("another half", byte_level(b"\xa9"), 5),
    ("a character and a half", byte_level(b"a\xe2\x82"), 6),
    ("a real replacement character", byte_level("\ufffd".encode()), 7),
    ("a lone space", byte_level(b" "), 8),
    ("spaces are a lone space", byte_level(b"   "), 8),
    ("a tab is one too", byte_level(b"\t"), 8),
    ("and line ends", byte_level(b"\r\n\n"), 8),
    ("runs inside", byte_level(b"a \t\r\n b"), 9),
    ("as one space", byte_level(b"A b"), 9),
    ("other white space inside stays", byte_level("a\u2028b".encode()), 10),
    ("nothing left but a mark: the text", byte_level("\u0301".encode()), 11),
    ("another mark is another text", byte_level("\u0300".encode()), 12),
    ("white space only, stripped to nothing", byte_level(b"\v"), 13),
    ("another such", byte_level(b"\f"), 14),
    ("no-break space is a space by NFKC", byte_level("\u00a0".encode()), 8),
    ("capital sigma", byte_level("ΑΣ".encode()), 15),
    ("is no final sigma", byte_level("ας".encode()), 16),
    ("but the middle one", byte_level("ασ".encode()), 15),
    ("a spacing mark is a mark", byte_level("क\u093e".encode()), 17),
    ("its letter", byte_level("क".encode()), 17),
    ("control characters are no white space", byte_level(b"\x1ca"), 18),
    ("dotted capital I loses its dot", byte_level("İ".encode()), 19),
    ("i", "i", 19),
    # Not written in byte characters, so they are texts of their own.
    ("special token kept", "<｜end▁of▁sentence｜>", 20),
    ("a token that looks like it", "<|end▁of▁sentence|>", 20),
    ("special token in byte characters", "<think>", 21),
    ("ideograph by NFKC", byte_level("㊀".encode()), 22),
    ("its plain form", byte_level("一".encode()), 22),
]


def tokenizer(cases, special):
    vocab = {token: i for i, (_, token, _) in enumerate(cases) if token not in special}
    added = [{"id": i, "content": token, "special": True} for i, (_, token, _) in enumerate(cases)
             if token in special]
    return {"version": "1.0", "added_tokens": added, "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": vocab, "merges": []}}


def save(parsed, name="tokenizer.json"):
    path = os.path.join(d.scratch(), name)
    with open(path, "w", encoding="utf-8") as f:
        if isinstance(parsed, str):
            f.write(parsed)
        else:
            json.dump(parsed, f)
    return path


def run(*arguments):
    return subprocess.run([TOOL, *arguments], capture_output=True, text=True, check=False)


def table(path):
    with open(path, "rb") as f:
        data = f.read()
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def test_rules():
    good = tokenizer(CASES, {"<｜end▁of▁sentence｜>", "<think>"})
    out = os.path.join(d.scratch(), "ids")
    done = run(save(good), out)
    d.equal(done.returncode, 0, f"mkengramids: {done.stderr}")
    got = table(out)
    d.equal(len(got), len(CASES), "one number per id")
    for number, (what, token, expected) in zip(got, CASES):
        d.equal(number, expected, f"{what}: {token!r}")
    d.check(f"{len(CASES)} ids, 23 compressed" in done.stdout, f"it says how many: {done.stdout}")


def test_refused():
    base = tokenizer(CASES[:4], set())
    out = os.path.join(d.scratch(), "ids")

    def refused(parsed, words, *more):
        done = run(save(parsed), out, *more)
        d.equal(done.returncode, 1, f"{words}: exit code")
        d.check(words in done.stderr and len(done.stderr.splitlines()) == 1,
                f"{words}: {done.stderr!r}")
        d.check(not os.path.exists(out), f"{words}: nothing is written")

    refused("{", "not JSON")
    refused("[]", "must be a JSON object")
    refused({**base, "decoder": {"type": "WordPiece"}}, "decoder must be ByteLevel")
    refused({**base, "decoder": None}, "decoder must be ByteLevel")
    refused({**base, "model": {}}, "model.vocab must be an object")
    refused({**base, "added_tokens": [1]}, "added_tokens must be a list of objects")
    refused({**base, "added_tokens": [{"id": 0, "content": "x"}]}, "id 0 is both 'a' and 'x'")
    refused({**base, "added_tokens": [{"id": 9, "content": "x"}]}, "id 4 has no token")
    refused({**base, "added_tokens": [{"id": -1, "content": "x"}]}, "found -1")
    refused({**base, "added_tokens": [{"id": True, "content": "x"}]}, "found True")
    refused({**base, "model": {"vocab": {}}}, "there are no tokens")
    config = save({"text_config": {"vocab_size": 4, "engram_compressed_vocab_size": 3}})
    refused(base, "engram_compressed_vocab_size is 3, the tokenizer gives 2", "--config", config)
    # The released table has a known count.
    many = {"decoder": {"type": "ByteLevel"},
            "model": {"vocab": {f"t{i}": i for i in range(129280)}}}
    refused(many, "expected 99092 compressed ids of 129280, found 129280")
    for i in range(99092, 129280):
        del many["model"]["vocab"][f"t{i}"]
        many["model"]["vocab"][f"T{i - 99092}"] = i
    done = run(save(many), out)
    d.equal(done.returncode, 0, f"99,092 of 129,280: {done.stderr}")
    d.equal(run().returncode, 2, "no arguments")
    d.equal(run("--help").returncode, 0, "--help")
    d.equal(run("/nowhere", out).returncode, 1, "no tokenizer")
    source = save(base)
    for wrong in (("/dev/zero", out), (source, "/dev/full"), (source, os.path.dirname(source))):
        done = run(*wrong)
        d.equal(done.returncode, 1, f"{wrong}: exit code")
        d.check("not a regular file" in done.stderr, f"{wrong}: {done.stderr}")


def test_model_takes_it():
    """A tokenizer of bytes gives the toy model's own table, and verify accepts it."""
    model = os.path.join(d.scratch(), "model")
    subprocess.run([MKMODEL, "--config", "tiny", model], check=True, stdout=subprocess.DEVNULL)
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2}
    added = []
    for byte in range(256):
        vocab[byte_level(bytes([byte]))] = 3 + byte
    # White space alone is one id by the rule; toys keep those apart, so they become special.
    for byte in b"\t\n\r":
        del vocab[byte_level(bytes([byte]))]
        added.append({"id": 3 + byte, "content": f"<{byte}>", "special": True})
    for i in range(259, 512):
        added.append({"id": i, "content": f"<special {i}>", "special": True})
    parsed = {"decoder": {"type": "ByteLevel"}, "model": {"vocab": vocab}, "added_tokens": added}
    out = os.path.join(model, "engram_ids.bin")
    shutil.copy(out, out + ".toy")
    done = run(save(parsed), out, "--config", os.path.join(model, "config.json"))
    d.equal(done.returncode, 0, f"a tokenizer of bytes: {done.stderr}")
    d.equal(table(out), table(out + ".toy"), "it is the toy rule's table")
    done = subprocess.run([CACHECTL, "model", "verify", model], capture_output=True, text=True,
                          check=False)
    d.equal(done.returncode, 0, f"verify: {done.stderr}")


def main():
    test_rules()
    test_refused()
    test_model_takes_it()
    d.finish()


if __name__ == "__main__":
    main()
