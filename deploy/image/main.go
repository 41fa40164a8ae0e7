// Image makes the container image of Headroom, without a container engine. The same source gives the same image, byte by byte.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func main() {
	var o options
	flag.StringVar(&o.name, "name", "ghcr.io/headroom-mesh/headroom:dev", "`NAME:TAG` of the image")
	flag.StringVar(&o.out, "out", "bin/image", "`DIR` to write to")
	platforms := flag.String("platforms", "linux/amd64,linux/arm64", "`OS/ARCHITECTURE` to build for, several by commas")
	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), `usage: image [flags] [PROGRAM...]

Writes DIR/oci, an OCI layout of all platforms, and for each of them DIR/OS-ARCH.tar, for docker load and ctr images import,
and DIR/OS-ARCH.spdx.json, what is inside. With PROGRAMs, which are static binaries, the image is of these and starts the
first; without, it is of agent and meshctl, which are built.

`)
		flag.PrintDefaults()
	}
	flag.Parse()
	o.platforms, o.programs = strings.Split(*platforms, ","), flag.Args()
	if err := run(o); err != nil {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
}

type options struct {
	name, out string
	platforms []string
	programs  []string // none: those of Headroom
}

func (o options) validate() error {
	if _, tag, found := strings.Cut(o.name[strings.LastIndex(o.name, "/")+1:], ":"); !found || tag == "" {
		return fmt.Errorf("-name %q: want NAME:TAG", o.name)
	}
	for _, p := range o.platforms {
		if system, arch, _ := strings.Cut(p, "/"); system == "" || arch == "" {
			return fmt.Errorf("-platforms: %q: want OS/ARCHITECTURE, such as linux/arm64", p)
		}
	}
	if len(o.programs) > 0 && len(o.platforms) > 1 {
		return errors.New("-platforms: PROGRAMs are for one platform: say for which")
	}
	return nil
}

func run(o options) error {
	if err := o.validate(); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "headroom-image-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	var images []image
	for _, p := range o.platforms {
		programs := o.programs
		if len(programs) == 0 {
			if programs, err = build(p, filepath.Join(work, p)); err != nil {
				return err
			}
		}
		i, err := newImage(p, programs)
		if err != nil {
			return err
		}
		images = append(images, i)
	}
	return write(o, images)
}

// build builds Headroom's programs.
func build(platform, dir string) ([]string, error) {
	system, arch, _ := strings.Cut(platform, "/")
	c := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", dir+"/", "./cmd/agent", "./cmd/meshctl")
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+system, "GOARCH="+arch)
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build for %s: %w\n%s", platform, err, out)
	}
	return []string{filepath.Join(dir, "agent"), filepath.Join(dir, "meshctl")}, nil
}

func write(o options, images []image) error {
	if err := os.RemoveAll(filepath.Join(o.out, "oci")); err != nil { // blobs of other images would stay there
		return err
	}
	l, err := newLayout(filepath.Join(o.out, "oci"))
	if err != nil {
		return err
	}
	for _, i := range images {
		base := filepath.Join(o.out, strings.ReplaceAll(i.platform, "/", "-"))
		err := errors.Join(l.add(i), os.WriteFile(base+".spdx.json", i.sbom, 0o644), i.writeArchive(base+".tar", o.name))
		if err != nil {
			return err
		}
	}
	digest, err := l.finish(o.name)
	if err != nil {
		return err
	}
	fmt.Printf("%s@%s\n", o.name, digest)
	return nil
}
