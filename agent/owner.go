package agent

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// owner returns what tells the agent with this data folder from all others, made when it is first asked for. In a cluster it is
// what tells the node from others, as the folder goes with the agent's pod, and the next one is to have the node's name at once.
func owner(dir, nodeUID string) (string, error) {
	if nodeUID != "" {
		sum := sha256.Sum256([]byte(nodeUID))
		return hex.EncodeToString(sum[:16]), nil
	}
	path := filepath.Join(dir, "identity")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return newOwner(path)
	}
	if err != nil {
		return "", fmt.Errorf("read the agent's identity: %w", err)
	}
	id := strings.TrimSpace(string(text))
	if b, err := hex.DecodeString(id); err != nil || len(b) != 16 {
		return "", fmt.Errorf("the agent's identity in %s: want 32 hexadecimal digits; remove the file, and it gets a new one", path)
	}
	return id, nil
}

// newOwner stores one, whole or not at all.
func newOwner(path string) (id string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("store the agent's identity: %w; choose another folder with --data-dir", err)
		}
	}()
	var b [16]byte
	rand.Read(b[:])
	id = hex.EncodeToString(b[:])
	file, err := os.CreateTemp(filepath.Dir(path), ".identity-*")
	if err != nil {
		return "", err
	}
	_, err = file.WriteString(id + "\n")
	if err = errors.Join(err, file.Sync(), file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return "", errors.Join(err, os.Remove(file.Name()))
	}
	return id, nil
}
