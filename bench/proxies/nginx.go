//go:build linux

package main

import "strings"

func nginx() peer {
	return peer{
		name:    "nginx",
		install: fromDebian("nginx", "nginx-light", "libnginx-mod-stream"),
		version: []string{"-v"},
		configure: func(h hop) ([]string, error) {
			return []string{"-p", h.Dir, "-e", "stderr", "-c", h.file("nginx.conf")}, h.write("nginx.conf", nginxConfig())
		},
	}
}

// nginxTLSOut are the directives of a module for TLS towards the next hop.
func nginxTLSOut(module string) string {
	return strings.ReplaceAll(`
<<- if .TLSOut>>
	MODULE_ssl_certificate <<.Certs>>/hop.crt;
	MODULE_ssl_certificate_key <<.Certs>>/hop.key;
	MODULE_ssl_trusted_certificate <<.Certs>>/ca.crt;
	MODULE_ssl_verify on;
	MODULE_ssl_name hop.bench;
	MODULE_ssl_server_name on;
	MODULE_ssl_session_reuse on;
	MODULE_ssl_protocols TLSv1.3;
	MODULE_ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;
<<- end>>
`, "MODULE", module)
}

const nginxTLSIn = `
<<- if .TLSIn>>
		ssl_certificate <<.Certs>>/hop.crt;
		ssl_certificate_key <<.Certs>>/hop.key;
		ssl_client_certificate <<.Certs>>/ca.crt;
		ssl_verify_client on;
		ssl_protocols TLSv1.3;
		ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;
<<- end>>
`

// nginxUpstream is the pool of a protocol.
func nginxUpstream(protocol, options string) string {
	return strings.ReplaceAll(`	upstream PROTOCOL {
<<- range .To>>
		server <<.>>:<<$.PROTOCOL>>;
<<- end>>
`, "PROTOCOL", protocol) + options + "	}\n"
}

const nginxKeepAlive = `
		keepalive 1024;
		keepalive_requests 1000000000;
		keepalive_timeout 600s;
`

func nginxConfig() string {
	return `
load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off;
master_process off;
pid nginx.pid;
error_log stderr error;
worker_rlimit_nofile 65536;
events { worker_connections 30000; }
http {
	access_log off;
	client_body_temp_path body;
	proxy_temp_path proxy;
	fastcgi_temp_path fastcgi;
	uwsgi_temp_path uwsgi;
	scgi_temp_path scgi;
	tcp_nodelay on;
	keepalive_timeout 600s;
	keepalive_requests 1000000000;
	client_max_body_size 0;
	client_body_buffer_size 64k;
	proxy_http_version 1.1;
	proxy_set_header Connection "";
	proxy_request_buffering off;
	proxy_buffer_size 16k;
	proxy_buffers 16 32k;
	proxy_busy_buffers_size 64k;
	proxy_max_temp_file_size 0;
	proxy_read_timeout 600s;
	grpc_read_timeout 600s;
	http2_max_concurrent_streams 1000;
` + nginxTLSOut("proxy") + nginxTLSOut("grpc") + nginxUpstream("H1", nginxKeepAlive) + nginxUpstream("H2", nginxKeepAlive) + `
	server {
		listen <<.At>>:<<.H1>><<if .TLSIn>> ssl<<end>> backlog=4096;
` + nginxTLSIn + `
		location / { proxy_pass http<<if .TLSOut>>s<<end>>://H1; }
	}
	server {
		listen <<.At>>:<<.H2>><<if .TLSIn>> ssl<<end>> http2;
` + nginxTLSIn + `
		location / { grpc_pass grpc<<if .TLSOut>>s<<end>>://H2; }
	}
}
stream {
	tcp_nodelay on;
	proxy_buffer_size 64k;
	proxy_timeout 600s;
	<<if .TLSOut>>proxy_ssl on;<<end>>
` + nginxTLSOut("proxy") + nginxUpstream("TCP", "") + `
	server {
		listen <<.At>>:<<.TCP>><<if .TLSIn>> ssl<<end>>;
` + nginxTLSIn + `
		proxy_pass TCP;
	}
}
`
}
