#!/usr/bin/env bash
# Runs a Kubernetes cluster on this machine, as root. Its machines, "control" and "node1", "node2" and so on, are sets of
# namespaces with file systems of their own. All that the rest of this machine sees of them is one network link, and what
# is in the state folder. Binaries come from build.sh.
#
#   cluster.sh up                  starts what does not run, and waits until the nodes are ready
#   cluster.sh down                removes everything but the binaries
#   cluster.sh stop MACHINE        cuts its power
#   cluster.sh start MACHINE       boots it again
#   cluster.sh load IMAGE.tar...   gives images (docker-archive or OCI) to the nodes that run
#   cluster.sh exec MACHINE CMD... runs a command on a machine
#
# Environment: NODES is how many nodes a new cluster gets (2, up to 9), CLUSTER tells clusters on the same machine apart
# (0, up to 9).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
id=${CLUSTER:-0}
name=headroom-kube$id
state=${XDG_CACHE_HOME:-$HOME/.cache}/headroom-kube/cluster$id
nodes=$(cat "$state/nodes" 2>/dev/null || echo "${NODES:-2}")
patience=180 # seconds, for what takes five on a machine with nothing else to do

fail() {
  echo "kube: $*" >&2
  exit 1
}

# until_true SECONDS CMD... repeats a command until it succeeds.
until_true() {
  local deadline=$((SECONDS + $1))
  until ("${@:2}") >/dev/null 2>&1; do
    ((SECONDS < deadline)) || return 1
    sleep 0.2
  done
}

# process prints the process that a machine lives and dies with.
process() {
  local pid
  pid=$(cat "$state/$1/pid" 2>/dev/null) && grep -qs "$state" "/proc/$pid/cmdline" && echo "$pid"
}

ended() { ! process "$1"; }

# --- network: the control plane's machine is the switch, 172.30.0.1; node N is 172.30.0.10+N, and its pods 10.244.N.0/24.

link() {
  local netns=$name-$1
  ip netns pids "$netns" >/dev/null 2>&1 && return
  ip netns add "$netns"
  ip -n "$netns" link set lo up
  ip netns exec "$netns" sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0
  if [ "$1" = control ]; then link_control "$netns"; else link_node "$netns" "${1#node}"; fi
}

link_control() {
  ip -n "$1" link add br0 type bridge
  ip -n "$1" link set br0 up
  address "$1" br0 1
  route_pods "$1" 0
  ip link add "$name" type veth peer name outside netns "$1"
  ip addr add "172.29.$id.1/30" dev "$name"
  ip -n "$1" addr add "172.29.$id.2/30" dev outside
  ip link set "$name" up
  ip -n "$1" link set outside up
}

link_node() {
  local switch=$name-control
  ip -n "$switch" link del "node$2" 2>/dev/null || true # of a node that lost its power
  # A boot doesn't change the address of a network card, so that neighbours need not notice.
  ip -n "$switch" link add "node$2" type veth peer name eth0 address "02:00:00:00:00:0$2" netns "$1"
  ip -n "$switch" link set "node$2" master br0 up
  ip -n "$1" link set eth0 up
  address "$1" eth0 "$((10 + $2))"
  ip -n "$1" route add default via 172.30.0.1
  ip -n "$1" route add default via fd30::1
  route_pods "$1" "$2"
}

address() {
  ip -n "$1" addr add "172.30.0.$3/24" dev "$2"
  ip -n "$1" addr add "fd30::$3/64" dev "$2" nodad
}

route_pods() { # route_pods NETNS N: to the pods of all nodes but node N
  local n
  for ((n = 1; n <= nodes; n++)); do
    [ "$n" = "$2" ] && continue
    ip -n "$1" route add "10.244.$n.0/24" via "172.30.0.$((10 + n))"
    ip -n "$1" route add "fd31:0:0:$n::/64" via "fd30::$((10 + n))"
  done
}

# --- cgroups: a machine has one of its own in every hierarchy of version 1, below that of this process, or one of version 2.

