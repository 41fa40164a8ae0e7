package sim

// lru is the items that a replica has cached. They form a circle from the latest used to the one that has not been used
// for longest, and on to a place that holds none, number 0.
type lru struct {
	size   int
	places map[int32]int32 // of items
	links  []link
}

type link struct{ item, before, after int32 }

func newLRU(size int) lru {
	if size == 0 {
		return lru{}
	}
	return lru{size: size, places: map[int32]int32{}, links: make([]link, 1)}
}

// use reports whether the item is cached, and caches it.
func (l *lru) use(item int32) bool {
	if l.size == 0 {
		return false
	}
	at, hit := l.places[item]
	switch {
	case hit:
		l.unlink(at)
	case len(l.places) < l.size:
		at = int32(len(l.links))
		l.links = append(l.links, link{})
	default:
		at = l.links[0].before
		l.unlink(at)
		delete(l.places, l.links[at].item)
	}
	l.places[item] = at
	first := l.links[0].after
	l.links[at] = link{item: item, before: 0, after: first}
	l.links[first].before = at
	l.links[0].after = at
	return hit
}

func (l *lru) unlink(at int32) {
	before, after := l.links[at].before, l.links[at].after
	l.links[before].after = after
	l.links[after].before = before
}
