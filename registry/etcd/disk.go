package etcd

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
	"google.golang.org/protobuf/encoding/protojson"
)

// saveAfter is how long changes of the registry are gathered before they are written to disk.
const saveAfter = time.Second

// file is the copy of the registry on disk. An empty path makes it do nothing.
type file struct {
	path    string
	log     *slog.Logger
	pending atomic.Pointer[registry.Snapshot] // still to be written
	wake    chan struct{}
}

func newFile(path string, log *slog.Logger) *file {
	return &file{path: path, log: log, wake: make(chan struct{}, 1)}
}

// load returns nil if there is nothing to start from.
func (f *file) load() *registry.Snapshot {
	if f.path == "" {
		return nil
	}
	content, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	record := new(meshv1.SnapshotRecord)
	if err == nil {
		err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(content, record)
	}
	if err != nil {
		f.log.Warn("copy of the registry on disk is ignored", "path", f.path, "err", err)
		return nil
	}
	snapshot, err := registry.SnapshotFromProto(record)
	if err != nil {
		f.log.Warn("parts of the copy of the registry on disk are ignored", "path", f.path, "err", err)
	}
	return snapshot
}

// save has a snapshot written soon. It does not wait.
func (f *file) save(s *registry.Snapshot) {
	if f.path == "" {
		return
	}
	f.pending.Store(s)
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

func (f *file) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.wake:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(saveAfter):
		}
		f.flush()
	}
}

// flush writes what is still to be written.
func (f *file) flush() {
	snapshot := f.pending.Swap(nil)
	if snapshot == nil {
		return
	}
	if err := f.write(snapshot); err != nil {
		f.log.Warn("write the copy of the registry on disk", "path", f.path, "err", err)
	}
}

// write leaves either the old content or the new one, whenever the machine stops.
func (f *file) write(s *registry.Snapshot) error {
	content, err := registry.Encode(s.Proto())
	if err != nil {
		return err
	}
	dir := filepath.Dir(f.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	next := f.path + ".tmp"
	if err := writeSynced(next, content); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	if err := os.Rename(next, f.path); err != nil {
		return err
	}
	return syncDir(dir)
}

func writeSynced(path string, content []byte) error {
	w, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = w.Write(content)
	return errors.Join(err, w.Sync(), w.Close())
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
