#!/usr/bin/env bash
# Makes a cluster's certificates and kubeconfigs: certificates.sh STATE ADDRESS NODES, where ADDRESS is the API server's
# as this machine sees it.
set -euo pipefail
state=$1 address=$2 nodes=$3
mkdir -p "$state/pki"
cd "$state/pki"
umask 077

certificate() { # certificate FILE COMMON_NAME ORGANIZATION [SUBJECT_ALTERNATIVE_NAME]
  local extensions="keyUsage=digitalSignature,keyEncipherment
extendedKeyUsage=serverAuth,clientAuth"
  [ -z "${4:-}" ] || extensions+=$'\n'subjectAltName=$4
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$1.key" -subj "/O=$3/CN=$2" 2>/dev/null |
    openssl x509 -req -CA ca.crt -CAkey ca.key -days 365 -extfile <(echo "$extensions") -out "$1.crt" 2>/dev/null
}

# kubeconfig FILE SERVER prints a kubeconfig that needs no other file.
kubeconfig() {
  cat <<EOF
apiVersion: v1
kind: Config
current-context: headroom
contexts: [{name: headroom, context: {cluster: headroom, user: $1}}]
clusters: [{name: headroom, cluster: {server: "https://$2:6443", certificate-authority-data: $(base64 -w0 ca.crt)}}]
users: [{name: $1, user: {client-certificate-data: $(base64 -w0 "$1.crt"), client-key-data: $(base64 -w0 "$1.key")}}]
EOF
}

client() { # client FILE COMMON_NAME ORGANIZATION [SUBJECT_ALTERNATIVE_NAME]
  certificate "$@"
  kubeconfig "$1" 172.30.0.1 >"$1.kubeconfig"
}

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt -days 365 -subj /CN=headroom-kube 2>/dev/null
openssl ecparam -name prime256v1 -genkey -noout -out accounts.key # signs the tokens of service accounts
names=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local
certificate apiserver apiserver system:masters "$names,IP:10.96.0.1,IP:172.30.0.1,IP:$address,IP:127.0.0.1"
client controllers system:kube-controller-manager system:controllers
client scheduler system:kube-scheduler system:controllers
client proxy system:kube-proxy system:proxies
for ((n = 1; n <= nodes; n++)); do
  client "node$n" "system:node:node$n" system:nodes "DNS:node$n,IP:172.30.0.$((10 + n)),IP:fd30::$((10 + n))"
done
certificate admin admin system:masters
kubeconfig admin "$address" >"$state/kubeconfig"
touch done
