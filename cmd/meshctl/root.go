package main

import (
	"strings"

	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/spf13/cobra"
)

const defaultAgent = "127.0.0.1:15010"

// app is one run of meshctl.
type app struct {
	target
	output string // table, yaml or json
	ran    bool   // whether the command line was understood
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "meshctl",
		Short: "Set policies and see what the balancers of the mesh see",
		Long: `Meshctl sets the policy of a service, registers replicas and shows what the balancers see.

It talks to any one agent of the mesh: the one that --agent or HEADROOM_AGENT names, else that of this machine, else one of
the Kubernetes cluster that kubectl would use, through its API server. Register, deregister and capture concern that agent's
own node; in a cluster, --node names it. A SERVICE may be written NAMESPACE/NAME or NAMESPACE/NAME:PORT, as in
Kubernetes, for NAME.NAMESPACE or PORT.NAME.NAMESPACE.
Exit codes: 0 done, 1 failed, 2 wrong usage.`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
	}
	a.target.flags(root)
	root.AddCommand(
		a.services(), a.endpoints(), a.members(), a.register(), a.deregister(), a.policy(), a.top(), a.capture(), a.check(), a.ready(), a.ca(), a.simulate(), a.call(), a.echo(), version(), docs())
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
			if err := a.settle(cmd); err != nil {
				return err
			}
			return run(cmd, args)
		}
	}
	for _, sub := range cmd.Commands() {
		a.noteRun(sub)
	}
}

// serviceArg takes the name of a service as the only argument, and rewrites it as the mesh writes it.
func serviceArg(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return misused("want one argument, the name of a service, got %d", len(args))
	}
	return meshName(&args[0])
}

// optionalServiceArg is serviceArg for commands that can do without.
func optionalServiceArg(_ *cobra.Command, args []string) error {
	if len(args) > 1 {
		return misused("want one argument at most, the name of a service, got %d", len(args))
	}
	if len(args) == 1 {
		return meshName(&args[0])
	}
	return nil
}

// meshName makes NAMESPACE/NAME[:PORT] the name of the mesh, and refuses what is none.
func meshName(service *string) error {
	written := *service
	namespace, name, inKubernetes := strings.Cut(written, "/")
	if inKubernetes {
		name, port, hasPort := strings.Cut(name, ":")
		*service = name + "." + namespace
		if hasPort {
			*service = port + "." + *service
		}
	}
	if !document.IsServiceName(*service) || inKubernetes && strings.Contains(written, ".") {
		return misused("%q is not a valid service name: want %s, or a Kubernetes service as NAMESPACE/NAME or NAMESPACE/NAME:PORT",
			written, document.ServiceNames)
	}
	return nil
}

func firstOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}
