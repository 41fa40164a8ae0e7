package document

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// otherKind returns the kind that a document states, if it is not that of the message: then every other problem that
// could be reported would only mislead.
func otherKind(tree any, desc protoreflect.MessageDescriptor) (string, bool) {
	object, _ := tree.(map[string]any)
	kind, ok := object["kind"].(string)
	return kind, ok && desc.Fields().ByJSONName("kind") != nil && kind != string(desc.Name())
}

func (p *Problems) message(path string, v any, desc protoreflect.MessageDescriptor) {
	if desc.FullName().Parent() == "google.protobuf" {
		return // these have JSON forms of their own
	}
	object, ok := v.(map[string]any)
	if !ok {
		p.wrongType(path, "a group of fields", v)
		return
	}
	for _, key := range slices.Sorted(maps.Keys(object)) {
		field := fieldByName(desc, key)
		if field == nil {
			p.Add(join(path, key), "no such field; %s", suggestion(key, desc))
			continue
		}
		p.field(join(path, key), object[key], field)
	}
}

// fieldByName knows a field by its JSON name alone, so that a document has only one way to be written.
func fieldByName(desc protoreflect.MessageDescriptor, name string) protoreflect.FieldDescriptor {
	return desc.Fields().ByJSONName(name)
}

func (p *Problems) field(path string, v any, field protoreflect.FieldDescriptor) {
	switch {
	case v == nil: // as if left out
	case field.IsMap():
		p.object(path, v, field.MapValue())
	case field.IsList():
		p.list(path, v, field)
	default:
		p.value(path, v, field)
	}
}

func (p *Problems) object(path string, v any, value protoreflect.FieldDescriptor) {
	object, ok := v.(map[string]any)
	if !ok {
		p.wrongType(path, "a group of names and values", v)
		return
	}
	for _, key := range slices.Sorted(maps.Keys(object)) {
		p.value(join(path, key), object[key], value)
	}
}

func (p *Problems) list(path string, v any, field protoreflect.FieldDescriptor) {
	list, ok := v.([]any)
	if !ok {
		p.wrongType(path, "a list", v)
		return
	}
	for i, element := range list {
		p.value(fmt.Sprintf("%s[%d]", path, i), element, field)
	}
}

func (p *Problems) value(path string, v any, field protoreflect.FieldDescriptor) {
	var want string
	var ok bool
	switch field.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		p.message(path, v, field.Message())
		return
	case protoreflect.StringKind, protoreflect.BytesKind:
		want = "a string"
		_, ok = v.(string)
	case protoreflect.BoolKind:
		want = "true or false"
		_, ok = v.(bool)
	case protoreflect.EnumKind:
		want = "one of " + enumNames(field.Enum())
		name, _ := v.(string)
		ok = field.Enum().Values().ByName(protoreflect.Name(name)) != nil
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		want = "a number"
		ok = isFloat(v)
	default:
		bits, signed := integerType(field.Kind())
		want = integerRange(bits, signed)
		ok = isInteger(v, bits, signed)
	}
	if !ok {
		p.wrongType(path, want, v)
	}
}

func (p *Problems) wrongType(path, want string, got any) {
	if path == "" {
		path = "document"
	}
	p.Add(path, "want %s, got %s", want, describe(got))
}

func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "nothing"
	case string:
		if v == "" {
			return `a string ""`
		}
		return "a string " + quote(v)
	case json.Number:
		return "a number " + v.String()
	case bool:
		return strconv.FormatBool(v)
	case []any:
		return "a list"
	}
	return "a group of fields"
}

func isFloat(v any) bool {
	number, ok := v.(json.Number)
	if !ok {
		return false
	}
	_, err := number.Float64() // fails for what is too large
	return err == nil
}

func integerType(kind protoreflect.Kind) (bits int, signed bool) {
	switch kind {
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return 32, false
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return 64, false
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind:
		return 32, true
	}
	return 64, true
}

func integerRange(bits int, signed bool) string {
	if signed {
		return fmt.Sprintf("a whole number of %d bits", bits)
	}
	return fmt.Sprintf("a whole number, 0 or above, of %d bits", bits)
}

// isInteger also takes numbers such as 1e3 and 2.0, as protojson does, and strings where JSON numbers are too narrow.
func isInteger(v any, bits int, signed bool) bool {
	number, ok := v.(json.Number)
	if text, isString := v.(string); isString && bits == 64 {
		number, ok = json.Number(text), true
	}
	if !ok || len(number) > 32 || exponentTooLarge(number.String()) {
		return false
	}
	r, ok := new(big.Rat).SetString(number.String())
	if !ok || !r.IsInt() {
		return false
	}
	if signed {
		bits--
	}
	return r.Num().BitLen() <= bits && (signed || r.Sign() >= 0)
}

// exponentTooLarge protects from numbers such as 1e999999999, which take an age to write out.
func exponentTooLarge(number string) bool {
	_, exponent, found := strings.Cut(strings.ToLower(number), "e")
	if !found {
		return false
	}
	n, err := strconv.Atoi(exponent)
	return err != nil || n > 64 || n < -64
}

func enumNames(enum protoreflect.EnumDescriptor) string {
	var names []string
	for i := range enum.Values().Len() {
		names = append(names, string(enum.Values().Get(i).Name()))
	}
	return strings.Join(names, ", ")
}

func join(path, key string) string {
	if !plainKey(key) {
		key = quote(key)
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

func plainKey(key string) bool {
	return key != "" && len(key) <= 60 && !strings.ContainsFunc(key, func(r rune) bool {
		return r <= ' ' || r > '~' || r == '.' || r == '"'
	})
}

// suggestion says what the author may have meant by a field that does not exist.
func suggestion(key string, desc protoreflect.MessageDescriptor) string {
	var known []string
	for i := range desc.Fields().Len() {
		known = append(known, desc.Fields().Get(i).JSONName())
	}
	if best := Nearest(key, known); best != "" {
		return "did you mean " + best + "?"
	}
	return "known here: " + strings.Join(known, ", ")
}

// Nearest returns what the author of a name that isn't known may have meant, or "".
func Nearest(name string, known []string) string {
	best, bestDistance := "", len(name)/3+1
	for _, k := range known {
		if d := distance(fold(name), fold(k)); d < bestDistance || d == bestDistance && best == "" {
			best, bestDistance = k, d
		}
	}
	return best
}

// fold takes away the differences between ways to spell one name: pool_size, pool-size, poolSize.
func fold(name string) string {
	if len(name) > 60 {
		name = name[:60]
	}
	return strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(name))
}

// distance is the number of letters to insert, delete or replace to get from a to b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal = row[j+1]
			row[j+1] = cost
		}
	}
	return row[len(b)]
}
