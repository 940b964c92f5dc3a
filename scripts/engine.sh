#!/usr/bin/env bash
# Find a Docker that answers; print the shell lines that point `docker` at it.
#
#   eval "$(scripts/engine.sh)"     the `docker` of this shell if it answers; else the private engine of
#                                   CONTAINER_ENGINE (a script with setup, up and env), or of
#                                   ../shared/tools/container-engine beside the checkout, set up and started
#   scripts/engine.sh --running     only one that runs already; sets up and starts nothing
#   scripts/engine.sh --stop        stop the private engine, with all its containers; what it has built stays
#
# Exit code 3 and one line on stderr: there is none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

answers() { timeout 20 docker info >/dev/null 2>&1; }
none() {
    echo "engine: $1" >&2
    exit 3
}

if [[ ${1:-} != --stop ]] && answers; then exit 0; fi
script=${CONTAINER_ENGINE:-../shared/tools/container-engine}
[[ -x $script ]] || none "no Docker answers: start the Docker daemon, or name a script that starts one with CONTAINER_ENGINE"
script=$(readlink -f "$script")
[[ ${1:-} != --stop ]] || exec "$script" down
lines=$("$script" env)
eval "$lines"
if ! answers; then
    [[ ${1:-} != --running ]] || none "no Docker runs: start it with '$script up'"
    # A private engine needs root; the check saves the wait for a failing setup.
    [[ $(id -u) == 0 ]] || none "'$script' needs root: start the Docker daemon instead"
    { "$script" setup && "$script" up; } >&2 </dev/null || none "'$script' did not start an engine: see its messages above"
    answers || none "'$script' started an engine that does not answer"
fi
echo "$lines"
