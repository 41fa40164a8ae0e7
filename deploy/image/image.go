package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

// bin is where programs are in the image.
const bin = "/usr/local/bin"

// image is that of one platform.
type image struct {
	platform    string
	layer       []byte // a tar
	config      []byte
	sbom        []byte
	annotations map[string]string
}

// newImage makes an image with the programs and a list of what they are made of, and nothing else: static binaries need no
// more. They run as root where that is asked for, and as anybody else: nothing belongs to anyone.
func newImage(platform string, programs []string) (image, error) {
	i := image{platform: platform}
	var infos []*buildinfo.BuildInfo
	var files []file
	for _, p := range programs {
		info, err := buildinfo.ReadFile(p)
		if err != nil {
			return i, fmt.Errorf("read what %s is made of: %w", p, err)
		}
		content, err := os.ReadFile(p)
		if err != nil {
			return i, err
		}
		infos = append(infos, info)
		files = append(files, file{path.Join(bin, filepath.Base(p)), 0o755, content})
	}
	i.annotations = annotations(infos[0])
	var err error
	if i.sbom, err = sbom(platform, files, infos); err != nil {
		return i, err
	}
	files = append(files, file{"/usr/share/doc/sbom.spdx.json", 0o644, i.sbom})
	if i.layer, err = layer(files); err != nil {
		return i, err
	}
	i.config, err = i.newConfig(files[0].path)
	return i, err
}

func annotations(info *buildinfo.BuildInfo) map[string]string {
	a := map[string]string{
		"org.opencontainers.image.source":  "https://" + info.Main.Path,
		"org.opencontainers.image.version": info.Main.Version,
		"org.opencontainers.image.created": built(info),
	}
	if revision := setting(info, "vcs.revision"); revision != "" {
		a["org.opencontainers.image.revision"] = revision
	}
	return a
}

// built is the time of the source, not that of the build, or no two builds would be the same.
func built(info *buildinfo.BuildInfo) string {
	if t := setting(info, "vcs.time"); t != "" {
		return t
	}
	return time.Unix(0, 0).UTC().Format(time.RFC3339)
}

func setting(info *buildinfo.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

// file is one of the image.
type file struct {
	path    string
	mode    int64
	content []byte
}

// layer returns a tar of files and the folders that they are in.
func layer(files []file) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	var errs []error
	made := map[string]bool{"/": true}
	for _, f := range files {
		for _, dir := range parents(f.path) {
			if !made[dir] {
				made[dir] = true
				errs = append(errs, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir[1:] + "/", Mode: 0o755, ModTime: time.Unix(0, 0)}))
			}
		}
		errs = append(errs, add(w, f.path[1:], f.mode, f.content))
	}
	err := errors.Join(append(errs, w.Close())...)
	return b.Bytes(), err
}

// parents returns the folders above a path, the highest first.
func parents(p string) []string {
	dir := path.Dir(p)
	if dir == "/" {
		return nil
	}
	return append(parents(dir), dir)
}

func add(w *tar.Writer, name string, mode int64, content []byte) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content)), ModTime: time.Unix(0, 0)}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}

func (i image) newConfig(entrypoint string) ([]byte, error) {
	system, arch, _ := strings.Cut(i.platform, "/")
	return json.Marshal(map[string]any{
		"created": i.annotations["org.opencontainers.image.created"], "os": system, "architecture": arch,
		"config": map[string]any{
			"Entrypoint": []string{entrypoint}, "Env": []string{"PATH=" + bin}, "WorkingDir": "/", "Labels": i.annotations,
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(i.layer)}},
	})
}

// writeArchive writes what docker load and ctr images import read.
func (i image) writeArchive(file, name string) error {
	manifest, err := json.Marshal([]any{map[string]any{"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	w := tar.NewWriter(f)
	return errors.Join(
		add(w, "config.json", 0o644, i.config), add(w, "layer.tar", 0o644, i.layer), add(w, "manifest.json", 0o644, manifest),
		w.Close(), f.Close())
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// layout is an OCI layout: a folder of blobs, named by what is in them.
type layout struct {
	dir       string
	manifests []any
}

const (
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	indexType    = "application/vnd.oci.image.index.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

func newLayout(dir string) (*layout, error) {
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o755); err != nil {
		return nil, err
	}
	return &layout{dir: dir}, os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}

// blob stores content and returns how others refer to it.
func (l *layout) blob(mediaType string, content []byte) (map[string]any, error) {
	d := digest(content)
	name := filepath.Join(l.dir, "blobs", "sha256", strings.TrimPrefix(d, "sha256:"))
	return map[string]any{"mediaType": mediaType, "digest": d, "size": len(content)}, os.WriteFile(name, content, 0o644)
}

func (l *layout) object(mediaType string, object map[string]any) (map[string]any, error) {
	object["schemaVersion"], object["mediaType"] = 2, mediaType
	content, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	return l.blob(mediaType, content)
}

func (l *layout) add(i image) error {
	config, err := l.blob(configType, i.config)
	if err != nil {
		return err
	}
	small, err := compress(i.layer)
	if err != nil {
		return err
	}
	layer, err := l.blob(layerType, small)
	if err != nil {
		return err
	}
	manifest, err := l.object(manifestType, map[string]any{"config": config, "layers": []any{layer}, "annotations": i.annotations})
	if err != nil {
		return err
	}
	system, arch, _ := strings.Cut(i.platform, "/")
	manifest["platform"] = map[string]any{"os": system, "architecture": arch}
	l.manifests = append(l.manifests, manifest)
	return nil
}

func compress(content []byte) ([]byte, error) {
	var b bytes.Buffer
	w := gzip.NewWriter(&b) // whose header has no time
	_, err := io.Copy(w, bytes.NewReader(content))
	err = errors.Join(err, w.Close())
	return b.Bytes(), err
}

// finish names the image of all platforms, and returns its digest.
func (l *layout) finish(name string) (string, error) {
	all, err := l.object(indexType, map[string]any{"manifests": l.manifests})
	if err != nil {
		return "", err
	}
	all["annotations"] = map[string]any{
		"io.containerd.image.name":          name,
		"org.opencontainers.image.ref.name": name[strings.LastIndex(name, ":")+1:],
	}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": indexType, "manifests": []any{all}})
	if err != nil {
		return "", err
	}
	return all["digest"].(string), os.WriteFile(filepath.Join(l.dir, "index.json"), index, 0o644)
}
