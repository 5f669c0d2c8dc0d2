#!/usr/bin/env bash
# usage: publish.sh NAME: the site of a branch or tag, beside those of other versions, on the branch gh-pages.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=${1:?usage: publish.sh NAME}
# shellcheck source=scripts/trusted.sh
. scripts/trusted.sh
make docs
pages=$(mktemp -d)
trap 'git worktree remove --force "$pages"' EXIT
if git fetch origin gh-pages 2>/dev/null; then
  git worktree add --detach "$pages" FETCH_HEAD
else
  git worktree add --detach "$pages"
  git -C "$pages" checkout --quiet --orphan gh-pages
  git -C "$pages" rm -rfq .
fi
rm -rf "${pages:?}/$name"
cp -r site "$pages/$name"
# The home page leads to the highest release, to a pre-release where there is none, and else to the first branch.
versions=$(find "$pages" -maxdepth 1 -type d -name 'v[0-9]*' -printf '%f\n' | sort -V)
home=$(grep -E '^v[0-9.]+$' <<<"$versions" | tail -n 1 || true)
home=${home:-$(tail -n 1 <<<"$versions")}
if [ -n "$home" ] || [ ! -e "$pages/index.html" ]; then
  printf '<meta http-equiv="refresh" content="0; url=%s/">\n' "${home:-$name}" >"$pages/index.html"
fi
(
  cd "$pages"
  touch .nojekyll
  git add --all
  git -c user.name=docs -c user.email=docs@localhost commit --quiet --allow-empty -m "The site of $name"
  git push origin HEAD:gh-pages
)
