package policies

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// reason says in one word what came of an object.
type reason string

const (
	reasonStored      reason = "Stored"
	reasonInvalid     reason = "Invalid"
	reasonConflict    reason = "Conflict"
	reasonUnavailable reason = "StoreUnavailable"
)

func reasons() []reason {
	return []reason{reasonStored, reasonInvalid, reasonConflict, reasonUnavailable}
}

// outcome is what came of an object.
type outcome struct {
	reason   reason
	message  string
	revision int64 // at which it was written, if it is stored
}

func accepted(doc *meshv1.ServicePolicy) outcome {
	return outcome{reason: reasonStored, revision: revisionOf(doc), message: "the policy of " + doc.GetMetadata().GetName() + " in the store is this one"}
}

func invalid(err error, before *meshv1.ServicePolicy) outcome {
	message := oneLine(err)
	if managed(before) {
		message += "; the policy before this one stays in force"
	}
	return outcome{reason: reasonInvalid, message: message}
}

func unavailable(err error) outcome {
	return outcome{reason: reasonUnavailable, message: "it could not be stored, and will be tried again: " + oneLine(err)}
}

// agents is what the agents of the mesh said of themselves.
type agents struct {
	at      time.Time // zero: they were not asked yet
	answers []*meshv1.StatusResponse
	missing []string
}

func (a agents) number() int { return len(a.answers) + len(a.missing) }

// waiting returns the agents that have not applied a revision, each with the reason.
func (a agents) waiting(revision int64) []string {
	var waiting []string
	for _, s := range a.answers {
		if s.AppliedRevision < revision {
			waiting = append(waiting, fmt.Sprintf("%s: at revision %d", s.Node, s.AppliedRevision))
		}
	}
	return append(waiting, a.missing...)
}

// report makes the status of an object say what came of it. That it can't is logged once a pass: there may be many objects.
func (l *leader) report(ctx context.Context, o object) {
	before, ok := l.reported[o.GetUID()]
	if !ok {
		before, _, _ = unstructured.NestedMap(o.Object, "status")
	}
	now := statusOf(o, l.outcomes[o.service()], l.agents, before, time.Now())
	if reflect.DeepEqual(before, now) {
		return
	}
	switch err := l.writeStatus(ctx, o, now); {
	case err == nil || apierrors.IsNotFound(err):
		l.reported[o.GetUID()] = now
	case ctx.Err() == nil && l.unsaid == nil:
		l.unsaid = err
		l.log.Warn("can't write the status of a ServicePolicy, and perhaps of others", "service", o.service(), "err", err)
	}
}

func (l *leader) writeStatus(ctx context.Context, o object, status map[string]any) error {
	// What is left out of a merge patch stays.
	whole := map[string]any{"storeRevision": nil, "applied": nil}
	maps.Copy(whole, status)
	patch, err := json.Marshal(map[string]any{"status": whole})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	_, err = l.cfg.Objects.Resource(resource()).Namespace(o.GetNamespace()).
		Patch(ctx, o.GetName(), types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "headroom"}, "status")
	return err
}

// statusOf writes a status as JSON has it: numbers are int64.
func statusOf(o object, result outcome, a agents, before map[string]any, now time.Time) map[string]any {
	waiting := a.waiting(result.revision)
	status := map[string]any{"observedGeneration": o.GetGeneration()}
	isStored, isApplied, why, about := "False", "False", "NotStored", "the mesh does not go by it"
	if result.reason == reasonStored {
		status["storeRevision"] = result.revision
		status["applied"] = fmt.Sprintf("%d/%d", a.number()-len(waiting), a.number())
		isStored, why, about = "True", "Waiting", "waiting for "+firstOf(waiting)
		if len(waiting) == 0 {
			isApplied, why, about = "True", "Everywhere", fmt.Sprintf("all %d live agents go by it", a.number())
		}
	}
	condition := func(kind, status, reason, message string) any {
		return map[string]any{
			"type": kind, "status": status, "reason": reason, "message": message,
			"observedGeneration": o.GetGeneration(), "lastTransitionTime": since(before, kind, status, now),
		}
	}
	status["conditions"] = []any{
		condition("Accepted", isStored, string(result.reason), result.message),
		condition("Applied", isApplied, why, about),
	}
	return status
}

// since returns when a condition came to be as it is now.
func since(status map[string]any, kind, value string, now time.Time) string {
	conditions, _, _ := unstructured.NestedSlice(status, "conditions")
	for _, c := range conditions {
		if c, ok := c.(map[string]any); ok && c["type"] == kind && c["status"] == value {
			if at, ok := c["lastTransitionTime"].(string); ok {
				return at
			}
		}
	}
	return now.UTC().Format(time.RFC3339)
}

// firstOf names a few of many.
func firstOf(names []string) string {
	const most = 5
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
