"""What a state directory holds, read by the offsets of docs/format.md and nothing else.

For tests that damage a directory on purpose and must know what they hit.  Needs the program
build/tests/records, which prints and changes records of RocksDB.
"""

import os
import struct
import subprocess
from dataclasses import dataclass, field

from daemon import BUILD

HEADER_BYTES = 4096  # Of a segment file.
RECORDS = os.path.join(BUILD, "tests", "records")
KVDUMP = os.path.join(BUILD, "tools", "kvdump")


def kvdump(*arguments):
    done = subprocess.run([KVDUMP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=60, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def _table():
    table = []
    for i in range(256):
        for _ in range(8):
            i = (i >> 1) ^ (0x82f63b78 if i & 1 else 0)
        table.append(i)
    return table


_TABLE = _table()


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xff]
    return crc ^ 0xffffffff


def sealed(data, at=8, start=12):
    """The bytes with their checksum made right."""
    data = bytearray(data)
    struct.pack_into("<I", data, at, crc32c(bytes(data[start:])))
    return bytes(data)


def resealed_record(value):
    return value[:-4] + struct.pack("<I", crc32c(value[:-4]))


@dataclass
class Node:
    id: bytes
    parent: bytes
    tokens: int
    uids: list
    key: bytes
    value: bytes


@dataclass
class Page:
    session: bytes
    uid: int
    place: int
    generation: int
    position: int
    count: int
    key: bytes
    value: bytes


@dataclass
class Segment:
    state: int
    used_ms: int
    pages: int
    used: set


@dataclass
class Tree:
    nodes: dict = field(default_factory=dict)
    pages: dict = field(default_factory=dict)
    history: bytes = b""

    def owners(self, uid):
        """Ids of checkpoints whose rows are in the page: those that list it, and those below that
        do not list another one for its position."""
        found = set()
        position = self.pages[uid].position
        for node in sorted(self.nodes.values(), key=lambda n: n.tokens):
            start = self.nodes[node.parent].tokens if node.parent in self.nodes else 0
            inherits = node.parent in found and position < start // 128 * 128
            if uid in node.uids or inherits:
                found.add(node.id)
        return found

    def below(self, uid):
        """Those that list the page, and all below them: what a daemon drops with it."""
        found = set()
        for node in sorted(self.nodes.values(), key=lambda n: n.tokens):
            if uid in node.uids or node.parent in found:
                found.add(node.id)
        return found


class State:
    """A stopped daemon's directory."""

    def __init__(self, directory):
        self.directory = directory
        with open(os.path.join(directory, "superblock"), "rb") as f:
            self.superblock = f.read()
        self.id = self.superblock[16:32]
        self.page_bytes, = struct.unpack_from("<I", self.superblock, 32)
        self.segment_bytes, = struct.unpack_from("<Q", self.superblock, 40)
        self.pages_per_segment = (self.segment_bytes - HEADER_BYTES) // self.page_bytes
        self.records = {}
        done = subprocess.run([RECORDS, directory], check=True, stdout=subprocess.PIPE)
        for line in done.stdout.decode().splitlines():
            key, value = map(bytes.fromhex, line.split(" "))
            self.records[key] = value
        self.features, = struct.unpack_from("<Q", self.superblock, 48)
        self.users, self.sessions, self.trees = {}, {}, {}
        self.segments, self.doubt = {}, False
        for key, value in self.records.items():
            self._read(key, value)

    def _read(self, key, value):
        letter = key[:1]
        if letter == b"U":
            at = 33 if value[0] == 1 else 65  # Of version 2 the salt is encrypted.
            self.users[key[1:]] = value[at + 1:at + 1 + value[at]].decode()
        elif letter == b"S":
            name = value[81:81 + value[67]].decode()
            self.sessions[key[1:]] = (value[1:17], name)
        elif key == b"G":
            self.doubt = True
        elif letter == b"G":
            pages, = struct.unpack_from("<I", value, 10)
            bits = value[14:14 + (pages + 7) // 8]
            used = {page for page in range(pages) if bits[page // 8] >> page % 8 & 1}
            self.segments[struct.unpack(">I", key[1:])[0]] = Segment(
                value[1], struct.unpack_from("<Q", value, 2)[0], pages, used)
        elif letter == b"T":
            tree = self.trees.setdefault(key[1:17], Tree())
            if key[17:18] == b"N":
                replays, pages = value[95], struct.unpack_from("<I", value, 96)[0]
                uids = struct.unpack_from(f"<{pages}Q", value, 108 + 4 * replays)
                parent = value[18:34] if value[17] else None
                tree.nodes[value[1:17]] = Node(value[1:17], parent,
                                               struct.unpack_from("<I", value, 42)[0],
                                               list(uids), key, value)
            elif key[17:18] == b"H":
                tree.history = value
            else:
                uid, place, generation, position, count = struct.unpack_from("<QIQII", value, 1)
                tree.pages[uid] = Page(key[1:17], uid, place, generation, position, count, key,
                                       value)

    def label(self, session):
        """USER/SESSION, as the tools print it."""
        user, name = self.sessions[session]
        return f"{self.users[user]}/{name}"

    def session(self, label):
        return next(s for s in self.sessions if self.label(s) == label)

    def head(self, session):
        """Id of the checkpoint that a session goes on from."""
        return self.records[b"S" + session][51:67]

    def pages(self):
        return [page for tree in self.trees.values() for page in tree.pages.values()]

    def recorded(self):
        """Places in use, as the segments' records say."""
        return {number * segment.pages + page for number, segment in self.segments.items()
                for page in segment.used}

    def where(self, page):
        """(path, offset) of a page."""
        number, index = divmod(page.place, self.pages_per_segment)
        return self.segment(number), HEADER_BYTES + index * self.page_bytes

    def segment(self, number):
        return os.path.join(self.directory, "ssd", f"segment-{number:06}.kv")

    def read(self, page):
        path, offset = self.where(page)
        with open(path, "rb") as f:
            f.seek(offset)
            return f.read(self.page_bytes)

    def write(self, page, data):
        path, offset = self.where(page)
        with open(path, "r+b") as f:
            f.seek(offset)
            f.write(data)

    def line(self, page, cause):
        """What kvdump says of this page."""
        number, index = divmod(page.place, self.pages_per_segment)
        owners = len(self.trees[page.session].owners(page.uid))
        return (f"segment-{number:06}.kv page {index} (offset {self.where(page)[1]}): {cause}, "
                f"owners: {owners} {'checkpoint' if owners == 1 else 'checkpoints'} of session "
                f"{self.label(page.session)}")

    def put(self, key, value):
        subprocess.run([RECORDS, self.directory, "put", key.hex(), value.hex()], check=True)

    def delete(self, key):
        subprocess.run([RECORDS, self.directory, "delete", key.hex()], check=True)
