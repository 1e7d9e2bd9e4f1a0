# Shared by deploy/quickstart, tests/run, tests/release and .ci/run; sourced, not run.
# The caller has set `set -euo pipefail` and ROOT, the top of the repository.
# shellcheck shell=bash

export LC_ALL=C
# Debian's own python3 and meson, also where others come first in PATH.
export PATH="/usr/bin:/bin:/usr/sbin:/sbin:$PATH"

SELF=$(basename "$(dirname "$(realpath "$0")")")/$(basename "$0")
WORK=$ROOT/.quickstart
LOG=$WORK/${SELF//\//-}.log
BUILD=$ROOT/build

# What the sources, one build, the model and the state of the demo take, in MiB.
SPACE_MIB=1000

say() { printf '%s\n' "$*"; }

# One sentence, and out.
fail() {
    progress_end
    printf '%s: %s\n' "$SELF" "$*" >&2
    exit 1
}

# ---- Progress: one line that changes on a terminal, a line every few seconds elsewhere. ----

progress_last=-10
progress_open=no

progress() { # TEXT
    if [ -t 1 ]; then
        printf '\r\033[K  %s' "$1"
        progress_open=yes
    elif [ $((SECONDS - progress_last)) -ge 5 ]; then
        printf '  %s\n' "$1"
        progress_last=$SECONDS
    fi
}

progress_end() {
    if [ "$progress_open" = yes ]; then printf '\r\033[K'; fi
    progress_open=no
    progress_last=-10
}

# The line of the log that says what went wrong, for a sentence.
last_error() {
    local line
    line=$(grep -E ': (fatal )?error: |ERROR: ' "$LOG" | head -n 1 || true)
    [ -n "$line" ] || line=$(grep -E '^E: |[Ee]rror|FAILED' "$LOG" | tail -n 1 || true)
    [ -n "$line" ] || line=$(tail -n 1 "$LOG" || true)
    printf '%s' "$line" | cut -c 1-300
}

start_log() {
    mkdir -p "$WORK" 2>/dev/null || fail "$WORK cannot be created: is the folder writable?"
    chmod 700 "$WORK"
    : 2>/dev/null >"$LOG" || fail "$LOG cannot be written: is the disk full, or owned by root?"
}

# ---- Packages ----

packages_of() { # GROUP...
    local group
    for group in "$@"; do
        sed -n "s/^$group \(.*\)/\1/p" "$ROOT/deploy/packages"
    done
}

missing_packages() { # NAME...
    local name
    for name in "$@"; do
        if ! dpkg-query -W -f '${db:Status-Status}\n' "$name" 2>/dev/null | grep -qx installed; then
            printf '%s\n' "$name"
        fi
    done
}

# Sets as_root to what must stand before a command that needs root.
become_root() { # WHAT FOR
    as_root=()
    if [ "$(id -u)" -eq 0 ]; then return; fi
    command -v sudo >/dev/null ||
        fail "$1 needs root, and sudo is not installed: run this once as root."
    if ! sudo -n true 2>/dev/null; then
        [ -t 0 ] || fail "$1 needs root, and sudo asks for a password: run this once as root."
        sudo -v || fail "$1 needs root, and sudo refused: run this once as root."
    fi
    as_root=(sudo -n)
}

apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l LC_ALL=C apt-get \
        -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 --no-install-recommends "$@" </dev/null
}

show_apt() { # TOTAL
    local line got=0 unpacked=0 ready=0
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$LOG"
        case $line in
        Get:*) got=$((got + 1)) && progress "packages: $got of $1 downloaded" ;;
        Unpacking*) unpacked=$((unpacked + 1)) && progress "packages: $unpacked of $1 unpacked" ;;
        'Setting up'*) ready=$((ready + 1)) && progress "packages: $ready of $1 set up" ;;
        esac
    done
    progress_end
}

show_update() {
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$LOG"
        progress "package lists: ${line:0:60}"
    done
    progress_end
}

mib_free() { # PATH
    df -Pm "$1" | awk 'NR == 2 { print $4 }'
}

# What apt says it will need, in MiB: archives to fetch and space after unpacking.
mib_needed() {
    sed 's|/[0-9.,]* [kMG]*B||' | awk '/^Need to get|additional disk space/ {
             for (i = 1; i < NF; i++) if ($(i + 1) ~ /^[kMG]B$/) {
                 gsub(",", "", $i); n = $i
                 if ($(i + 1) == "kB") n /= 1000
                 if ($(i + 1) == "GB") n *= 1000
                 sum += n; break
             } }
         END { print int(sum) + 1 }'
}

