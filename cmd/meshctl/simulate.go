package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/headroom-mesh/headroom/dataplane/sim/chart"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/spf13/cobra"
)

// simulation is what the flags of simulate say.
type simulation struct {
	rules   []string
	policy  string // files
	against string
	set     []string
	seed    uint64
	runs    int
	plot    string
}

func (a *app) simulate() *cobra.Command {
	var s simulation
	cmd := &cobra.Command{
		Use:   "simulate SCENARIO",
		Short: "Play a scenario in virtual time, to see what a policy will do",
		Long: `Play a scenario in virtual time: clients, replicas, what goes wrong, and the balancing rules, pools and budgets that the
agents run. SCENARIO is the name of a built-in one ('meshctl simulate list') or a file ('meshctl simulate show SCENARIO'
prints one to start from). It asks no agent. The same seed gives the same results.

--set sets any field of the scenario by its path below spec; a list grows with the next index, and null leaves a field out.
Latencies are milliseconds as clients see them; TO is the time limit, which that many requests ran into.`,
		Example: `  meshctl simulate fast-slow
  meshctl simulate fast-slow --rules prequal,p2c --set load.rate=1000 --set 'replicas[1].count=4' --runs 5
  meshctl simulate fast-slow --policy new.yaml --against old.yaml
  meshctl simulate fast-slow-ramp --plot ramp.svg`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return misused("want one argument, a scenario, got %d: 'meshctl simulate list' lists those that are built in", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			rows, err := s.play(cmd, args[0])
			if err != nil {
				return err
			}
			if err := s.draw(rows); err != nil {
				return err
			}
			return s.write(cmd.OutOrStdout(), a.output, rows)
		},
	}
	a.outputFlag(cmd, "table", "json", "csv")
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringSliceVar(&s.rules, "rules", nil, "rules to compare: of the scenario, balancers, or oracle, which sees everything")
	flags.StringVar(&s.policy, "policy", "", "what this policy does: a ServicePolicy in a file; -: standard input")
	flags.StringVar(&s.against, "against", "", "compare --policy with the policy in this file")
	flags.StringArrayVar(&s.set, "set", nil, "set a field of the scenario, as in load.rate=200; can be given many times")
	flags.Uint64Var(&s.seed, "seed", 1, "seed of all that is random")
	flags.IntVar(&s.runs, "runs", 1, "play it this often, with this seed and the next ones, and show the median of each figure")
	flags.StringVar(&s.plot, "plot", "", "draw the results to a file that ends in .svg or .png")
	cmd.AddCommand(a.simulateList(), a.simulateShow())
	return cmd
}

func (a *app) simulateList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the built-in scenarios",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var rows [][]string
			for _, name := range scenario.Names() {
				s, err := scenario.Builtin(name)
				if err != nil {
					return err
				}
				rows = append(rows, []string{name, s.Description()})
			}
			return writeTable(cmd.OutOrStdout(), "SCENARIO SHOWS", rows)
		},
	}
}

