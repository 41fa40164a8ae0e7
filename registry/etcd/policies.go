package etcd

import (
	"context"
	"fmt"
	"strconv"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Policy implements registry.Policies.
func (r *Registry) Policy(ctx context.Context, service registry.ServiceName) (*meshv1.ServicePolicy, error) {
	var response *clientv3.GetResponse
	err := r.call(ctx, func(ctx context.Context, client *clientv3.Client) (err error) {
		response, err = client.Get(ctx, r.key(service.PolicyKey()))
		return err
	})
	if err == nil && len(response.Kvs) == 0 {
		err = registry.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read the policy of %s: %w", service, err)
	}
	kv := response.Kvs[0]
	doc, err := registry.PolicyFromValue(kv.Value, kv.ModRevision)
	if err != nil {
		return nil, fmt.Errorf("read the policy of %s, stored under %s: %w; `meshctl policy delete %s` removes it",
			service, kv.Key, err, service)
	}
	return doc, nil
}

// SetPolicy implements registry.Policies.
func (r *Registry) SetPolicy(ctx context.Context, doc *meshv1.ServicePolicy) (*meshv1.ServicePolicy, error) {
	if err := policy.Validate(doc); err != nil {
		return nil, err
	}
	service := registry.ServiceName(doc.GetMetadata().GetName())
	value, err := registry.PolicyValue(doc)
	if err != nil {
		return nil, fmt.Errorf("write the policy of %s: %w", service, err)
	}
	key := r.key(service.PolicyKey())
	condition, err := unchangedSince(key, doc.GetMetadata().GetResourceVersion())
	if err != nil {
		return nil, err
	}
	var response *clientv3.TxnResponse
	err = r.call(ctx, func(ctx context.Context, client *clientv3.Client) error {
		response, err = client.Txn(ctx).If(condition...).Then(clientv3.OpPut(key, string(value))).Commit()
		return err
	})
	if err == nil && !response.Succeeded {
		err = registry.ErrConflict
	}
	if err != nil {
		return nil, fmt.Errorf("write the policy of %s: %w", service, err)
	}
	return registry.PolicyFromValue(value, response.Header.Revision)
}

// unchangedSince translates a resource version: etcd counts a key that doesn't exist as modified at revision 0.
func unchangedSince(key, version string) ([]clientv3.Cmp, error) {
	if version == "" {
		return nil, nil
	}
	revision, err := strconv.ParseInt(version, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("metadata.resourceVersion: want the revision that was read, got %q", version)
	}
	return []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", revision)}, nil
}

// DeletePolicy implements registry.Policies.
func (r *Registry) DeletePolicy(ctx context.Context, service registry.ServiceName) (int64, error) {
	var response *clientv3.DeleteResponse
	err := r.call(ctx, func(ctx context.Context, client *clientv3.Client) (err error) {
		response, err = client.Delete(ctx, r.key(service.PolicyKey()))
		return err
	})
	if err == nil && response.Deleted == 0 {
		err = registry.ErrNotFound
	}
	if err != nil {
		return 0, fmt.Errorf("delete the policy of %s: %w", service, err)
	}
	return response.Header.Revision, nil
}
