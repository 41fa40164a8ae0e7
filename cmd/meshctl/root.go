package main

import (
	"cmp"
	"os"
	"strings"

	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/spf13/cobra"
)

const defaultAgent = "127.0.0.1:15010"

// app is one run of meshctl.
type app struct {
	agent  string // the address as the user gave it
	output string // table, yaml or json
	ran    bool   // whether the command line was understood
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "meshctl",
		Short: "Set policies and see what the balancers of the mesh see",
		Long: `Meshctl sets the policy of a service, registers replicas and shows what the balancers see.

It talks to any one agent of the mesh; register and deregister concern that agent's own node.
Exit codes: 0 done, 1 failed, 2 wrong usage.`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
	}
	root.PersistentFlags().StringVar(&a.agent, "agent", cmp.Or(os.Getenv("HEADROOM_AGENT"), defaultAgent),
		"agent to ask: HOST:PORT or unix:///PATH; the environment variable HEADROOM_AGENT changes the default")
	root.PersistentFlags().Lookup("agent").DefValue = defaultAgent
	root.AddCommand(
		a.services(), a.endpoints(), a.members(), a.register(), a.deregister(), a.policy(), a.top(), a.capture(), a.check(), a.ca(), a.simulate(), a.call(), a.echo(), version(), docs())
	root.SetHelpCommand(help())
	a.noteRun(root)
	return root
}

// help is cobra's, but fails if there is no such command.
func help() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Help about any command",
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return misused("there is no command %q", strings.Join(args, " "))
			}
			found.InitDefaultHelpFlag()
			return found.Help()
		},
	}
}

// noteRun makes all commands note that they run: what fails earlier is wrong usage.
func (a *app) noteRun(cmd *cobra.Command) {
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			a.ran = true
			return run(cmd, args)
		}
	}
	for _, sub := range cmd.Commands() {
		a.noteRun(sub)
	}
}

// serviceArg takes the name of a service as the only argument.
func serviceArg(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return misused("want one argument, the name of a service, got %d", len(args))
	}
	return validName(args[0])
}

func validName(service string) error {
	if !document.IsLabel(service) {
		return misused("%q is not a valid service name: want a DNS label (a-z, 0-9 and '-' inside, 63 characters at most)", service)
	}
	return nil
}

// optionalServiceArg is serviceArg for commands that can do without.
func optionalServiceArg(_ *cobra.Command, args []string) error {
	if len(args) > 1 {
		return misused("want one argument at most, the name of a service, got %d", len(args))
	}
	if len(args) == 1 {
		return validName(args[0])
	}
	return nil
}

func firstOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}
