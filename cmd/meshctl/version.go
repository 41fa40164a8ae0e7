package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
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
