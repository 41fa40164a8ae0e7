// Package document reads and writes the documents that operators keep in files: messages of the API as YAML or JSON.
// It accepts nothing that it does not understand, and says at once all that is wrong.
package document

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
	goyaml "sigs.k8s.io/yaml/goyaml.v3"
)

// MaxSize is the size of the largest input that is decoded, in bytes.
const MaxSize = 1 << 20

// Decode fills m from data, which holds one document in YAML or JSON. An error about the content is a Problems; m is
// then in no useful state.
func Decode(data []byte, m proto.Message) error {
	docs, err := split(data)
	switch {
	case err != nil:
		return err
	case len(docs) == 0:
		return Problems{"the document is empty"}
	case len(docs) > 1:
		return Problems{fmt.Sprintf("want one document, got %d, separated by ---", len(docs))}
	}
	return decodeJSON(docs[0], m)
}

// DecodeAll decodes data, which holds any number of YAML documents separated by "---". Empty ones are skipped.
func DecodeAll[M proto.Message](data []byte, newMessage func() M) ([]M, error) {
	docs, err := split(data)
	if err != nil {
		return nil, err
	}
	var all []M
	var problems Problems
	for i, doc := range docs {
		m := newMessage()
		if err := decodeJSON(doc, m); err != nil {
			problems.in(i, len(docs), err)
		}
		all = append(all, m)
	}
	return all, problems.Err()
}

// in adds the problems of document i of n.
func (p *Problems) in(i, n int, err error) {
	prefix := ""
	if n > 1 {
		prefix = fmt.Sprintf("document %d: ", i+1)
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		*p = append(*p, prefix+line)
	}
}

// separator finds the lines that end a document; YAML 1.1 knows all of these ends of line.
var separator = regexp.MustCompile(`(?:^|[\n\r\x{85}\x{2028}\x{2029}])(?:---|\.\.\.)(?:[ \t\n\r\x{85}\x{2028}\x{2029}]|$)`)

// split returns the documents in data that are not empty, as JSON.
func split(data []byte) ([]json.RawMessage, error) {
	if len(data) > MaxSize {
		return nil, Problems{fmt.Sprintf("want 1 MiB at most, got %d bytes", len(data))}
	}
	if !utf8.Valid(data) {
		return nil, Problems{"want text in UTF-8"}
	}
	if json.Valid(data) { // most JSON is YAML, but not all
		return notNull(nil, data), nil
	}
	var docs []json.RawMessage
	var problems Problems
	chunks := cut(data)
	for i, chunk := range chunks {
		doc, err := yaml.YAMLToJSONStrict(chunk)
		if err != nil {
			problems.in(i, len(chunks), yamlProblems(err))
		} else if unclear := ambiguous(chunk); len(unclear) > 0 {
			problems.in(i, len(chunks), unclear)
		}
		docs = notNull(docs, doc)
	}
	return docs, problems.Err()
}

func notNull(docs []json.RawMessage, doc []byte) []json.RawMessage {
	if doc = bytes.TrimSpace(doc); len(doc) == 0 || string(doc) == "null" {
		return docs
	}
	return append(docs, doc)
}

// cut cuts data at its separators. What follows "---" on the same line belongs to the next document.
func cut(data []byte) [][]byte {
	var chunks [][]byte
	start := 0
	for _, at := range separator.FindAllIndex(data, -1) {
		if len(bytes.TrimSpace(data[start:at[0]])) > 0 {
			chunks = append(chunks, data[start:at[0]])
		}
		start = at[1]
	}
	return append(chunks, data[start:])
}

// oldYAML finds the plain words that YAML 1.1 reads as a number or a truth value, and YAML 1.2 in another way.
var oldYAML = regexp.MustCompile(`^(?:[-+]?(?:0[0-9_]+|[0-9][0-9_]*_[0-9_]*|0b[01_]+)|y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF)$`)

// ambiguous refuses what the author may have meant in another way than it would be read.
func ambiguous(chunk []byte) Problems {
	var root goyaml.Node
	if goyaml.Unmarshal(chunk, &root) != nil {
		return nil // the decoder that counts has understood it
	}
	var problems Problems
	var look func(*goyaml.Node)
	look = func(n *goyaml.Node) {
		if n.Kind == goyaml.ScalarNode && n.Style == 0 && oldYAML.MatchString(n.Value) {
			problems = append(problems, fmt.Sprintf("line %d: versions of YAML differ on what %s means: "+
				"put it in quotes if it is text, or else write a decimal number, true or false", n.Line, n.Value))
		}
		for _, child := range n.Content {
			look(child)
		}
	}
	look(&root)
	return problems
}

// yamlProblems rewords what the YAML parser says.
func yamlProblems(err error) Problems {
	var unsupported *json.UnsupportedValueError
	if errors.As(err, &unsupported) {
		return Problems{"want finite numbers, got " + unsupported.Str}
	}
	text := strings.ReplaceAll(err.Error(), "error converting YAML to JSON: ", "")
	text = strings.TrimPrefix(strings.TrimPrefix(text, "yaml: "), "unmarshal errors:\n")
	var problems Problems
	for line := range strings.SplitSeq(text, "\n") {
		problems = append(problems, "not valid YAML: "+strings.TrimSpace(line))
	}
	return problems
}

func decodeJSON(doc json.RawMessage, m proto.Message) error {
	decoder := json.NewDecoder(bytes.NewReader(doc))
	decoder.UseNumber()
	var tree any
	if err := decoder.Decode(&tree); err != nil {
		return Problems{err.Error()}
	}
	desc := m.ProtoReflect().Descriptor()
	if other, ok := otherKind(tree, desc); ok {
		return Problems{fmt.Sprintf("kind: want %s, got %s", desc.Name(), quote(other))}
	}
	var problems Problems
	problems.message("", tree, desc)
	if len(problems) > 0 {
		return problems
	}
	if err := protojson.Unmarshal(doc, m); err != nil {
		return Problems{err.Error()}
	}
	return nil
}

// ValidateAll reports what validate says of the documents that came from one input.
func ValidateAll[M proto.Message](docs []M, validate func(M) error) error {
	var problems Problems
	for i, doc := range docs {
		if err := validate(doc); err != nil {
			problems.in(i, len(docs), err)
		}
	}
	return problems.Err()
}
