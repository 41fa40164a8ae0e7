package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// outputFlag gives cmd the flag -o, with the first form as default.
func (a *app) outputFlag(cmd *cobra.Command, forms ...string) {
	form := cmd.Flags().StringP("output", "o", forms[0], "form of the output: "+strings.Join(forms, ", "))
	cmd.PreRunE = func(*cobra.Command, []string) error {
		a.output = *form
		if !slices.Contains(forms, a.output) {
			return misused("--output: want %s, got %q", strings.Join(forms, " or "), a.output)
		}
		return nil
	}
}

// writeMessage writes all fields of m, unset ones too, so that programs that read it find what they expect.
func (a *app) writeMessage(w io.Writer, m proto.Message) error {
	if a.output == "yaml" {
		return writeYAML(w, m)
	}
	return writeJSON(w, m, protojson.MarshalOptions{EmitUnpopulated: true})
}

// writeDocument writes the fields of a document that are set, as its author would.
func (a *app) writeDocument(w io.Writer, m proto.Message) error {
	if a.output == "json" {
		return writeJSON(w, m, protojson.MarshalOptions{})
	}
	return writeYAML(w, m)
}

func writeYAML(w io.Writer, m proto.Message) error {
	text, err := document.EncodeYAML(m)
	if err != nil {
		return err
	}
	_, err = w.Write(text)
	return err
}

func writeJSON(w io.Writer, m proto.Message, options protojson.MarshalOptions) error {
	text, err := options.Marshal(m)
	if err != nil {
		return fmt.Errorf("write as JSON: %w", err)
	}
	return indentJSON(w, text)
}

// indentJSON gives JSON the same spaces every time, which protojson refuses to do.
func indentJSON(w io.Writer, text []byte) error {
	var out bytes.Buffer
	if err := json.Indent(&out, text, "", "  "); err != nil {
		return fmt.Errorf("write as JSON: %w", err)
	}
	out.WriteByte('\n')
	_, err := out.WriteTo(w)
	return err
}

// writeTable writes rows under the names of their columns.
func writeTable(w io.Writer, columns string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(strings.Fields(columns), "\t"))
	for _, row := range rows {
		for i, cell := range row {
			row[i] = orDash(cell)
		}
		fmt.Fprintln(t, strings.Join(row, "\t"))
	}
	return t.Flush()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
