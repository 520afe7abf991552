#!/usr/bin/env bash
# Builds the documents as a site into target/site, and fails on a link or an anchor
# that leads nowhere.
#
# MkDocs comes from PyPI into .prepared/mkdocs (ignored by git), once.
set -euo pipefail
cd "$(dirname "$0")/../.."

mkdocs_version=1.6.1
venv=.prepared/mkdocs
if [[ ! -x $venv/bin/mkdocs ]]; then
    python3 -m venv "$venv" && "$venv/bin/pip" --quiet install "mkdocs==$mkdocs_version"
fi
source=target/site-source
rm -rf "$source"
mkdir -p "$source/bench"
cp ./*.md "$source/"
cp bench/README.md "$source/bench/"
cp -r docs "$source/docs"
rm -r "$source/docs/site"
"$venv/bin/mkdocs" build --strict --config-file docs/site/mkdocs.yml 2>&1 |
    { grep -v '^INFO' || true; }
echo "the site is in target/site: open target/site/index.html"
