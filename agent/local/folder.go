package local

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/localservice"
	"github.com/headroom-mesh/headroom/registry"
)

// maxFileSize is far above what any declaration of replicas takes.
const maxFileSize = 1 << 20

// folder is a folder of LocalService documents as it was last read.
type folder struct {
	path  string // "": there is none
	files map[string]file
	err   string // why it could not be read
}

// file keeps what it last defined without error.
type file struct {
	data     []byte
	err      string // why data was refused
	services []localservice.LocalService
}

func newFolder(path string) folder { return folder{path: path, files: map[string]file{}} }

// read brings the folder up to date. What can't be read, or not be understood, stays as it was.
func (f *folder) read(log *slog.Logger) {
	if f.path == "" {
		return
	}
	entries, err := os.ReadDir(f.path)
	if err != nil {
		if f.err != err.Error() {
			log.Error("folder of services can't be read; what it declared stays", "err", err)
		}
		f.err = err.Error()
		return
	}
	f.err = ""
	present := map[string]bool{}
	for _, e := range entries {
		if isDocument(e.Name()) {
			present[e.Name()] = true
			f.readFile(e.Name(), log)
		}
	}
	maps.DeleteFunc(f.files, func(name string, _ file) bool { return !present[name] })
}

func isDocument(name string) bool {
	return !strings.HasPrefix(name, ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name))
}

func (f *folder) readFile(name string, log *slog.Logger) {
	old, known := f.files[name]
	path := filepath.Join(f.path, name)
	data, err := readLimited(path)
	if errors.Is(err, os.ErrNotExist) && !isLink(path) {
		return // gone since the folder was listed
	}
	if err == nil && known && old.data != nil && bytes.Equal(data, old.data) {
		return
	}
	now := file{data: data, services: old.services}
	if err == nil {
		var services []localservice.LocalService
		if services, err = parse(data); err == nil {
			now.services = services
		}
	}
	if err != nil {
		now.err = err.Error()
		if now.err != old.err || !bytes.Equal(now.data, old.data) {
			log.Error("file of services refused; what it declared before stays", "reason", path, "err", err)
		}
	}
	f.files[name] = now
}

// isLink reports whether there is a link, though it may lead nowhere.
func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().Type() == os.ModeSymlink
}

func readLimited(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("no regular file")
	}
	if info.Size() > maxFileSize {
		return nil, fmt.Errorf("%d bytes: more than the %d allowed", info.Size(), maxFileSize)
	}
	return os.ReadFile(path)
}

// parse reads the documents of a file. An empty one is refused: it may be about to be written. Whoever wants its
// replicas gone removes it.
func parse(data []byte) ([]localservice.LocalService, error) {
	docs, err := localservice.ParseAll(data)
	if err != nil {
		return nil, err
	}
	if len(docs) == 0 {
		return nil, errors.New("no document in it")
	}
	var services []localservice.LocalService
	for _, doc := range docs {
		s, err := localservice.Compile(doc)
		if err != nil {
			return nil, err
		}
		services = append(services, s)
	}
	return services, nil
}

func (f *folder) bad() int {
	n := 0
	for _, file := range f.files {
		if file.err != "" {
			n++
		}
	}
	return n
}

// declaration is a replica as a file declares it.
type declaration struct {
	key replicaKey
	terms
	check *localservice.HealthCheck
	file  string // with its folder
}

// terms are what is said of a replica besides its check.
type terms struct {
	weight   int
	protocol policy.Protocol
}

// declarations lists what the files declare, in the order of their names.
func (f *folder) declarations() []declaration {
	var all []declaration
	for _, name := range slices.Sorted(maps.Keys(f.files)) {
		for _, s := range f.files[name].services {
			for _, e := range s.Endpoints {
				key := replicaKey{registry.ServiceName(s.Service), e.Address}
				all = append(all, declaration{key, terms{e.Weight, s.Protocol}, s.Check, filepath.Join(f.path, name)})
			}
		}
	}
	return all
}

// merge returns what the folders declare together, the first one winning, and describes the duplicates.
func merge(folders ...folder) (map[replicaKey]declaration, map[string]bool) {
	first := map[replicaKey]declaration{}
	duplicates := map[string]bool{}
	for _, f := range folders {
		for _, d := range f.declarations() {
			if earlier, ok := first[d.key]; ok {
				duplicates[fmt.Sprintf("%s %s: in %s and in %s", d.key.service, d.key.address, earlier.file, d.file)] = true
				continue
			}
			first[d.key] = d
		}
	}
	return first, duplicates
}

// find returns the file that declares a replica.
func (f *folder) find(key replicaKey) (string, bool) {
	for _, d := range f.declarations() {
		if d.key == key {
			return d.file, true
		}
	}
	return "", false
}

