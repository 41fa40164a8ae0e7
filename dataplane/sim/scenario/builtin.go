package scenario

import (
	"embed"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/headroom-mesh/headroom/policy/document"
)

//go:embed builtin/*.yaml
var builtin embed.FS

// Names returns the names of the built-in scenarios.
func Names() []string {
	entries, _ := builtin.ReadDir("builtin") // what is embedded can be read
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	return names
}

// Text returns a built-in scenario as it was written. The error says which ones there are.
func Text(name string) ([]byte, error) {
	names := Names()
	if !slices.Contains(names, name) {
		meant := ": "
		if near := document.Nearest(name, names); near != "" {
			meant = fmt.Sprintf(": did you mean %s? ", near)
		}
		return nil, fmt.Errorf("there is no scenario %q%sbuilt in are %s; a file is given as a path, such as ./%s.yaml",
			name, meant, strings.Join(names, ", "), path.Base(name))
	}
	return builtin.ReadFile("builtin/" + name + ".yaml")
}

// Builtin returns a built-in scenario. The error says which ones there are.
func Builtin(name string) (Scenario, error) {
	text, err := Text(name)
	if err != nil {
		return Scenario{}, err
	}
	s, err := Parse(text)
	if err != nil {
		return Scenario{}, fmt.Errorf("read the built-in scenario %s: %w", name, err)
	}
	return s, nil
}
