package scenario

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// step leads from a value of JSON to one inside it: by name into a group of fields, or by index into a list.
type step struct {
	name  string
	index int
}

func (s step) byName() bool { return s.name != "" }

var part = regexp.MustCompile(`^([A-Za-z][A-Za-z0-9]*)((?:\[[0-9]{1,6}\])*)$`)

// parsePath reads a path such as "replicas[0].count". It may start with "spec.".
func parsePath(path string) ([]step, error) {
	var steps []step
	for text := range strings.SplitSeq(strings.TrimPrefix(path, "spec."), ".") {
		found := part.FindStringSubmatch(text)
		if found == nil {
			return nil, errors.New(`want the path of a field below spec, such as load.rate or replicas[0].count`)
		}
		steps = append(steps, step{name: found[1]})
		for index := range strings.SplitSeq(strings.Trim(found[2], "[]"), "][") {
			if n, err := strconv.Atoi(index); err == nil {
				steps = append(steps, step{index: n})
			}
		}
	}
	return steps, nil
}

// put sets what steps lead to from node, and returns node, or what replaces it. Groups and lists that aren't there yet are
// made; a list grows by one at most.
func put(node any, steps []step, value any) (any, error) {
	if len(steps) == 0 {
		return value, nil
	}
	if steps[0].byName() {
		return putField(node, steps, value)
	}
	return putElement(node, steps, value)
}

func putField(node any, steps []step, value any) (any, error) {
	if node == nil {
		node = map[string]any{}
	}
	fields, ok := node.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("there is no %s inside: it would be in no group of fields", steps[0].name)
	}
	inner, err := put(fields[steps[0].name], steps[1:], value)
	fields[steps[0].name] = inner
	return fields, err
}

func putElement(node any, steps []step, value any) (any, error) {
	list, ok := node.([]any)
	if !ok && node != nil {
		return nil, fmt.Errorf("there is no [%d]: it would be in no list", steps[0].index)
	}
	i := steps[0].index
	if i > len(list) {
		return nil, fmt.Errorf("there is no [%d]: the list has %d, counted from 0", i, len(list))
	}
	if i == len(list) {
		list = append(list, nil)
	}
	inner, err := put(list[i], steps[1:], value)
	list[i] = inner
	return list, err
}

// loads are the fields of load of which only one can be set.
func loads() []string { return []string{"rate", "utilization", "stages", "users"} }

// isLoad reports whether steps lead into one of the loads.
func isLoad(steps []step) bool {
	return len(steps) > 1 && steps[0].name == "load" && slices.Contains(loads(), steps[1].name)
}

// makeRoom takes out what can't stand beside the field that steps lead to, so that "load.rate" can be set where there was
// a utilization.
func makeRoom(spec any, steps []step) {
	root, _ := spec.(map[string]any)
	load, _ := root["load"].(map[string]any)
	if !isLoad(steps) {
		return
	}
	for _, other := range loads() {
		if other != steps[1].name {
			delete(load, other)
		}
	}
}

// overlap reports whether the fields at two paths can't be set independently.
func overlap(a, b string) bool {
	x, errX := parsePath(a)
	y, errY := parsePath(b)
	if errX != nil || errY != nil {
		return false
	}
	n := min(len(x), len(y))
	return slices.Equal(x[:n], y[:n]) || isLoad(x) && isLoad(y)
}
