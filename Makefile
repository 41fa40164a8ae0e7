# Headroom: `make demo` shows it at work, `make test` runs every test. Both install what they need.

SHELL   := /bin/bash
TOOLS   := go tool -modfile=api/tools.mod

.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

build: ## build agent and meshctl into bin/
	@CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o bin/ ./cmd/...

demo: build ## run the main job on this machine (HOLD=1 keeps it running, DEMO_OUT=FILE writes the figures as JSON)
	@go build -o bin/demo ./bench/demo
	@bin/demo -bin bin $(if $(HOLD),-hold) $(if $(DEMO_CHECK),-check) $(if $(DEMO_OUT),-out $(DEMO_OUT))

test: deps lint ## run every test, all but those that only count with the race detector; needs root for network namespaces
	@go test -race -timeout 9m ./...
	@go test -timeout 9m ./dataplane/sim/evidence ./dataplane/balancer ./agent

lint: ## check format, vet, staticcheck and the modernizers
	@test -z "$$(gofmt -l . | tee /dev/stderr)"
	@go vet ./...
	@$(TOOLS) staticcheck ./...
	@go fix -diff ./...

gen: ## regenerate api/ (needs protoc), docs/reference/ and the definition of ServicePolicy for Kubernetes
	@go build -modfile=api/tools.mod -o bin/tools/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
	@PATH="$(CURDIR)/bin/tools:$$PATH" protoc -I api --go_out=. --go_opt=module=github.com/headroom-mesh/headroom \
		--go-grpc_out=. --go-grpc_opt=module=github.com/headroom-mesh/headroom api/mesh/v1/*.proto
	@go run ./docs/gen

image: ## make the container image for amd64 and arm64 in bin/image (IMAGE=NAME:TAG)
	@go run ./deploy/image -name $(or $(IMAGE),ghcr.io/headroom-mesh/headroom:$(shell sed -n 's/^appVersion: //p' deploy/helm/Chart.yaml))

evidence: ## play all scenarios and write docs/evidence.md
	@go run ./docs/evidence

bench: build ## measure what requests cost beside other proxies (CELLS=a,b PEERS=x,y ROUNDS=n for a part, BENCH_OUT=FILE for JSON)
	@go build -o bin/proxies ./bench/proxies
	@bin/proxies $(if $(CELLS),-cells '$(CELLS)') $(if $(PEERS),-peers '$(PEERS)') $(if $(ROUNDS),-rounds $(ROUNDS)) \
		$(if $(BENCH_OUT),-out '$(BENCH_OUT)') $(if $(PROFILES),-profiles '$(PROFILES)') $(if $(CELLS)$(PEERS)$(ROUNDS),,-results bench)

bench-picks: ## measure what a pick costs, with one processor and with two contending, and write it down
	@go run ./bench/picks

bench-capture: build ## measure what it costs to be captured: connections and bytes, beside a direct way (as root)
	@go run ./bench/capture

kube-up: deps ## run Kubernetes with two nodes on this machine, as root (first builds it: 7 to 15 minutes)
	@test/kube/cluster.sh up

kube-test: deps ## test the chart there; with KUBECONFIG set, on a cluster that is up (KUBE_SKIP=TEST leaves one out)
	@cd test/kube && go test -tags kube -count=1 -timeout 30m $(if $(KUBE_SKIP),-skip '$(KUBE_SKIP)') .

kube-down: ## stop it, and remove all but what was built
	@test/kube/cluster.sh down

chart-test: ## test the chart without a cluster (first builds helm and others: 15 minutes; HELM3=PATH tests a helm 3, too)
	@cd test/kube && go test -tags chart -count=1 ./chart

deps: ## install the system packages that the tests use
	@.ci/deps

fuzz: ## fuzz what reads the bytes of others, FUZZTIME each (30s)
	@.ci/fuzz $(FUZZTIME)

.PHONY: help build demo test lint gen image evidence bench bench-picks bench-capture kube-up kube-test kube-down chart-test deps fuzz
