#!/bin/sh
# Check this bundle and install fl-privacy @VERSION@ from it, without network.
#
#   ./install.sh FOLDER     into a new virtual environment; PYTHON=... names the interpreter (default: python@PYTHON@)
#   ./install.sh --image    load the image into Docker
#   ./install.sh --check    check the files only
set -eu
here=$(cd "$(dirname "$0")" && pwd)
die() {
    echo "install: $*" >&2
    exit 1
}

[ $# = 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; }
(cd "$here" && sha256sum --check --strict --quiet SHA256SUMS) || die "the bundle is damaged or was changed: fetch it again"
echo "install: all files are as listed; SHA256SUMS is $(sha256sum <"$here/SHA256SUMS" | cut -d' ' -f1)"
case $1 in
--check) exit 0 ;;
--image)
    [ -f "$here/image.tar.gz" ] || die "this bundle has no image"
    exec docker load --input "$here/image.tar.gz" ;;
-*) die "unknown option $1" ;;
esac

[ "$(uname -sm)" = "Linux @PLATFORM@" ] || die "the bundle is for Linux @PLATFORM@, this is $(uname -sm)"
python=${PYTHON:-python@PYTHON@}
[ "$("$python" -c 'import ensurepip, venv, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = @PYTHON@ ] ||
    die "$python is no Python @PYTHON@ with venv: install it (Debian: apt-get install python3-venv) or set PYTHON=..."
[ ! -e "$1" ] || die "$1 exists: name a new folder"
trap 'rm -rf "$1"' EXIT
"$python" -m venv "$1"
"$1/bin/python" -m pip --isolated --disable-pip-version-check install --quiet --no-deps --no-index --require-hashes \
    --find-links "$here/wheels" -r "$here/requirements.txt"
"$1/bin/python" -m pip --isolated check
"$1/bin/python" -c "import lightgbm" || die "install the OpenMP runtime (Debian: libgomp1, Red Hat: libgomp)"
trap - EXIT
echo "install: done; try $1/bin/fl-privacy --help"
