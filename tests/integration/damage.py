"""Damage to the files of a model, for tests that make a good one and spoil it."""

import json
import os
import re
import shutil
import struct
import subprocess

import daemon as d

CACHECTL = os.path.join(d.BUILD, "tools", "cachectl")
MKMODEL = os.path.join(d.BUILD, "tools", "mkmodel")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
IDS = "engram_ids.bin"
CONFIG = "config.json"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"



# ---- Files, and the two parts of a weight file. ----

def read(path):
    with open(path, "rb") as f:
        return f.read()


def write(path, data):
    with open(path, "wb") as f:
        f.write(data)


def split(path):
    whole = read(path)
    count = struct.unpack("<Q", whole[:8])[0]
    return whole[8:8 + count], whole[8 + count:]


def join(path, header, data):
    write(path, struct.pack("<Q", len(header)) + header + data)


def replaced(text, old, new, what):
    assert text.count(old) >= 1, f"{what}: no {old!r}"
    return text.replace(old, new, 1)


# ---- Damage: each of these returns a function of the model's directory. ----

def on_file(name, change):
    """`change` gets and gives the bytes of a file."""
    def damage(directory):
        path = os.path.join(directory, name)
        write(path, change(read(path)))
    return damage


def on_parts(name, change):
    """`change` gets and gives the text of a weight file's header, and its data."""
    def damage(directory):
        path = os.path.join(directory, name)
        join(path, *change(*split(path)))
    return damage


def on_entries(name, change):
    """`change` edits the parsed header, and gives the data when they change as well."""
    def parts(head, data):
        parsed = json.loads(head)
        changed = change(parsed, data)
        return json.dumps(parsed).encode(), data if changed is None else changed
    return on_parts(name, parts)


def header(old, new, name=SINGLE):
    """The first `old` of the header's text becomes `new`."""
    return on_parts(name, lambda head, data: (
        replaced(head, old.encode(), new.encode(), name), data))


def entries(change, name=SINGLE):
    """`change` edits the parsed header."""
    def edit(parsed, _):
        change(parsed)
    return on_entries(name, edit)


def config(old, new):
    return on_file(CONFIG, lambda data: replaced(data, old.encode(), new.encode(), CONFIG))


def index(change):
    def edit(data):
        parsed = json.loads(data)
        parsed = change(parsed) or parsed
        return json.dumps(parsed).encode()
    return on_file(INDEX, edit)


def text(name, data):
    return lambda directory: write(os.path.join(directory, name), data)


def whole(change, name=SINGLE):
    return on_file(name, change)


def value(tensor, at, new, name=SINGLE):
    """Bytes of one tensor's data."""
    def edit(head, data):
        begin = json.loads(head)[tensor]["data_offsets"][0] + at
        return head, data[:begin] + new + data[begin + len(new):]
    return on_parts(name, edit)


def widened(pattern):
    """BF16 tensors whose name has this pattern are F32 with the same values."""
    def edit(parsed, data):
        pieces, at = [], 0
        names = [name for name in parsed if name != "__metadata__"]
        for name in sorted(names, key=lambda name: parsed[name]["data_offsets"][0]):
            entry = parsed[name]
            piece = data[slice(*entry["data_offsets"])]
            if entry["dtype"] == "BF16" and re.search(pattern, name):
                entry["dtype"] = "F32"
                piece = b"".join(b"\0\0" + piece[i:i + 2] for i in range(0, len(piece), 2))
            entry["data_offsets"] = [at, at + len(piece)]
            at += len(piece)
            pieces.append(piece)
        return b"".join(pieces)
    return on_entries(SINGLE, edit)


def finer(tensor):
    """Values of an F32 tensor grow by a part that BF16 could not hold."""
    def edit(head, data):
        begin, end = json.loads(head)[tensor]["data_offsets"]
        values = bytearray(data[begin:end])
        values[1::4] = b"\x70" * (len(values) // 4)
        return head, data[:begin] + bytes(values) + data[end:]
    return on_parts(SINGLE, edit)


def without(tensor):
    """The tensor is gone, data and all."""
    def edit(parsed, data):
        begin, end = parsed.pop(tensor)["data_offsets"]
        for name, entry in parsed.items():
            if name != "__metadata__" and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [x - (end - begin) for x in entry["data_offsets"]]
        return data[:begin] + data[end:]
    return on_entries(SINGLE, edit)


def added(tensor, dtype="I8"):
    """One tensor more, of four bytes."""
    def edit(parsed, data):
        parsed[tensor] = {"dtype": dtype, "shape": [4], "data_offsets": [len(data), len(data) + 4]}
        return data + bytes(4)
    return on_entries(SINGLE, edit)


def ids(change):
    def edit(data):
        values = list(struct.unpack("<512i", data))
        values = change(values) or values
        return struct.pack(f"<{len(values)}i", *values)
    return on_file(IDS, edit)


def put(values, at, new):
    values[at] = new


def retag(parsed, tensor, **fields):
    parsed[tensor].update(fields)


def removed(name):
    return lambda directory: os.unlink(os.path.join(directory, name))


def moved(parsed, tensor, shard):
    parsed["weight_map"][tensor] = shard


# ---- The programs. ----

def verify(directory):
    return subprocess.run([CACHECTL, "model", "verify", directory], capture_output=True, text=True,
                          timeout=60, check=False)


def make(directory, *options):
    done = subprocess.run([MKMODEL, "--seed", "3", *options, directory], capture_output=True,
                          text=True, check=False)
    d.equal(done.returncode, 0, f"mkmodel {options}: {done.stderr}")
    return directory


def copy_of(directory, damage=lambda _: None):
    """A copy with that done to it."""
    copy = os.path.join(d.scratch(), "model")
    shutil.copytree(directory, copy)
    damage(copy)
    return copy
