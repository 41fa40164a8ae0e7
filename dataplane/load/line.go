package load

// Line is where requests wait for a replica's slots: as many as it has slots hold one, the others follow in the order in
// which they came (late binding). ID identifies a request. Joining and leaving take constant time. It is for one owner,
// whose lock guards it together with what waits for the grants.
type Line[ID comparable] struct {
	slots   int
	holding int
	spots   map[ID]int32
	ring    []spot[ID] // ring[0] stands before the first waiting spot and after the last one
	unused  []int32    // spots of ring
}

// spot is a request's place in the line. Those that wait form a ring.
type spot[ID comparable] struct {
	id          ID
	holds       bool
	ahead, next int32
}

// NewLine returns an empty line before a number of slots.
func NewLine[ID comparable](slots int) *Line[ID] {
	return &Line[ID]{slots: slots, spots: map[ID]int32{}, ring: make([]spot[ID], 1)}
}

// Join puts a request in the line, unless it is there already, and returns whether it holds a slot.
func (l *Line[ID]) Join(id ID) (granted bool) {
	if at, there := l.spots[id]; there {
		return l.ring[at].holds
	}
	at := l.spot()
	l.spots[id] = at
	s := &l.ring[at]
	s.id = id
	if l.holding < l.slots { // nobody waits
		s.holds = true
		l.holding++
		return true
	}
	last := l.ring[0].ahead
	s.ahead, s.next = last, 0
	l.ring[last].next = at
	l.ring[0].ahead = at
	return false
}

// Enter gives a slot to a request that does not wait, whether there is one free or not: others wait the longer. If it is
// in the line already, it waits no more.
func (l *Line[ID]) Enter(id ID) {
	l.Join(id)
	if at := l.spots[id]; !l.ring[at].holds {
		l.unlink(at)
		l.ring[at].holds = true
		l.holding++
	}
}

// Leave takes a request out of the line, whether it holds a slot or waits. If that leaves a slot to another, it returns
// which now holds it. A request that is not in the line leaves nothing.
func (l *Line[ID]) Leave(id ID) (granted ID, ok bool) {
	at, there := l.spots[id]
	if !there {
		return granted, false
	}
	delete(l.spots, id)
	if l.ring[at].holds {
		l.holding--
	} else {
		l.unlink(at)
	}
	l.ring[at] = spot[ID]{}
	l.unused = append(l.unused, at)
	return l.grant()
}

// Resize changes the number of slots, and appends those that now hold one to granted. If there are fewer than hold one,
// these keep theirs until they leave.
func (l *Line[ID]) Resize(slots int, granted []ID) []ID {
	l.slots = slots
	for {
		id, ok := l.grant()
		if !ok {
			return granted
		}
		granted = append(granted, id)
	}
}

// Len returns how many hold a slot, and how many wait for one.
func (l *Line[ID]) Len() (holding, waiting int) { return l.holding, len(l.spots) - l.holding }

// grant gives a free slot to the first that waits.
func (l *Line[ID]) grant() (id ID, ok bool) {
	first := l.ring[0].next
	if first == 0 || l.holding >= l.slots {
		return id, false
	}
	l.unlink(first)
	l.ring[first].holds = true
	l.holding++
	return l.ring[first].id, true
}

func (l *Line[ID]) unlink(at int32) {
	s := &l.ring[at]
	l.ring[s.ahead].next = s.next
	l.ring[s.next].ahead = s.ahead
}

// spot returns one that is not in use.
func (l *Line[ID]) spot() int32 {
	if n := len(l.unused); n > 0 {
		at := l.unused[n-1]
		l.unused = l.unused[:n-1]
		return at
	}
	l.ring = append(l.ring, spot[ID]{})
	return int32(len(l.ring) - 1)
}
