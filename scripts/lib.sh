# shellcheck shell=bash
# What scripts/demo and scripts/test share: finding and installing what they need, and
# saying so. Sourced, never run. It changes to the repository's root, so that cargo
# reads the workspace's configuration wherever the caller stands.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit
self=scripts/$(basename "$0")

# The oldest UCX that kvferry builds against.
readonly UCX_MINIMUM=1.13

# Versions that are installed where the tool is missing; an installed one is used as it is.
# shellcheck disable=SC2034 # used by scripts/test
readonly NEXTEST_VERSION=0.9.151
# shellcheck disable=SC2034
readonly DENY_VERSION=0.20.2

if [[ -t 1 && -z ${NO_COLOR:-} && ${TERM:-dumb} != dumb ]]; then
    bold=$'\e[1m' plain=$'\e[0m'
else
    bold='' plain=''
fi

# headline TEXT: a line that starts a step.
headline() { printf '\n%s== %s%s\n' "$bold" "$*" "$plain"; }

# note TEXT: what a script does or found, on stderr.
note() { printf '%s: %s\n' "$self" "$*" >&2; }

die() {
    note "$*"
    exit 1
}

# --- Debian packages ---------------------------------------------------------------

apt_wanted=()
apt_updated=''

# want PACKAGE PURPOSE CHECK...: notes PACKAGE for install_wanted if CHECK fails.
want() {
    local package=$1 purpose=$2
    shift 2
    "$@" >/dev/null 2>&1 && return 0
    note "missing: $package ($purpose)"
    apt_wanted+=("$package")
}

