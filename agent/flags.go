package agent

import (
	"regexp"
	"strings"
)

// flagError is an error in the words of the command line.
type flagError struct {
	error
	text string
}

func (e flagError) Error() string { return e.text }

func (e flagError) Unwrap() error { return e.error }

// inFlags names flags instead of the fields of a part's Config, in what its New or Validate says is wrong: a line each,
// such as "part: field[0]: want ...".
func inFlags(part string, flags map[string]string, err error) error {
	if err == nil {
		return nil
	}
	head := regexp.MustCompile(`(?m)^(?:` + part + `: )?([a-zA-Z0-9]+(?:, [a-zA-Z0-9]+)*)(?:\[\d+\])?: `)
	text := head.ReplaceAllStringFunc(err.Error(), func(line string) string {
		var named []string
		for field := range strings.SplitSeq(head.FindStringSubmatch(line)[1], ", ") {
			flag, ok := flags[field]
			if !ok {
				return line
			}
			named = append(named, flag)
		}
		return strings.Join(named, ", ") + ": "
	})
	return flagError{err, text}
}