make_cgroups() {
  local controllers path dir
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    dir=/sys/fs/cgroup/$name-$1
    sed 's/[^ ]\+/+&/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
    mkdir -p "$dir/system"
    echo "$dir"
    return
  fi
  while IFS=: read -r _ controllers path; do
    dir=/sys/fs/cgroup/${controllers#name=}
    [ -n "$controllers" ] && [ -d "$dir" ] || continue
    dir=$dir${path%/}/$name-$1
    mkdir -p "$dir"
    if [ "$controllers" = cpuset ]; then # starts without any
      cat "$dir/../cpuset.cpus" >"$dir/cpuset.cpus"
      cat "$dir/../cpuset.mems" >"$dir/cpuset.mems"
    fi
    echo "$dir"
  done </proc/self/cgroup
}

remove_cgroups() {
  local dir
  while read -r dir; do
    until_true 10 remove_tree "$dir" || fail "cannot remove $dir: processes $(xargs <"$dir/cgroup.procs") are in it"
  done <"$state/$1/cgroups"
  rm "$state/$1/cgroups"
}

remove_tree() { [ ! -d "$1" ] || find "$1" -depth -type d -exec rmdir {} +; }

# --- machines

known() { [[ $1 = control || $1 =~ ^node[1-$nodes]$ ]] || fail "there is no machine '$1': it is control, or node1 to node$nodes"; }

start() {
  [ -d "$state/etc" ] || fail "there is no cluster: cluster.sh up makes it"
  process "$1" >/dev/null && return
  link "$1"
  mkdir -p "$state/$1"
  [ ! -e "$state/$1/cgroups" ] || remove_cgroups "$1"
  make_cgroups "$1" >"$state/$1/cgroups"
  boot "$1" </dev/null >"$state/$1/console" 2>&1 9>&- &
  echo $! >"$state/$1/pid"
  until_true 10 process "$1" || fail "$1 does not start: see $state/$1/console"
}

# boot becomes the process that a machine lives and dies with.
boot() {
  local dir
  while read -r dir; do echo "$BASHPID" >"$dir/cgroup.procs"; done <"$state/$1/cgroups"
  exec setsid nsenter --net="/run/netns/$name-$1" unshare --cgroup "$state/etc/machine.sh" "$1" "$state"
}

# stop ends all processes of a machine at once, as they share a namespace. The switch stays, so that the nodes' network does.
stop() {
  local pid
  if pid=$(process "$1"); then
    kill -9 "$pid"
    until_true 10 ended "$1" || fail "process $pid of $1 does not end"
  fi
  [ "$1" = control ] || ip netns del "$name-$1" 2>/dev/null || true
  [ ! -e "$state/$1/cgroups" ] || remove_cgroups "$1"
}

run_on() { # run_on MACHINE CMD...
  local pid
  pid=$(process "$1") || fail "$1 does not run"
  nsenter --target "$(pgrep -P "$pid")" --mount --net --pid --uts --ipc --cgroup env PATH="/run/kube/bin:$PATH" "${@:2}"
}

load() {
  local n image
  for ((n = 1; n <= nodes; n++)); do
    process "node$n" >/dev/null || continue
    until_true $patience run_on "node$n" ctr version || fail "containerd does not start on node$n: see $state/node$n/var/log"
    for image; do
      run_on "node$n" ctr --namespace k8s.io images import --all-platforms - <"$image" >/dev/null || fail "node$n cannot read the image $image"
    done
  done
}

kubectl() { "$state/bin/kubectl" --kubeconfig "$state/kubeconfig" "$@"; }

up() {
  local binaries n names=()
  [ "$nodes" = "${NODES:-$nodes}" ] || fail "the cluster has $nodes nodes, not $NODES: end it first with cluster.sh down"
  binaries=$("$here/build.sh" cluster)
  mkdir -p "$state/etc" "$state/volumes"
  echo "$nodes" >"$state/nodes"
  ln -sfn "$binaries" "$state/bin"
  cp --remove-destination "$here"/config/* "$here/machine.sh" "$state/etc/"
  [ -e "$state/pki/done" ] || "$here/certificates.sh" "$state" "172.29.$id.2" "$nodes"
  start control
  until_true $patience kubectl get --raw /readyz || fail "the API server does not get ready: see $state/control/var/log"
  for ((n = 1; n <= nodes; n++)); do
    start "node$n"
    names+=("node/node$n")
  done
  load "$binaries"/images/*.tar
  kubectl apply -f "$state/etc/addons.yaml" >/dev/null
  kubectl wait --for=create --timeout=${patience}s "${names[@]}" >/dev/null
  kubectl wait --for=condition=Ready --timeout=${patience}s "${names[@]}" >/dev/null
  kubectl --namespace kube-system rollout status --timeout=${patience}s deployment/coredns >/dev/null
  echo "The cluster is up: $nodes nodes. To use it, say what follows, or eval \"\$($0 up)\":" >&2
  echo "export KUBECONFIG=$state/kubeconfig"
  echo "export PATH=$state/bin:\$PATH"
}

down() {
  local machine
  for machine in "$state"/node*/ "$state"/control/; do
    [ ! -d "$machine" ] || stop "$(basename "$machine")"
  done
  ip netns del "$name-control" 2>/dev/null || true
  rm -rf "$state"
}

command=${1:-}
[ $# = 0 ] || shift
[[ $id =~ ^[0-9]$ && $nodes =~ ^[1-9]$ ]] || fail "CLUSTER is $id and NODES is $nodes: say one digit each"
[ "$(id -u)" = 0 ] || fail "only root can make namespaces and cgroups: run it as root"
for program in ip nft openssl pgrep sysctl nsenter; do
  command -v $program >/dev/null || fail "$program is missing: make deps installs it"
done
mkdir -p "$(dirname "$state")"
exec 9>"$state.lock"
case $command in
up | down) flock 9 && "$command" ;;
start | stop) flock 9 && known "${1:-}" && "$command" "$1" ;;
load) flock 9 && load "$@" ;;
exec) known "${1:-}" && run_on "$@" ;;
*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2 && exit 2 ;;
esac
