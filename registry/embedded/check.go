package embedded

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"runtime/debug"

	"go.etcd.io/etcd/server/v3/storage/backend"
	"go.etcd.io/etcd/server/v3/storage/datadir"
	"go.etcd.io/etcd/server/v3/storage/schema"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.uber.org/zap"
)

// headerSize is that of a header of a bbolt database with all fields up to its checksum.
const headerSize = 80

func damaged(dir string, err error) error {
	return fmt.Errorf("etcd data in %s is damaged or unreadable: %w: restore it from a backup or remove the folder", dir, err)
}

// check looks for damage that makes etcd hang, or panic where nobody can recover: a database that can't be opened, or one
// that is ahead of the write-ahead log, as a part of the log is gone. (An entry is in the log before it is applied, also
// when a crash comes between the two. What the log says of commits may be older, so verify.Verify is too strict.)
func check(dir string) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // the database is mapped into memory
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	path := datadir.ToBackendFileName(dir)
	if err := checkSize(path); errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	applied := lastApplied(path)
	if applied == 0 { // the first start was interrupted
		return nil
	}
	logged, err := lastEntry(datadir.ToWALDir(dir))
	if err != nil {
		return fmt.Errorf("write-ahead log: %w", err)
	}
	if logged < applied {
		return fmt.Errorf("write-ahead log: it ends at entry %d, but the database is at entry %d", logged, applied)
	}
	return nil
}

// checkSize reports a database that is shorter than it says in one of its two headers, of which the one with the higher
// transaction counts. To open such a file would end the process.
func checkSize(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if info.Size() == 0 { // the first start was interrupted
		return nil
	}
	size, last := uint64(0), uint64(0)
	first := make([]byte, headerSize)
	if _, err := file.ReadAt(first, 0); err != nil {
		return fmt.Errorf("%s is no database: it has %d bytes", path, info.Size())
	}
	for _, at := range []int64{0, int64(binary.NativeEndian.Uint32(first[24:]))} {
		header := make([]byte, headerSize)
		if _, err := file.ReadAt(header, at); err != nil {
			continue
		}
		sum := fnv.New64a()
		sum.Write(header[16:72])
		transaction := binary.NativeEndian.Uint64(header[64:])
		if sum.Sum64() == binary.NativeEndian.Uint64(header[72:]) && transaction >= last {
			last = transaction
			size = binary.NativeEndian.Uint64(header[56:]) * uint64(binary.NativeEndian.Uint32(header[24:]))
		}
	}
	if size > uint64(info.Size()) {
		return fmt.Errorf("%s has %d bytes of %d", path, info.Size(), size)
	}
	return nil
}

// lastApplied returns the last entry of the write-ahead log that the database holds. It panics if the file is none.
func lastApplied(path string) uint64 {
	b := backend.NewDefaultBackend(logger(), path)
	defer b.Close()
	applied, _ := schema.ReadConsistentIndex(b.ReadTx())
	return applied
}

// lastEntry returns the index of the last entry of the write-ahead log.
func lastEntry(dir string) (uint64, error) {
	if !wal.Exist(dir) {
		return 0, fmt.Errorf("there is none in %s", dir)
	}
	snapshots, err := wal.ValidSnapshotEntries(logger(), dir)
	if err != nil {
		return 0, err
	}
	if len(snapshots) == 0 {
		return 0, errors.New("it has no start")
	}
	snapshot := snapshots[len(snapshots)-1]
	log, err := wal.OpenForRead(logger(), dir, snapshot)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	_, _, entries, err := log.ReadAll()
	if err != nil || len(entries) == 0 {
		return snapshot.GetIndex(), err
	}
	return entries[len(entries)-1].GetIndex(), nil
}

// logger makes fatal messages panics and drops all others: errors say the same.
func logger() *zap.Logger { return zap.NewNop().WithOptions(zap.WithFatalHook(panicking{})) }
