//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// profile takes CPU profiles of proxies that offer them, while they have as much to do as they can.
func (b *bench) profile(ctx context.Context, c cell, players []*player) {
	if b.profiles == "" {
		return
	}
	for _, p := range players {
		if p.session == nil {
			continue
		}
		var fetching sync.WaitGroup
		for name, at := range p.running.profiles {
			file := filepath.Join(b.profiles, c.name()+"-"+name+".pprof")
			fetching.Go(func() {
				if err := saveProfile(ctx, at, file); err != nil {
					b.say("profile: %v", err)
				}
			})
		}
		if len(p.running.profiles) > 0 {
			if _, err := p.session.Saturate(0, profileLength, func() time.Duration { return 0 }); err != nil {
				b.say("profile: %v", err)
			}
		}
		fetching.Wait()
	}
}

func saveProfile(ctx context.Context, at, file string) error {
	text, err := fetch(ctx, fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%.0f", at, profileLength.Seconds()))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
}
