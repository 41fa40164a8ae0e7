//go:build linux

package main

func haproxy() peer {
	return peer{
		name:    "haproxy",
		install: fromDebian("haproxy", "haproxy"),
		version: []string{"-v"},
		configure: func(h hop) ([]string, error) {
			return []string{"-db", "-f", h.file("haproxy.cfg")}, h.write("haproxy.cfg", haproxyConfig)
		},
	}
}

const haproxyConfig = `
<<- $in := "" >><<if .TLSIn>><<$in = printf "ssl crt %s/hop.pem ca-file %s/ca.crt verify required" .Certs .Certs>><<end>>
<<- $out := "" >><<if .TLSOut>><<$out = printf "ssl crt %s/hop.pem ca-file %s/ca.crt verify required verifyhost hop.bench sni str(hop.bench)" .Certs .Certs>><<end ->>
global
	nbthread 1
	maxconn 12000
	no strict-limits
	tune.bufsize 32768
	tune.idle-pool.shared off
	ssl-default-bind-options ssl-min-ver TLSv1.3
	ssl-default-server-options ssl-min-ver TLSv1.3
	ssl-default-bind-ciphersuites TLS_AES_128_GCM_SHA256
	ssl-default-server-ciphersuites TLS_AES_128_GCM_SHA256
defaults
	timeout connect 5s
	timeout client 10m
	timeout server 10m
	timeout http-keep-alive 10m
	http-reuse always
	option splice-auto
	default-server pool-purge-delay 10m pool-max-conn -1
	balance roundrobin
listen h1
	mode http
	bind <<.At>>:<<.H1>> <<$in>>
<<range $i, $to := .To>>	server s<<$i>> <<$to>>:<<$.H1>> <<$out>>
<<end>>
listen h2
	mode http
	bind <<.At>>:<<.H2>> <<if .TLSIn>><<$in>> alpn h2<<else>>proto h2<<end>>
<<range $i, $to := .To>>	server s<<$i>> <<$to>>:<<$.H2>> <<if $.TLSOut>><<$out>> alpn h2<<else>>proto h2<<end>>
<<end>>
listen tcp
	mode tcp
	bind <<.At>>:<<.TCP>> <<$in>>
<<range $i, $to := .To>>	server s<<$i>> <<$to>>:<<$.TCP>> <<$out>>
<<end>>`
