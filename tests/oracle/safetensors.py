"""Safetensors files: reader (one file, or shards listed by an index) and writer.

A file is: u64 LE header length, JSON header, data.  The header maps a tensor
name to {dtype, shape, data_offsets}; `__metadata__` maps strings to strings.
BF16, F8_E4M3 and F8_E8M0 are returned as raw codes (uint16 / uint8); decode
them with quant.py.
"""
import json
import os

import numpy as np

NUMPY_OF = {
    "F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "I8": np.dtype("i1"),
    "U8": np.dtype("u1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype("u1"), "F8_E8M0": np.dtype("u1"),
}


class File:
    """One safetensors file, mapped read-only."""

    def __init__(self, path):
        self.path = path
        size = os.path.getsize(path)
        with open(path, "rb") as f:
            n = int.from_bytes(f.read(8), "little")
            if n > size - 8:
                raise ValueError("%s: header longer than the file" % path)
            header = json.loads(f.read(n).decode("utf-8"))
        self.metadata = header.pop("__metadata__", {})
        self.entries = header
        self.base = 8 + n
        self.data = np.memmap(path, dtype=np.uint8, mode="r")
        for name, e in header.items():
            self._check(name, e)

    def _check(self, name, e):
        lo, hi = e["data_offsets"]
        want = NUMPY_OF[e["dtype"]].itemsize
        for k in e["shape"]:
            want *= k
        if hi - lo != want or self.base + hi > len(self.data) or lo < 0:
            raise ValueError("%s: %s: size and shape disagree" % (self.path, name))

    def names(self):
        return sorted(self.entries)

    def __contains__(self, name):
        return name in self.entries

    def dtype(self, name):
        return self.entries[name]["dtype"]

    def shape(self, name):
        return tuple(self.entries[name]["shape"])

    def get(self, name):
        e = self.entries[name]
        lo, hi = e["data_offsets"]
        raw = np.array(self.data[self.base + lo:self.base + hi])
        return raw.view(NUMPY_OF[e["dtype"]]).reshape(e["shape"])


class Folder:
    """A model folder: model.safetensors, or shards named by the index file."""

    def __init__(self, folder):
        index = os.path.join(folder, "model.safetensors.index.json")
        self.files = {}
        self.where = {}
        if os.path.exists(index):
            with open(index) as f:
                shard_of = json.load(f)["weight_map"]
            for name, shard in shard_of.items():
                self.where[name] = self._open(os.path.join(folder, shard))
        else:
            f = self._open(os.path.join(folder, "model.safetensors"))
            for name in f.names():
                self.where[name] = f

    def _open(self, path):
        if path not in self.files:
            self.files[path] = File(path)
        return self.files[path]

    def names(self):
        return sorted(self.where)

    def __contains__(self, name):
        return name in self.where

    def dtype(self, name):
        return self.where[name].dtype(name)

    def shape(self, name):
        return self.where[name].shape(name)

    def get(self, name):
        return self.where[name].get(name)


def write(path, tensors, metadata=None):
    """tensors: list of (name, dtype, array); the array holds the raw codes."""
    header, blobs, at = {}, [], 0
    if metadata:
        header["__metadata__"] = {k: str(v) for k, v in metadata.items()}
    for name, dtype, a in tensors:
        a = np.ascontiguousarray(a)
        if a.dtype != NUMPY_OF[dtype]:
            raise ValueError("%s: %s is not %s" % (name, a.dtype, dtype))
        blob = a.tobytes()
        header[name] = {"dtype": dtype, "shape": list(a.shape),
                        "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little"))
        f.write(text)
        for blob in blobs:
            f.write(blob)