# Installs what is missing of these groups; does nothing, and asks no network, when all is there.
install_packages() { # GROUP...
    local all missing plan unreachable total free need
    command -v dpkg-query >/dev/null || fail "this machine has no dpkg; Debian 12 is what is known to work."
    mapfile -t all < <(packages_of "$@")
    [ "${#all[@]}" -gt 0 ] || fail "deploy/packages lists nothing for: $*."
    mapfile -t missing < <(missing_packages "${all[@]}")
    if [ "${#missing[@]}" -eq 0 ]; then
        say "packages: all ${#all[@]} are installed"
        return
    fi
    say "packages: ${#missing[@]} of ${#all[@]} are missing: ${missing[*]}"
    become_root "installing packages"

    apt update 2>&1 | show_update || true
    if ! plan=$(apt -s install "${missing[@]}" 2>>"$LOG"); then
        unreachable=$(sed -n 's/^[WE]: \(Failed to fetch .*\)/\1/p' "$LOG" | head -n 1 | cut -c 1-200)
        fail "no package source has them: ${unreachable:-$(last_error)}."
    fi
    total=$(grep -c '^Inst ' <<<"$plan" || true)
    need=$(apt --assume-no install "${missing[@]}" 2>/dev/null | mib_needed || true)
    free=$(mib_free /usr)
    [ "$free" -ge "$need" ] ||
        fail "the packages need $need MiB and /usr has $free MiB free."
    apt -y install "${missing[@]}" 2>&1 | show_apt "$total" ||
        fail "the packages could not be installed: $(last_error) (log: $LOG)."
    mapfile -t missing < <(missing_packages "${all[@]}")
    [ "${#missing[@]}" -eq 0 ] || fail "apt-get said yes, yet these are missing: ${missing[*]}."
    say "packages: all ${#all[@]} are installed, $total with what they depend on"
}

check_space() {
    local free
    free=$(mib_free "$ROOT")
    [ "$free" -ge "$SPACE_MIB" ] ||
        fail "building and running here needs $SPACE_MIB MiB and $ROOT has $free MiB free."
}

# ---- Build ----

# 0: this folder is a build of this tree; anything else: it is not (moved, broken, absent).
build_is_ours() { # FOLDER
    /usr/bin/python3 - "$1" "$ROOT" <<'PYTHON' 2>/dev/null
import json, os, sys
folder, root = sys.argv[1:]
info = json.load(open(os.path.join(folder, "meson-info", "meson-info.json")))
ours = os.path.realpath(info["directories"]["source"]) == os.path.realpath(root)
there = os.path.realpath(info["directories"]["build"]) == os.path.realpath(folder)
ninja = os.path.exists(os.path.join(folder, "build.ninja"))
sys.exit(0 if ours and there and ninja and not info["error"] else 1)
PYTHON
}

show_ninja() { # NAME
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$LOG"
        case $line in
        '['*/*']'*) progress "$1: ${line%%]*}]" ;;
        *warning:*) progress_end && printf '%s\n' "$line" ;;
        esac
    done
    progress_end
}

# Configures (again, so that new files are seen) and builds.
build() { # FOLDER MESON_OPTION...
    local folder=$1 name again=()
    shift
    name=$(basename "$folder")
    if build_is_ours "$folder"; then
        again=(--reconfigure)
    else
        rm -rf "$folder"
    fi
    progress "$name: configuring"
    /usr/bin/meson setup "${again[@]}" "$@" "$folder" "$ROOT" >>"$LOG" 2>&1 </dev/null ||
        fail "meson could not configure $name/: $(last_error) (log: $LOG)."
    progress_end
    if ! /usr/bin/ninja -C "$folder" 2>&1 </dev/null | show_ninja "$name"; then
        grep -E -A 20 '^FAILED' "$LOG" | head -n 40 >&2 || true
        fail "building in $name/ failed: $(last_error) (log: $LOG)."
    fi
}

# ---- Tests ----

# Runs `meson test` in a build; prints the report, whose last line is the count.
run_tests() { # FOLDER MESON_TEST_ARGUMENT...
    local folder=$1 code=0
    shift
    rm -f "$folder/meson-logs/testlog.json"
    /usr/bin/meson test -C "$folder" --no-rebuild "$@" </dev/null || code=$?
    /usr/bin/python3 "$ROOT/tests/report.py" "$folder/meson-logs/testlog.json" "$code"
}
