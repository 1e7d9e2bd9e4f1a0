"""mkmodel: into a directory that is there already.

Goal: a model that mkmodel made is replaced whole, whatever ended it before; one that somebody else
made is not touched without --force, and the sentence says how to go on.
"""

import os
import re
import subprocess
import time

import daemon as d
from damage import (CONFIG, IDS, INDEX, MKMODEL, SECOND, SINGLE, copy_of, entries, header, make,
                    read, removed, text, verify, write)


def untimed(answer):
    """Without the seconds it took."""
    text, count = re.subn(r", [0-9.]+ s\n$", "\n", answer)
    assert count == 1, answer
    return text


def test_made_again():
    """Into a directory with another model: nothing of that one stays; what fails leaves no model."""
    directory = os.path.join(d.scratch(), "again")
    for options in (("--shards", "4"), ("--shards", "2"), ("--plain",), ("--shards", "3"), ()):
        fresh = make(os.path.join(d.scratch(), "fresh"), *options)
        make(directory, *options)
        d.equal(sorted(os.listdir(directory)), sorted(os.listdir(fresh)), f"files of {options}")
        d.equal(untimed(verify(directory).stdout), untimed(verify(fresh).stdout),
                f"model of {options}")
    make(directory, "--shards", "2")
    blocked = os.path.join(directory, "model-00002-of-00003.safetensors.tmp")
    os.mkdir(blocked)
    done = subprocess.run([MKMODEL, "--shards", "3", directory], capture_output=True, text=True,
                          check=False)
    d.equal((done.returncode, done.stderr),
            (1, f"mkmodel: {blocked}: Is a directory\n"), "a shard that cannot be written")
    d.check(not os.path.exists(os.path.join(directory, CONFIG)), "no config.json of the earlier run")
    os.rmdir(blocked)
    process = subprocess.Popen([MKMODEL, "--config", "small", directory], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    part = os.path.join(directory, "model.safetensors.tmp")
    while process.poll() is None and not os.path.exists(part):
        time.sleep(0.01)
    process.terminate()
    talk = process.communicate(timeout=60)[1]
    d.equal((process.returncode, talk), (1, "mkmodel: interrupted\n"), "a mkmodel that is ended")
    d.check(not os.path.exists(part), "no half of a file is left")
    orphan = os.path.join(d.scratch(), "none", "model")
    done = subprocess.run([MKMODEL, orphan], capture_output=True, text=True, check=False)
    d.equal((done.returncode, done.stderr),
            (1, f"mkmodel: {orphan}: the directory above it does not exist; make it first\n"),
            "no directory above")
    for wrong in ((), ("--out", directory), ("--model", "tiny", directory), (directory, "more")):
        d.equal(subprocess.run([MKMODEL, *wrong], capture_output=True, check=False).returncode, 2,
                f"mkmodel {wrong}")


def mkmodel(directory, *options):
    return subprocess.run([MKMODEL, *options, directory], capture_output=True, text=True,
                          timeout=60, check=False)


def contents(directory):
    return {name: read(os.path.join(directory, name)) for name in os.listdir(directory)}


def test_foreign(models):
    """A model that mkmodel did not make is not touched; --force takes its place."""
    def foreign(name):
        return header('"made_by":"mkmodel"', '"format":"pt"', name)
    cases = [  # what, base, damage, the file that is named
        ("one file", "plain", foreign(SINGLE), SINGLE),
        ("one of three shards", "shards", foreign(SECOND), SECOND),
        ("no metadata", "tiny", entries(lambda h: h.pop("__metadata__") and None), SINGLE),
        ("an empty file", "plain", text(SINGLE, b""), SINGLE),
        ("weights of another form", "plain", removed(SINGLE), CONFIG),
        ("ids before their model", "tiny", lambda p: (removed(SINGLE)(p), removed(CONFIG)(p)), IDS),
        ("an index alone", "shards", lambda p: [removed(name)(p) for name in os.listdir(p)
                                                if name != INDEX], INDEX),
    ]
    for what, base, damage, named in cases:
        copy = copy_of(models[base], damage)
        write(os.path.join(copy, "model.safetensors.tmp"), b"half")
        write(os.path.join(copy, "README"), b"mine")
        before = contents(copy)
        done = mkmodel(copy)
        d.equal((done.returncode, done.stdout, done.stderr),
                (1, "", f"mkmodel: {copy} holds a model that mkmodel did not make ({named}): name "
                        "another directory, or replace it with --force\n"), what)
        d.check(contents(copy) == before, f"{what}: nothing is touched")
        done = mkmodel(copy, "--force", "--plain")
        d.equal(done.returncode, 0, f"{what}: --force: {done.stderr}")
        d.equal(sorted(os.listdir(copy)), sorted(["README", CONFIG, SINGLE]), f"{what}: replaced")
        d.equal(mkmodel(copy).returncode, 0, f"{what}: and from then on as any of mkmodel's")
    # A directory with other files is not for models, unless one of mkmodel's is there already.
    other = d.scratch()
    write(os.path.join(other, "config.json.tmp"), b"{")
    write(os.path.join(other, "notes.safetensors"), b"mine")
    before = contents(other)
    done = mkmodel(other, "--plain")
    d.equal((done.returncode, done.stdout, done.stderr),
            (1, "", f"mkmodel: {other} is not empty and holds no model that mkmodel made "
                    "(notes.safetensors): name another directory, or write into it with --force\n"),
            "a directory of other things")
    d.check(contents(other) == before, "nothing is touched")
    done = mkmodel("/etc")
    d.check(done.returncode == 1 and "mkmodel: /etc is not empty and holds no model" in done.stderr
            and not os.path.exists("/etc/config.json"), f"/etc: {done.stderr}")
    d.equal(mkmodel(other, "--plain", "--force").returncode, 0, "--force")
    for options in ((), ("--plain",)):
        d.equal(mkmodel(other, *options).returncode, 0, "and then without")
    d.equal(sorted(os.listdir(other)), sorted([CONFIG, SINGLE, "notes.safetensors"]), "stay")
    left = d.scratch()
    write(os.path.join(left, "config.json.tmp"), b"{")
    d.equal(mkmodel(left, "--plain").returncode, 0, "what a killed mkmodel left")
    d.equal(sorted(os.listdir(left)), sorted([CONFIG, SINGLE]), "is gone")
    help_text = subprocess.run([MKMODEL, "--help"], capture_output=True, text=True, check=True)
    d.check("--force" in help_text.stdout, "--help names --force")


def test_killed():
    """kill -9 at any time: the next run makes its model, and nothing else is left."""
    directory = make(os.path.join(d.scratch(), "killed"), "--shards", "3")
    for pause in (0, 0.05, 0.2, 0.5):
        process = subprocess.Popen([MKMODEL, "--config", "small", "--shards", "4", directory],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while pause > 0 and process.poll() is None and not any(
                name.endswith(".tmp") for name in os.listdir(directory)):
            time.sleep(0.002)
        time.sleep(pause)
        process.kill()
        process.wait()
        left = os.listdir(directory)
        if pause > 0:
            d.check(process.returncode == -9 and any(name.endswith(".tmp") for name in left),
                    f"killed after {pause} s: {left}")
        done = mkmodel(directory, "--plain")
        d.equal((done.returncode, done.stderr), (0, ""), f"the run after {left}")
        d.equal(sorted(os.listdir(directory)), [CONFIG, SINGLE], f"nothing of {left}")
        d.equal(verify(directory).returncode, 0, "a whole model")


def main():
    root = d.scratch()
    test_made_again()
    test_foreign({
        "tiny": make(os.path.join(root, "tiny"), "--config", "tiny"),
        "plain": make(os.path.join(root, "plain"), "--config", "tiny", "--plain"),
        "shards": make(os.path.join(root, "shards"), "--config", "tiny", "--shards", "3"),
    })
    test_killed()
    d.finish()


if __name__ == "__main__":
    main()
