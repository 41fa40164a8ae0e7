package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"go.uber.org/zap/zapcore"
)

// bridge hands the warnings and errors of etcd to slog, except for those that nobody can do anything about.
type bridge struct {
	log     *slog.Logger
	stopped func() bool // etcd calls every closed listener an error
	fields  []zapcore.Field
}

// Enabled implements zapcore.Core.
func (b *bridge) Enabled(level zapcore.Level) bool {
	return level >= zapcore.WarnLevel && !b.stopped()
}

// With implements zapcore.Core.
func (b *bridge) With(fields []zapcore.Field) zapcore.Core {
	return &bridge{log: b.log, stopped: b.stopped, fields: slices.Concat(b.fields, fields)}
}

// Check implements zapcore.Core.
func (b *bridge) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if b.Enabled(entry.Level) && !isNoise(entry.Message) {
		return checked.AddCore(entry, b)
	}
	return checked
}

// isNoise knows what etcd warns of at every start of a single member on loopback.
func isNoise(message string) bool {
	return strings.HasPrefix(message, "Running http and grpc server on single port") ||
		message == "simple token is not cryptographically signed"
}

// Write implements zapcore.Core.
func (b *bridge) Write(entry zapcore.Entry, fields []zapcore.Field) error {
	level := slog.LevelWarn
	if entry.Level > zapcore.WarnLevel {
		level = slog.LevelError
	}
	b.log.Log(context.Background(), level, "etcd: "+entry.Message, attributes(b.fields, fields)...)
	return nil
}

// Sync implements zapcore.Core.
func (b *bridge) Sync() error { return nil }

func attributes(lists ...[]zapcore.Field) []any {
	encoder := zapcore.NewMapObjectEncoder()
	for _, fields := range lists {
		for _, field := range fields {
			field.AddTo(encoder)
		}
	}
	var attributes []any
	for key, value := range encoder.Fields {
		attributes = append(attributes, slog.Any(key, value))
	}
	return attributes
}

// panicking makes a fatal message a panic instead of the end of the process.
type panicking struct{}

// OnWrite implements zapcore.CheckWriteHook.
func (panicking) OnWrite(entry *zapcore.CheckedEntry, fields []zapcore.Field) {
	for _, field := range fields {
		if field.Key == "error" {
			panic(fmt.Sprintf("%s: %v", entry.Message, field.Interface))
		}
	}
	panic(entry.Message)
}
