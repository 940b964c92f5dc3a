#!/usr/bin/env bash
# The federation in containers, from nothing: an engine, the wheels, the image, `docker compose up` and its checks.
# An engine that was started for it is stopped afterwards. Arguments go to pytest.
#
# Exit code 3: there is no engine, and none can be started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

found=$(mktemp)
trap 'rm -f "$found"' EXIT
if ! scripts/engine.sh --running >/dev/null 2>&1; then
    trap 'rm -f "$found"; scripts/engine.sh --stop 2>/dev/null || true' EXIT
fi

# Setting an engine up waits for the network most of the time, installing for the processor.
scripts/engine.sh >"$found" &
engine=$!
make --no-print-directory wheelhouse || {
    wait "$engine" || true # half a set-up cannot be stopped
    exit 1
}
wait "$engine" || exit 3
eval "$(<"$found")"
FL_PRIVACY_CONTAINERS=1 PATH="$PWD/.venv/bin:$PATH" python -m pytest -m containers tests/test_image.py tests/test_compose.py "$@" ||
    exit 1
