#!/usr/bin/env bash
# Builds tensord with a preview of the next Burn, from a copy of this checkout:
#
#   experiments/burn-0.23/check.sh [--without-patches] [COMMAND...]
#
# COMMAND is run in the copy, whose packages are tensord's crates and `smoke/`;
# without one: cargo check --workspace --keep-going. It stays outside `.ci/run`, as it
# compiles Burn once more.
set -euo pipefail
shopt -s nullglob
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
preview=0.23.0-pre.1
crates=(proto channel session transport client backend worker scheduler demo server)

patches=("$here"/patches/*.patch)
if [ "${1:-}" = --without-patches ]; then
    patches=()
    shift
fi
[ $# -gt 0 ] || set -- cargo check --workspace --keep-going

target=${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/tensord/burn-$preview}
copy=$target/copy
mkdir -p "$copy"

# Only files whose contents differ are written, so that cargo rebuilds what changed.
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
for crate in "${crates[@]}"; do
    cp -RL "$root/$crate" "$new/$crate"
    # Tests and benchmarks need more crates; they are no part of the experiment.
    rm -rf "$new/$crate/tests" "$new/$crate/benches"
    sed -i '/^\[dev-dependencies\]/,/^$/d; /^\[\[bench\]\]/,/^$/d' "$new/$crate/Cargo.toml"
done
cp -RL "$root/data" "$new/data"
cp -R "$here/smoke" "$new/smoke"

# Burn's crates all have one version. The experiment computes little, so nothing is optimized.
sed -E -e "s/^(burn[a-z-]* = \{ version = \"=)[0-9.]+\"/\1$preview\"/" \
    -e "s/^members = .*/members = [$(printf '"%s", ' "${crates[@]}")\"smoke\"]/" \
    -e '/^\[profile.dev.package\]/,/^$/d' -e '/^tensord-(testkit|tests|fuzz) = /d' "$root/Cargo.toml" >"$new/Cargo.toml"
grep -q "version = \"=$preview\"" "$new/Cargo.toml" ||
    { echo "no version of Burn was found in $root/Cargo.toml: has the form of its lines changed?" >&2; exit 1; }

for patch in "${patches[@]}"; do
    # No fuzz: a patch that matches only nearly may change another place.
    patch --quiet --directory "$new" --strip 1 --fuzz 0 <"$patch" ||
        { echo "$patch does not apply: adapt it to the changed code" >&2; exit 1; }
done

# Versions of other crates are the checkout's where the preview allows it.
[ -e "$copy/Cargo.lock" ] || cp "$root/Cargo.lock" "$copy/"
# Files that are gone go from the copy too.
(cd "$copy" && find . -type f ! -path ./Cargo.lock) | while read -r file; do
    [ -e "$new/$file" ] || rm "$copy/$file"
done
(cd "$new" && find . -type f) | while read -r file; do
    cmp --quiet "$new/$file" "$copy/$file" || install -D -m 644 "$new/$file" "$copy/$file"
done
cd "$copy"
export CARGO_TARGET_DIR=$target
exec "$@"
