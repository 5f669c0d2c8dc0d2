#!/usr/bin/env bash
# usage: publish_docs.sh NAME: the site of a branch or tag, beside those of other versions, on the branch gh-pages.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1
make docs
git config --global --add safe.directory "$PWD"
pages=$(mktemp -d)
git fetch origin gh-pages 2>/dev/null && git worktree add "$pages" FETCH_HEAD || {
  git worktree add --detach "$pages"
  git -C "$pages" checkout --quiet --orphan gh-pages
  git -C "$pages" rm -rfq .
}
rm -rf "${pages:?}/$name"
cp -r site "$pages/$name"
case $name in
  v*) printf '<meta http-equiv="refresh" content="0; url=%s/">\n' "$name" >"$pages/index.html" ;;
  *) [ -e "$pages/index.html" ] || printf '<meta http-equiv="refresh" content="0; url=%s/">\n' "$name" >"$pages/index.html" ;;
esac
cd "$pages"
touch .nojekyll
git add --all
git -c user.name=docs -c user.email=docs@localhost commit --quiet --allow-empty -m "The site of $name"
git push origin HEAD:gh-pages
