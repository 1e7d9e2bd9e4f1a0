"""Damage to the files of a model, for tests that make a good one and spoil it."""

import json
import os
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



# ---- Each of these returns a function of the model's directory. ----

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


def header(old, new, name=SINGLE):
    """The first `old` of the header's text becomes `new`."""
    def damage(directory):
        path = os.path.join(directory, name)
        text, data = split(path)
        join(path, replaced(text, old.encode(), new.encode(), name), data)
    return damage


def entries(change, name=SINGLE, data_change=None):
    """`change` edits the parsed header."""
    def damage(directory):
        path = os.path.join(directory, name)
        text, data = split(path)
        parsed = json.loads(text)
        parsed = change(parsed) or parsed
        join(path, json.dumps(parsed, separators=(",", ":")).encode(),
             data_change(data) if data_change else data)
    return damage


def config(old, new):
    def damage(directory):
        path = os.path.join(directory, CONFIG)
        write(path, replaced(read(path), old.encode(), new.encode(), CONFIG))
    return damage


def index(change):
    def damage(directory):
        path = os.path.join(directory, INDEX)
        parsed = json.loads(read(path))
        parsed = change(parsed) or parsed
        write(path, json.dumps(parsed).encode())
    return damage


def text(name, data):
    return lambda directory: write(os.path.join(directory, name), data)


def whole(change, name=SINGLE):
    """`change` gets and gives the bytes of a file."""
    def damage(directory):
        path = os.path.join(directory, name)
        write(path, change(read(path)))
    return damage


def value(tensor, at, new, name=SINGLE):
    """Bytes of one tensor's data."""
    def damage(directory):
        path = os.path.join(directory, name)
        head, data = split(path)
        begin = json.loads(head)[tensor]["data_offsets"][0] + at
        join(path, head, data[:begin] + new + data[begin + len(new):])
    return damage


def without(tensor):
    """The tensor is gone, data and all."""
    def damage(directory):
        path = os.path.join(directory, SINGLE)
        head, data = split(path)
        parsed = json.loads(head)
        begin, end = parsed.pop(tensor)["data_offsets"]
        for name, entry in parsed.items():
            if name != "__metadata__" and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [x - (end - begin) for x in entry["data_offsets"]]
        join(path, json.dumps(parsed).encode(), data[:begin] + data[end:])
    return damage


def added(tensor, dtype="I8"):
    """One tensor more, of four bytes."""
    def damage(directory):
        path = os.path.join(directory, SINGLE)
        head, data = split(path)
        parsed = json.loads(head)
        parsed[tensor] = {"dtype": dtype, "shape": [4], "data_offsets": [len(data), len(data) + 4]}
        join(path, json.dumps(parsed).encode(), data + bytes(4))
    return damage


def ids(change):
    def damage(directory):
        path = os.path.join(directory, IDS)
        values = list(struct.unpack("<512i", read(path)))
        values = change(values) or values
        write(path, struct.pack(f"<{len(values)}i", *values))
    return damage


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
