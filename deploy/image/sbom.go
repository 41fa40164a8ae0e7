package main

import (
	"cmp"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"net/url"
	"path"
	"runtime/debug"
	"strings"
)

// sbom lists the modules that programs are made of, as an SPDX document, from what the linker has written into them.
func sbom(platform string, files []file, infos []*buildinfo.BuildInfo) ([]byte, error) {
	var packages, relations []any
	known := map[string]bool{}
	add := func(m *debug.Module, version string) string {
		id := reference(m.Path + "-" + version)
		if !known[id] {
			known[id] = true
			packages = append(packages, pkg(id, m.Path, version))
		}
		return id
	}
	relate := func(from, kind, to string) {
		relations = append(relations, map[string]string{"spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to})
	}
	for i, f := range files {
		program := reference("program-" + path.Base(f.path))
		packages = append(packages, map[string]any{
			"SPDXID": program, "name": path.Base(f.path), "versionInfo": infos[i].Main.Version,
			"downloadLocation": "NOASSERTION", "filesAnalyzed": false, "primaryPackagePurpose": "APPLICATION",
			"checksums": []any{map[string]string{"algorithm": "SHA256", "checksumValue": strings.TrimPrefix(digest(f.content), "sha256:")}},
		})
		relate("SPDXRef-DOCUMENT", "DESCRIBES", program)
		standard := &debug.Module{Path: "stdlib"}
		relate(program, "DEPENDS_ON", add(standard, strings.TrimPrefix(infos[i].GoVersion, "go")))
		for _, m := range infos[i].Deps {
			m = cmp.Or(m.Replace, m)
			relate(program, "DEPENDS_ON", add(m, m.Version))
		}
	}
	text, err := json.MarshalIndent(map[string]any{
		"spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
		"name":              "headroom " + platform,
		"documentNamespace": fmt.Sprintf("https://%s/spdx/%s", infos[0].Main.Path, strings.TrimPrefix(digest(files[0].content), "sha256:")),
		"creationInfo":      map[string]any{"created": built(infos[0]), "creators": []string{"Tool: headroom-image"}},
		"packages":          packages, "relationships": relations,
	}, "", " ")
	return append(text, '\n'), err
}

// reference is how a document refers to a package: in letters, digits, points and lines.
func reference(name string) string {
	return "SPDXRef-" + strings.NewReplacer("/", "-", "_", "-", "~", "-", "+", "-").Replace(name)
}

func pkg(id, name, version string) map[string]any {
	return map[string]any{
		"SPDXID": id, "name": name, "versionInfo": version, "downloadLocation": "NOASSERTION", "filesAnalyzed": false,
		"externalRefs": []any{map[string]string{
			"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": "pkg:golang/" + name + "@" + url.QueryEscape(version),
		}},
	}
}