func (a *app) simulateShow() *cobra.Command {
	return &cobra.Command{
		Use:   "show SCENARIO",
		Short: "Print a built-in scenario, as a start for one of your own",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return misused("want one argument, the name of a built-in scenario, got %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := scenario.Text(args[0])
			if err != nil {
				return usageError(err.Error())
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
}

// play plays a scenario as the flags say.
func (s *simulation) play(cmd *cobra.Command, name string) ([]scenario.Row, error) {
	if err := s.contradiction(); err != nil {
		return nil, err
	}
	scene, err := s.scene(name)
	if err != nil {
		return nil, err
	}
	rules, err := s.chosen(cmd.InOrStdin(), scene)
	if err != nil {
		return nil, err
	}
	cases, err := scene.Plan(rules)
	if err != nil {
		return nil, misused("%v", listed(name+" can't be played with these rules", err))
	}
	bar := progressBar{out: cmd.ErrOrStderr()}
	defer bar.clear()
	return scenario.Run(cmd.Context(), cases, scenario.Options{Seed: s.seed, Runs: s.runs, Progress: bar.show()})
}

// contradiction finds flags that make no sense.
func (s *simulation) contradiction() error {
	switch {
	case s.runs < 1 || s.runs > 1000:
		return misused("--runs: want a number from 1 to 1000, got %d", s.runs)
	case s.against != "" && s.policy == "":
		return misused("--against needs --policy: it compares the two")
	case s.against != "" && len(s.rules) > 0:
		return misused("--against compares two policies: --rules can't be given with it")
	case s.policy == "-" && s.against == "-":
		return misused("want --policy or --against from standard input, not both")
	case s.plot != "" && !slices.Contains(chart.Formats(), s.plotFormat()):
		return misused("--plot: want a file that ends in .svg or .png, got %q", s.plot)
	}
	return nil
}

func (s *simulation) plotFormat() string { return strings.TrimPrefix(filepath.Ext(s.plot), ".") }

// draw draws a picture, if one is wanted.
func (s *simulation) draw(rows []scenario.Row) error {
	if s.plot == "" {
		return nil
	}
	var picture bytes.Buffer
	if err := chart.Draw(&picture, s.plotFormat(), rows); err != nil {
		return err
	}
	if err := os.WriteFile(s.plot, picture.Bytes(), 0o666); err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	return nil
}

// scene reads the scenario, and sets what is to be set in it.
func (s *simulation) scene(name string) (scenario.Scenario, error) {
	scene, err := readScenario(name)
	if err != nil {
		return scene, err
	}
	var settings []scenario.Setting
	for _, text := range s.set {
		path, value, found := strings.Cut(text, "=")
		if !found || path == "" {
			return scene, misused("--set: want FIELD=VALUE, as in load.rate=200, got %q", text)
		}
		settings = append(settings, scenario.Setting{Path: path, Value: value})
	}
	if len(settings) == 0 {
		return scene, nil
	}
	if scene, err = scene.With(settings); err != nil {
		return scene, misused("%v", listed("--set", err))
	}
	return scene, nil
}

func readScenario(name string) (scenario.Scenario, error) {
	if !strings.ContainsAny(name, `/\`) && !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(name)) {
		scene, err := scenario.Builtin(name)
		if err != nil {
			return scene, usageError(err.Error())
		}
		return scene, nil
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return scenario.Scenario{}, fmt.Errorf("read the scenario: %w", err)
	}
	scene, err := scenario.Parse(data)
	if err != nil {
		return scene, listed(name+" is not a valid scenario", err)
	}
	return scene, nil
}

// chosen returns the rules to play; none: those of the scenario.
func (s *simulation) chosen(stdin io.Reader, scene scenario.Scenario) ([]scenario.Rule, error) {
	var rules []scenario.Rule
	for _, name := range s.rules {
		rule, err := scene.Rule(name)
		if err != nil {
			return nil, misused("--rules: %v", err)
		}
		if slices.ContainsFunc(rules, func(r scenario.Rule) bool { return r.Name == name }) {
			return nil, misused("--rules: %s is named twice", name)
		}
		rules = append(rules, rule)
	}
	for _, file := range []string{s.against, s.policy} {
		if file == "" {
			continue
		}
		p, err := readPolicy(stdin, file)
		if err != nil {
			return nil, err
		}
		rules = append(rules, scenario.Rule{Name: s.ruleName(file, p), Policy: &p})
	}
	return rules, nil
}

// ruleName names a policy after its file, or, if it is not from a file, after its balancer.
func (s *simulation) ruleName(file string, p policy.Policy) string {
	if file == "-" {
		return string(p.Balancer)
	}
	if filepath.Base(s.policy) == filepath.Base(s.against) {
		return file
	}
	return filepath.Base(file)
}

func readPolicy(stdin io.Reader, file string) (policy.Policy, error) {
	data, err := readFile(stdin, file)
	if err != nil {
		return policy.Policy{}, err
	}
	doc, err := policy.Parse(data)
	if err != nil {
		return policy.Policy{}, listed(file+" is not a valid policy", err)
	}
	return policy.Compile(doc)
}
