package sim

import "time"

// startFault lets a fault begin: for the nth of those affected, if it happens to one after the other.
func (s *simulation) startFault(id int32, nth int) {
	f := s.cfg.Faults[id]
	s.apply(f.turn(nth), 1)
	if f.Lasts > 0 && f.Kind != Join && f.Kind != Restart {
		s.agenda.put(s.now, int64(f.Lasts), faultEnds, id, uint32(nth))
	}
	if f.Every > 0 && nth+1 < s.cfg.turns(f) {
		s.agenda.put(s.now, int64(f.Every), faultStarts, id, uint32(nth+1))
	}
}

func (s *simulation) endFault(id int32, nth int) { s.apply(s.cfg.Faults[id].turn(nth), -1) }

// turn returns what happens of a fault at the nth time.
func (f Fault) turn(nth int) Fault {
	if f.Every > 0 {
		f.First, f.Count = f.First+nth, 1
	}
	return f
}

// turns returns how often a fault happens.
func (c Config) turns(f Fault) int {
	if f.Every == 0 {
		return 1
	}
	n := 0
	if f.Kind == Restart {
		for _, a := range c.Agents {
			n += max(a.Count, 1)
		}
	} else {
		for _, g := range c.Replicas {
			if f.Group == "" || f.Group == g.Name {
				n = max(n, g.Count, 1)
			}
		}
	}
	return min(f.until(n), n) - f.First
}

// Over returns when a fault that passes has passed for the last of those that it happens to.
func (c Config) Over(f Fault) time.Duration {
	return f.At + f.Lasts + time.Duration(max(c.turns(f)-1, 0))*f.Every
}

// apply adds a fault to those in force, or takes it away again.
func (s *simulation) apply(f Fault, by int) {
	if f.Kind == Restart {
		for i := f.First; i < min(f.until(len(s.agents)), len(s.agents)); i++ {
			s.startAgent(i)
		}
		return
	}
	for g := range s.cfg.Replicas {
		if f.Group != "" && f.Group != s.cfg.Replicas[g].Name {
			continue
		}
		group := s.replicas[s.groups[g]:s.groups[g+1]]
		for i := f.First; i < min(f.until(len(group)), len(group)); i++ {
			r := &group[i]
			took := r.takesRequests()
			r.advance(s.now)
			s.applyTo(r, f, by)
			s.settle(r)
			switch takes := r.takesRequests(); {
			case !took && takes:
				s.announce(r)
			case took && !takes:
				r.stopped, s.checks = s.now, true
			}
		}
	}
	switch f.Kind {
	case Unhealthy, Drain, Leave, Join:
		s.spreadNews()
	}
}

// until returns the end of what is affected of n.
func (f Fault) until(n int) int {
	if f.Count == 0 {
		return n
	}
	return f.First + f.Count
}

func (s *simulation) applyTo(r *replica, f Fault, by int) {
	switch f.Kind {
	case Stall:
		r.stalled += by
	case Freeze:
		r.frozen += by
		if r.frozen == 0 {
			s.answerHeld(r)
		}
	case Slow:
		if by > 0 {
			r.slow *= f.Factor
		} else {
			r.slow /= f.Factor
		}
	case Fail:
		r.failShare, r.failAfter = 0, int64(f.Latency)
		if by > 0 {
			r.failShare = f.Share
		}
	case Crash:
		r.crashed += by
		if by > 0 {
			s.loseAll(r)
		}
	case Unhealthy:
		r.unhealthy += by
	case Drain:
		r.draining += by
	case Leave:
		r.registered = by < 0
	case Join:
		r.registered = true
	}
}

// answerHeld answers the probes that came while the node stood still.
func (s *simulation) answerHeld(r *replica) {
	held := r.held
	r.held = nil
	for _, id := range held {
		s.probing(id)
	}
	s.answerAsked(r)
}

func (s *simulation) answerAsked(r *replica) {
	asked := r.asked
	r.asked = nil
	for _, u := range asked {
		s.asked(u)
	}
}

// loseAll ends all that a node was at; callers see their connections break. It comes back knowing nothing.
func (s *simulation) loseAll(r *replica) {
	s.closeLine(r)
	for len(r.jobs) > 0 {
		if t := r.remove(len(r.jobs) - 1).try; t != nil {
			s.quitLine(t)
			s.answer(t, failed)
		}
	}
	for r.line.length() > 0 {
		if t := s.first(&r.line); t != nil {
			s.quitLine(t)
			s.answer(t, failed)
		}
	}
	for _, id := range r.held {
		s.loseProbe(id)
	}
	r.held = nil
	s.answerAsked(r)
	r.tracker = newTracker(s.cfg.Policy)
}
