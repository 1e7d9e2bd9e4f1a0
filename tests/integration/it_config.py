"""The configuration as an operator meets it: --print-config, --check-config, files, drop-ins, flags.

The printed configuration and deploy/cached.conf are the same bytes; every mistake is answered by file,
line, key and nearest right key, with exit code 2; the environment changes nothing.
"""

import os
import subprocess

import daemon as d
from daemon import admin_pb, check, equal


def run(*arguments, env=None):
    done = subprocess.run([d.BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=env, timeout=20, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    return path


def printed():
    code, out, err = run("--print-config")
    equal(code, 0, "--print-config")
    equal(err, "", "nothing on standard error")
    with open(os.path.join(d.SOURCE, "deploy/cached.conf"), encoding="utf-8") as f:
        check(f.read() == out, "deploy/cached.conf is what --print-config prints")
    path = write(os.path.join(d.scratch(), "c.conf"), out)
    equal(run("--config", path, "--print-config")[1], out, "what is printed reads back the same")
    return out


# What a daemon needs; written into a file, so that only the mistake under test is left.
NEEDED = ("[server]\nsocket=/tmp/none\ntoken_file=/tmp/none\n[state]\ndir=/tmp/none\n"
          "[engine]\nmodel_dir=/tmp/none\n")


def mistakes():
    directory = d.scratch()
    cases = [
        ("[hbm]\nbytse = 1GiB\n", 2, 'unknown key "hbm.bytse"; did you mean "hbm.bytes"?'),
        ("[ssd]\nsegment_byte = 1MiB\n", 2, 'did you mean "ssd.segment_bytes"?'),
        ("[sdd]\nsegment_bytes = 1MiB\n", 2, 'did you mean "ssd.segment_bytes"?'),
        ("[SSD]\nBytes = 1GiB\n", 2, 'unknown key "SSD.Bytes"; did you mean "ssd.bytes"?'),
        ("[state]\ndir = /" + "x" * 200 + "\n", 2, "and a path at most 160"),
        ("[state]\ndir = /" + "x" * 160 + "\n", 2, "160"),
        ("token_file = x\n", 1, 'did you mean "server.token_file"?'),
        ("[hbm]\nbytes = much\n", 2, "hbm.bytes"),
        ("[hbm]\n\n# c\nbytes = 1KiB\n", 4, "1MiB to 64TiB"),
        ("[pool]\nttl = 5\n", 2, "a time such as 5min"),
        ("[engine]\nbackend = cuda\n", 2, "cpu|synthetic"),
        ("[window]\nspare_tokens = 129\n", 2, "4 to 128"),
        ("[hbm]\nbytes=2MiB\nbytes=3MiB\n", 3, "set already in line 2"),
        ("[log]\nnonsense\n", 2, "neither a [section]"),
        ("[log]\nlevel = " + "x" * 300 + "\n", 2, "a line has at most"),
    ]
    for text, line, words in cases:
        path = write(os.path.join(directory, "bad.conf"), text)
        code, out, err = run("--check-config", path)
        equal(code, 2, f"{text!r}: exit code")
        equal(out, "", f"{text!r}: nothing on standard output")
        check(err.startswith(f"cached: {path}:{line}: ") and words in err and
              err.count("\n") == 1, f"{text!r}: {err!r}")
        code, _, err_start = run("--config", path)
        check(code == 2 and err_start == err, f"{text!r}: starting says the same")

    good = write(os.path.join(directory, "good.conf"), NEEDED)
    equal(run("--check-config", good), (0, f"{good}: ok\n", ""), "a right file")
    for missing, words in (("socket=/tmp/none\n", "server.socket or server.listen"),
                           ("token_file=/tmp/none\n", "server.token_file"),
                           ("[state]\ndir=/tmp/none\n", "state.dir"),
                           ("model_dir=/tmp/none\n", "engine.model_dir")):
        path = write(os.path.join(directory, "part.conf"), NEEDED.replace(missing, ""))
        code, _, err = run("--check-config", path)
        check(code == 2 and words in err and err.count("\n") == 1, f"without {missing!r}: {err!r}")
    for address in ("0.0.0.0:7070", "[::]:7070", "10.1.2.3:7070", "127.0.0.1", "host:99999"):
        for clock in ("real", "virtual"):
            path = write(os.path.join(directory, "open.conf"),
                         f"{NEEDED}[clock]\nmode={clock}\n")
            code, _, err = run("--config", path, f"--server.listen={address}")
            check(code == 2 and "server.listen must be host:port on loopback" in err and
                  err.count("\n") == 1, f"{address}: {err!r}")
    code, _, err = run("--config", good, "--engine.pass_rows=1")
    check(code == 2 and err.endswith("engine.pass_rows must be 0, or 128 to 4096 (at least 2 and "
                                     "engine.chunk_tokens = 128), found 1\n"), repr(err))
    check("# 0, or engine.chunk_tokens (at least 2) to 4096; default 0\npass_rows = 0\n"
          in run("--print-config")[1], "the range of pass_rows")
    for path, words in ((os.path.join(directory, "none.conf"), "No such file"),
                        (directory, "no regular file")):
        code, _, err = run("--check-config", path)
        check(code == 2 and path in err and words in err, f"{path}: {err!r}")


def flags():
    for argument, words in (("--hbm.byte=1MiB", "did you mean --hbm.bytes"),
                            ("--hbm.bytes", "needs a value"), ("--config", "--config needs a file"),
                            ("--check-config=", "--check-config needs a file"), ("--hbm.bytes=x", "hbm.bytes"),
                            ("what", "--help"), ("--plant", "did you mean"),
                            ("--plant=skip_flush", "did you mean"), ("--Version", "did you mean")):
        code, out, err = run(argument)
        check(code == 2 and out == "" and words in err and err.count("\n") == 1,
              f"{argument}: {err!r}")
    code, out, _ = run("--version")
    check(code == 0 and out.startswith("cached 0.") and "commit" in out, f"--version: {out!r}")
    code, out, _ = run("--help")
    check(code == 0 and "Example:" in out and "--check-config" in out, "--help has an example")


def order():
    """Defaults < file < drop-ins by name < flags; nothing from the environment."""
    directory = d.scratch()
    path = write(os.path.join(directory, "o.conf"),
                 "[pool]\nttl=10s\n[ssd]\nttl=10h\n[index]\nram=10MiB\n[log]\nlevel=debug\n")
    write(os.path.join(directory, "o.conf.d", "20-b.conf"), "[ssd]\nttl=20h\n[index]\nram=20MiB\n")
    write(os.path.join(directory, "o.conf.d", "10-a.conf"), "[ssd]\nttl=30h\n")
    write(os.path.join(directory, "o.conf.d", "99.txt"), "[ssd]\nttl=99h\n")
    write(os.path.join(directory, "o.conf.d", ".hidden.conf"), "[ssd]\nttl=98h\n")
    env = dict(os.environ, CACHED_LOG_LEVEL="error", CACHED_SSD_TTL="1h", CACHED_CONFIG="/none")
    daemon = d.Daemon({"index.ram": "30MiB"}, arguments=["--config", path])
    os.environ.update(CACHED_LOG_LEVEL="error", CACHED_SSD_TTL="1h")
    daemon.start()
    items = {i.key: i for i in daemon.client("stats").admin.GetConfig(
        admin_pb.GetConfigRequest()).items}
    for key, value, origin in (
            ("pool.ttl", "10s", f"{path}:2"),
            ("ssd.ttl", "20h", f"{path}.d/20-b.conf:2"),
            ("index.ram", "30MiB", "flag"),
            ("log.level", "debug", f"{path}:8"),
            ("io.backend", "auto", "default"),
            ("server.token_file", daemon.token_file, "flag")):
        equal((items[key].value, items[key].origin), (value, origin), key)
        check(len(items[key].doc) > 10, f"{key} has its meaning")
    settings = [line for line in printed().splitlines() if " =" in line and line[0] != "#"]
    equal(len(items), len(settings), "every setting is there")
    check(len(settings) > 20, f"settings printed: {len(settings)}")
    for _, _, token in d.TOKENS.values():
        check(all(token not in i.value for i in items.values()), "no token in it")
    daemon.stop()

    write(os.path.join(directory, "o.conf.d", "30-bad.conf"), "\n[ssd]\ntt=1h\n")
    code, _, err = run("--check-config", path, env=env)
    check(code == 2 and f"{path}.d/30-bad.conf:3: " in err, f"a bad drop-in: {err!r}")


printed()
mistakes()
flags()
order()
d.finish()
