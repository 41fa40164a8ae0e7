package ca

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/headroom-mesh/headroom/dataplane/identity"
)

// Write puts the files where an agent with --tls DIR looks for them. Between two of them an agent that looks finds that
// they don't match, and looks again.
func (f Files) Write(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the folder for the certificate: %w", err)
	}
	return errors.Join(
		WriteFile(filepath.Join(dir, identity.RootsFile), f.Roots),
		WriteFile(filepath.Join(dir, identity.KeyFile), f.Key),
		WriteFile(filepath.Join(dir, identity.CertificateFile), f.Certificate))
}

// WriteFile writes a file that only its owner may read, whole or not at all.
func WriteFile(path string, content []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // has mode 0600
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err = errors.Join(err, file.Sync(), file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}

// lock makes a folder, and keeps others from making a CA in it until unlock is called.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of the CA: %w", err)
	}
	folder, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lock the folder of the CA: %w", err)
	}
	if err := syscall.Flock(int(folder.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock the folder of the CA: %s: %w", dir, err), folder.Close())
	}
	return func() { folder.Close() }, nil
}
