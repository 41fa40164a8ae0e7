#!/usr/bin/env bash
# Builds what is tested with, unless it was built before, and prints the folder it is in:
#   build.sh cluster   Kubernetes, etcd, helm, containerd, the cluster's images and OpenAPI schemas; 7 to 15 minutes
#   build.sh checks    helm-unittest, and kubectl-validate, whose --local-schemas are in the other folder's schemas; 4 minutes
# The folder is in the cache of this user, named by all that goes into it. Builds need 5 GB of disk for as long as they run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
what=${1:-cluster}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/headroom-kube

sources() {
  case $what in
  cluster) echo build.sh image.sh go.mod go.sum kubebox/*.go coredns/*.go pause/*.go ;;
  checks) echo build.sh tools/go.mod tools/go.sum ;;
  *) echo "build.sh: there is no '$what': it is cluster or checks" >&2 && return 2 ;;
  esac
}

build_cluster() {
  local version kubernetes program flags=-s\ -w
  version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do # what the programs say they are
    flags+=" -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$version")"
    flags+=" -X $package.gitTreeState=clean"
  done
  build -gcflags=all=-dwarf=false -ldflags "$flags" -o "$1/" ./kubebox ./coredns ./pause helm.sh/helm/v4/cmd/helm
  for program in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl etcd; do
    ln -s kubebox "$1/$program"
  done
  mkdir "$1/images"
  ./image.sh "$1/pause" headroom.test/pause:1 >"$1/images/pause.tar"
  ./image.sh "$1/coredns" headroom.test/coredns:1 >"$1/images/coredns.tar"
  schemas "$(go list -m -f '{{.Dir}}' k8s.io/kubernetes)/api/openapi-spec/v3" "$1/schemas"
  containers "$1"
}

# containers unpacks Debian's containerd, runc and network plugins: they take minutes to build, and any version will do.
containers() {
  (
    cd "$unpacked"
    download || { apt-get update -qq && download; }
    for package in *.deb; do dpkg -x "$package" .; done
  ) || { echo "build.sh: cannot download Debian's containerd, runc and containernetworking-plugins" >&2 && return 1; }
  cp "$unpacked"/usr/bin/{containerd,containerd-shim-runc-v2,ctr} "$unpacked/usr/sbin/runc" "$1/"
  mkdir "$1/cni"
  cp "$unpacked"/usr/lib/cni/{bridge,host-local,loopback} "$1/cni/"
}

download() { apt-get -o APT::Sandbox::User=root download -qq containerd runc containernetworking-plugins; }

# schemas names Kubernetes' OpenAPI documents as kubectl-validate --local-schemas wants them.
schemas() {
  local document path
  for document in "$1"/api*__v[0-9]*_openapi.json; do
    path=$(basename "$document" _openapi.json)
    mkdir -p "$2/$(dirname "${path//__//}")"
    cp "$document" "$2/${path//__//}.json"
  done
}

build_checks() {
  cd tools
  build -o "$1/" github.com/helm-unittest/helm-unittest/cmd/helm-unittest
  GOBIN=$1 compile install sigs.k8s.io/kubectl-validate@v0.0.4
}

build() { compile build -buildvcs=false "$@"; }

compile() { CGO_ENABLED=0 GOCACHE=$unpacked/go nice -n 19 go "$1" -trimpath "${@:2}"; }

files=$(sources)
folder=$cache/$what-$(cat $files | sha256sum | cut -c1-16)
mkdir -p "$cache"
exec 8>"$cache/$what.lock"
flock 8
if [ ! -d "$folder" ]; then
  rm -rf "$cache/build-$what".* # of a build that was killed
  unpacked=$(mktemp -d "$cache/build-$what.XXXXXX")
  trap 'rm -rf "$unpacked"' EXIT
  echo "building $folder; see build.sh for how long that takes" >&2
  mkdir "$unpacked/done"
  "build_$what" "$unpacked/done" >&2
  mv "$unpacked/done" "$folder"
fi
echo "$folder"
