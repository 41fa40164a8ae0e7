package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func version() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of meshctl",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprintln(cmd.OutOrStdout(), versionLine())
			return nil
		},
	}
}

func versionLine() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "meshctl (unknown version)"
	}
	line := fmt.Sprintf("meshctl %s, %s", info.Main.Version, info.GoVersion)
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			line += ", commit " + s.Value
		}
	}
	return line
}

// docs writes the reference of the commands, from the commands themselves.
func docs() *cobra.Command {
	return &cobra.Command{
		Use:    "docs DIR",
		Short:  "Write the reference of meshctl as Markdown files",
		Args:   cobra.ExactArgs(1),
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return doc.GenMarkdownTree(cmd.Root(), args[0])
		},
	}
}