# Installs what `want` noted. Fails, having said why, where that is not possible.
install_wanted() {
    ((${#apt_wanted[@]})) || return 0
    local packages=("${apt_wanted[@]}") as_root=()
    apt_wanted=()
    if ! command -v apt-get >/dev/null; then
        note "there is no apt-get here; please install what is missing (Debian's names: ${packages[*]})"
        return 1
    fi
    if ((EUID != 0)); then
        # A password may be asked for where somebody can type one, and nowhere else.
        as_root=(sudo)
        [[ -t 0 ]] || as_root+=(-n)
        if ! command -v sudo >/dev/null || ! "${as_root[@]}" true; then
            note "only root may do this: apt-get install ${packages[*]}"
            return 1
        fi
    fi
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive
        apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)
    if [[ -z $apt_updated ]]; then
        apt_updated=yes
        note "apt-get update"
        quietly "${apt[@]}" update || note "apt-get update failed; trying with the old lists"
    fi
    note "apt-get install -y --no-install-recommends ${packages[*]}"
    quietly "${apt[@]}" install -y --no-install-recommends "${packages[@]}"
}

# quietly COMMAND...: its output is shown only if it fails.
quietly() {
    local output
    if ! output=$("$@" 2>&1 </dev/null); then
        printf '%s\n' "$output" >&2
        return 1
    fi
}

have_cc() { cc -xc - -o /dev/null <<<'#include <stdio.h>
int main(void) { return puts("") < 0; }'; }

have_cxx() { c++ -xc++ - -o /dev/null <<<'#include <string>
int main() { return std::string().size(); }'; }

have_ucx() { [[ -n ${UCX_DIR:-} ]] || pkg-config --exists ucx; }

# libclang, and the headers of its own that it needs to read anybody's.
have_libclang() {
    [[ -n ${LIBCLANG_PATH:-} ]] && return 0
    { compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' || ldconfig -p | grep -F libclang; } &&
        { compgen -G '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' ||
            compgen -G '/usr/lib*/clang/*/include/stddef.h'; }
}

have_pip() { python3 -m pip --version || pip3 --version; }

# What building kvferry needs.
want_for_build() {
    want gcc 'a C compiler and linker' command -v cc
    want libc6-dev 'headers of the C library' have_cc
    want pkg-config 'finds UCX' command -v pkg-config
    want libucx-dev 'UCX: library and headers' have_ucx
    want libclang-dev 'reads UCX headers at build time' have_libclang
}

# What scripts/fetch-ucx needs.
want_for_fetch() {
    want python3 'downloads and unpacks UCX' command -v python3
    want python3-pip 'downloads UCX' have_pip
}

# What the Python package needs, to be built and tested.
want_for_python() {
    want python3 'builds and tests the Python package' command -v python3
    want python3-venv 'makes an environment for that' python3 -c 'import ensurepip, venv'
}

# --- Python ------------------------------------------------------------------------

# The interpreter of an environment below the target directory, which is made if need be.
python_environment() {
    local home
    home=$(target_directory)/python || return
    if ! "$home/bin/python" -c '' 2>/dev/null; then
        rm -rf "$home"
        python3 -m venv "$home" >&2 || return
    fi
    printf '%s\n' "$home/bin/python"
}

# python_install PACKAGES...: into that environment.
python_install() {
    "$(python_environment)" -m pip install --quiet --disable-pip-version-check "$@" >&2
}

# --- Rust --------------------------------------------------------------------------

require_rust() {
    if ! command -v cargo >/dev/null; then
        PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
        export PATH
    fi
    command -v cargo >/dev/null ||
        die "cargo is not here: install Rust with rustup (https://rustup.rs), then run this again"
}

# require_component NAME: rustfmt or clippy, which a minimal toolchain leaves out.
require_component() {
    local program=cargo-$1
    [[ $1 == rustfmt ]] && program=cargo-fmt
    "$program" --version >/dev/null 2>&1 && return 0
    note "rustup component add $1"
    rustup component add "$1" >&2
}

# install_tool CRATE VERSION FLAGS...: the program of CRATE, from crates.io, into cargo's bin.
install_tool() {
    local crate=$1 version=$2
    shift 2
    note "cargo install $crate@$version --locked (some minutes, once per machine)"
    # Where somebody watches, cargo shows how far it is; in a log it would be hundreds of lines.
    local quiet=()
    [[ -t 2 ]] || quiet=(--quiet)
    # Quick to build rather than quick to run; in a build directory of its own, which
    # cargo removes at the end.
    env -u CARGO_TARGET_DIR -u RUSTFLAGS -u CARGO_BUILD_TARGET \
        CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off \
        CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=0 \
        cargo install "${quiet[@]}" --locked "$@" "$crate@$version" </dev/null >&2
}

# The directory that cargo builds into, wherever it was configured.
target_directory() {
    cargo metadata --format-version 1 --no-deps --locked |
        sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p'
}

# --- UCX ---------------------------------------------------------------------------

# prefix_version PREFIX: major.minor of the UCX whose headers are there.
prefix_version() {
    sed -n -e 's/^#define UCP_API_MAJOR *\([0-9]*\).*/\1/p' \
        -e 's/^#define UCP_API_MINOR *\([0-9]*\).*/\1/p' \
        "$1/include/ucp/api/ucp_version.h" | paste -sd.
}

# major.minor of the UCX that the build will use.
ucx_version() {
    if [[ -n ${UCX_DIR:-} ]]; then
        prefix_version "$UCX_DIR"
    else
        pkg-config --modversion ucx | cut -d. -f1,2
    fi
}

# use_ucx PREFIX: programs started from here load the UCX of PREFIX.
use_ucx() { export LD_LIBRARY_PATH=$1/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; }

# Where the distribution's UCX is too old, builds and runs with the one from PyPI.
replace_old_ucx() {
    [[ -z ${UCX_DIR:-} ]] || return 0
    pkg-config --atleast-version="$UCX_MINIMUM" ucx && return 0
    note "this system's UCX $(ucx_version) is older than $UCX_MINIMUM; building with a newer one"
    want_for_fetch
    install_wanted || return 1
    local prefix
    prefix=$(scripts/fetch-ucx | tail -n 1) || return 1
    export UCX_DIR=$prefix
    use_ucx "$prefix"
}
