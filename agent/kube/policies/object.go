package policies

import (
	"encoding/json"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/headroom-mesh/headroom/registry"
)

// adopt is the annotation by which an object takes the place of whatever else the store has for its service.
const adopt = "headroom.dev/adopt"

// object is a ServicePolicy of Kubernetes. It is shared: nobody may change it.
type object struct{ *unstructured.Unstructured }

// service returns the service that the object is about.
func (o object) service() registry.ServiceName {
	return registry.ServiceName(o.GetName() + "." + o.GetNamespace())
}

// adopts reports whether the object takes over what others wrote.
func (o object) adopts() bool { return o.GetAnnotations()[adopt] == "true" }

// document returns what the store is to have.
func (o object) document() (*meshv1.ServicePolicy, error) {
	spec := o.Object["spec"]
	if spec == nil {
		spec = map[string]any{}
	}
	text, err := json.Marshal(map[string]any{
		"apiVersion": policy.APIVersion,
		"kind":       policy.Kind,
		"metadata":   map[string]any{"name": o.service(), "managedBy": document.ManagedByKubernetes},
		"spec":       spec,
	})
	if err != nil {
		return nil, err
	}
	return policy.Parse(text)
}

// decision is what is to be done about an object.
type decision struct {
	outcome
	version string // of what is to be replaced, if something is to be written: as in metadata.resourceVersion
	write   bool
}

// decide compares what the store is to have with what it has, which may be nothing.
func decide(o object, doc, stored *meshv1.ServicePolicy) decision {
	version := stored.GetMetadata().GetResourceVersion()
	switch {
	case stored == nil:
		return decision{write: true, version: "0"}
	case managed(stored) && proto.Equal(doc.Spec, stored.Spec):
		return decision{outcome: accepted(stored)}
	case managed(stored) || o.adopts():
		return decision{write: true, version: version}
	}
	return decision{outcome: outcome{reason: reasonConflict, message: fmt.Sprintf(
		"the policy of %s in the store was written with meshctl, at revision %s: hand it over with `meshctl policy delete %[1]s`, "+
			"or replace it with `%[3]s`", o.service(), version, o.annotate())}}
}

func (o object) annotate() string {
	return fmt.Sprintf("kubectl annotate servicepolicy -n %s %s %s=true", o.GetNamespace(), o.GetName(), adopt)
}

func managed(doc *meshv1.ServicePolicy) bool {
	return doc.GetMetadata().GetManagedBy() == document.ManagedByKubernetes
}

// unreadable is what comes of an object in whose place the store has something that is no policy.
func (o object) unreadable(err error) outcome {
	return outcome{reason: reasonConflict, message: fmt.Sprintf("what the store has as the policy of %s can't be read (%v): remove it with "+
		"`meshctl policy delete %[1]s`, or replace it with `%[3]s`", o.service(), err, o.annotate())}
}

// oneLine writes problems, of which each is a line, as the message of a condition.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