// matching lists the replicas of a service that are declared, or only the one at wanted if that is anywhere.
func (f *folder) matching(service registry.ServiceName, wanted localservice.Address) []replicaKey {
	var keys []replicaKey
	for _, d := range f.declarations() {
		if d.key.service == service && (wanted == localservice.Address{} || d.key.address == wanted) && !slices.Contains(keys, d.key) {
			keys = append(keys, d.key)
		}
	}
	slices.SortFunc(keys, func(a, b replicaKey) int { return cmp.Compare(a.address.String(), b.address.String()) })
	return keys
}

// fileOf names the file of one registered replica: web_127.0.0.1_8080.yaml, or web_unix,run,web.sock.yaml.
func fileOf(service string, address localservice.Address) string {
	if address.Socket != "" {
		return service + "_unix" + strings.NewReplacer("%", "%25", ",", "%2C", "/", ",").Replace(address.Socket) + ".yaml"
	}
	return service + "_" + strings.NewReplacer("[", "", "]", "", ":", "_").Replace(address.String()) + ".yaml"
}

// write stores one replica, whole or not at all.
func (f *folder) write(service string, e localservice.Endpoint, spec *meshv1.LocalServiceSpec) error {
	address := e.Address
	endpoint := &meshv1.LocalEndpoint{Address: address.String()}
	if e.Weight != 1 {
		endpoint.Weight = new(uint32(e.Weight))
	}
	data, err := localservice.Encode(&meshv1.LocalService{
		ApiVersion: policy.APIVersion,
		Kind:       localservice.Kind,
		Metadata:   &meshv1.Metadata{Name: service},
		Spec: &meshv1.LocalServiceSpec{
			Endpoints: []*meshv1.LocalEndpoint{endpoint}, Check: spec.GetCheck(), Protocol: spec.GetProtocol(),
		},
	})
	if err != nil {
		return fmt.Errorf("register %s %s: %w", service, address, err)
	}
	if err := writeFile(f.path, fileOf(service, address), data); err != nil {
		return fmt.Errorf("register %s %s: %w", service, address, err)
	}
	return nil
}

func (f *folder) remove(key replicaKey) error {
	// Files that somebody else put here may hold more than this replica.
	own := filepath.Join(f.path, fileOf(string(key.service), key.address))
	for _, d := range f.declarations() {
		if d.key == key && d.file != own {
			return fmt.Errorf("%s %s: %w, %s: remove it there", key.service, key.address, ErrDeclared, d.file)
		}
	}
	if err := os.Remove(own); err != nil {
		return fmt.Errorf("deregister: %w", err)
	}
	return syncFolder(f.path)
}

func writeFile(dir, name string, data []byte) (err error) {
	tmp, err := os.CreateTemp(dir, ".new-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), filepath.Join(dir, name)); err != nil {
		return err
	}
	return syncFolder(dir)
}

func syncFolder(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// watcher tells of changes in the folders, as far as the system does, and when to read them in any case.
type watcher struct {
	notify  *fsnotify.Watcher // nil if the system has none to give
	changes <-chan fsnotify.Event
	errors  <-chan error
	quiet   *time.Timer // ends when no change has come for a while
	tick    *time.Ticker
	look    *time.Ticker // for folders that were replaced
	folders []string
	seen    []os.FileInfo // of the folders, nil for one that was not there or has changed its name
}

func (l *Local) watch() *watcher {
	w := &watcher{quiet: time.NewTimer(settle), tick: time.NewTicker(rescanInterval), look: time.NewTicker(lookInterval)}
	for _, dir := range []string{l.cfg.Services, l.cfg.Registered} {
		if dir != "" {
			w.folders = append(w.folders, filepath.Clean(dir))
		}
	}
	w.seen = make([]os.FileInfo, len(w.folders))
	w.replaced()
	notify, err := fsnotify.NewBufferedWatcher(64)
	if err != nil {
		l.log.Warn("folders can't be watched; they are read again from time to time", "err", err)
		return w
	}
	w.notify, w.changes, w.errors = notify, notify.Events, notify.Errors
	w.renew()
	return w
}

// renew watches the folders, also one that was replaced by another of its name. Errors are left to the ticker.
func (w *watcher) renew() {
	if w.notify == nil {
		return
	}
	for _, dir := range w.folders {
		_ = w.notify.Add(dir)
	}
}

// heed takes in a change. One of a folder itself means that it was removed or renamed.
func (w *watcher) heed(change fsnotify.Event) {
	if i := slices.Index(w.folders, change.Name); i >= 0 {
		w.seen[i] = nil
	}
	w.quiet.Reset(settle)
}

// replaced reports whether a folder is another one than it was last time.
func (w *watcher) replaced() bool {
	replaced := false
	for i, dir := range w.folders {
		now, err := os.Stat(dir)
		if err != nil {
			now = nil
		}
		if now != nil && (w.seen[i] == nil || !os.SameFile(now, w.seen[i])) {
			replaced = true
		}
		w.seen[i] = now
	}
	return replaced
}

func (w *watcher) close() {
	w.quiet.Stop()
	w.tick.Stop()
	w.look.Stop()
	if w.notify != nil {
		_ = w.notify.Close()
	}
}
