package sim

// Run plays what c says and returns what was seen. The error is that of c.Validate.
func Run(c Config) (Result, error) {
	if err := c.Validate(); err != nil {
		return Result{}, err
	}
	return Result{}, nil
}
