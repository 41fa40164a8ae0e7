package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// self makes an image of this test, and returns where it is.
func self(t *testing.T) string {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "image")
	o := options{name: "example.com:5000/a/b:v1", out: out, platforms: []string{"linux/" + runtime.GOARCH}, programs: []string{program}}
	if err := run(o); err != nil {
		t.Fatal(err)
	}
	return out
}

func read(t *testing.T, elements ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(elements...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func decode[T any](t *testing.T, text []byte) (object T) {
	t.Helper()
	if err := json.Unmarshal(text, &object); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return object
}

// untar returns the files of a tar.
func untar(t *testing.T, r io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		if uid := h.Uid + h.Gid; uid != 0 || h.ModTime.Unix() != 0 {
			t.Errorf("%s belongs to %d, or is of %v", h.Name, uid, h.ModTime)
		}
		files[h.Name] = content
	}
}

type descriptor struct {
	MediaType, Digest string
	Size              int
	Platform          struct{ OS, Architecture string }
	Annotations       map[string]string
}

// follow returns the blob that a descriptor is of, which must be as it says.
func follow(t *testing.T, out string, d descriptor) []byte {
	t.Helper()
	content := read(t, out, "oci", "blobs", "sha256", strings.TrimPrefix(d.Digest, "sha256:"))
	if len(content) != d.Size || digest(content) != d.Digest {
		t.Errorf("%s: has %d bytes, and digest %s", d.Digest, len(content), digest(content))
	}
	return content
}

func TestLayout(t *testing.T) {
	out := self(t)
	type index struct{ Manifests []descriptor }
	top := decode[index](t, read(t, out, "oci", "index.json")).Manifests
	if len(top) != 1 || top[0].Annotations["org.opencontainers.image.ref.name"] != "v1" {
		t.Fatalf("index: %+v", top)
	}
	platforms := decode[index](t, follow(t, out, top[0])).Manifests
	if len(platforms) != 1 || platforms[0].Platform.OS != "linux" || platforms[0].Platform.Architecture != runtime.GOARCH {
		t.Fatalf("platforms: %+v", platforms)
	}
	manifest := decode[struct {
		Config descriptor
		Layers []descriptor
	}](t, follow(t, out, platforms[0]))
	config := decode[struct {
		OS, Architecture string
		Config           struct{ Entrypoint, Env []string }
		Rootfs           struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}](t, follow(t, out, manifest.Config))
	name := filepath.Base(os.Args[0])
	if diff := cmp.Diff([]string{"/usr/local/bin/" + name}, config.Config.Entrypoint); diff != "" {
		t.Error(diff)
	}
	z, err := gzip.NewReader(bytes.NewReader(follow(t, out, manifest.Layers[0])))
	if err != nil {
		t.Fatal(err)
	}
	layer, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if len(config.Rootfs.DiffIDs) != 1 || config.Rootfs.DiffIDs[0] != digest(layer) {
		t.Errorf("the layer has digest %s, the image says %v", digest(layer), config.Rootfs.DiffIDs)
	}
	files := untar(t, bytes.NewReader(layer))
	if !bytes.Equal(files["usr/local/bin/"+name], read(t, os.Args[0])) {
		t.Error("the program in the layer is another one")
	}
	if !bytes.Equal(files["usr/share/doc/sbom.spdx.json"], read(t, out, "linux-"+runtime.GOARCH+".spdx.json")) {
		t.Error("the list of what is inside is another one than that beside the image")
	}
}

func TestArchive(t *testing.T) {
	out := self(t)
	files := untar(t, bytes.NewReader(read(t, out, "linux-"+runtime.GOARCH+".tar")))
	manifest := decode[[]struct {
		Config           string
		RepoTags, Layers []string
	}](t, files["manifest.json"])
	if len(manifest) != 1 || manifest[0].RepoTags[0] != "example.com:5000/a/b:v1" {
		t.Fatalf("manifest: %+v", manifest)
	}
	config := decode[struct {
		Rootfs struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}](t, files[manifest[0].Config])
	if digest(files[manifest[0].Layers[0]]) != config.Rootfs.DiffIDs[0] {
		t.Error("the layer is not that of the configuration")
	}
}

func TestSameSourceSameImage(t *testing.T) {
	first, second := self(t), self(t)
	for _, file := range []string{"oci/index.json", "linux-" + runtime.GOARCH + ".tar"} {
		if !bytes.Equal(read(t, first, file), read(t, second, file)) {
			t.Errorf("%s differs from one time to the next", file)
		}
	}
}

func TestSBOM(t *testing.T) {
	document := decode[struct {
		SPDXVersion string
		Packages    []struct {
			SPDXID, Name, VersionInfo string
			ExternalRefs              []struct{ ReferenceLocator string }
		}
		Relationships []struct{ SPDXElementID, RelationshipType, RelatedSPDXElement string }
	}](t, read(t, self(t), "linux-"+runtime.GOARCH+".spdx.json"))
	ids, locators := map[string]bool{"SPDXRef-DOCUMENT": true}, map[string]bool{}
	for _, p := range document.Packages {
		if ids[p.SPDXID] {
			t.Errorf("%s is there twice", p.SPDXID)
		}
		ids[p.SPDXID] = true
		for _, r := range p.ExternalRefs {
			locators[r.ReferenceLocator] = true
		}
	}
	if !locators["pkg:golang/stdlib@"+strings.TrimPrefix(runtime.Version(), "go")] {
		t.Errorf("the standard library is not among %v", locators)
	}
	for _, r := range document.Relationships {
		if !ids[r.SPDXElementID] || !ids[r.RelatedSPDXElement] {
			t.Errorf("unknown ends: %+v", r)
		}
	}
}

func TestNamesInSBOM(t *testing.T) {
	if got := reference("program-my_agent+2"); got != "SPDXRef-program-my-agent-2" {
		t.Errorf("got %s", got)
	}
	p, err := json.Marshal(pkg("a", "example.com/a", "v2.5.0+incompatible"))
	if want := `"pkg:golang/example.com/a@v2.5.0%2Bincompatible"`; err != nil || !bytes.Contains(p, []byte(want)) {
		t.Errorf("got %s, %v, want %s in it", p, err, want)
	}
}

func TestWrongUse(t *testing.T) {
	for want, o := range map[string]options{
		`-name "localhost:5000/a": want NAME:TAG`:   {name: "localhost:5000/a", platforms: []string{"linux/arm64"}},
		`-platforms: "linux": want OS/ARCHITECTURE`: {name: "a:b", platforms: []string{"linux"}},
		"PROGRAMs are for one platform":             {name: "a:b", platforms: []string{"linux/a", "linux/b"}, programs: []string{"x"}},
		"read what no-such-file is made of":         {name: "a:b", platforms: []string{"linux/a"}, programs: []string{"no-such-file"}},
	} {
		if err := run(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}
