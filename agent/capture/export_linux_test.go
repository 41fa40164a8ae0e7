package capture

// Mend puts back what others have removed, as a Capture that runs does from time to time.
func (c *Capture) Mend() error {
	ns, err := openNamespace(c.cfg.Netns)
	if err != nil {
		return err
	}
	defer ns.close()
	r, err := openRouter(ns)
	if err != nil {
		return err
	}
	defer r.close()
	return c.mend(r)
}
