package document

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"sigs.k8s.io/yaml"
)

// EncodeYAML writes the fields of m that are set, in the order in which the .proto file declares them.
func EncodeYAML(m proto.Message) ([]byte, error) {
	var e encoder
	e.message("", m.ProtoReflect())
	if e.err != nil {
		return nil, fmt.Errorf("write %s as YAML: %w", m.ProtoReflect().Descriptor().Name(), e.err)
	}
	return e.out.Bytes(), nil
}

type encoder struct {
	out bytes.Buffer
	err error // the first one
}

func (e *encoder) message(indent string, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		if field := fields.Get(i); m.Has(field) {
			e.field(indent, field, m.Get(field))
			indent = strings.ReplaceAll(indent, "-", " ") // only the first field of an element carries its dash
		}
	}
}

func (e *encoder) field(indent string, field protoreflect.FieldDescriptor, v protoreflect.Value) {
	e.out.WriteString(indent + field.JSONName() + ":")
	inner := strings.ReplaceAll(indent, "-", " ")
	switch {
	case field.IsMap():
		e.err = fmt.Errorf("%s is a map", field.FullName()) // no document has one
	case field.IsList():
		e.list(inner, field, v.List())
	case field.Message() != nil:
		e.nested(inner+"  ", v.Message())
	default:
		e.out.WriteString(" " + e.scalar(field, v) + "\n")
	}
}

func (e *encoder) nested(indent string, m protoreflect.Message) {
	if isEmpty(m) {
		e.out.WriteString(" {}\n")
		return
	}
	e.out.WriteString("\n")
	e.message(indent, m)
}

func (e *encoder) list(indent string, field protoreflect.FieldDescriptor, list protoreflect.List) {
	e.out.WriteString("\n")
	for i := range list.Len() {
		switch {
		case field.Message() == nil:
			e.out.WriteString(indent + "- " + e.scalar(field, list.Get(i)) + "\n")
		case isEmpty(list.Get(i).Message()):
			e.out.WriteString(indent + "- {}\n")
		default:
			e.message(indent+"- ", list.Get(i).Message())
		}
	}
}

func isEmpty(m protoreflect.Message) bool {
	empty := true
	m.Range(func(protoreflect.FieldDescriptor, protoreflect.Value) bool {
		empty = false
		return false
	})
	return empty
}

func (e *encoder) scalar(field protoreflect.FieldDescriptor, v protoreflect.Value) string {
	switch field.Kind() {
	case protoreflect.StringKind:
		return text(v.String())
	case protoreflect.EnumKind:
		return e.enum(field.Enum(), v.Enum())
	case protoreflect.BytesKind:
		e.err = fmt.Errorf("%s is of bytes", field.FullName()) // no document has any
		return ""
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return e.number(field, v.Float())
	}
	return v.String()
}

func (e *encoder) enum(enum protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	value := enum.Values().ByNumber(n)
	if value == nil {
		e.err = fmt.Errorf("%s has no value %d", enum.FullName(), n)
		return ""
	}
	return text(string(value.Name()))
}

func (e *encoder) number(field protoreflect.FieldDescriptor, x float64) string {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		e.err = fmt.Errorf("%s is %v", field.JSONName(), x)
	}
	return strconv.FormatFloat(x, 'g', -1, 64)
}

var plain = regexp.MustCompile(`^[A-Za-z0-9/][A-Za-z0-9._/:-]*[A-Za-z0-9._/-]$|^[A-Za-z]$`)

// text quotes s unless every reader takes it for a string as it is.
func text(s string) string {
	if !plain.MatchString(s) {
		return strconv.Quote(s)
	}
	read, err := yaml.YAMLToJSON([]byte(s))
	if want, _ := json.Marshal(s); err != nil || !bytes.Equal(bytes.TrimSpace(read), want) {
		return strconv.Quote(s)
	}
	return s
}
