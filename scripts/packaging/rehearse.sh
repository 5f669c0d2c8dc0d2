#!/usr/bin/env bash
# usage: rehearse.sh FOLDER: what publishing the wheels of FOLDER would do, on this machine alone: the page of the index, the
# bill of materials, an installation by name, version and hash from an index on loopback, the update from the package of
# the same name that is published today and back, and the choice of a wheel for aarch64. At last it refuses a wheel whose
# README.md has links that lead nowhere outside the repository. Needs a package index.
# PYTHON: whose wheel is installed.
set -euo pipefail
shopt -s nullglob
folder=${1:?usage: rehearse.sh FOLDER}
python=${PYTHON:-python3}
published=2.12.1
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheels=("$folder"/tensorizer-*-"$tag-$tag"-*"$(uname -m)".whl)
[ ${#wheels[@]} = 1 ] || { echo "rehearse.sh: ${#wheels[@]} wheels for $tag on $(uname -m) in $folder: expected one" >&2; exit 1; }
wheel=${wheels[0]}
version=$(basename "$wheel" | cut -d- -f2)
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT
venv() { "$python" -m venv "$work/$1"; }

venv tools
"$work/tools/bin/pip" -q install twine 'readme-renderer[md]' 'cyclonedx-python-lib[json-validation]'
"$work/tools/bin/twine" check --strict "$folder"/tensorizer-*

"$work/tools/bin/python" - "$wheel" <<'PY'
import sys, zipfile
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

with zipfile.ZipFile(sys.argv[1]) as archive:
    (name,) = (name for name in archive.namelist() if ".dist-info/sboms/" in name)
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(archive.read(name).decode())
sys.exit(f"{name}: {wrong}" if wrong else print(f"{name}: a valid CycloneDX document"))
PY

mkdir -p "$work/index/simple/tensorizer"
cp "$folder"/tensorizer-* "$work/index/simple/tensorizer"
:>"$work/server"
"$work/tools/bin/python" -u -m http.server --bind 127.0.0.1 --directory "$work/index" 0 >"$work/server" 2>&1 &
server=$!
until port=$(grep -o 'port [0-9]*' "$work/server"); do kill -0 "$server"; sleep 0.1; done
index=http://127.0.0.1:${port#port }/simple
printf 'tensorizer==%s --hash=sha256:%s\n' "$version" "$(sha256sum "$wheel" | cut -d' ' -f1)" >"$work/requirements"
install() { PIP_FIND_LINKS='' PIP_EXTRA_INDEX_URL='' "$work/$1/bin/pip" -q --isolated install --no-deps --index-url "$index" --require-hashes -r "$work/requirements"; }
files() { (cd "$work/$1/lib" && find . -type f -not -name '*.pyc' -not -path '*/pip*' | sort); }

venv clean
files clean >"$work/nothing"
install clean
files clean >"$work/ours"
echo "tensorizer $version: installed from $index by its hash"
"$work/clean/bin/pip" -q uninstall -y tensorizer
files clean | diff "$work/nothing" -

venv updated
"$work/updated/bin/pip" -q install --no-deps "tensorizer==$published"
files updated >"$work/theirs"
install updated
files updated | diff "$work/ours" -
"$work/updated/bin/pip" -q install --no-deps "tensorizer==$published"
files updated | diff "$work/theirs" -
echo "tensorizer $published to $version and back: no file is left behind"

others=("$folder"/tensorizer-*-"$tag-$tag"-*aarch64.whl)
if [ ${#others[@]} = 0 ]; then
  echo "no wheel for aarch64 in $folder: which one pip chooses there was not tried"
else
  "$work/clean/bin/pip" -q --isolated download --no-deps --only-binary :all: --platform manylinux_2_28_aarch64 \
    --index-url "$index" --dest "$work/download" "tensorizer==$version"
  cmp "$work/download/"*.whl "${others[0]}" && echo "aarch64: pip chooses ${others[0]##*/}"
fi

"$work/tools/bin/python" - "$folder"/tensorizer-*.whl <<'PY'
import email, re, sys, zipfile
from readme_renderer.markdown import render

for wheel in sys.argv[1:]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = render(email.message_from_bytes(archive.read(name)).get_payload(decode=True).decode())
    links = re.findall(r'(?:href|src|srcset)="([^"]+)"', page)
    wrong = [link for link in links if not re.match("https?://|#", link)]
    if wrong or not links:
        sys.exit(f"rehearse.sh: {wheel}: {len(wrong)} of {len(links)} links and pictures of README.md lead nowhere on the page of "
                 f"an index: {', '.join(wrong[:3])}; build with GITHUB_REPOSITORY=OWNER/NAME")
print(f"README.md: all {len(links)} links and pictures have whole addresses")
PY
