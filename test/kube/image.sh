#!/usr/bin/env bash
# Writes an image (docker-archive) of one static binary: image.sh BINARY NAME:TAG >IMAGE.tar
set -euo pipefail
binary=$1 tag=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
program=$(basename "$binary")
mkdir "$work/root"
cp "$binary" "$work/root/$program"
chmod 755 "$work/root" "$work/root/$program"
pack() { tar --create --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner "$@"; }
pack --file "$work/layer.tar" --directory "$work/root" "$program"
cat >"$work/config.json" <<EOF
{"architecture": "$(go env GOARCH)", "os": "linux", "config": {"Entrypoint": ["/$program"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$(sha256sum "$work/layer.tar" | cut -d' ' -f1)"]}}
EOF
echo "[{\"Config\": \"config.json\", \"RepoTags\": [\"$tag\"], \"Layers\": [\"layer.tar\"]}]" >"$work/manifest.json"
pack --directory "$work" config.json layer.tar manifest.json
