#!/usr/bin/env bash
# Is process 1 of a machine of the cluster: gives it file systems of its own, then keeps its programs running. What is the
# cluster's is below /run/kube there, so that configuration names the same paths everywhere.
set -euo pipefail
machine=$1 state=$2

if [ $$ != 1 ]; then
  cgroup=$(cat "$state/$machine/cgroups")/system # of version 2: only a cgroup without processes can have controlled children
  [ ! -d "$cgroup" ] || echo $$ >"$cgroup/cgroup.procs"
  exec unshare --mount --pid --uts --ipc --fork --mount-proc --kill-child "$0" "$@"
fi

# File systems: /run and /tmp are empty, /var is the machine's disk, changes to /etc and /opt are on that disk.
mount --make-rprivate /
! mountpoint --quiet /run/netns || umount --recursive --lazy /run/netns # or what others delete would live on here
disk=$state/$machine
mkdir -p "$disk"/var/{lib,log,tmp,cache} "$disk"/{etc,opt}/{upper,work}
for dir in etc opt; do
  mount -t overlay -o "lowerdir=/$dir,upperdir=$disk/$dir/upper,workdir=$disk/$dir/work" overlay "/$dir"
done
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/kube/{bin,etc,pki,volumes}
ln -sfn /run "$disk/var/run"
for dir in bin etc pki volumes; do
  mount --bind "$state/$dir/" "/run/kube/$dir"
done
mount --bind "$disk/var" /var
cp --remove-destination /run/kube/etc/resolv.conf /etc/ # says at once that a name is unknown
mount -t tmpfs tmpfs /tmp
mkdir /tmp/hostpath_pv # of the controllers' provisioner: all machines share it
mount --bind /run/kube/volumes /tmp/hostpath_pv

# Kernel: a view of its own cgroups, and copies of those settings that the kubelet writes, but which are all machines'.
version2=
[ ! -e /sys/fs/cgroup/cgroup.controllers ] || version2=true
mount -t sysfs sysfs /sys
if [ $version2 ]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
  sed 's/[^ ]\+/+&/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
else
  mount -t tmpfs tmpfs /sys/fs/cgroup
  while IFS=: read -r _ controllers _; do
    [ -n "$controllers" ] || continue
    dir=/sys/fs/cgroup/${controllers#name=}
    mkdir "$dir"
    mount -t cgroup -o "${controllers/#name=/none,name=}" cgroup "$dir" || rmdir "$dir"
  done </proc/self/cgroup
fi
mkdir -p /run/kube/sys
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  copy=/run/kube/sys/${setting//\//-}
  cat "/proc/sys/$setting" >"$copy"
  mount --bind "$copy" "/proc/sys/$setting"
done
mount --make-rshared / # so that pods may mount for others
hostname "$machine"

# Programs.
export PATH=/run/kube/bin:$PATH

keep() { # keep PROGRAM ARG... starts it again whenever it ends
  while :; do
    "$@" >>"/var/log/$1.log" 2>&1 || echo "$1 ended: $?"
    sleep 1
  done &
}

pki=/run/kube/pki
if [ "$machine" = control ]; then
  keep etcd --data-dir /var/lib/etcd --unsafe-no-fsync
  keep kube-apiserver --etcd-servers http://127.0.0.1:2379 --advertise-address 172.30.0.1 --allow-privileged \
    --service-cluster-ip-range 10.96.0.0/16,fd32::/112 --enable-aggregator-routing \
    --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction \
    --client-ca-file $pki/ca.crt --tls-cert-file $pki/apiserver.crt --tls-private-key-file $pki/apiserver.key \
    --kubelet-certificate-authority $pki/ca.crt --kubelet-preferred-address-types InternalIP \
    --kubelet-client-certificate $pki/apiserver.crt --kubelet-client-key $pki/apiserver.key \
    --requestheader-client-ca-file $pki/ca.crt --requestheader-allowed-names apiserver \
    --requestheader-username-headers X-Remote-User --requestheader-group-headers X-Remote-Group \
    --requestheader-extra-headers-prefix X-Remote-Extra- \
    --proxy-client-cert-file $pki/apiserver.crt --proxy-client-key-file $pki/apiserver.key \
    --service-account-issuer https://kubernetes.default.svc.cluster.local \
    --service-account-key-file $pki/accounts.key --service-account-signing-key-file $pki/accounts.key
  keep kube-controller-manager --kubeconfig $pki/controllers.kubeconfig --bind-address 127.0.0.1 --leader-elect=false \
    --use-service-account-credentials --service-account-private-key-file $pki/accounts.key --root-ca-file $pki/ca.crt \
    --cluster-signing-cert-file $pki/ca.crt --cluster-signing-key-file $pki/ca.key --enable-hostpath-provisioner
  keep kube-scheduler --kubeconfig $pki/scheduler.kubeconfig --bind-address 127.0.0.1 --leader-elect=false
else
  n=${machine#node}
  mkdir -p /etc/cni/net.d
  sed "s/NODE/$n/g" /run/kube/etc/pods.conflist >/etc/cni/net.d/pods.conflist
  keep containerd --config /run/kube/etc/containerd.toml
  until [ -S /run/containerd/containerd.sock ]; do sleep 0.1; done
  keep kubelet --config /run/kube/etc/kubelet.yaml --kubeconfig "$pki/$machine.kubeconfig" --hostname-override "$machine" \
    --node-ip "172.30.0.$((10 + n)),fd30::$((10 + n))" --node-labels "topology.kubernetes.io/zone=zone$n" \
    --tls-cert-file "$pki/$machine.crt" --tls-private-key-file "$pki/$machine.key"
  keep kube-proxy --config /run/kube/etc/kube-proxy.yaml --hostname-override "$machine"
fi
wait
