package sim

import "math"

// never is a time that does not come.
const never = math.MaxInt64

// event is something that happens at a time. What id and generation mean depends on the kind.
type event struct {
	at         int64 // nanoseconds since the start
	order      uint64
	id         int32
	generation uint32
}

type eventKind uint8

const (
	birth          eventKind = iota // the next request of the open loop
	wish                            // a user's next request
	arrival                         // of a try at its replica
	wake                            // a replica may have finished something
	failure                         // a replica fails a try
	response                        // of a replica, to a try
	timeout                         // of a try
	cancelation                     // of a try, at its replica
	probing                         // arrival of a probe
	probed                          // its answer
	asking                          // arrival of a question
	answering                       // its answer
	releasing                       // arrival of the word that a place in a line is not needed
	inquiryTimeout                  // answers that have not come are not waited for
	inquiryGivenUp                  // the caller does not wait either
	idling                          // an agent hears of an idle replica
	tick                            // an agent looks whether probes are due
	hearing                         // an agent hears what the registry says
	level                           // antagonists change their demand
	faultStarts
	faultEnds
	sample
	bucketEnds
)

// kind is kept in the low byte of order, the number of the event above it: of events at the same time, the first that
// was put down comes first.
func (e event) kind() eventKind { return eventKind(e.order) }

func (e event) before(o event) bool { return e.at < o.at || e.at == o.at && e.order < o.order }

// agenda is the events to come: a heap in which each node has four children, which costs fewer steps than two.
//
// Most events are put down with one of few constant delays, so each of these comes in order by itself, in a lane.
type agenda struct {
	heap  []event
	lanes []lane
	count uint64
}

// lane is a queue of events that are all put down with the same delay.
type lane struct {
	delay  int64
	events []event // a ring
	first  int
	length int
}

// addLane makes put cheaper for a delay that is used often.
func (a *agenda) addLane(delay int64) {
	if a.laneOf(delay) == nil {
		a.lanes = append(a.lanes, lane{delay: delay, events: make([]event, 16)})
	}
}

func (a *agenda) laneOf(delay int64) *lane {
	for i := range a.lanes {
		if a.lanes[i].delay == delay {
			return &a.lanes[i]
		}
	}
	return nil
}

// put puts down what is to happen some time after now.
func (a *agenda) put(now, delay int64, kind eventKind, id int32, generation uint32) {
	a.count++
	e := event{at: now + delay, order: a.count<<8 | uint64(kind), id: id, generation: generation}
	if l := a.laneOf(delay); l != nil {
		l.push(e)
		return
	}
	a.push(e)
}

// next takes the first event out; ok is false if there is none.
func (a *agenda) next() (e event, ok bool) {
	var first *lane
	for i := range a.lanes {
		l := &a.lanes[i]
		if l.length > 0 && (first == nil || l.head().before(first.head())) {
			first = l
		}
	}
	if len(a.heap) > 0 && (first == nil || a.heap[0].before(first.head())) {
		return a.pop(), true
	}
	if first == nil {
		return event{}, false
	}
	return first.pop(), true
}

func (l *lane) head() event { return l.events[l.first] }

func (l *lane) push(e event) {
	if l.length == len(l.events) {
		grown := make([]event, 2*l.length)
		n := copy(grown, l.events[l.first:])
		copy(grown[n:], l.events[:l.first])
		l.events, l.first = grown, 0
	}
	l.events[(l.first+l.length)&(len(l.events)-1)] = e
	l.length++
}

func (l *lane) pop() event {
	e := l.head()
	l.first = (l.first + 1) & (len(l.events) - 1)
	l.length--
	return e
}

func (a *agenda) push(e event) {
	a.heap = append(a.heap, e)
	i := len(a.heap) - 1
	for i > 0 {
		parent := (i - 1) / 4
		if !e.before(a.heap[parent]) {
			break
		}
		a.heap[i] = a.heap[parent]
		i = parent
	}
	a.heap[i] = e
}

func (a *agenda) pop() event {
	top := a.heap[0]
	n := len(a.heap) - 1
	last := a.heap[n]
	a.heap = a.heap[:n]
	if n > 0 {
		a.sink(last)
	}
	return top
}

// sink puts e where the top was, and lets it sink to its place.
func (a *agenda) sink(e event) {
	n, i := len(a.heap), 0
	for {
		first := 4*i + 1
		if first >= n {
			break
		}
		least := first
		for child := first + 1; child < min(first+4, n); child++ {
			if a.heap[child].before(a.heap[least]) {
				least = child
			}
		}
		if !a.heap[least].before(e) {
			break
		}
		a.heap[i] = a.heap[least]
		i = least
	}
	a.heap[i] = e
}
