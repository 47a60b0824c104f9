#!/usr/bin/env bash
# Runs `smoke/` on a pool of two devices, both built with the preview of Burn, by check.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/tensord/burn-0.23.0-pre.1}

"$here/check.sh" cargo build -p tensord -p smoke --no-default-features

work=$(mktemp -d)
pool=
trap '[ -z "$pool" ] || kill "$pool"; rm -rf "$work"' EXIT
TENSORD_STATE="$work/state" "$CARGO_TARGET_DIR/debug/tensord" up --listen 127.0.0.1:0 \
    --devices 'flex*2' >"$work/pool.log" 2>&1 &
pool=$!
TENSORD_URL=
for _ in $(seq 300); do
    TENSORD_URL=$(sed -n "s/^programs:.*'\(tensord:.*\)'$/\1/p" "$work/pool.log")
    [ -z "$TENSORD_URL" ] || break
    sleep 0.1
done
if [ -z "$TENSORD_URL" ]; then
    cat "$work/pool.log" >&2
    echo "the pool has not started within 30 s" >&2
    exit 1
fi
export TENSORD_URL
timeout 300 "$CARGO_TARGET_DIR/debug/smoke"
